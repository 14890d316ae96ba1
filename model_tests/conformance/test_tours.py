"""Every edge of the small models' complete graphs is taken by the shipped implementation, or a reason says why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from model_tests.broadcast_ring.adapter import Ring
from model_tests.payload_reuse.adapter import PayloadReuse
from model_tests.stage_handoff.adapter import Stage, reaps

from quiesce.model import manifest, tlc
from quiesce.model.adapter import Adapter
from quiesce.model.coverage import Coverage
from quiesce.model.graph import Graph, read_dump
from quiesce.model.lockstep import lockstep
from quiesce.model.tours import drive

ADAPTERS: list[type[Adapter]] = [PayloadReuse, Ring, Stage]
QUICK: list[tuple[type[Adapter], str]] = [
    (PayloadReuse, "two messages"),
    (PayloadReuse, "an exception"),
    (PayloadReuse, "a peer that dies"),
    (PayloadReuse, "lent twice"),
    (Ring, "three messages"),
    (Ring, "views"),
    (Ring, "loans"),
    (Ring, "bodies"),
    (Ring, "deaths"),
    (Ring, "comings"),
    (Stage, "gloo"),
    (Stage, "extra"),
    (Stage, "two dicts"),
    (Stage, "an exception"),
    (Stage, "one step, fresh"),
    (Stage, "one step, gathered"),
]
LONG: list[tuple[type[Adapter], str]] = [
    (PayloadReuse, "lent"),
    (PayloadReuse, "an exception, then another message"),
    (PayloadReuse, "a peer that dies, then another message"),
    (Ring, "two readers"),
    (Ring, "a writer that dies"),
    (Stage, "two steps"),
    (Stage, "gather"),
    (Stage, "fresh"),
    (Stage, "nccl"),
]
NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(3600)]
MODELS = [
    *(pytest.param(*model, id=f"{model[0].__name__}, {model[1]}") for model in QUICK),
    *(pytest.param(*model, id=f"{model[0].__name__}, {model[1]}", marks=NIGHTLY) for model in LONG),
]


@pytest.mark.parametrize(("adapter", "small"), MODELS)
def test_every_edge_is_taken_or_explained(adapter: type[Adapter], small: str) -> None:
    coverage = Coverage.of(adapter, small)
    drive(adapter, small, coverage)
    _, unexplained = coverage.untaken()
    assert not unexplained, f"{len(unexplained)} edges, such as {unexplained[0]}"


def test_every_small_model_is_toured() -> None:
    assert sorted(f"{adapter.__name__}, {small}" for adapter, small in [*QUICK, *LONG]) == sorted(
        f"{adapter.__name__}, {small}" for adapter in ADAPTERS for small in adapter.small
    )


@pytest.mark.parametrize(
    "small", ["gloo", "two dicts", "extra", pytest.param("nccl", marks=NIGHTLY), "one step, fresh"]
)
def test_a_reason_knows_its_model(small: str) -> None:
    """What the reason for reaping infers from a state alone is what the constants say."""
    oracle = Stage.load(small)
    bound, nccl = oracle.evaluate("MaxPending"), oracle.evaluate("Flavour") == "nccl"
    for state in Graph.explore(oracle).states:
        for r in (1, 2):
            sent = state["metadata"][r - 1]
            full = sent["sent"] - sent["reaped"] >= bound
            idle = nccl or not state["queue"][r, "compute"]
            assert reaps(state, r) == (full and idle and state["at"][r - 1] in ("metadata", "more"))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_reason_explains_something(adapter: type[Adapter]) -> None:
    left = set(adapter.reasons)
    toured = [small for kind, small in QUICK if kind is adapter]
    for small in dict.fromkeys([*toured, *adapter.small]):
        if left:
            coverage = Coverage.of(adapter, small)
            left -= {
                reason for index in range(len(coverage.graph.edges)) for reason in coverage.reasons_for(index)
            }
    assert not left


def test_lockstep_is_counted_in_the_same_graph() -> None:
    """The edges of lockstep are edges of the graph; those taken by either kind of run are counted together."""
    coverage = Coverage.of(PayloadReuse, "two messages")
    drive(PayloadReuse, "two messages", coverage)
    toured = set(coverage.taken["tours"])
    taken = lockstep(
        PayloadReuse,
        small="two messages",
        examples=24,
        on_step=lambda state, step: coverage.count("lockstep", state, step),
        options=settings(database=None, derandomize=True),
    )
    assert 0 < len(coverage.taken["lockstep"]) == len(taken)
    assert coverage.together == coverage.taken["lockstep"] | toured
    assert coverage.taken["tours"] == toured


@pytest.mark.parametrize(("adapter", "small"), [(Ring, "deaths")])
def test_the_graph_is_that_of_tlc(adapter: type[Adapter], small: str, tmp_path: Path) -> None:
    oracle = adapter.load(small)
    coverage = Coverage.of(adapter, small)
    dump = tmp_path / "graph.dot"
    tlc.run(
        oracle.module,
        oracle.config.without(("invariant", "property")),
        libraries=manifest.load().libraries,
        coverage=False,
        short=True,
        timeout=200,
        options=["-dump", "dot,actionlabels", str(dump)],
    )
    graph, _ = read_dump(dump)
    own = coverage.graph
    assert set(graph.states) == set(own.states)
    assert {(graph.states[e.source], graph.states[e.target]) for e in graph.edges} == {
        (own.states[e.source], own.states[e.target]) for e in own.edges
    }
