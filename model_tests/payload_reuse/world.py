"""The real things behind the specification's variables: a sender over inproc whose environment does as it is told.

Over inproc the receiver's frames are the sender's memory, so that whoever holds them decides when a tracker fires.
`World.view` is the abstraction function: what the specification's variables are, read off the implementation.
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import zmq
from model_tests.stepper import PATIENCE, Stepper, Stop

from quiesce import events
from quiesce.codec import Encoder
from quiesce.lifecycle import Tracker
from quiesce.payload_reuse import COPY_THRESHOLD, PayloadSender, _Frame, _Message

LARGE, SMALL = COPY_THRESHOLD + 5_000, 400
STOPS = {
    ("Take", "end"),
    ("Encode", "begin"),
    ("Encode", "end"),
    ("SendPart", "end"),
    ("PartRefused", "error"),
    ("PartRefused", "end"),
    ("Abort", "begin"),
    ("Abort", "end"),
    ("Remember", "end"),
    ("Recycle", "end"),
    ("DropSurplus", "end"),
    ("Touch", "end"),
    ("Close", "end"),
}

_endpoints = itertools.count()


class Interrupted(BaseException):
    """What a signal handler might raise between two parts."""


class Gate:
    """A real tracker that shows itself done only once the test says so.

    `overlooked` while the sender looks at it a moment before it fires.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.open = False
        self.overlooked = False

    @property
    def done(self) -> bool:
        return self.open and not self.overlooked and self.tracker.done

    def wait(self, timeout: float) -> None:
        raise NotImplementedError("the test never waits on a gate")


class _Refusing(zmq.Socket):  # type: ignore[type-arg]
    """A socket that can be told to refuse the next part of a message whose pipe is gone.

    libzmq refuses it (EAGAIN) if it is asked between the two steps in which a pipe dies, and swallows it later. Which
    of them happens is a race that a test cannot win; what is left behind is the same, so that swallowing and then
    saying EAGAIN is what a refusal looks like.
    """

    refuse = False
    accepted = False

    def send(self, *args: Any, **options: Any) -> Any:
        self.accepted = False
        result = super().send(*args, **options)
        if self.refuse:
            self.refuse = False
            raise zmq.Again
        self.accepted = True
        return result


class World:
    """One sender of class `cls` that binds, and a receiver that comes and goes, over inproc."""

    def __init__(self, cls: type[PayloadSender], free_limit: int) -> None:
        self.context = zmq.Context()
        self.endpoint = f"inproc://world-{next(_endpoints)}"
        self.gates: dict[tuple[int, int], Gate] = {}
        self.owed: dict[tuple[int, int], Gate] = {}
        socket = self.context.socket(zmq.PUSH, socket_class=_Refusing)
        socket.sndhwm = 1
        socket.bind(self.endpoint)
        self.socket = socket
        self.sender = self._watched(cls)(socket, encoder=Encoder(), free_limit=free_limit)
        self.receiver = self._receiver()
        self.frames: list[zmq.Frame] = []
        self.glimpse: bytes | None = None
        self.read: list[int] = []
        self.tensor = torch.zeros(LARGE, dtype=torch.uint8)
        self.stepper = Stepper(self._is_stop)
        self.message: _Message | None = None
        self.obj: dict[str, Any] = {}
        self.unnoticed = False

    def _receiver(self) -> zmq.Socket[bytes]:
        receiver = self.context.socket(zmq.PULL)
        receiver.rcvhwm = 1
        receiver.connect(self.endpoint)
        return receiver

    def _watched(self, cls: type[PayloadSender]) -> type[PayloadSender]:
        world = self

        class Watched(cls):  # type: ignore[valid-type, misc]
            def _encode(self, message: _Message, obj: object, lend: bool) -> None:
                world.message = message
                super()._encode(message, obj, lend)

            def _owe(self, message: _Message, tracker: Tracker, frame: _Frame) -> None:
                gate = world.owed[message.number, len(message.trackers) + 1] = Gate(tracker)
                super()._owe(message, gate, frame)

        return Watched

    def _is_stop(self, event: events.Event) -> bool:
        if event.action == "SendPart" and event.phase != "begin":
            self._gate()
        return (event.action, event.phase) in STOPS and event.fields.get("sent", True) is not False

    def _gate(self) -> None:
        """Put the tracker of a part just sent behind a gate."""
        message = self.message
        assert message is not None
        for index, tracker in enumerate(message.trackers):
            frame = message.frames[index]
            if (
                not isinstance(tracker, Gate)
                and frame.owner != "frame"
                and memoryview(frame.view).nbytes >= COPY_THRESHOLD
            ):
                key = message.number, index + 1
                message.trackers[index] = self.gates[key] = self.owed.get(key) or Gate(tracker)

    def call(self, lend: bool) -> Callable[[], object]:
        """A call that sends a message whose object is made by `shape`, once the sender stands before encoding it."""
        self.obj = {}
        send = self.sender.lend if lend else self.sender.send
        return lambda: send(self.obj, timeout=0)

    def shape(self, parts: list[tuple[bool, bool]], number: int, lend: bool) -> None:
        """Make the object of message `number`: its parts as (large, lent), the first of them the payload."""
        pad = bytes([number]) * (LARGE if parts[0][0] else SMALL)
        tensors = []
        for large, lent in parts[1:]:
            if lent:
                tensors.append(self.tensor if large else self.tensor[:SMALL])
            else:
                # What is not contiguous is copied, so that it is not lent in a message that lends others.
                columns = 2 if lend and large else 1
                size = LARGE if large else SMALL
                tensors.append(torch.full((size, columns), number, dtype=torch.uint8)[:, 0])
        self.obj.update(pad=pad, tensors=tensors)

    @contextmanager
    def overlooking(self, seen: Collection[object] = ()) -> Iterator[None]:
        """Whatever the sender looks at meanwhile, it finds no tracker fired but those of `seen`."""
        gates = [gate for gate in self.gates.values() if gate not in seen]
        for gate in gates:
            gate.overlooked = True
        try:
            yield
        finally:
            for gate in gates:
                gate.overlooked = False

    # What the environment does.

    def take(self) -> bool:
        """PeerTake: whether there was a message."""
        try:
            self.frames = self.receiver.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self.read = []
        return True

    def begin_read(self) -> None:
        self.glimpse = bytes(self.frames[len(self.read)].buffer)

    def end_read(self) -> None:
        frame = bytes(self.frames[len(self.read)].buffer)
        self.read.append(_version(frame) if frame == self.glimpse else 0)
        self.glimpse = None

    def versions(self) -> list[int]:
        """The message that each frame held is of, as far as its bytes tell: 0 for a mixture."""
        return [_version(bytes(frame.buffer)) for frame in self.frames if len(frame)]

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

    def dies(self) -> None:
        """PeerDies: the receiver closes; the word of it waits in the sender's mailbox, unread."""
        self.sender._socket.get(zmq.EVENTS)
        self.receiver.close(linger=0)
        assert self._told(PATIENCE), "the sender's socket was not told that its peer closed"
        self.unnoticed = True
        # libzmq reads its mailbox at most once a millisecond of use; from now on it does at the next call.
        time.sleep(0.003)

    def notice(self) -> None:
        """Notice: the pipe is dead to the end: the peer's word that it closes, then its answer to ours."""
        socket = self.sender._socket
        socket.get(zmq.EVENTS)
        if self.unnoticed and self.message is not None and self.stepper.running:
            self._told(0.1)
            socket.get(zmq.EVENTS)
        self.unnoticed = False

    def _told(self, patience: float) -> bool:
        return bool(select.select([self.sender._socket.get(zmq.FD)], [], [], patience)[0])

    def returns(self) -> None:
        """PeerReturns: a new receiver connects; the sender takes note, unless it has not noticed the old one's end."""
        self.receiver = self._receiver()
        assert self._told(PATIENCE), "the sender's socket was not told that a peer connected"
        if not self.unnoticed:
            self.sender._socket.get(zmq.EVENTS)

    def begin_overwrite(self, number: int) -> None:
        self.tensor[: LARGE // 2].fill_(number)

    def end_overwrite(self, number: int) -> None:
        self.tensor.fill_(number)

    # What the implementation is at.

    def view(self) -> dict[str, Any]:
        pool = self.sender.pool
        return {
            "free": sorted(map(id, pool._free)),
            "pending": sorted(id(buffer) for buffer, *_ in pool._pending),
            "undone": {key for key, gate in self.gates.items() if not gate.done},
            "holding": len(self.frames),
            "read": list(self.read),
        }

    def close(self) -> None:
        """Leave nothing behind, wherever the test stopped."""
        while self.stepper.running:
            self.stepper.resume(Interrupted())
        self.drop()
        self.receiver.close(linger=0)
        self.sender._socket.close(linger=0)
        self.context.term()


def _version(frame: bytes) -> int:
    """The number that the bytes of a frame were made from: all of them, but for the structure around the pad."""
    body = frame[30 : len(frame) // 2 + 1] if frame[:1] == b"\xc1" else frame
    return body[0] if body and body == body[:1] * len(body) else 0


def stop_name(stop: Stop) -> str:
    """The action of the specification that a stop stands for; "" where it stands for none."""
    if stop.action == "Encode":
        return "BeginEncode" if stop.phase == "begin" else "EndEncode"
    return "" if stop.action in ("return", "raise") else stop.action
