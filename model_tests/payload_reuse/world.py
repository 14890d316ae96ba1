"""The real things behind the specification's variables: a sender over inproc whose environment does as it is told.

Over inproc the receiver's frames are the sender's memory, so that whoever holds them decides when a tracker fires.
`World.view` is the abstraction function: what the specification's variables are, read off the implementation.
"""

from __future__ import annotations

import itertools
import select
import time
from collections.abc import Callable
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
    """A real tracker that shows itself done only once the test says so."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.open = False

    @property
    def done(self) -> bool:
        return self.open and self.tracker.done

    def wait(self, timeout: float) -> None:
        raise NotImplementedError("the test never waits on a gate")


class _Refusing(zmq.Socket):  # type: ignore[type-arg]
    """A socket that can be told to refuse the next part of a message whose pipe is gone.

    libzmq refuses it (EAGAIN) if it is asked between the two steps in which a pipe dies, and swallows it later. Which
    of them happens is a race that a test cannot win; what is left behind is the same, so that swallowing and then
    saying EAGAIN is what a refusal looks like.
    """

    refuse = False

    def send(self, *args: Any, **options: Any) -> Any:
        result = super().send(*args, **options)
        if self.refuse:
            self.refuse = False
            raise zmq.Again
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
        self.sender = self._watched(cls)(socket, encoder=Encoder(), free_limit=free_limit)
        self.receiver = self._receiver()
        self.frames: list[zmq.Frame] = []
        self.glimpse: bytes | None = None
        self.read: list[int] = []
        self.tensor = torch.zeros(LARGE, dtype=torch.uint8)
        self.stepper = Stepper(self._is_stop)
        self.message: _Message | None = None

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

    def call(self, shape: list[tuple[bool, bool]], number: int) -> Callable[[], object]:
        """The call that sends message `number`: parts as (large, lent), the first of them the payload."""
        pad = bytes([number]) * (LARGE if shape[0][0] else SMALL)
        tensors = []
        for large, lent in shape[1:]:
            tensor = self.tensor if lent else torch.full((LARGE,), number, dtype=torch.uint8)
            tensors.append(tensor if large else tensor[:SMALL])
        send = self.sender.lend if any(lent for _, lent in shape) else self.sender.send
        return lambda: send({"pad": pad, "tensors": tensors}, timeout=0)

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

    def dies(self, within_message: bool, refuse: bool) -> None:
        """PeerDies: the receiver closes. Within a message the pipe is dead to the end when this returns, so that its
        next part is refused or swallowed as told; else the word of it waits in the sender's mailbox, unread.
        """
        socket = self.sender._socket
        socket.get(zmq.EVENTS)
        self.receiver.close(linger=0)
        assert self._told(PATIENCE), "the sender's socket was not told that its peer closed"
        if within_message:
            # The peer's word that it closes, then its answer to ours.
            socket.get(zmq.EVENTS)
            self._told(0.2)
            socket.get(zmq.EVENTS)
            socket.refuse = refuse
        # libzmq reads its mailbox at most once a millisecond of use; from now on it does at the next call.
        time.sleep(0.005)

    def _told(self, patience: float) -> bool:
        return bool(select.select([self.sender._socket.get(zmq.FD)], [], [], patience)[0])

    def returns(self) -> None:
        """PeerReturns: a new receiver connects, and the sender's socket takes note."""
        self.receiver = self._receiver()
        assert self._told(PATIENCE), "the sender's socket was not told that a peer connected"
        self.sender._socket.get(zmq.EVENTS)

    def overwrite(self, number: int) -> None:
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
