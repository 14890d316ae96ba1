"""A state graph as SVG: a column for each distance from the start, states ordered so that few edges cross."""

from __future__ import annotations

from collections import deque
from html import escape

from quiesce.model.graph import Graph

LARGEST = 300
"""States up to which a picture of all of them can be read."""
_COLUMN, _ROW, _RADIUS, _SWEEPS = 70, 16, 4, 4  # pixels, pixels, pixels, sorting passes

STYLE = """
.quiesce-graph circle { fill: var(--dim); } .quiesce-graph circle.start { fill: var(--good); }
.quiesce-graph path { fill: none; stroke: var(--line); } .quiesce-graph path.back { stroke-dasharray: 2 3; }
.quiesce-graph path:hover, .quiesce-graph circle:hover { stroke: var(--bad); stroke-width: 3; }
"""


def layers(graph: Graph) -> list[list[int]]:
    """The states by their distance from the initial ones, each layer in the order of its neighbours before."""
    distance = dict.fromkeys(graph.initial, 0)
    todo = deque(graph.initial)
    before: dict[int, list[int]] = {}
    while todo:
        here = todo.popleft()
        for index in graph.leaving[here]:
            target = graph.edges[index].target
            if target not in distance:
                distance[target] = distance[here] + 1
                todo.append(target)
            if distance[target] == distance[here] + 1:
                before.setdefault(target, []).append(here)
    found: list[list[int]] = [[] for _ in range(max(distance.values(), default=-1) + 1)]
    for state, depth in distance.items():
        found[depth].append(state)
    after: dict[int, list[int]] = {}
    for target, sources in before.items():
        for source in sources:
            after.setdefault(source, []).append(target)
    for _ in range(_SWEEPS):
        for neighbours, order in ((before, found), (after, found[::-1])):
            _sort(neighbours, order)
    return found


def _sort(neighbours: dict[int, list[int]], order: list[list[int]]) -> None:
    place: dict[int, float] = {}
    for layer in order:
        means = {
            state: sum(place[n] for n in known) / len(known)
            for state in layer
            if (known := [n for n in neighbours.get(state, ()) if n in place])
        }
        layer.sort(key=lambda state: means.get(state, 0.0))
        place.update({state: (row + 0.5) / len(layer) for row, state in enumerate(layer)})


def svg(graph: Graph, title: str) -> str:
    """The picture; a state shows its variables, and an edge its action, under the pointer."""
    columns = layers(graph)
    tallest = max(map(len, columns), default=1)
    width, height = _COLUMN * len(columns) + 20, _ROW * tallest + 20
    place = {
        state: (20 + _COLUMN * depth, round(10 + height * (row + 0.5) / len(layer) * (height - 20) / height))
        for depth, layer in enumerate(columns)
        for row, state in enumerate(layer)
    }
    parts = [
        f'<svg class="quiesce-graph" role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(title)}</title>'
    ]
    for edge in graph.edges:
        if edge.source == edge.target:
            continue
        (x, y), (u, v) = place[edge.source], place[edge.target]
        bend = (u - x) // 2 if u > x else _COLUMN // 2
        parts.append(
            f'<path class="{"" if u > x else "back"}" d="M{x} {y}C{x + bend} {y} {u - bend} {v} {u} {v}">'
            f"<title>{escape(edge.action)}</title></path>"
        )
    starts = set(graph.initial)
    for state, (x, y) in place.items():
        parts.append(
            f'<circle class="{"start" if state in starts else ""}" cx="{x}" cy="{y}" r="{_RADIUS}">'
            f"<title>{escape(repr(graph.states[state]))}</title></circle>"
        )
    return "".join([*parts, "</svg>"])
