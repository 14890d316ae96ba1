"""What somebody else's sender is put on: a socket over inproc, a receiver that keeps what it took, and what was seen.

Over inproc the receiver's frames are the sender's memory, so that whoever holds them decides when a tracker fires. The
methods of `Seen` bear the names of the specification's actions: where they stop the sender, a test says what comes
next; and a run can be recorded and judged as one of the shipped sender can.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from model_tests.payload_reuse.world import LARGE, SMALL, Gate
from model_tests.stepper import PATIENCE

from quiesce.events import action
from quiesce.payload_reuse import COPY_THRESHOLD

_endpoints = itertools.count()


class Seen:
    """What a sender was seen to do. `call` is its own code, run where the action has its place."""

    @action("Take", lambda self, result, buffer, limit: {"buffer": buffer, "free_limit": limit})
    def take(self, buffer: int, limit: int) -> None:
        """It has chosen a buffer, and keeps at most `limit` free ones."""

    @action(
        "Encode",
        lambda self, result, call, message, buffer, shape: {
            "message": message,
            "buffer": buffer,
            "shape": [list(part) for part in shape()],
        },
    )
    def encode(self, call: Callable[[], Any], message: int, buffer: int, shape: Callable[[], Any]) -> Any:
        """`shape` says afterwards which parts the message has: (large, lent) each."""
        return call()

    @action(
        "SendPart",
        lambda self, result, call, message, part, of: {
            "message": message,
            "part": part,
            "of": of,
            "sent": True,
            "tracker": id(result) if isinstance(result, Gate) else None,
        },
    )
    def send_part(self, call: Callable[[], Any], message: int, part: int, of: int) -> Any:
        """The result is a `Gate` if the part was sent in place."""
        return call()

    @action("Remember", lambda self, result, buffer, asked: {"buffer": buffer, "asked": list(asked)})
    def remember(self, buffer: int, asked: Collection[int]) -> None:
        """The message is out; `asked` are the gates that will be asked about its buffer."""

    @action("Recycle", lambda self, result, buffer: {"buffer": buffer})
    def recycle(self, buffer: int) -> None:
        """The buffer is on the free list."""

    @action("DropSurplus", lambda self, result, buffer: {"buffer": buffer})
    def drop_surplus(self, buffer: int) -> None:
        """The buffer is nowhere any more."""

    @action("Idle")
    def idle(self) -> None:
        """It asks for the next message; no action of the specification."""


class Ended(BaseException):
    """Ends a sender's loop where it stands."""


class Wire:
    """A PUSH socket for a sender to send on, and the PULL socket at its other end, without a high-water mark.

    `message` is the number of the message under way and `parts` how many frames it has, which the sender's encoder
    tells; frames that are not sent in place are passed on as they are.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.gates: dict[tuple[int, int], Gate] = {}
        self.frames: list[zmq.Frame] = []
        self.read: list[int] = []
        self.glimpse: bytes | None = None
        self.message = self.parts = self.part = 0
        self.context = zmq.Context()
        self.endpoint = f"inproc://foreign-{next(_endpoints)}"
        self.receiver = self.context.socket(zmq.PULL)
        self.receiver.rcvhwm = 0
        self.receiver.bind(self.endpoint)
        self.socket = self.connect()

    def connect(self) -> zmq.Socket[Any]:
        """The sender's socket."""
        socket = self.context.socket(zmq.PUSH, socket_class=type("Watched", (_Watched,), {"wire": self}))
        socket.sndhwm = 0
        socket.linger = 0
        socket.connect(self.endpoint)
        return socket

    def send(self, send: Callable[..., Any], data: Any, flags: int, track: bool) -> Any:
        """Send one part in place, its tracker behind a gate."""
        self.part += 1
        key = self.message, self.part

        def call() -> Any:
            tracker = send(data, flags, copy=False, track=True)
            if memoryview(data).nbytes >= COPY_THRESHOLD:
                tracker = self.gates[key] = Gate(tracker)
            return tracker

        tracker = self.seen.send_part(call, *key, self.parts)
        return tracker if track else None

    @contextmanager
    def overlooking(self) -> Iterator[None]:
        """Whatever the sender looks at meanwhile, it finds no tracker fired."""
        gates = list(self.gates.values())
        for gate in gates:
            gate.overlooked = True
        try:
            yield
        finally:
            for gate in gates:
                gate.overlooked = False

    # What the environment does.

    def take(self) -> None:
        """PeerTake"""
        assert self.receiver.poll(1000 * PATIENCE), "nothing arrived"
        self.frames, self.read = self.receiver.recv_multipart(copy=False), []

    def begin_read(self) -> None:
        self.glimpse = bytes(self.frames[len(self.read)].buffer)

    def end_read(self) -> None:
        frame = bytes(self.frames[len(self.read)].buffer)
        self.read.append(version(frame) if frame == self.glimpse else 0)
        self.glimpse = None

    def drop(self) -> None:
        self.frames, self.read = [], []

    def fires(self, message: int, part: int) -> None:
        """TrackerFires: let the sender see a tracker that must be done, since nobody reads its frame."""
        gate = self.gates[message, part]
        deadline = time.monotonic() + PATIENCE / 4
        while not gate.tracker.done and time.monotonic() < deadline:
            time.sleep(0.001)
        assert gate.tracker.done, (
            f"nobody reads part {part} of message {message}, but its tracker does not fire"
        )
        gate.open = True

    def close(self) -> None:
        self.drop()
        self.receiver.close(linger=0)
        self.socket.close(linger=0)
        self.context.term()


class _Watched(zmq.Socket):  # type: ignore[type-arg]
    wire: Wire

    def send(self, data: Any, flags: int = 0, copy: bool = True, track: bool = False, **more: Any) -> Any:
        if copy:
            return super().send(data, flags, copy=copy, track=track, **more)
        return self.wire.send(super().send, data, flags, track)


def version(frame: bytes) -> int:
    """The message that the bytes in the middle of a frame were made for; 0 if they are of several, or torn."""
    middle = frame[len(frame) // 4 : 3 * len(frame) // 4]
    return middle[0] if middle == middle[:1] * len(middle) else 0


def size(large: bool) -> int:
    """How many bytes such a part has."""
    return LARGE if large else SMALL
