"""`BroadcastRing` and its readers held to `spec/BroadcastRing.tla`, in one process and one action at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_tests.broadcast_ring.faults import READERS, WRITERS
from model_tests.broadcast_ring.world import MESSAGE, TOO_LONG, Seat, World, slot_value
from model_tests.stepper import PATIENCE, Stepper, Stop
from model_tests.traces import runs

from quiesce.broadcast_ring import BroadcastRing
from quiesce.errors import Closed, PeerDied, QuiesceTimeout
from quiesce.model import Function, ModelValue, Oracle, State, Step, case_ring
from quiesce.model.adapter import Adapter, does, lets
from quiesce.model.case import Case
from quiesce.model.replay import Suite
from quiesce.model.traces import Trace
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import ACK, BYE

WRITING = (
    "Loan", "Take", "BeginFill", "EndFill", "Publish", "Overflow", "SendBody", "Post", "Return", "Close", "Admit",
    "HearRelease", "HearLeave", "Exclude", "Vacate", "Recycle", "DropLoan",
)  # fmt: skip
READING = ("Open", "BeginCopy", "EndCopy", "Lease", "TakeBody", "TimeOut", "FindWriterDead")
COLLECTING = ("HearRelease", "HearLeave", "Vacate", "Recycle", "DropLoan")
BETWEEN = (*COLLECTING, "Admit", "Exclude")
NEVER_LEASE = 1 << 40  # bytes


def _small(**constants: str) -> dict[str, str]:
    base = {"Readers": "{r1}", "Slots": "{s1}", "Window": "2", "Messages": "2", "Mortal": "{}"}
    return {**base, **constants}


def _is_recyclable(state: State, slot: ModelValue) -> bool:
    return bool(
        state["slot"][slot] in ("held", "lent")
        and slot not in state["loaned"]
        and slot != state["current"]
        and not state["holders"][slot]
    )


def _is_vacant(state: State) -> bool:
    """Whether there is a reader that left, was heard to, and holds nothing."""
    held = set().union(*state["holders"].values())
    return state["step"] == "idle" and any(
        life in ("left", "dying", "dead") and reader not in state["admitted"] and reader not in held
        for reader, life in state["life"].items()
    )


def _is_later(step: Step, readers: Collection[ModelValue]) -> bool:
    return any(reader < step.parameters["r"] for reader in readers)


class Ring(Adapter):
    """`ring_class` and `reader_class` are the implementation under test."""

    model = "ring_deaths"
    constants = {
        "Readers": "{r1, r2, r3}",
        "Remote": "{r3}",
        "Late": "{r2}",
        "Leavers": "{r1, r2, r3}",
        "Mortal": "{r1, r2}",
        "Window": "4",
        "Messages": "30",
        "Loans": "TRUE",
        "Bodies": "TRUE",
        "Views": "2",
        "WriterMortal": "TRUE",
    }
    small = {
        "two readers": _small(Readers="{r1, r2}"),
        "three messages": _small(Messages="3", Views="0"),
        "views": _small(Views="2"),
        "loans": _small(Loans="TRUE"),
        "bodies": _small(Readers="{r1, r2}", Remote="{r2}", Bodies="TRUE", Messages="1"),
        "deaths": _small(Mortal="{r1}"),
        "comings": _small(Late="{r1}", Leavers="{r1}"),
        "a writer that dies": _small(WriterMortal="TRUE", Bodies="TRUE"),
    }
    reasons = {
        "the writer hears, lets in, forgets and recycles only between two publications": (
            lambda state, step: state["step"] != "idle" and step.action in BETWEEN
        ),
        "what was heard is recycled before anything else is done": (
            lambda state, step: (
                state["step"] == "idle"
                and step.action in WRITING
                and step.action not in ("HearRelease", "HearLeave", "Vacate", "Recycle")
                and any(_is_recyclable(state, slot) for slot in state["slot"])
            )
        ),
        "a reader that greets is let in before the next message, and before the end": (
            lambda state, step: (
                step.action in ("Take", "Overflow", "Close") and "joining" in state["life"].values()
            )
        ),
        "a free slot is taken when all that was told has been heard": (
            lambda state, step: (
                step.action in ("Take", "Loan")
                and state["slot"][step.parameters["s"]] == "free"
                and any(state["notices"].values())
            )
        ),
        "what a reader told is heard before it is forgotten": (
            lambda state, step: step.action == "Exclude" and bool(state["notices"][step.parameters["r"]])
        ),
        "a reader that left is forgotten as soon as it has let everything go": (
            lambda state, step: step.action in WRITING and step.action != "Vacate" and _is_vacant(state)
        ),
        "a goodbye is heard before anything is recycled": (
            lambda state, step: (
                step.action == "Recycle"
                and any(notice["kind"] == "leave" for told in state["notices"].values() for notice in told)
            )
        ),
        "a goodbye is heard together with what follows it": (
            lambda state, step: (
                step.action in WRITING
                and step.action not in BETWEEN
                and any(
                    life == "left" and reader not in state["admitted"] and state["notices"][reader]
                    for reader, life in state["life"].items()
                )
            )
        ),
        "what is lost with the writer is the kernel's choice": lambda state, step: step.action == "LoseBody",
        "what was copied is released before the next entry is opened": (
            lambda state, step: (
                step.action == "Open" and 1 in dict(state["grip"][step.parameters["r"]]).values()
            )
        ),
        "a body that has arrived is taken": (
            lambda state, step: step.action == "TimeOut" and bool(state["bodies"][step.parameters["r"]])
        ),
        "a reader that waits finds out that the writer is dead": (
            lambda state, step: step.action == "TimeOut" and state["writer"] == "dead"
        ),
        "readers are posted in the order of their ranks, and sent bodies after that": (
            lambda state, step: (
                (step.action == "Post" and _is_later(step, state["unposted"]))
                or (
                    step.action == "SendBody"
                    and (bool(state["unposted"]) or _is_later(step, state["unsent"]))
                )
            )
        ),
        "notices are heard in the order of ranks": (
            lambda state, step: (
                step.action in ("HearRelease", "HearLeave")
                and _is_later(step, {r for r, notices in state["notices"].items() if notices})
            )
        ),
    }
    ring_class: type[BroadcastRing] = BroadcastRing
    reader_class: type[RingReader] = RingReader

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        known = oracle.evaluate
        readers, remote = known("Readers"), known("Remote")
        self.ranks = {value: rank for rank, value in enumerate([*sorted(readers - remote), *sorted(remote)])}
        self.remote = remote
        self.slots = {value: slot for slot, value in enumerate(sorted(known("Slots")))}
        self.world = World(
            self.ring_class, self.reader_class, sorted(readers - remote), sorted(remote), len(self.slots),
            known("Views"), known("Window"), known("Mortal"), known("WriterMortal"),
        )  # fmt: skip
        self.closing = self.whole = self.collecting = False
        self.errors: list[str] = []
        self.messages, self.bodies = known("Messages"), known("Bodies")
        for value in sorted(readers - known("Late")):
            self.world.join(self.ranks[value])
            self._run(lambda: self.world.ring.wait_until_ready(0.0))
        self.reported.clear()

    # The writer.

    @lets(*WRITING)
    def write(self, wanted: Step) -> None:
        """The writer takes its next step, or begins a call that leads to the one that is wanted."""
        writer = self.world.writer
        if wanted.action == "DropLoan":
            self.world.loans.pop(self.slots[wanted.parameters["s"]], None)
        while not self.reported and writer.running:
            self._wrote(writer.resume())
        if self.reported:
            return
        # What ends with this step is not left standing behind it.
        self.whole = wanted.action in ("Loan", "Admit")
        self.collecting = wanted.action in COLLECTING
        self._wrote(writer.start(self._call(wanted)))
        while not self.reported and writer.running:
            self._wrote(writer.resume())

    def _call(self, wanted: Step) -> Callable[[], object]:
        ring = self.world.ring
        if wanted.action == "Take":
            return self._publish(self.slots[wanted.parameters["s"]])
        if wanted.action == "Overflow":
            return self._publish(None, TOO_LONG)
        if wanted.action == "Loan":
            return self._empty
        if wanted.action == "Close":
            # Left where it has returned in the specification: it would wait for what remote readers have yet to take.
            self.closing = True
            return lambda: ring.close(1.0)
        if wanted.action in COLLECTING and wanted.parameters.get("r") not in self.remote:
            return ring._collect
        return lambda: ring.wait_until_ready(0.0)

    def _publish(self, slot: int | None, size: int = MESSAGE) -> Callable[[], object]:
        number = self.world.ring._sequence + 1
        if slot in self.world.loans:
            message = self.world.loans[slot]
            self.world.sent = None
            # A loan is written when it is published, and not before: so that a reader that still reads it shows.
            return lambda: self.world.ring.publish(message.fill_(number), 0.0)
        self.world.sent = message = torch.full((size,), number)
        return lambda: self.world.ring.publish(message, 0.0)

    def _empty(self) -> None:
        world = self.world
        tensor = world.ring.empty((MESSAGE,), torch.int64, 0.0)
        address = tensor.data_ptr() - world.ring._memory.address
        layout = world.ring._memory.layout
        world.loans[(address - layout.slots_at) // layout.slot_bytes] = tensor

    @does("KillWriter")
    def kill_writer(self) -> None:
        self.world.kill_writer()

    def _run(self, call: Callable[[], object]) -> bool:
        """Run a call of the writer to its end."""
        self._wrote(self.world.writer.start(call))
        while self.world.writer.running:
            self._wrote(self.world.writer.resume())
        return bool(self.reported)

    def _wrote(self, stop: Stop) -> None:
        action, world = stop.action, self.world
        if action == "raise":
            assert isinstance(stop.fields["error"], QuiesceTimeout | PeerDied), stop.fields["error"]
        elif action == "Fill":
            world.filling = stop.phase == "begin"
            self.happened("BeginFill" if world.filling else "EndFill")
        elif action != "return":
            parameters = {}
            if "r" in stop.fields:
                parameters["r"] = world.values[stop.fields["r"]]
            if "s" in stop.fields and action != "HearRelease":
                parameters["s"] = slot_value(stop.fields["s"])
            self.happened(action, **parameters)
            if action == "Admit":
                # The answer is there before anything happens to the writer.
                reader = world.seats[stop.fields["r"]].reader
                assert reader is not None
                reader.wait_until_ready(PATIENCE)
            if self.whole or (action == "Return" and not self.closing):
                while world.writer.running:
                    self._wrote(world.writer.resume())

    def _steps(self) -> tuple[Step, ...]:
        return self.oracle.successors(self.states[0])

    def _leave_nothing_begun(self) -> None:
        """End a call of the writer's that hears and recycles, if nothing is left that it could."""
        left = any(step.action in BETWEEN for step in self._steps())
        if self.collecting and self.states[0]["step"] == "idle" and not left:
            while self.world.writer.running:
                self._wrote(self.world.writer.resume())

    # The readers.

    @does("Join")
    def join(self, r: ModelValue) -> None:
        self._leave_nothing_begun()
        self.world.join(self.ranks[r])

    @lets(*READING)
    def read(self, wanted: Step) -> None:
        """A reader takes its next step, or begins to receive; whether it leases is decided when it has opened."""
        self._leave_nothing_begun()
        rank = self.ranks[wanted.parameters["r"]]
        seat = self.world.seats[rank]
        assert seat.reader is not None
        leasing = wanted.action != "BeginCopy" and self.world.views
        seat.reader.lease_bytes = 8 * MESSAGE if leasing else NEVER_LEASE
        if seat.stepper.running:
            self._advance(rank)
            if self.reported:
                return
        self._read(rank, self.world.receive(rank, wanted.action == "TakeBody"))
        self._advance(rank)

    @lets("Release")
    def release(self, wanted: Step) -> None:
        """After a copy, or when the last view of a lease is gone."""
        self._leave_nothing_begun()
        rank = self.ranks[wanted.parameters["r"]]
        seat = self.world.seats[rank]
        if seat.dropper.running:
            while seat.dropper.running:
                self._read(rank, seat.dropper.resume())
        else:
            self._advance(rank)

    def _advance(self, rank: int) -> None:
        """Let a reader's call go on until something has happened, or it ends."""
        stepper = self.world.seats[rank].stepper
        while not self.reported and stepper.running:
            self._read(rank, stepper.resume())

    def _read(self, rank: int, stop: Stop) -> None:
        action, world = stop.action, self.world
        seat, reader = world.seats[rank], world.values[rank]
        state = self.states[0]
        if action == "raise":
            if not isinstance(stop.fields["error"], QuiesceTimeout | Closed | PeerDied):
                self.errors.append(f"{type(stop.fields['error']).__name__}: {stop.fields['error']}")
            assert isinstance(stop.fields["error"], QuiesceTimeout | Closed | PeerDied), stop.fields["error"]
        elif action in ("return", "Sleep"):
            return
        elif action == "Copy":
            self.happened("BeginCopy" if stop.phase == "begin" else "EndCopy", r=reader)
        elif action == "TimeOut":
            # Not a step of the specification unless a body is awaited.
            if reader not in self.remote and state["opened"][reader]["kind"] == "body":
                self.happened("TimeOut", r=reader)
        elif action == "FindWriterDead":
            for _ in state["bodies"][reader]:
                self.wherever("LoseBody", r=reader)
            self.happened("FindWriterDead", r=reader)
        elif action == "Release":
            if stop.phase == "end":
                self.happened("Release", r=reader, s=slot_value(stop.fields["s"]))
        else:
            self.happened(action, r=reader)
            if action == "TakeBody" and reader in self.remote and state["writer"] == "up":
                world.hear(ACK)
            if action == "Lease":
                seat.slots[state["opened"][reader]["seq"]] = stop.fields["s"]
        if action in ("Lease", "TakeBody", "TimeOut") or (action, stop.phase) == ("Release", "end"):
            while seat.stepper.running:
                self._read(rank, seat.stepper.resume())

    @does("Drop")
    def drop(self, r: ModelValue, s: ModelValue) -> None:
        seat = self.world.seats[self.ranks[r]]
        number = next(number for number, slot in seat.slots.items() if slot == self.slots[s])
        if len(seat.views[number]) == 1:
            del seat.slots[number]
            views = seat.views.pop(number)
            seat.dropper.start(views.clear)
        else:
            seat.views[number].pop(0)

    @does("Leave")
    def leave(self, r: ModelValue) -> None:
        self._leave_nothing_begun()
        reader = self.world.seats[self.ranks[r]].reader
        assert reader is not None
        reader.close()
        if r in self.remote and self.states[0]["writer"] == "up":
            self.world.hear(BYE)

    @does("Kill")
    def kill(self, r: ModelValue) -> None:
        self._leave_nothing_begun()
        body = self.world.seats[self.ranks[r]].body
        assert body is not None
        body.start_dying()

    @does("Exit")
    def exit(self, r: ModelValue) -> None:
        self.world.seats[self.ranks[r]].end()

    def can(self, step: Step) -> bool:
        r, s = step.parameters.get("r"), step.parameters.get("s")
        seat = self.world.seats[self.ranks[r]] if r is not None else None
        slot = self.slots[s] if s is not None else None
        if step.action == "DropLoan":
            return self.states[0]["step"] == "idle"
        if step.action == "Take":
            # A loan is the caller's to publish, and it does so only where it may.
            allowed = any((t.action, t.parameters) == ("Take", step.parameters) for t in self._steps())
            return self.states[0]["slot"][s] == "free" or (allowed and slot in self.world.loans)
        if step.action == "Drop":
            assert seat is not None
            return slot in seat.slots.values() and not seat.dropper.running
        if step.action == "Leave":
            assert seat is not None
            return not seat.stepper.running
        return True

    def attempts(self) -> list[Step]:
        """The caller publishes whether or not there is room: the writer must not."""
        state = self.states[0]
        idle = not self.world.writer.running and state["writer"] == "up" and state["sequence"] < self.messages
        if not (idle and self.bodies) or any(step.action == "Overflow" for step in self._steps()):
            return []
        return [Step("Overflow", Function(), state)]

    def weight(self, step: Step) -> int:
        """Messages travel most of the time; the end of the writer comes late, if at all."""
        likely = {
            "KillWriter": 1, "Kill": 3, "Loan": 3, "Leave": 8, "DropLoan": 12, "Drop": 20, "Join": 40, "Overflow": 60,
            "SendBody": 60, "Open": 480, "TimeOut": 1600,
        }  # fmt: skip
        if step.action == "Leave" and self.world.seats[self.ranks[step.parameters["r"]]].views:
            return 160
        return likely.get(step.action, 160)

    # What is to be seen.

    def view(self) -> Mapping[str, Any]:
        world = self.world
        if world.sent is not None:
            sent = world.sent.numpy().view(np.uint8)
            for frame in world.ring._body:
                shared = np.shares_memory(np.frombuffer(frame, np.uint8), sent)
                assert not shared, "the body on its way is the caller's memory"
        seats = {f"reader {reader}": world.seat(rank) for reader, rank in self.ranks.items()}
        return {**world.view(), **seats}

    def facts(self, state: State) -> Mapping[str, Any]:
        """What cannot be told of an end that is gone is taken as it is seen."""
        seen = self.view()
        found = {name: state[name] if name in state else seen[name] for name in seen}
        if state["writer"] == "dead":
            found |= {
                name: seen[name] for name in seen if not name.startswith("reader") and name != "entries"
            }
        else:
            steps = self.oracle.successors(state) if state["writer"] == "up" else ()
            found["recyclable"] = {step.parameters["s"] for step in steps if step.action == "Recycle"}
            if state["writer"] == "closed":
                found["recyclable"] = seen["recyclable"]
        for reader in self.ranks:
            found[f"reader {reader}"] = self._reader(state, reader, seen[f"reader {reader}"])
        return found

    def _reader(self, state: State, reader: ModelValue, seen: Mapping[str, Any]) -> Mapping[str, Any]:
        life = state["life"][reader]
        found = dict(seen)
        if life in ("in", "left", "dying"):
            found["torn"] = set()
        if life in ("in", "left") and seen["cursor"] is not None:
            found["cursor"] = state["cursor"][reader]
            if seen["got"] is not None and not self.world.seats[self.ranks[reader]].stepper.running:
                found["got"] = state["got"][reader]
            if "posts" in seen:
                found |= {name: state[name][reader] for name in ("posts", "opened")}
                notices = state["notices"][reader]
                found["notices"] = tuple("leave" if n["kind"] == "leave" else n["slot"] for n in notices)
        return found

    def damage(self) -> str:
        """What readers find in their leases, and in everything that was published."""
        world = self.world
        for stepper in (world.writer, *(seat.stepper for seat in world.seats)):
            self._finish(stepper)
        if world.sent is not None:
            world.sent.fill_(0)  # the caller writes its memory, as it may
        for reader, rank in self.ranks.items():
            seat, life = world.seats[rank], self.states[0]["life"][reader]
            self.errors += [
                f"{reader} has a lease of message {n}, and finds other bytes" for n in world.torn(rank)
            ]
            if seat.reader is None or seat.reader._closed or life not in ("in", "dying"):
                continue
            before = None
            while before != (seat.reader._cursor, seat.value):
                self._check(reader, seat)
                before = seat.reader._cursor, seat.value
                seat.reader.lease_bytes = NEVER_LEASE
                world.receive(rank, False)
                self._finish(seat.stepper)
        return "; ".join(dict.fromkeys(self.errors))

    def _check(self, reader: ModelValue, seat: Seat) -> None:
        """What a reader received last must be what it opened last, unless it has yet to receive that."""
        assert seat.reader is not None
        due = seat.reader._cursor
        received = self.states[0]["got"][reader] if seat.value is None else seat.value
        if due is not None and seat.reader._opened is None and due <= self.messages and received != due:
            self.errors.append(f"{reader} received message {received} (0: of several) in place of {due}")

    def _finish(self, stepper: Stepper) -> None:
        """Let a call come to its end; note the error that it should not have raised."""
        while stepper.running:
            stop = stepper.resume()
            error = stop.fields.get("error") if stop.action == "raise" else None
            if error and not isinstance(error, QuiesceTimeout | Closed | PeerDied):
                self.errors.append(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        self.world.end()

    @classmethod
    def record(cls, directory: Path) -> None:
        runs.ring(directory, runs.Ring(writer=cls.ring_class, reader=cls.reader_class))

    @classmethod
    def cases(cls, trace: Trace) -> list[Case]:
        return case_ring.cases(trace.events)


def _variant(name: str) -> type[Ring]:
    members = {
        "ring_class": WRITERS.get(name, BroadcastRing),
        "reader_class": READERS.get(name, RingReader),
        "__module__": __name__,
        "__qualname__": f"VARIANTS[{name!r}]",
    }
    return type(f"Ring_{name}", (Ring,), members)


VARIANTS = {name: _variant(name) for name in (*WRITERS, *READERS)}
"""The same with faulty writers and readers, by the names of the mutants."""

SUITE = Suite(
    Ring,
    VARIANTS,
    {
        "release_with_a_view": "views",
        **dict.fromkeys(("loan_written_after_publish", "loan_recycled"), "loans"),
        **dict.fromkeys(("body_not_copied", "forget_pending_body"), "bodies"),
        "lap_reader": "three messages",
        "holders_after_posts": "deaths",
        **dict.fromkeys(("exclude_while_dying", "counted_twice", "stale_notices"), "deaths"),
        "leave_drops_leases": "comings",
    },
)
