"""The implementation on the simulated device and the specification, step by step.

Who moves is drawn by Hypothesis. After each move the oracle takes the steps that the implementation reported, and
both must agree on every queue, point, block and counter; before each move, on what may move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_tests.stage_handoff.pipeline import ELEMENTS, SHAPES, Pipeline, Rank, Shape, meant
from model_tests.stage_handoff.stager import Stager

from quiesce.events import Event, observe
from quiesce.model import Oracle, manifest
from quiesce.simulated import SimulatedStream, SimulatedWorld

MODELS: dict[str, Shape] = {
    "stage_handoff_nccl": Shape(),
    "stage_handoff_gloo": Shape(flavour="gloo", wait_twice=True),
    "stage_handoff_fresh": Shape(fresh=True, steps=2, scratch=False),
    "stage_handoff_gather": Shape(gather=True, steps=2),
    "stage_handoff_extra": Shape(flavour="gloo", extra=True, max_pending=3),
}
HOST = {"ReceiveMetadata", "PostReceive", "AwaitReceive", "AllGather", "BeforeForward", "Forward"} | {
    "SendMetadata",
    "SendTensors",
}
STREAMS = {"Pass", "BeginWork", "EndWork", "BeginTransfer", "EndTransfer"}
EXAMPLES = max(10, settings.default.max_examples // 5)


def version(memory: torch.Tensor, known: int) -> int:
    """The version a block holds as a whole; 0 for anything else."""
    values = memory.unique().tolist()
    return values[0] if len(values) == 1 and 1 <= values[0] <= known else 0


def items(stream: SimulatedStream, named: Mapping[SimulatedStream, Any]) -> tuple[Any, ...]:
    """A queue as the specification sees it: the kind of each item, and the point of each wait."""
    return tuple(
        (item.kind, (named[item.point[0]], item.point[1])) if item.point else item.kind
        for item in stream.queue
    )


def spec_items(queue: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same of a queue in a state of the specification."""
    return tuple(
        ("wait", (item["point"]["stream"], item["point"]["count"]))
        if item["kind"] == "wait"
        else item["kind"]
        for item in queue
    )


def compare_streams(
    world: SimulatedWorld, state: Mapping[str, Any], named: Mapping[SimulatedStream, Any]
) -> None:
    """Both have the same items in the same streams, as many finished, and the same ones running."""
    by_name = {name: stream for stream, name in named.items()}
    empty = SimulatedStream("", -1)
    for name in state["queue"]:
        stream = by_name.get(name, empty)
        assert items(stream, named) == spec_items(state["queue"][name]), name
        assert stream.ran == state["ran"][name], name
    assert {named[s] for s in world.streams if s.queue and s.queue[0].running} | {
        named[world.receivers[s.queue[0].line]]
        for s in world.streams
        if s.queue and s.queue[0].running and s.queue[0].kind == "send"
    } == state["busy"]


class Lockstep:
    """A pipeline, and the state of the specification that it must be in."""

    def __init__(self, oracle: Oracle, pipeline: Pipeline):
        self.oracle = oracle
        self.pipeline = pipeline
        self.taken: set[str] = set()
        (self.state,) = oracle.initial()
        self.blocks: dict[int, tuple[int, str]] = {}
        second = pipeline.ranks[1]
        self.blocks |= {memory.data_ptr(): (2, name) for name, memory in second.memory.items()}
        self.blocks |= {
            memory.data_ptr(): (rank.number, "out") for rank in pipeline.ranks for memory in rank.outputs
        }

    def named(self) -> dict[SimulatedStream, Any]:
        """The streams by the names of the specification: <<rank, kind>>."""
        return {s: (int(s.name[0]), s.name[2:].split()[0]) for s in self.pipeline.world.streams}

    def take(self, action: str, **parameters: Any) -> None:
        """The specification takes the step that the implementation took."""
        (self.state,) = self.oracle.step(self.state, action, **parameters)
        self.taken.add(action)

    def move(self, mover: Rank | SimulatedStream) -> None:
        """One move of the implementation, and all the steps that it stands for."""
        if isinstance(mover, SimulatedStream):
            name = next(name for name, stream in self.pipeline.world.runnable() if stream is mover)
            self.pipeline.move(mover)
            self.take(name, s=self.named()[mover])
            return
        seen: list[Event] = []
        where = mover.at
        with observe(lambda event: seen.append(event) if event.phase == "end" else None):
            self.pipeline.move(mover)
        if where == "forward":
            self.take("Forward", r=mover.number, b=self.block_of(mover))
        elif where == "again":
            self.take("AwaitReceive", r=mover.number)
        for event in seen:
            self.take(event.action, r=event.fields["r"])

    def block_of(self, rank: Rank) -> tuple[int, str]:
        """The block that forward writes; one not seen before takes a name that is left."""
        address = rank.outputs[0].data_ptr()
        if address not in self.blocks:
            left = {(1, "out"), (1, "spare")} - set(self.blocks.values())
            self.blocks[address] = min(left)
        return self.blocks[address]

    def compare(self) -> None:
        """Both agree on all that can be seen."""
        state, pipeline, named = self.state, self.pipeline, self.named()
        compare_streams(pipeline.world, state, named)
        for rank in pipeline.ranks:
            index = rank.number - 1
            assert rank.at == state["at"][index]
            assert rank.step == state["step"][index]
            handles = {(named[h.event.point[0]], h.event.point[1]) for h in rank.link._unsettled}  # type: ignore[attr-defined]
            assert handles == {(p["stream"], p["count"]) for p in state["handles"][index]}
            other = pipeline.ranks[1 - index]
            metadata = state["metadata"][index]
            assert (other.inbox.sent, other.inbox.taken) == (metadata["sent"], metadata["taken"])
            assert other.inbox.sent - rank.link.pending == metadata["reaped"]
            for address, block in rank.backend._blocks.items():
                name = self.blocks.get(address)
                if name:
                    memory = torch.from_numpy(block.memory).view(torch.int32)
                    assert version(memory[:ELEMENTS], pipeline.shape.steps) == state["memory"][name], name
                    assert (block not in rank.backend._free) == state["block"][name]["live"], name

    def compare_moves(self) -> None:
        """Both agree on who may move."""
        steps = self.oracle.successors(self.state)
        named = self.named()
        streams = {(step.action, step.parameters["s"]) for step in steps if step.action in STREAMS}
        assert streams == {(name, named[stream]) for name, stream in self.pipeline.world.runnable()}
        hosts = {step.parameters["r"] for step in steps if step.action in HOST}
        # A send that finds the bound reached reaps first, if it can.
        hosts |= {
            step.parameters["r"]
            for step in steps
            if step.action == "ReapMetadata"
            and self.state["at"][step.parameters["r"] - 1] in ("metadata", "more")
            if self.pipeline.shape.flavour == "nccl"
            or not self.state["queue"][step.parameters["r"], "compute"]
        }
        assert hosts == {rank.number for rank in self.pipeline.ranks if rank.may_move()}


@pytest.mark.parametrize("model", MODELS)
def test_pipeline_and_specification_agree(model: str) -> None:
    """Every queue, point, block and counter of the pipeline is as the specification says, after every step."""
    oracle = Oracle.load(model)

    @settings(max_examples=EXAMPLES)
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        def choose(below: int) -> int:
            return data.draw(st.integers(0, below - 1)) if below > 1 else 0

        pipeline = Pipeline(choose, MODELS[model])
        lockstep = Lockstep(oracle, pipeline)
        lockstep.compare()
        lockstep.compare_moves()
        while moves := list(pipeline.moves()):
            lockstep.move(moves[choose(len(moves))])
            lockstep.compare()
            lockstep.compare_moves()
        assert pipeline.ranks[1].results == meant(pipeline.shape)
        assert all(at == "done" for at in lockstep.state["at"])

    agree()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "model",
    [
        "stage_handoff_gloo",
        "stage_handoff_extra",
        pytest.param("stage_handoff_gather", marks=pytest.mark.nightly),
    ],
)
def test_every_schedule_agrees(model: str) -> None:
    """Not a sample: from every state that any schedule leads to, every move is made, and both agree.

    Calls that are several steps of the specification are made whole.
    """
    oracle = Oracle.load(model)
    seen = set()
    taken: set[str] = set()
    frontier: list[list[int]] = [[]]
    while frontier:
        path = frontier.pop()
        pipeline = Pipeline(lambda below: 0, MODELS[model])
        lockstep = Lockstep(oracle, pipeline)
        for choice in path:
            lockstep.move(list(pipeline.moves())[choice])
        lockstep.compare()
        taken |= lockstep.taken
        if lockstep.state in seen:
            continue
        seen.add(lockstep.state)
        lockstep.compare_moves()
        moves = len(list(pipeline.moves()))
        frontier += [[*path, choice] for choice in range(moves)]
        assert moves or pipeline.ranks[1].results == meant(pipeline.shape)
    assert taken == set(oracle.actions) - set(manifest.load().models[model].untaken) - {"Done"}


def test_the_shapes_of_other_tests_are_modelled() -> None:
    """Each kind of pipeline that schedules are drawn for has a feature set that a model covers."""

    def features(shape: Shape) -> set[str]:
        return {name for name in ("fresh", "gather", "extra", "wait_twice") if getattr(shape, name)}

    modelled = [features(replace(shape)) for shape in MODELS.values()]
    for shape in SHAPES:
        assert features(shape) in modelled


def test_staging_and_specification_agree() -> None:
    """The same for host staging: the stager's moves are the specification's actions."""
    oracle = Oracle.load("host_staging")

    @settings(max_examples=EXAMPLES)
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        def choose(below: int) -> int:
            return data.draw(st.integers(0, below - 1)) if below > 1 else 0

        stager = Stager(choose)
        (state,) = oracle.initial()
        buffers: dict[int, str] = {}
        blocks: dict[int, str] = {}

        def called(names: dict[int, str], address: int, free: tuple[str, str]) -> str:
            if address not in names:
                names[address] = next(name for name in free if name not in names.values())
            return names[address]

        def buffer_of(view: torch.Tensor) -> str:
            return called(buffers, view.untyped_storage().data_ptr(), ("p1", "p2"))

        while True:
            # The pool recycles when it is next asked; the specification, as soon as a loan has ended.
            for reader in [name for name in ("p1", "p2") if state["pinned"][name]["state"] == "lent"]:
                if not any(loan["buffer"] == reader for loan in state["loans"]):
                    (state,) = oracle.step(state, "Recycle", p=reader)
            moves = stager.moves()
            named = {s: s.name for s in stager.world.streams}
            compare_streams(stager.world, state, named)
            steps = oracle.successors(state)
            enabled = {s.action for s in steps} - {"Done"}
            if "Produce" not in enabled:
                # The model has two blocks; the allocator would make a third.
                moves = [(name, what) for name, what in moves if name != "Produce"]
            assert enabled == {name for name, _ in moves}
            assert {(s.action, s.parameters["s"]) for s in steps if s.action in STREAMS} == {
                (name, stream.name) for name, stream in moves if name in STREAMS
            }
            if not moves:
                break
            name, what = moves[choose(len(moves))]
            view = what.view if name == "EndLoan" else what[1]._view if name in ("Settle", "Lend") else None
            stager.move(name, what)
            if name in STREAMS:
                parameters = {"s": what.name}
            elif name == "Produce":
                assert stager.made is not None
                parameters = {"d": called(blocks, stager.made.data_ptr(), ("d1", "d2"))}
            else:
                parameters = {"p": buffer_of(stager.copying[-1][1]._view if view is None else view)}
            (state,) = oracle.step(state, name, **parameters)
        assert stager.wrong == 0
        assert state["step"] == stager.steps

    agree()


def test_every_action_of_the_specification_has_a_method() -> None:
    """What hosts do in the specification is a marked method of the same name, in the same order."""
    from quiesce.events import actions
    from quiesce.host_staging import HostStaging, Staged
    from quiesce.stage_handoff import StageLink

    by_caller = {"Forward", "Interrupt", "FindPeerGone", "Kill"}  # or by whoever does harm
    of_link = [
        name for name in Oracle.load("stage_handoff_nccl").actions if name not in STREAMS | {"Done", "Init"}
    ]
    assert list(actions(StageLink)) == [name for name in of_link if name not in by_caller]
    # EndLoan is the transport's, Produce the caller's, Recycle the pool's.
    assert {**actions(HostStaging), **actions(Staged)}.keys() == {"Stage", "Settle", "Lend"}
