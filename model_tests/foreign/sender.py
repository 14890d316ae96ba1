"""Senders of other people held to `spec/PayloadReuse.tla`. `Sender` is what their adapters have in common."""

from __future__ import annotations

import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import zmq.utils.garbage
from model_tests.foreign.naive import NaiveSender
from model_tests.foreign.wire import Ended, Seen, Wire, size
from model_tests.stepper import PATIENCE, Stepper, Stop

from quiesce.model import ModelValue, Oracle, State, Step, manifest
from quiesce.model.adapter import Adapter, does, lets

STOPS = {("Take", "end"), ("Encode", "begin"), ("Encode", "end"), ("SendPart", "end"), ("Idle", "begin")}
SETTLING = ("Remember", "Recycle", "DropSurplus")


class Sender(Adapter):
    """A sender that asks for messages and sends them in a loop of its own, and one that receives them."""

    manifest = manifest.load(Path(__file__).with_name("manifest.toml"))
    model = "foreign_sender"
    constants: Mapping[str, str] = {"Buffers": "{b1, b2, b3, b4}", "MaxMessage": "6", "HighWater": "6"}
    reasons = {
        "it looks at its trackers when it has another message to send": (
            lambda state, step: step.action in SETTLING and step.action != "Remember" and state["number"] > 2
        ),
        "what nobody was ever to read is recycled before a buffer is taken": (
            lambda state, step: (
                step.action == "Take" and any(not entry["asked"] for entry in state["pending"])
            )
        ),
        "having recycled a buffer, it takes one": (
            lambda state, step: (
                state["step"] == "idle" and bool(state["free"]) and step.action not in ("Take", "Recycle")
            )
        ),
        "the end of the socket is not looked at": lambda state, step: step.action in ("Close", "Reap"),
    }

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self.limit: int = oracle.evaluate("FreeLimit")
        self.lends = bool(oracle.evaluate("Tensors"))
        self.names: dict[int, ModelValue] = {}
        self.seen = Seen()
        self.wire = Wire(self.seen)
        self.tensor = np.zeros(size(True), np.uint8)
        self.parts: Sequence[Mapping[str, bool]] = ()
        self.before: list[int] = []
        self.hand: int | None = None
        self.stepper = Stepper(lambda event: (event.action, event.phase) in STOPS)
        self.set_up()
        self.stepper.start(self._run)

    # What is different in each sender.

    @abstractmethod
    def set_up(self) -> None:
        """Make the sender, with `self.wire.socket` as its socket."""

    @abstractmethod
    def loop(self) -> None:
        """Send what `self.next()` gives until that raises `Ended`."""

    @abstractmethod
    def new(self) -> Any:
        """A message whose content is not decided yet."""

    @abstractmethod
    def fill(self, message: Any) -> None:
        """Give it the content of message `self.wire.message`, in the shape `self.parts`."""

    @abstractmethod
    def pools(self) -> tuple[list[int], list[tuple[int, Collection[Any]]]]:
        """The free buffers, and those waited for with what is asked about them, oldest first."""

    # Where the sender's own code passes.

    def _run(self) -> None:
        try:
            self.loop()
        except Ended as error:
            # A traceback keeps the frames it passed alive, and with them the sender's memory.
            traceback.clear_frames(error.__traceback__)

    def next(self) -> Any:
        """Called by the sender when it is through with a message: the next one."""
        if self.hand is not None:
            free, pending = self.pools()
            asked = {buffer: [id(gate) for gate in gates] for buffer, gates in pending}
            self._remembered(self.hand, free, asked)
            self.hand = None
        self.seen.idle()
        self.wire.message += 1
        self.message = self.new()
        return self.message

    def _remembered(self, hand: int, free: Collection[int], asked: Mapping[int, Collection[int]]) -> None:
        self.seen.remember(hand, asked.get(hand, ()))
        self.happened("Remember")
        if hand not in asked:
            self._settled(hand, hand in free)
        self.before = list(asked)

    def _settled(self, buffer: int, kept: bool) -> None:
        (self.seen.recycle if kept else self.seen.drop_surplus)(buffer)
        self.happened("Recycle" if kept else "DropSurplus", b=self._name(buffer))
        if not kept:
            # Its address may come again, for another buffer.
            self.names.pop(buffer, None)

    def encode(self, call: Callable[[], Sequence[Any]], buffer: int) -> Any:
        """Called by the sender when it encodes a message into a buffer it has chosen."""
        free, pending = self.pools()
        waiting = [item for item, _ in pending]
        for item in self.before:
            if item not in waiting:
                self._settled(item, item in free or item == buffer)
        self.hand = buffer
        self.names.setdefault(buffer, self.wanted_name)
        self.seen.take(buffer, self.limit)
        self.wire.part = 0

        def encoded() -> Any:
            self.fill(self.message)
            frames = call()
            self.wire.parts = len(frames)
            return frames

        shape = lambda: [(part["large"], part["lent"]) for part in self.parts]  # noqa: E731
        return self.seen.encode(encoded, self.wire.message, buffer, shape)

    # What is asked for.

    @lets("Take", "Recycle", "DropSurplus")
    def send(self, wanted: Step) -> None:
        """The next message; the sender settles what it finds done, and takes a buffer."""
        self.wanted_name = self._fresh(wanted)
        # A tracker that fired may be looked at a moment too early, or not.
        with self.wire.overlooking() if wanted.action == "Take" else nullcontext():
            stop = self.stepper.resume()
        assert stop.action == "Take", stop
        self.happened("Take", b=self._name(stop.fields["buffer"]))

    @lets("BeginEncode", "EndEncode", "SendPart", "Remember")
    def go_on(self, wanted: Step) -> None:
        if wanted.action == "EndEncode":
            self.parts = wanted.parameters["s"]
        with self.wire.overlooking():
            self._tell(self.stepper.resume(), wanted)

    def _tell(self, stop: Stop, wanted: Step) -> None:
        if stop.action == "Encode":
            if stop.phase == "begin":
                self.happened("BeginEncode")
            else:
                self.happened("EndEncode", s=self.parts)
        elif stop.action == "SendPart":
            self.happened("SendPart")
        else:
            assert stop.action == "Idle", (stop, wanted)

    @does("BeginOverwrite")
    def begin_overwrite(self, t: ModelValue) -> None:
        self.tensor[: size(True) // 2] = self.wire.message + 1

    @does("EndOverwrite")
    def end_overwrite(self, t: ModelValue) -> None:
        self.tensor[:] = self.wire.message + 1

    @does("PeerTake")
    def peer_take(self) -> None:
        self.wire.take()

    @does("BeginRead")
    def begin_read(self) -> None:
        self.wire.begin_read()

    @does("EndRead")
    def end_read(self) -> None:
        self.wire.end_read()

    @does("PeerDrop")
    def peer_drop(self) -> None:
        self.wire.drop()

    @does("TrackerFires")
    def tracker_fires(self, m: int, i: int) -> None:
        self.wire.fires(m, i)

    def can(self, step: Step) -> bool:
        """Nothing is settled before there is a message to send, for which the caller has written its tensor."""
        if step.action in ("Recycle", "DropSurplus"):
            here = self.states[0]
            more = here["number"] <= self.oracle.evaluate("MaxMessage")
            return (
                more and not here["overwriting"] and all(v == here["number"] for t, v in self._tensors(here))
            )
        return True

    def _tensors(self, state: State) -> list[tuple[Any, int]]:
        return [(x, version) for x, version in state["content"].items() if str(x).startswith("t")]

    def attempts(self) -> list[Step]:
        """None: the sender goes on by itself, whatever it is asked for."""
        return []

    def weight(self, step: Step) -> int:
        return {"Recycle": 1, "DropSurplus": 1}.get(step.action, 4)

    # What is to be seen.

    def _name(self, buffer: int) -> ModelValue:
        return self.names.get(buffer, ModelValue(f"unknown_{buffer}"))

    def _fresh(self, wanted: Step) -> ModelValue:
        """A name for a buffer that is new, if one is taken: the one wanted, or one that is not in use."""
        used = set(self.names.values())
        names = [wanted.parameters["b"], *sorted(self.oracle.evaluate("Buffers"))]
        return next((name for name in names if name not in used), ModelValue("one_too_many"))

    def view(self) -> Mapping[str, Any]:
        free, pending = self.pools()
        wire = self.wire
        return {
            "free": {self._name(buffer) for buffer in free},
            "pending": {self._name(buffer) for buffer, _ in pending},
            "undone": {key for key, gate in wire.gates.items() if not gate.done},
            "holding": len(wire.frames),
            # A header has no version of its own.
            "read": tuple(0 if self.is_header(n) else number for n, number in enumerate(wire.read)),
            "fired too early": set(),
        }

    def is_header(self, part: int) -> bool:
        """Whether part `part` of the message that is read, from 0, is the same in every message."""
        return False

    def facts(self, state: State) -> Mapping[str, Any]:
        alive = {(frame["msg"], frame["part"]) for frame in state["alive"]}
        gates = self.wire.gates
        return {
            "free": set(state["free"]),
            "pending": {entry["buffer"] for entry in state["pending"]},
            "undone": {(frame["msg"], frame["part"]) for frame in state["undone"]},
            "holding": len(state["holding"]),
            "read": tuple(0 if self.is_header(n) else e["version"] for n, e in enumerate(state["seen"])),
            "fired too early": {key for key in alive if key in gates and gates[key].tracker.done},
        }

    def close(self) -> None:
        while self.stepper.running:
            self.stepper.resume(Ended())
        self.wire.close()


class ArrayFirst(Sender):
    """`NaiveSender` with the header behind the array."""

    constants = {**Sender.constants, "Shapes": "<- ArrayFirst", "FreeLimit": "4"}
    small = {
        "two messages": {
            "Shapes": "<- ArrayFirst",
            "Buffers": "{b1, b2}",
            "MaxMessage": "2",
            "HighWater": "2",
        },
    }
    header_first = False

    def set_up(self) -> None:
        self.others = set(zmq.utils.garbage.gc.refs)  # frames of earlier tests that libzmq never lets go of
        self.sender = NaiveSender(self.wire.socket, size(True), self.header_first)
        encode = self.sender.encode

        def watched(array: Any, buffer: Any) -> Any:
            return self.encode(lambda: encode(self.array, buffer), id(buffer))

        self.sender.encode = watched  # type: ignore[method-assign]

    def loop(self) -> None:
        while True:
            self.sender.send(self.next())

    def new(self) -> Any:
        return None

    def fill(self, message: Any) -> None:
        self.array = np.full(size(self.parts[self.header_first]["large"]), self.wire.message, np.uint8)

    def pools(self) -> tuple[list[int], list[tuple[int, Collection[Any]]]]:
        free, pending = self.sender.free, self.sender.pending
        return [id(b) for b in free], [(id(b), [tracker]) for tracker, b in pending]

    def is_header(self, part: int) -> bool:
        return part != self.header_first

    def close(self) -> None:
        """pyzmq's collector lets go of the last frames a little after the socket is closed."""
        super().close()
        deadline = time.monotonic() + PATIENCE
        while zmq.utils.garbage.gc.refs.keys() - self.others and time.monotonic() < deadline:
            time.sleep(0.001)
        self.sender.close()


class HeaderFirst(ArrayFirst):
    """`NaiveSender` with the header before the array."""

    constants = {**ArrayFirst.constants, "Shapes": "<- HeaderFirst"}
    small = {name: {**constants, "Shapes": "<- HeaderFirst"} for name, constants in ArrayFirst.small.items()}
    header_first = True
