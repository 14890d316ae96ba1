"""The implementation and TLC's evaluator, step by step together.

Writer and readers are real, in threads that stop at the edges of actions; Hypothesis says whose turn it is. The
specification must allow each step, and after it both must show the same state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from model_tests.broadcast_ring.world import (
    COPIED,
    LEASED,
    LOCAL,
    NOTHING,
    REMOTE,
    TOO_LONG,
    WINDOW,
    World,
    rank_value,
    slot_value,
)
from model_tests.stepper import Stop

from quiesce.broadcast_ring import BroadcastRing
from quiesce.errors import Closed, PeerDied, QuiesceTimeout
from quiesce.model import Disabled, Oracle, State
from quiesce.ring_reader import RingReader

MODEL = "ring_deaths"
MESSAGES = 30
OVERRIDES = {
    "Readers": "{r1, r2, r3}",
    "Remote": "{r3}",
    "Late": "{r1, r2, r3}",
    "Leavers": "{r1, r2, r3}",
    "Mortal": "{r1, r2}",
    "Window": f"{WINDOW}",
    "Messages": f"{MESSAGES}",
    "Loans": "TRUE",
    "Bodies": "TRUE",
    "Views": "2",
    "WriterMortal": "TRUE",
}


def oracle() -> Oracle:
    return Oracle.load(MODEL, set=OVERRIDES)


class Lockstep(RuleBasedStateMachine):
    """The shipped ring under test, or, with arguments, another one."""

    kill_after = 60
    """Steps of the specification that the writer is given before it may be killed."""

    def __init__(
        self, ring_class: type[BroadcastRing] = BroadcastRing, reader_class: type[RingReader] = RingReader
    ) -> None:
        super().__init__()
        self.spec = oracle()
        (self.state,) = self.spec.initial()
        self.world = World(ring_class, reader_class)
        self.trail: list[str] = []
        for rank in (LOCAL[0], REMOTE[0]):
            self.join(rank)
            self.admit()
            while self.world.writer.running:
                self.resume_writer()

    def teardown(self) -> None:
        self.world.end()

    @rule(choice=st.integers(0, 10**6))
    def go_on(self, choice: int) -> None:
        """Somebody takes the next step, or begins something."""
        turns = self.turns()
        name, *arguments = turns[choice % len(turns)]
        getattr(self, name)(*arguments)
        self.compare()

    def turns(self) -> list[tuple[Any, ...]]:
        world, state = self.world, self.state
        found: list[tuple[Any, ...]] = []
        if world.writer.running:
            if state["writer"] == "up":
                found += [("resume_writer",)] * 8
        elif state["writer"] == "up":
            found += [("admit",)]
            if state["sequence"] < MESSAGES:
                found += [("publish", size) for size in (COPIED, LEASED, LEASED, TOO_LONG)] * 2
                found += [("empty",)] + [
                    ("publish_loan", slot) for slot in world.loans if self.is_unpublished(slot)
                ]
            elif not world.loans:
                found += [("close",)]
            found += [("drop_loan", slot) for slot in world.loans]
        if state["writer"] == "up" and len(self.trail) > self.kill_after:
            found += [("kill_writer",)]
        for rank in (*LOCAL, *REMOTE):
            seat, life = world.seats[rank], state["life"][rank_value(rank)]
            if seat.stepper.running:
                if life != "dying":
                    found += [("resume_reader", rank)] * 6
            elif life == "out" and state["writer"] == "up":
                found += [("join", rank)]
            elif life == "in":
                found += [("receive", rank)] * 6
                if rank in REMOTE or state["opened"][rank_value(rank)] == NOTHING:
                    found += [("leave", rank)]
            elif life == "joining" and state["writer"] == "dead":
                found += [("receive", rank)]
            if rank in LOCAL:
                if life in ("in", "left") and not seat.stepper.running:
                    found += [("drop_view", rank, number) for number in seat.views]
                if life in ("in", "left"):
                    found += [("start_dying", rank)]
                if life == "dying":
                    found += [("end_dying", rank)]
        return found or [("rest",)]

    def is_unpublished(self, slot: int) -> bool:
        return self.state["slot"][slot_value(slot)] == "held"

    def rest(self) -> None:
        """Nothing is left to do."""

    # Following the specification.

    def follow(self, action: str, **parameters: Any) -> None:
        self.trail.append(f"{action}({', '.join(f'{k}={v}' for k, v in parameters.items())})")
        try:
            (self.state,) = self.spec.step(self.state, action, **parameters)
        except Disabled as reason:
            raise AssertionError(
                f"the specification forbids what was done: {reason}\n" + "\n".join(self.trail)
            ) from None

    def compare(self) -> None:
        state: State = self.state
        seen = self.world.view()
        seats, recyclable = seen.pop("seats"), seen.pop("recyclable")
        if state["writer"] == "dead":
            seen = {"entries": seen["entries"]}
        expected: dict[str, Any] = {name: state[name] for name in seen}
        for rank, seat in seats.items():
            if state["life"][rank] in ("in", "left"):
                wanted = {"cursor": state["cursor"][rank]}
                if "posts" in seat:
                    wanted |= {name: state[name][rank] for name in ("posts", "opened")}
                    wanted["notices"] = [
                        "leave" if notice["kind"] == "leave" else notice["slot"]
                        for notice in state["notices"][rank]
                    ]
                seen[f"seat {rank}"], expected[f"seat {rank}"] = seat, wanted
        if state["writer"] == "up":
            seen["recyclable"] = recyclable
            expected["recyclable"] = {
                step.parameters["s"] for step in self.spec.successors(state) if step.action == "Recycle"
            }
        different = {name: (seen[name], expected[name]) for name in seen if seen[name] != expected[name]}
        assert not different, f"implementation and specification differ in {different}\n" + "\n".join(
            self.trail
        )
        assert not self.spec.violated(state), self.spec.violated(state)
        self.compare_bytes()

    def compare_bytes(self) -> None:
        """Whatever is leased holds what was published, and a body is nobody's but the ring's."""
        for rank in LOCAL:
            if self.state["life"][rank_value(rank)] in ("in", "left", "dying"):
                for number, views in self.world.seats[rank].views.items():
                    assert all(bool((view == number).all()) for view in views), f"torn\n{self.trail}"
        if self.world.sent is not None:
            sent = self.world.sent.numpy().view(np.uint8)
            for frame in self.world.ring._body:
                assert not np.shares_memory(np.frombuffer(frame, np.uint8), sent), (
                    "a body is the caller's memory"
                )

    # The writer.

    def advance_writer(self, stop: Stop) -> None:
        action, fields = stop.action, {"r": rank_value, "s": slot_value}
        if action == "return":
            return
        if action == "raise":
            assert isinstance(stop.fields["error"], QuiesceTimeout | PeerDied), stop.fields["error"]
            return
        if action == "Fill":
            self.world.filling = stop.phase == "begin"
            self.follow("BeginFill" if stop.phase == "begin" else "EndFill", s=self.state["current"])
            return
        found = {name: convert(stop.fields[name]) for name, convert in fields.items() if name in stop.fields}
        if action == "HearRelease":
            del found["s"]
        self.follow(action, **found)

    def resume_writer(self) -> None:
        self.advance_writer(self.world.writer.resume())

    def publish(self, size: int) -> None:
        number = self.world.ring._sequence + 1
        self.world.sent = torch.full((size,), number)
        sent = self.world.sent
        self.advance_writer(self.world.writer.start(lambda: self.world.ring.publish(sent, 0.0)))

    def publish_loan(self, slot: int) -> None:
        loan = self.world.loans[slot].fill_(self.world.ring._sequence + 1)
        self.world.sent = None
        self.advance_writer(self.world.writer.start(lambda: self.world.ring.publish(loan, 0.0)))

    def empty(self) -> None:
        world = self.world

        def call() -> None:
            tensor = world.ring.empty((LEASED,), torch.int64, 0.0)
            address = tensor.data_ptr() - world.ring._memory.address
            layout = world.ring._memory.layout
            world.loans[(address - layout.slots_at) // layout.slot_bytes] = tensor

        self.advance_writer(world.writer.start(call))

    def drop_loan(self, slot: int) -> None:
        del self.world.loans[slot]

    def admit(self) -> None:
        def call() -> None:
            self.world.ring.wait_until_ready(0.0)

        self.advance_writer(self.world.writer.start(call))

    def close(self) -> None:
        self.advance_writer(self.world.writer.start(lambda: self.world.ring.close(0.1)))

    def kill_writer(self) -> None:
        self.world.kill_writer()
        self.follow("KillWriter")

    # The readers.

    def join(self, rank: int) -> None:
        self.world.seats[rank].views.clear()
        self.world.join(rank)
        self.follow("Join", r=rank_value(rank))

    def receive(self, rank: int) -> None:
        value = rank_value(rank)
        coming = self.state["bodies"][value]
        arrives = bool(coming) and (rank in REMOTE or self.state["opened"][value]["kind"] == "body")
        self.world.seats[rank].leased = None
        self.advance_reader(rank, self.world.receive(rank, arrives))

    def resume_reader(self, rank: int) -> None:
        self.advance_reader(rank, self.world.seats[rank].stepper.resume())

    def advance_reader(self, rank: int, stop: Stop) -> None:
        action, reader = stop.action, rank_value(rank)
        seat = self.world.seats[rank]
        if action == "return":
            assert stop.fields["value"] == self.state["got"][reader], (stop, self.state["got"], self.trail)
            if seat.leased is None:
                seat.views.pop(stop.fields["value"])
        elif action == "raise":
            assert isinstance(stop.fields["error"], QuiesceTimeout | Closed | PeerDied), stop.fields["error"]
        elif action == "Copy":
            self.follow("BeginCopy" if stop.phase == "begin" else "EndCopy", r=reader)
        elif action == "TimeOut":
            # Not a step of the specification unless a body is awaited.
            if rank in LOCAL and self.state["opened"][reader]["kind"] == "body":
                self.follow("TimeOut", r=reader)
        elif action == "TakeBody":
            self.follow("TakeBody", r=reader)
            if rank in REMOTE and self.state["writer"] == "up":
                assert self.world.ring._socket.poll(5000), "the acknowledgement did not arrive"
        elif action == "FindWriterDead":
            while self.state["bodies"][reader]:
                self.follow("LoseBody", r=reader)
            self.follow("FindWriterDead", r=reader)
        elif action != "Sleep":
            if action == "Lease":
                seat.leased = stop.fields["s"]
            self.follow(
                action, r=reader, **({"s": slot_value(stop.fields["s"])} if action == "Release" else {})
            )

    def drop_view(self, rank: int, number: int) -> None:
        seat, reader = self.world.seats[rank], rank_value(rank)
        slot = next(
            loan["buffer"]
            for loan in self.state["loans"]
            if (loan["reader"], loan["version"]) == (reader, number)
        )
        seat.views[number].pop(0)
        self.follow("Drop", r=reader, s=slot)
        if not seat.views[number]:
            del seat.views[number]
            self.follow("Release", r=reader, s=slot)

    def leave(self, rank: int) -> None:
        reader = self.world.seats[rank].reader
        assert reader is not None
        if reader._cursor is None:
            reader.wait_until_ready(5.0)
        reader.close()
        self.follow("Leave", r=rank_value(rank))

    def start_dying(self, rank: int) -> None:
        body = self.world.seats[rank].body
        assert body is not None
        body.start_dying()
        self.follow("Kill", r=rank_value(rank))

    def end_dying(self, rank: int) -> None:
        seat = self.world.seats[rank]
        assert seat.body is not None
        assert seat.reader is not None
        seat.end()
        self.follow("Exit", r=rank_value(rank))
