"""Walks that together take every edge of a state graph."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from quiesce.model.adapter import Adapter, Run
from quiesce.model.coverage import Coverage
from quiesce.model.graph import Graph
from quiesce.model.oracle import Step
from quiesce.model.values import State


def tours(graph: Graph, longest: int = 1_000) -> Iterator[tuple[int, ...]]:
    """Walks from an initial state, as indices of edges, that together take every edge reachable from one.

    A walk goes on with an edge not taken yet, or by the shortest way to one, until it is `longest` edges long or
    no such edge is ahead; the last approach may exceed `longest`. Not minimal, but no walk is without a new edge.
    """
    untaken = [list(reversed(indices)) for indices in graph.leaving]
    taken: set[int] = set()
    for start in graph.initial:
        while walk := _walk(graph, start, untaken, taken, longest):
            yield tuple(walk)


def _walk(graph: Graph, start: int, untaken: list[list[int]], taken: set[int], longest: int) -> list[int]:
    walk: list[int] = []
    here = start
    while not walk or len(walk) < longest:
        way = _nearest(graph, here, untaken)
        if way is None:
            break
        for index in way:
            if index not in taken:
                taken.add(index)
                untaken[graph.edges[index].source].remove(index)
            walk.append(index)
            here = graph.edges[index].target
    return walk


def _nearest(graph: Graph, start: int, untaken: list[list[int]]) -> list[int] | None:
    """The shortest way from `start` that ends with an edge not taken yet."""
    came: dict[int, int] = {}
    seen = {start}
    todo = deque([start])
    while todo:
        here = todo.popleft()
        if untaken[here]:
            way = [untaken[here][-1]]
            while here != start:
                way.append(came[here])
                here = graph.edges[came[here]].source
            return way[::-1]
        for index in graph.leaving[here]:
            target = graph.edges[index].target
            if target not in seen:
                seen.add(target)
                came[target] = index
                todo.append(target)
    return None


def drive(
    adapter: type[Adapter], small: str, coverage: Coverage, *, tries: int = 12, longest: int = 1_000
) -> Drive:
    """Drive an implementation along every edge of the graph of a small model that it can be made to take.

    Walks are planned as they go, since the implementation may take another step than the one asked for. An edge
    that was asked for `tries` times and not taken is given up; one that a reason of the adapter explains is not
    asked for. The edges taken are counted in `coverage`. Raises `Divergence` where both come apart.
    """
    graph, oracle = coverage.graph, adapter.load(small)
    calls = adapter.calls()
    failed: dict[int, int] = {}
    barred = {
        index
        for index, edge in enumerate(graph.edges)
        if edge.action not in calls or index in coverage.explained
    }
    left = [{index for index in leaving if index not in barred} for leaving in graph.leaving]

    def took(state: State, step: Step) -> None:
        index = coverage.count("tours", state, step)
        if index is not None:
            left[graph.edges[index].source].discard(index)

    def fail(index: int) -> None:
        failed[index] = failed.get(index, 0) + 1
        if failed[index] >= tries:
            barred.add(index)
            left[graph.edges[index].source].discard(index)

    walks = steps = 0
    while True:
        run = Run(adapter(oracle), took)
        try:
            walked = 0
            plan: list[int] = []
            unable: set[int] = set()
            while walked < longest:
                walked += 1
                if len(run.states) > 1:
                    # Which state it is will show; until then no edge can be aimed at.
                    offers = [step for step in run.offers() if step.state not in run.states]
                    decided = [step for step in offers if calls[step.action].decides] or offers
                    if not decided:
                        break
                    run.ask(decided[walked % len(decided)])
                    plan = []
                    continue
                here = graph.numbers[run.states[0]]
                if not plan or graph.edges[plan[-1]].source != here:
                    plan = _way(graph, here, left, barred | unable, walks)
                    if not plan:
                        break
                index = plan.pop()
                edge = graph.edges[index]
                step = Step(edge.action, edge.parameters, graph.states[edge.target])
                if not run.adapter.can(step):
                    plan = []
                elif run.ask(step) and run.states == (step.state,) and index not in left[edge.source]:
                    continue
                fail(index)
                unable.add(index)
        finally:
            run.close()
        steps += walked
        walks += 1
        if walked == 1 and not plan:
            return Drive(walks, steps, tuple(index for index, count in failed.items() if count >= tries))


@dataclass(frozen=True)
class Drive:
    """What a drive came to: walks begun, steps asked for, edges given up."""

    walks: int
    steps: int
    given_up: tuple[int, ...]


def _way(graph: Graph, start: int, left: list[set[int]], barred: set[int], turn: int) -> list[int]:
    """A shortest way from `start` that ends with an edge not taken yet, last edge first; empty if there is none.

    `turn` chooses among several: an implementation may have more states than the specification, and which of them it
    is in depends on the way.
    """
    choose = random.Random(turn)
    came: dict[int, int] = {}
    seen = {start}
    todo = deque([start])
    while todo:
        here = todo.popleft()
        for index in left[here]:
            if index not in barred:
                way = [index]
                while here != start:
                    way.append(came[here])
                    here = graph.edges[came[here]].source
                return way
        for index in choose.sample(graph.leaving[here], len(graph.leaving[here])):
            target = graph.edges[index].target
            if target not in seen and index not in barred:
                seen.add(target)
                came[target] = index
                todo.append(target)
    return []
