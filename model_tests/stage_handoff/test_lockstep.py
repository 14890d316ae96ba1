"""The implementation on the simulated device and the specification, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_tests.stage_handoff.adapter import STREAMS, VARIANTS, Stage, item, items
from model_tests.stage_handoff.pipeline import SHAPES, Shape
from model_tests.stage_handoff.stager import Stager

from quiesce.model import Oracle, manifest
from quiesce.model.adapter import Divergence
from quiesce.model.lockstep import lockstep
from quiesce.simulated import SimulatedStream, SimulatedWorld

MODELS = ("nccl", "gloo", "fresh", "gather", "extra")
EXAMPLES = max(12, settings.default.max_examples // 5)


@pytest.mark.parametrize("small", MODELS)
def test_the_link_keeps_step(small: str) -> None:
    """Every queue, point, block and counter of a pipeline is as the specification says, after every step."""
    lockstep(Stage, small=small, examples=EXAMPLES, steps=100)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_faulty_link_falls_out_of_step(name: str) -> None:
    with pytest.raises(Divergence):
        lockstep(VARIANTS[name], examples=100, options=settings(database=None, derandomize=True))


def test_the_models_are_those_of_the_manifest() -> None:
    """The small models of the adapter that stand for models of the manifest are these."""
    for name in MODELS:
        model = manifest.load().models[f"stage_handoff_{name}"]
        assert Stage.small[name] == model.set


def test_the_shapes_of_other_tests_are_modelled() -> None:
    """Each kind of pipeline that schedules are drawn for has a feature set that a model covers."""

    def features(shape: Shape) -> set[str]:
        return {name for name in ("fresh", "gather", "extra", "wait_twice") if getattr(shape, name)}

    kinds = {"Fresh": "fresh", "Gather": "gather", "Extra": "extra", "WaitTwice": "wait_twice"}
    modelled = [
        {kinds[constant] for constant in Stage.small[name] if constant in kinds and name in MODELS}
        for name in MODELS
    ]
    for shape in SHAPES:
        assert features(shape) in modelled


def compare_streams(
    world: SimulatedWorld, state: Mapping[str, Any], named: Mapping[SimulatedStream, Any]
) -> None:
    """Both have the same items in the same streams, as many finished, and the same ones running."""
    by_name = {name: stream for stream, name in named.items()}
    empty = SimulatedStream("", -1)
    for name in state["queue"]:
        stream = by_name.get(name, empty)
        assert items(stream, named) == tuple(map(item, state["queue"][name])), name
        assert stream.ran == state["ran"][name], name
    assert {named[s] for s in world.streams if s.queue and s.queue[0].running} == state["busy"]


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
    of_link = [name for name in Oracle.load(Stage.model).actions if name not in (*STREAMS, "Done", "Init")]
    assert list(actions(StageLink)) == [name for name in of_link if name not in by_caller]
    # EndLoan is the transport's, Produce the caller's, Recycle the pool's.
    assert {**actions(HostStaging), **actions(Staged)}.keys() == {"Stage", "Settle", "Lend"}
