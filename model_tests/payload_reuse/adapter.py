"""`PayloadSender` held to `spec/PayloadReuse.tla`: over inproc, where the test decides when a tracker fires."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from model_tests.payload_reuse.faulty import FAULTY, RecycledAtReceive
from model_tests.payload_reuse.world import Interrupted, World, stop_name
from model_tests.stepper import Stop
from model_tests.traces import runs

from quiesce.errors import PeerDied, QuiesceTimeout
from quiesce.model import ModelValue, Oracle, State, Step, case_payload
from quiesce.model.adapter import Adapter, does, lets
from quiesce.model.case import Case
from quiesce.model.replay import Suite
from quiesce.model.traces import Trace
from quiesce.payload_reuse import PayloadSender

# What every run changes in the model, because World is what it is.
INPROC = {"Transport": '"inproc"', "Side": '"bind"', "HighWater": "2", "FreeLimit": "1"}
# The sender's calls of the socket, in which it notices that a peer died some time ago.
_PATIENT = 100  # steps after which a call is taken never to end
NOTICING = ("SendPart", "SendTimesOut", "Abort")


def _small(**constants: str) -> dict[str, str]:
    nothing = {
        "Tensors": "{}",
        "Buffers": "{b1, b2}",
        "MaxMessage": "1",
        "MaxParts": "3",
        "Shapes": "<- ThreeParts",
        "PeerMayDie": "FALSE",
        "MayInterrupt": "FALSE",
    }
    return {**INPROC, **nothing, **constants}


def _marked(state: State) -> bool:
    """Whether the last message in the pipe is the one that is worked on, ended by an abort mark."""
    last = state["pipe"][-1][-1] if state["pipe"] else {"part": -1, "msg": -1}
    return bool(last["part"] == 0 and last["msg"] == state["number"])


def _pending(state: State, step: Step) -> int:
    """The message for which the buffer of a step is pending; 0 if it is not."""
    found = [entry["message"] for entry in state["pending"] if entry["buffer"] == step.parameters.get("b")]
    return found[0] if found else 0


class PayloadReuse(Adapter):
    """`sender_class` is the implementation under test."""

    model = "payload_reuse_all"
    constants = {
        **INPROC,
        "Buffers": "{b1, b2, b3, b4}",
        "MaxMessage": "6",
        "Shapes": "<- LockstepShapes",
    }
    small = {
        "two messages": _small(MaxMessage="2", MaxParts="2", Shapes="<- LargeThenSmall"),
        "a peer that dies": _small(PeerMayDie="TRUE", Buffers="{b1}"),
        "an exception": _small(MayInterrupt="TRUE", Buffers="{b1}"),
        "an exception, then another message": _small(
            MayInterrupt="TRUE", MaxMessage="2", MaxParts="2", Shapes="<- LargeThenSmall"
        ),
        "a peer that dies, then another message": _small(PeerMayDie="TRUE", MaxMessage="2"),
        "lent": _small(Tensors="{t1}", Shapes="<- TensorWithin", PeerMayDie="TRUE", Buffers="{b1}"),
        "lent twice": _small(Tensors="{t1}", MaxMessage="2", MaxParts="2", Shapes="<- TensorLast"),
    }
    reasons = {
        "libzmq notices in its next call that a peer died; that it may do so only later is its own affair": (
            lambda state, step: state["gone"] and step.action in (*NOTICING, "PartRefused")
        ),
        "an abort mark is sent alone wherever there is room; that libzmq overlooks new room is its own affair": (
            lambda state, step: (
                step.action == "Abort"
                and not (state["partial"] or _marked(step.state))
                and state["mode"] == "usual"
                and state["peer"] != "down"
                and len(state["pipe"]) < 2
            )
        ),
        "what nobody was ever to read is recycled first, the oldest first": (
            lambda state, step: (
                step.action in ("Take", "Recycle", "DropSurplus")
                and any(
                    not entry["asked"] and entry["message"] < (_pending(state, step) or state["number"])
                    for entry in state["pending"]
                )
            )
        ),
    }
    own = frozenset({"Take", "Recycle", "DropSurplus", "Touch", "Close"})
    sender_class: type[PayloadSender] = PayloadSender

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self.world = World(self.sender_class, oracle.evaluate("FreeLimit"))
        self.names: dict[int, ModelValue] = {}
        self.number = 1
        self.closed = False
        self.tensors = oracle.evaluate("Tensors")
        lent = [any(part["lent"] for part in shape) for shape in oracle.evaluate("Shapes")]
        self.may_lend, self.may_send = any(lent), not all(lent)
        self.lending = self.may_lend

    # The caller.

    @does("Take")
    def send(self, b: ModelValue) -> None:
        """A call of `send` or `lend` begins; what fires from now on, it finds out after it took a buffer."""
        if self.may_send and self.may_lend:
            self.lending = self.number % 3 != 0
        with self.world.overlooking():
            stop = self.world.stepper.start(self.world.call(self.lending))
            while stop.action != "Take" and self.world.stepper.running:
                self._tell(stop)
                stop = self.world.stepper.resume()
        if stop.action == "Take" and stop.fields["buffer"] not in self.names:
            left = sorted(self.oracle.evaluate("Buffers") - set(self.names.values()))
            self.names[stop.fields["buffer"]] = b if b in left else next(iter(left), b)
        self._tell(stop)

    @lets("BeginEncode", "EndEncode", "SendPart", "SendTimesOut", "PartRefused", "Abort", "Remember")
    def go_on(self, wanted: Step) -> None:
        """The sender takes its next step. Whether libzmq refuses or swallows a part is the environment's choice."""
        if wanted.action == "EndEncode":
            parts = [(part["large"], part["lent"]) for part in wanted.parameters["s"]]
            self.shape = wanted.parameters["s"]
            self.world.shape(parts, self.number, self.lending)
        if self.world.unnoticed and wanted.action in (*NOTICING, "PartRefused"):
            self.world.notice()
            self.world.socket.refuse = wanted.action == "PartRefused"
            self.wherever("Notice")
        elif wanted.action == "Abort" and _marked(wanted.state):
            # libzmq looks about once a millisecond, and may not know yet that the receiver made room for the mark.
            self.world.notice()
        self._advance()

    @does("Interrupt")
    def interrupt(self) -> None:
        self.happened("Interrupt")
        self._tell(self.world.stepper.resume(Interrupted()))

    @does("BeginOverwrite")
    def begin_overwrite(self, t: ModelValue) -> None:
        self.world.begin_overwrite(self.number)

    @does("EndOverwrite")
    def end_overwrite(self, t: ModelValue) -> None:
        self.world.end_overwrite(self.number)

    @does("Recycle", "DropSurplus")
    def settle(self, b: ModelValue) -> bool:
        """The sender looks at what is pending up to `b`, and finds that settled; the rest fires a moment too late."""
        pool = self.world.sender.pool
        pending = [self._name(id(entry[0])) for entry in pool._pending]
        looks = pending.index(b) + 1 if b in pending else len(pending)
        seen = [tracker for entry in pool._pending if self._name(id(entry[0])) == b for tracker in entry[1]]
        with self.world.overlooking(seen):
            return self._whole(functools.partial(pool.settle, looks))

    @does("Touch")
    def touch(self) -> bool:
        with self.world.overlooking():
            return self._whole(self.world.sender.settle)

    @does("Close")
    def close_sender(self) -> bool:
        done = self._whole(lambda: self.world.sender._close(0.1))
        self.world.sender.pool.free_limit = 0
        self.world.sender.pool._free.clear()
        self.closed = True
        return done

    # The environment.

    @does("PeerTake")
    def peer_take(self) -> bool:
        """There is nothing to take if the message went to a pipe that was dead."""
        taken = self.world.take()
        if taken and isinstance(self.world.sender, RecycledAtReceive):
            self.world.sender.acknowledged.add(self.world.versions()[0])
        return taken

    @does("BeginRead")
    def begin_read(self) -> None:
        self.world.begin_read()

    @does("EndRead")
    def end_read(self) -> None:
        self.world.end_read()

    @does("PeerDrop")
    def peer_drop(self) -> None:
        self.world.drop()

    @does("TrackerFires")
    def tracker_fires(self, m: int, i: int) -> None:
        self.world.fires(m, i)

    @does("PeerDies")
    def peer_dies(self) -> None:
        self.world.dies()

    @lets("Notice")
    def notice(self, wanted: Step) -> None:
        """Whether the next part of a message begun is refused or swallowed is the environment's choice."""
        self.world.notice()
        self.world.socket.refuse = wanted.state["mode"] == "doomed"
        self.happened("Notice")

    @does("PeerReturns")
    def peer_returns(self) -> None:
        self.world.returns()

    @does("Reap")
    def reap(self) -> None:
        """libzmq's own threads do; the trackers tell."""

    def can(self, step: Step) -> bool:
        if step.action == "EndEncode":
            return self.lending or not any(part["lent"] for part in step.parameters["s"])
        return True

    def attempts(self) -> list[Step]:
        """None: whatever the sender is asked for, it goes on by itself, and what it does must be allowed."""
        return []

    def weight(self, step: Step) -> int:
        """Messages travel most of the time; the peer dies once, and better within a message; the end is the end."""
        if step.action == "PeerDies":
            return 12 if self.states[0]["partial"] else 1
        return {"Close": 1, "PeerReturns": 3, "PartRefused": 12}.get(step.action, 6)

    # What happened, and what is to be seen.

    def _whole(self, call: Callable[[], object]) -> bool:
        """Run a call to its end; whether anything happened in it."""
        self._tell(self.world.stepper.start(call))
        while self.world.stepper.running:
            self._tell(self.world.stepper.resume())
        return bool(self.reported)

    def _advance(self) -> None:
        """Let the sender go on until something has happened, or its call has ended."""
        before = len(self.reported)
        while len(self.reported) == before and self.world.stepper.running:
            stop = self.world.stepper.resume()
            self._tell(stop)
            if stop.action == "Remember":
                while self.world.stepper.running:
                    self._tell(self.world.stepper.resume())

    def _tell(self, stop: Stop) -> None:
        action = stop_name(stop)
        if action in NOTICING and not (action == "Abort" and stop.phase == "begin"):
            self._noticed()
        if action == "Take":
            self.happened("Take", b=self._name(stop.fields["buffer"]))
        elif action == "EndEncode":
            self.happened("EndEncode", s=self.shape)
        elif action in ("Recycle", "DropSurplus"):
            self.happened(action, b=self._name(stop.fields["buffer"]))
            if action == "DropSurplus":
                # Its address may come again, for another buffer.
                del self.names[stop.fields["buffer"]]
        elif action == "Touch":
            self.world.unnoticed = False
            self.wherever("Touch")
        elif action == "Abort":
            if stop.phase == "end":
                self._aborted()
        elif action:
            self.happened(action)
            self.number += action == "Remember"
        elif stop.action == "raise":
            error = stop.fields["error"]
            assert isinstance(error, (QuiesceTimeout, PeerDied, Interrupted)), repr(error)
            if isinstance(error, QuiesceTimeout):
                self._noticed()
                self.happened("SendTimesOut")
                self.number += 1

    def _aborted(self) -> None:
        """A mark alone is taken or not, and the sender need not know; libzmq does, unless it swallows what it takes."""
        if any(state["mode"] != "usual" for state in self.states):
            self.happened("Abort")
        else:
            taken = self.world.socket.accepted
            self.happened("Abort", where=lambda state: taken == _marked(state))

    def _noticed(self) -> None:
        self.world.unnoticed = False
        self.wherever("Notice")

    def _name(self, key: int) -> ModelValue:
        return self.names.get(key, ModelValue(f"unknown_{key}"))

    def view(self) -> Mapping[str, Any]:
        world, pool = self.world, self.world.sender.pool
        pending = [self._name(id(entry[0])) for entry in pool._pending]
        assert len(set(pending)) == len(pending), f"a buffer is pending twice: {pending}"
        return {
            "free": {self._name(id(buffer)) for buffer in pool._free},
            "pending": set(pending),
            "undone": {key for key, gate in world.gates.items() if not gate.done},
            "holding": len(world.frames),
            "read": tuple(world.read),
            "in a call": world.stepper.running,
            "lent": bool(world.sender.loans) and not world.stepper.running,
            "next part is refused": world.socket.refuse,
            "fired too early": set(),
        }

    def facts(self, state: State) -> Mapping[str, Any]:
        undone = {(frame["msg"], frame["part"]) for frame in state["undone"]}
        lent = {(frame["msg"], frame["part"]) for t in self.tensors for frame in state["loan"][t]}
        # While libzmq closes the socket, only what the receiver can still take is certainly alive.
        taken = {frame for message in (*state["pipe"], state["holding"]) for frame in message}
        still = state["alive"] if state["socket"] != "closed" else state["alive"] & taken
        alive = {(frame["msg"], frame["part"]) for frame in still}
        idle = state["step"] in ("idle", "closed")
        return {
            "free": set(state["free"]),
            "pending": {entry["buffer"] for entry in state["pending"]},
            "undone": undone,
            "holding": len(state["holding"]),
            # An abort mark has no bytes, hence no version.
            "read": tuple(0 if entry["part"] == 0 else entry["version"] for entry in state["seen"]),
            "in a call": not idle,
            "lent": idle and bool(lent & undone),
            "next part is refused": state["mode"] == "doomed" and not state["gone"],
            "fired too early": {
                key for key in alive if key in self.world.gates and self.world.gates[key].tracker.done
            },
        }

    def damage(self) -> str:
        """What the receiver finds in everything that was sent, and what the sender has kept."""
        world, pool = self.world, self.world.sender.pool
        for _ in range(_PATIENT):
            if not world.stepper.running:
                break
            if not world.obj:
                self.shape = next(iter(self.oracle.evaluate("Shapes")))
                world.shape([(p["large"], p["lent"]) for p in self.shape], self.number, self.lending)
            world.stepper.resume()
        found = ["the sender sends for ever"] if world.stepper.running else []
        kept = [id(entry[0]) for entry in pool._pending] + [id(buffer) for buffer in pool._free]
        if len(set(kept)) < len(kept):
            found.append("a buffer is free and pending at once, or twice")
        if len(pool._free) > pool.free_limit:
            found.append(f"{len(pool._free)} buffers are free, more than the {pool.free_limit} allowed")
        arrived = []
        while world.frames or (not world.receiver.closed and world.take()):
            versions = world.versions() or [0]
            if not len(world.frames[0]):
                world.drop()  # an abort mark alone
                continue
            arrived.append(max(versions))
            if len(set(versions)) > 1 or not versions[0]:
                found.append(
                    f"a message arrived whose frames hold the bytes of messages {versions} (0: of several)"
                )
            world.drop()
        if len(set(arrived)) < len(arrived):
            found.append(f"messages arrived twice: {arrived}")
        state = self.states[0]
        lost = set(state["accepted"]) - set(arrived) - self._delivered() - state["excused"]
        if lost and not self.closed:
            found.append(f"messages {sorted(lost)} were reported as sent and never arrived")
        return "; ".join(found) or self._stuck()

    def _delivered(self) -> set[int]:
        return {entry[0]["msg"] for state in self.states for entry in state["delivered"]}

    def _stuck(self) -> str:
        """Whether something is never settled, although nobody reads anything."""
        sender = self.world.sender
        for gate in self.world.gates.values():
            gate.open = True
        deadline = time.monotonic() + 1.0
        while sender.pool.pending and time.monotonic() < deadline:
            sender.pool.settle(sender.pool.pending) if self.closed else sender.settle()
        left = sender.pool.pending
        return f"{left} buffer(s) are never settled, although nobody reads anything" if left else ""

    def close(self) -> None:
        self.world.close()

    @classmethod
    def record(cls, directory: Path) -> None:
        runs.payload(directory, runs.Payload(sender=cls.sender_class))

    @classmethod
    def cases(cls, trace: Trace) -> list[Case]:
        return case_payload.cases(trace.events)


def _variant(name: str) -> type[PayloadReuse]:
    members = {"sender_class": FAULTY[name], "__module__": __name__, "__qualname__": f"VARIANTS[{name!r}]"}
    return type(f"PayloadReuse_{name}", (PayloadReuse,), members)


VARIANTS = {name: _variant(name) for name in FAULTY}
"""The same with the faulty senders, by the names of the mutants."""

INTERRUPTED = "an exception, then another message"
SUITE = Suite(
    PayloadReuse,
    VARIANTS,
    {
        **dict.fromkeys(("orphan_part", "resent_when_complete", "failed_send_forgotten"), INTERRUPTED),
        "failed_send_leaked": "an exception",
        **dict.fromkeys(
            ("refused_part_retried", "refusal_not_ended"), "a peer that dies, then another message"
        ),
        "refused_parts_kept": "a peer that dies",
        **dict.fromkeys(("timeout_ignored", "never_touched"), "a peer that dies"),
        "pending_forgotten": "a peer that dies, then another message",
        "caller_told_at_once": "lent twice",
    },
)
