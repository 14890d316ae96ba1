"""Graphs are complete, and tours take each of their edges."""

from __future__ import annotations

import itertools

import pytest

from quiesce.model.errors import ModelError
from quiesce.model.graph import EdgeCoverage, Graph
from quiesce.model.manifest import Manifest
from quiesce.model.oracle import Oracle
from quiesce.model.tours import tours


@pytest.fixture(scope="module")
def graph(own_manifest: Manifest) -> Graph:
    return Graph.explore(Oracle.load("post", manifest=own_manifest))


@pytest.mark.parametrize("longest", [1, 10, 1_000])
def test_tours_take_every_edge_and_are_walks(graph: Graph, longest: int) -> None:
    walks = list(tours(graph, longest))
    walked = [index for walk in walks for index in walk]
    assert EdgeCoverage.of(graph, walked).share == 1.0
    for walk in walks:
        assert graph.edges[walk[0]].source in graph.initial
        for one, next_one in itertools.pairwise(walk):
            assert graph.edges[one].target == graph.edges[next_one].source


def test_tours_are_near_minimal(graph: Graph) -> None:
    # Every walk ends in the one final state, so a tour cannot return: the least number of walks is bounded below
    # by the edges out of the initial state, and each shared prefix is walked again.
    walks = list(tours(graph))
    assert sum(map(len, walks)) < 8 * len(graph.edges)
    seen: set[int] = set()
    for walk in walks:
        assert not seen.issuperset(walk)
        seen.update(walk)


def test_coverage_counts_by_action_and_lists_what_is_missing(graph: Graph) -> None:
    coverage = EdgeCoverage.of(graph, [0])
    assert sum(coverage.taken.values()) == 1
    assert coverage.taken["Send"] == 1
    assert coverage.total == {"Send": 78, "Deliver": 62, "Read": 116, "Done": 1}
    assert len(coverage.missing) == len(graph.edges) - 1
    assert "1 of      78" in str(coverage)


def test_an_edge_is_found_by_what_it_does(graph: Graph) -> None:
    edge = graph.edges[5]
    found = graph.find(graph.states[edge.source], edge.action, edge.parameters, graph.states[edge.target])
    assert found == 5
    assert graph.find(graph.states[edge.source], "Done", {}, graph.states[edge.target]) is None


def test_a_graph_beyond_the_limit_is_refused(own_manifest: Manifest) -> None:
    with pytest.raises(ModelError, match="more than 10 states"):
        Graph.explore(Oracle.load("post", manifest=own_manifest), limit=10)
