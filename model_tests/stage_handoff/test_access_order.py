"""The simulated device, its allocator and its checker: against the specification, and by byte range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_tests.stage_handoff.faulty_device import FAULTS
from model_tests.stage_handoff.pipeline import DRAWS

from quiesce.errors import NotQuiescent, QuiesceTimeout
from quiesce.model import Oracle, Step, manifest
from quiesce.simulated import Choose, SimulatedBackend, SimulatedEvent, SimulatedWorld, chooser

STREAMS = {"Pass", "BeginWork", "EndWork"}


class Program:
    """Any program of AccessOrder.tla, on the simulated device: one method for each of its calls."""

    def __init__(self, device: type[SimulatedBackend] = SimulatedBackend) -> None:
        self.world = SimulatedWorld(lambda below: 0)
        self.backend = device(self.world, eager=False)
        self.streams = {"s1": self.backend.current(), "s2": self.backend.stream("s2")}
        self.event = SimulatedEvent()
        self.memory: dict[str, torch.Tensor | None] = {
            "b": self.backend.empty((2,), torch.int32),
            "p": self.backend.pinned(8).view(torch.int32),
        }
        self.seen = {
            name: self.backend.alias(memory) for name, memory in self.memory.items() if memory is not None
        }
        self.calls = 0

    def call(self, action: str, parameters: Mapping[str, Any]) -> None:
        """Make a call, or let a stream take a step, as the specification did."""
        if action in STREAMS:
            self.world.run(self.streams[parameters["s"]])
            return
        self.calls += 1
        # There is one event, and `from` is no name in Python.
        names = {"from": "reads", "to": "writes"}
        getattr(self, action)(**{names.get(name, name): of for name, of in parameters.items() if name != "e"})

    def Launch(self, s: str, reads: frozenset[str], writes: frozenset[str]) -> None:
        number = self.calls

        def kernel(*tensors: torch.Tensor) -> None:
            if not reads:
                tensors[0].fill_(number)
            elif writes:
                tensors[1].copy_(tensors[0])

        with self.backend.using(self.streams[s]):
            self.backend.launch(kernel, [self.memory[b] for b in reads], [self.memory[b] for b in writes])  # type: ignore[misc]

    def Collective(self, s: str, reads: frozenset[str], writes: frozenset[str]) -> None:
        with self.backend.using(self.streams[s]):
            before = self.backend.record()
        with self.backend.using(self.streams["s2"]):
            self.backend.wait(before)
        self.Launch("s2", reads, writes)
        self.backend.record(self.event, self.streams["s2"])

    def Record(self, s: str) -> None:
        self.backend.record(self.event, self.streams[s])

    def WaitEvent(self, s: str) -> None:
        self.backend.wait(self.event, self.streams[s])

    def SyncEvent(self) -> None:
        self.backend.synchronize(self.event, 0.0)

    def SyncStream(self, s: str) -> None:
        self.backend.synchronize(self.backend.record(stream=self.streams[s]), 0.0)

    def SyncDevice(self) -> None:
        for name in self.streams:
            self.SyncStream(name)

    def HostRead(self, p: str) -> None:
        memory = self.memory[p]
        assert memory is not None
        self.backend.host_access(memory)

    def HostWrite(self, p: str) -> None:
        memory = self.memory[p]
        assert memory is not None
        self.backend.host_access(memory, writes=True)
        memory.fill_(self.calls)

    def CopyPageable(self, s: str, p: str, d: str) -> None:
        with self.backend.using(self.streams[s]):
            self.backend.copy_pageable(self.memory[d], self.memory[p])  # type: ignore[arg-type]

    def RecordStream(self, b: str, s: str) -> None:
        with self.backend.using(self.streams[s]):
            self.backend.record_stream(self.memory[b])  # type: ignore[arg-type]

    def Free(self, b: str) -> None:
        self.memory[b] = None

    def Allocate(self, b: str) -> None:
        self.memory[b] = self.backend.empty((2,), torch.int32)


def compare(oracle: Oracle, program: Program, state: Mapping[str, Any], steps: Sequence[Step]) -> None:
    """Both agree on what is flagged and what may run next, and until a race on what lies in memory."""
    streams = {stream: name for name, stream in program.streams.items()}
    assert bool(program.world.order.races) == state["race"]
    runnable = {(name, streams[stream]) for name, stream in program.world.runnable()}
    assert runnable == {(step.action, step.parameters["s"]) for step in steps if step.action in STREAMS}
    if program.memory["b"] is None and state["calls"] < oracle.evaluate("MaxCalls") and not state["race"]:
        hand_out = any(program.backend._reusable(block) for block in program.backend._free)
        assert hand_out == any(step.action == "Allocate" for step in steps)
    if not state["race"]:
        for name, meant in state["memory"].items():
            assert meant <= 0 or program.seen[name].unique().tolist() == [meant]


def run(program: Program, oracle: Oracle, choose: Choose) -> None:
    """Make calls, and let streams run, as chosen among what the specification allows."""
    (state,) = oracle.initial()
    while True:
        steps = [step for step in oracle.successors(state) if step.action != "Done"]
        compare(oracle, program, state, steps)
        if not steps:
            return
        # By kind first: there are many ways to launch.
        kinds = sorted({step.action for step in steps})
        kind = kinds[choose(len(kinds))]
        steps = [step for step in steps if step.action == kind]
        step = steps[choose(len(steps))]
        program.call(step.action, step.parameters)
        state = step.state


@pytest.mark.parametrize("model", ["stream_events", "stream_everything"])
def test_programs_run_as_the_specification_says(model: str) -> None:
    """The checker flags a program at the same call as in the specification; until then memory holds the same."""
    oracle = Oracle.load(model)

    @given(st.data())
    def agree(data: st.DataObject) -> None:
        run(Program(), oracle, lambda below: data.draw(st.integers(0, below - 1)) if below > 1 else 0)

    agree()


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"wait_returns_early"}))
def test_a_faulty_device_is_told_apart(fault: str) -> None:
    """The mutants of the environment and of the checker, built: each departs from the specification."""
    oracle = Oracle.load(manifest.load().mutants[fault].model)
    for seed in range(DRAWS):
        try:
            run(Program(FAULTS[fault]), oracle, chooser(seed))
        except AssertionError:
            return
    pytest.fail(f"{fault} was never told apart")


@pytest.mark.parametrize("device", [SimulatedBackend, FAULTS["wait_returns_early"]])
def test_synchronising_waits(device: type[SimulatedBackend]) -> None:
    """The host goes on once the point is reached; the faulty device lets it go on before."""
    backend = device(SimulatedWorld(chooser(0)), eager=False)
    backend.launch(lambda: None)
    event = backend.record()
    backend.synchronize(event, 1.0)
    assert event.reached == (device is SimulatedBackend)


def test_every_fault_of_the_environment_is_built() -> None:
    """The mutants of the manifest and the faulty devices have the same names."""
    mutants = [m.name for m in manifest.load().mutants.values() if m.protocol == "stream_ordering"]
    assert set(mutants) == set(FAULTS)


def device() -> tuple[SimulatedBackend, Any]:
    """A simulated device whose streams never run by themselves, and a second stream."""
    backend = SimulatedBackend(SimulatedWorld(lambda below: 0), eager=False)
    return backend, backend.stream("side")


def touch(memory: torch.Tensor) -> None:
    """A kernel that writes what it is given."""
    memory.add_(1)


def test_views_that_overlap_conflict_and_others_do_not() -> None:
    """What counts is the bytes of the storage: not the tensor object, its offset or its shape."""
    backend, side = device()
    whole = torch.zeros(8, 8)
    backend.launch(touch, writes=[whole[:4]])
    with backend.using(side):
        backend.launch(touch, writes=[whole[4:]])
    assert not backend.world.order.races
    with backend.using(side):
        backend.launch(touch, writes=[whole.view(-1)[31:33]])
    assert len(backend.world.order.races) == 1


def test_a_race_names_both_sites() -> None:
    """The report leads to the two lines that made the calls, and says what to do."""
    backend, side = device()
    memory = backend.empty((4,), torch.float32)
    backend.launch(touch, writes=[memory])
    with backend.using(side):
        backend.launch(touch, writes=[memory])
    with pytest.raises(NotQuiescent) as caught:
        backend.world.order.check()
    first = touch.__code__.co_filename
    lines = [word for word in str(caught.value).split() if word.startswith(first)]
    assert len(set(lines)) == 2
    assert "wait for it" in str(caught.value)


def test_the_host_races_with_a_copy_it_did_not_wait_for() -> None:
    """A pinned buffer may be read by the host only behind the event of its copy, and written only then too."""
    for writes in (False, True):
        backend, _ = device()
        pinned = backend.pinned(16)
        source = torch.ones(16, dtype=torch.uint8)
        backend.copy(pinned, source)
        done = backend.record()
        backend.host_access(pinned, writes)
        assert backend.world.order.races
        backend.synchronize(done, 1.0)
        before = len(backend.world.order.races)
        backend.host_access(pinned, writes)
        assert len(backend.world.order.races) == before
        assert torch.equal(pinned, source)


def test_two_reads_do_not_conflict() -> None:
    """Only a write makes two accesses conflict."""
    backend, side = device()
    memory = torch.zeros(4)
    backend.launch(lambda source: source, reads=[memory])
    with backend.using(side):
        backend.launch(lambda source: source, reads=[memory])
    assert not backend.world.order.races


def test_an_event_captures_a_point() -> None:
    """Recording again does not move a wait, and waiting for an event never recorded waits for nothing."""
    backend, side = device()
    event = backend.record()
    with backend.using(side):
        backend.wait(SimulatedEvent())
        backend.wait(event)
    backend.launch(lambda: None)
    backend.record(event)
    backend.world.run(side)
    backend.world.run(side)
    assert side.ran == 2
    assert not event.reached


def test_record_stream_keeps_memory_until_the_stream_has_used_it() -> None:
    """Without it, memory that died is handed out at once, whatever another stream does with it."""
    for recorded in (False, True):
        backend, side = device()
        memory = backend.empty((16,), torch.int32)
        address = memory.data_ptr()
        with backend.using(side):
            backend.launch(lambda source: source, reads=[memory])
            if recorded:
                backend.record_stream(memory)
        del memory
        again = backend.empty((16,), torch.int32)
        assert (again.data_ptr() == address) == (not recorded)
        del again
        backend.world.drain()
        addresses = {
            backend.empty((16,), torch.int32).data_ptr(),
            backend.empty((16,), torch.int32).data_ptr(),
        }
        assert address in addresses


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    """The allocator takes memory back when the last view has died, and not when a kernel that uses it ends."""
    backend, _ = device()
    memory = backend.empty((4, 4), torch.float32)
    address, view = memory.data_ptr(), memory[1:, 2]
    del memory
    other = backend.empty((4, 4), torch.float32)
    assert other.data_ptr() != address
    del view
    assert backend.empty((4, 4), torch.float32).data_ptr() == address


def test_a_copy_from_pageable_memory_has_read_it() -> None:
    """The source may be written as soon as the call has returned."""
    backend, _ = device()
    source, target = torch.full((4,), 3), torch.zeros(4, dtype=torch.int64)
    backend.copy_pageable(target, source)
    backend.host_access(source, writes=True)
    source.fill_(9)
    backend.world.drain()
    assert target.tolist() == [3, 3, 3, 3]
    assert not backend.world.order.races


def test_waiting_for_what_cannot_come_ends() -> None:
    """A point behind a receive that nobody sends to is not reached, and the host says so at once."""
    from quiesce.simulated_transport import SimulatedPeers, SimulatedTransport

    backend = SimulatedBackend(SimulatedWorld(chooser(1)))
    handle = SimulatedTransport(SimulatedPeers(), backend, 1, "gloo").receive(torch.zeros(4), 2)
    with pytest.raises(QuiesceTimeout, match="never be reached"):
        handle.wait(1.0)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.booleans())
def test_a_missing_wait_shows_only_if_it_is_missing(seed: int, waits: bool) -> None:
    """With the wait the bytes are right under every schedule, without it the checker speaks under every schedule."""
    backend = SimulatedBackend(SimulatedWorld(chooser(seed)))
    side = backend.stream("side")
    source, target = backend.empty((8,), torch.int32), backend.empty((8,), torch.int32)
    backend.launch(lambda memory: memory.fill_(7), writes=[source])
    produced = backend.record()
    with backend.using(side):
        if waits:
            backend.wait(produced)
        backend.copy(target, source)
        copied = backend.record()
    backend.synchronize(copied, 1.0)
    backend.host_access(target)
    assert bool(backend.world.order.races) == (not waits)
    if waits:
        assert target.tolist() == [7] * 8
