"""The complete state graph of a small model, from the oracle or from TLC's dump, and what was walked of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from quiesce.model.errors import ModelError
from quiesce.model.oracle import Oracle, label
from quiesce.model.values import Function, State, parse_state

NOTHING = Function()


@dataclass(frozen=True)
class Edge:
    """A transition between two states of a graph, given by their numbers."""

    source: int
    action: str
    parameters: Function
    target: int

    def __str__(self) -> str:
        return f"{self.source} {label(self.action, self.parameters)} {self.target}"


@dataclass(frozen=True)
class Graph:
    """States, numbered from 0; the numbers of the initial ones; all edges, by their source."""

    states: tuple[State, ...]
    initial: tuple[int, ...]
    edges: tuple[Edge, ...]

    @classmethod
    def explore(cls, oracle: Oracle, limit: int = 100_000) -> Graph:
        """Everything reachable, breadth first. Raises `ModelError` beyond `limit` states."""
        numbers = {state: number for number, state in enumerate(oracle.initial())}
        initial = tuple(numbers.values())
        states = list(numbers)
        edges: list[Edge] = []
        for source, state in enumerate(states):
            for step in oracle.successors(state):
                target = numbers.setdefault(step.state, len(states))
                if target == len(states):
                    if target >= limit:
                        raise ModelError(
                            f"{oracle.module.stem} has more than {limit:,} states; use a smaller model"
                        )
                    states.append(step.state)
                edges.append(Edge(source, step.action, step.parameters, target))
        return cls(tuple(states), initial, tuple(edges))

    @cached_property
    def leaving(self) -> tuple[tuple[int, ...], ...]:
        """For each state, the indices of the edges that leave it."""
        found: list[list[int]] = [[] for _ in self.states]
        for index, edge in enumerate(self.edges):
            found[edge.source].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def numbers(self) -> dict[State, int]:
        """The number of each state."""
        return {state: number for number, state in enumerate(self.states)}

    def find(self, source: State, action: str, parameters: Mapping[str, object], target: State) -> int | None:
        """The index of an edge; None if the graph has none such."""
        start, end = self.numbers.get(source), self.numbers.get(target)
        if start is None or end is None:
            return None
        for index in self.leaving[start]:
            edge = self.edges[index]
            if edge.action == action and edge.parameters == parameters and edge.target == end:
                return index
        return None


@dataclass(frozen=True)
class EdgeCoverage:
    """How many of the edges of each action were taken, and which were not."""

    taken: Mapping[str, int]
    total: Mapping[str, int]
    missing: tuple[Edge, ...]

    @classmethod
    def of(cls, graph: Graph, walked: Iterable[int]) -> EdgeCoverage:
        """The coverage reached by walking the edges with these indices."""
        seen = set(walked)
        taken: dict[str, int] = {}
        total: dict[str, int] = {}
        for index, edge in enumerate(graph.edges):
            total[edge.action] = total.get(edge.action, 0) + 1
            taken[edge.action] = taken.get(edge.action, 0) + (index in seen)
        missing = tuple(edge for index, edge in enumerate(graph.edges) if index not in seen)
        return cls(taken, total, missing)

    @property
    def share(self) -> float:
        """The share of all edges that was taken, from 0 to 1."""
        total = sum(self.total.values())
        return sum(self.taken.values()) / total if total else 1.0

    def __str__(self) -> str:
        width = max(map(len, self.total), default=0)
        lines = [f"{name:<{width}}  {self.taken[name]:>7,} of {self.total[name]:>7,}" for name in self.total]
        return "\n".join([*lines, f"{self.share:.1%} of all edges"])


_NODE = re.compile(r'^(-?\d+) \[label="((?:[^"\\]|\\.)*)"(,style = filled)?\]')
_EDGE = re.compile(r'^(-?\d+) -> (-?\d+) \[label="([^"]*)"')
_ESCAPED = re.compile(r"\\(.)")


def read_dump(path: Path) -> tuple[Graph, int]:
    """The graph that TLC wrote with `-dump dot,actionlabels`, and how many lines of it were duplicates.

    TLC's labels have no parameters, and "Next" where TLC does not know the action: `Graph.explore` names them.
    """
    states: dict[int, State] = {}
    initial: list[int] = []
    pairs: list[tuple[int, str, int]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if edge := _EDGE.match(line):
                pairs.append((int(edge[1]), edge[3], int(edge[2])))
            elif node := _NODE.match(line):
                states[int(node[1])] = parse_state(_ESCAPED.sub(_unescape, node[2]))
                if node[3]:
                    initial.append(int(node[1]))
    numbers = {key: number for number, key in enumerate(states)}
    unique = dict.fromkeys(pairs)
    edges = tuple(
        Edge(numbers[a], action, NOTHING, numbers[b]) for a, action, b in _by_source(unique, numbers)
    )
    return Graph(tuple(states.values()), tuple(numbers[key] for key in initial), edges), len(pairs) - len(
        unique
    )


def _by_source(
    pairs: Iterable[tuple[int, str, int]], numbers: Mapping[int, int]
) -> Iterator[tuple[int, str, int]]:
    yield from sorted(pairs, key=lambda pair: numbers[pair[0]])


def _unescape(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]
