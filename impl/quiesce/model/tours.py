"""Walks that together take every edge of a state graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from quiesce.model.graph import Graph


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
