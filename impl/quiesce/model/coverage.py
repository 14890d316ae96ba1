"""Which edges of a model's complete graph an implementation took, in which kind of run, and why not the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quiesce.model.adapter import Adapter, Reason
from quiesce.model.graph import Edge, Graph
from quiesce.model.oracle import Step
from quiesce.model.values import State

BEYOND = "only edges that are explained by another reason lead there"

KINDS = ("tours", "lockstep", "traces")
"""The kinds of runs that are counted apart."""


@dataclass
class Coverage:
    """The edges of `graph` that were taken, by kind of run."""

    graph: Graph
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    taken: dict[str, set[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: type[Adapter], small: str) -> Coverage:
        """Nothing taken yet of the complete graph of one of the adapter's small models."""
        return cls(Graph.explore(adapter.load(small)), adapter.reasons)

    def count(self, kind: str, state: State, step: Step) -> int | None:
        """Count a step as taken in a run of this kind; the index of its edge, None if the graph has none such."""
        index = self.graph.find(state, step.action, step.parameters, step.state)
        if index is not None:
            self.taken.setdefault(kind, set()).add(index)
        return index

    def reasons_for(self, index: int) -> list[str]:
        """The reasons that explain why an edge is not taken."""
        edge = self.graph.edges[index]
        state = self.graph.states[edge.source]
        step = Step(edge.action, edge.parameters, self.graph.states[edge.target])
        return [reason for reason, applies in self.reasons.items() if applies(state, step)]

    @cached_property
    def explained(self) -> dict[int, str]:
        """The edges that need not be taken, each with the first reason that applies."""
        graph = self.graph
        found: dict[int, str] = {}
        for index in range(len(graph.edges)):
            reasons = self.reasons_for(index)
            if reasons:
                found[index] = reasons[0]
        reached = set(graph.initial)
        todo = list(reached)
        while todo:
            for index in graph.leaving[todo.pop()]:
                target = graph.edges[index].target
                if index not in found and target not in reached:
                    reached.add(target)
                    todo.append(target)
        for index, edge in enumerate(graph.edges):
            if edge.source not in reached:
                found.setdefault(index, BEYOND)
        return found

    @property
    def together(self) -> set[int]:
        """The edges taken in runs of any kind."""
        return set().union(*self.taken.values())

    def untaken(self) -> tuple[dict[str, int], list[Edge]]:
        """How many edges not taken each reason explains, and the edges that none does."""
        left = sorted(set(range(len(self.graph.edges))) - self.together)
        counts = Counter(self.explained[index] for index in left if index in self.explained)
        return dict(counts), [self.graph.edges[index] for index in left if index not in self.explained]

    def rows(self) -> Iterable[tuple[str, dict[str, int]]]:
        """For each action: all its edges, those with a reason not to be taken, those taken by kind and together."""
        every = range(len(self.graph.edges))
        together = self.together
        excused = self.explained.keys() - together
        sets: dict[str, Any] = {
            "edges": every,
            "excused": excused,
            **{k: self.taken.get(k, ()) for k in KINDS},
        }
        sets["together"] = together
        counts = {
            name: Counter(self.graph.edges[index].action for index in indices)
            for name, indices in sets.items()
        }
        for action in counts["edges"]:
            yield action, {name: count[action] for name, count in counts.items()}
