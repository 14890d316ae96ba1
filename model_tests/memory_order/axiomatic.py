"""SC, x86-TSO and ARMv8 as axioms: which outcomes of a small program are those of an acyclic candidate execution.

An independent statement of what `spec/MemoryModel.tla` says as a machine. x86-TSO after Owens, Sarkar and Sewell in
the form of Alglave, Maranget and Tautschnig; ARMv8 after aarch64.cat (Pulte, Flur, Deacon et al., POPL 2018).
Programs have no read-modify-writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Edge = tuple[int, int]


@dataclass(frozen=True)
class Instruction:
    """One instruction. `back` fields are distances to earlier loads of the thread, as in the specification."""

    op: str  # "load", "store", "branch", "fence"
    word: str = ""
    order: str = "plain"  # "acquire", "acquire_pc", "release"; of a fence "full", "load", "store", "context"
    value: int = 0
    addr: frozenset[int] = frozenset()
    data: frozenset[int] = frozenset()
    ctrl: frozenset[int] = frozenset()

    @property
    def accesses(self) -> bool:
        return self.op in ("load", "store")


Program = tuple[tuple[Instruction, ...], ...]


def outcomes(model: str, program: Program, words: str) -> set[tuple[int, ...]]:
    """Every outcome: the values of all loads in the order of the program, then the final words."""
    found = set()
    for execution in candidates(program, words):
        if execution.is_coherent() and execution.is_allowed(model):
            found.add(execution.outcome)
    return found


def candidates(program: Program, words: str) -> Iterator[Execution]:
    events = [(t, i, ins) for t, thread in enumerate(program) for i, ins in enumerate(thread)]
    loads = [n for n, (_, _, ins) in enumerate(events) if ins.op == "load"]
    stores = {
        w: [n for n, (_, _, ins) in enumerate(events) if ins.op == "store" and ins.word == w] for w in words
    }
    sources = [[None, *stores[events[n][2].word]] for n in loads]
    orders = [list(itertools.permutations(stores[w])) for w in words]
    for rf, co in itertools.product(itertools.product(*sources), itertools.product(*orders)):
        yield Execution(events, dict(zip(loads, rf, strict=True)), dict(zip(words, co, strict=True)))


class Execution:
    """A choice of the store that each load reads (None: what was there at first) and of the order of stores."""

    def __init__(
        self,
        events: list[tuple[int, int, Instruction]],
        reads: dict[int, int | None],
        order: dict[str, tuple[int, ...]],
    ) -> None:
        self.events = events
        self.ins = [ins for _, _, ins in events]
        self.po = {
            (a, b) for a, b in self.pairs() if events[a][0] == events[b][0] and events[a][1] < events[b][1]
        }
        self.rf = {(store, load) for load, store in reads.items() if store is not None}
        self.co = {pair for stores in order.values() for pair in itertools.combinations(stores, 2)}
        self.fr = {
            (load, store)
            for load, source in reads.items()
            for store in order[self.ins[load].word]
            if source is None or (source, store) in self.co
        }
        values = [self.ins[s].value if s is not None else 0 for s in reads.values()]
        final = [self.ins[stores[-1]].value if stores else 0 for stores in order.values()]
        self.outcome = (*values, *final)

    def pairs(self) -> Iterable[Edge]:
        return itertools.permutations(range(len(self.events)), 2)

    def external(self, edges: set[Edge]) -> set[Edge]:
        return {(a, b) for a, b in edges if self.events[a][0] != self.events[b][0]}

    def is_coherent(self) -> bool:
        same = {(a, b) for a, b in self.po if self.ins[a].accesses and self.ins[b].accesses}
        same = {(a, b) for a, b in same if self.ins[a].word == self.ins[b].word}
        return acyclic(same | self.rf | self.co | self.fr)

    def is_allowed(self, model: str) -> bool:
        accesses = {(a, b) for a, b in self.po if self.ins[a].accesses and self.ins[b].accesses}
        if model == "sc":
            return acyclic(accesses | self.rf | self.co | self.fr)
        if model == "tso":
            kept = {(a, b) for a, b in accesses if (self.ins[a].op, self.ins[b].op) != ("store", "load")}
            return acyclic(
                kept | self.fenced("full") | self.atomics() | self.external(self.rf) | self.co | self.fr
            )
        seen = self.external(self.rf | self.co | self.fr)
        return acyclic(seen | self.depends() | self.barriers())

    def fenced(self, kind: str, before: str = "", after: str = "") -> set[Edge]:
        """Pairs with such a fence between them; `before` and `after` name an operation, or any access."""
        return {
            (a, b)
            for a, b in self.po
            if self.matches(a, before) and self.matches(b, after)
            for f, ins in enumerate(self.ins)
            if ins.op == "fence" and ins.order == kind and (a, f) in self.po and (f, b) in self.po
        }

    def matches(self, n: int, op: str) -> bool:
        return self.ins[n].accesses if not op else self.ins[n].op == op

    def atomics(self) -> set[Edge]:
        """[L]; po; [A]"""
        return {
            (a, b) for a, b in self.po if self.ins[a].order == "release" and self.ins[b].order == "acquire"
        }

    def barriers(self) -> set[Edge]:
        """bob"""
        acquire = {
            (a, b)
            for a, b in self.po
            if self.ins[a].order in ("acquire", "acquire_pc") and self.ins[b].accesses
        }
        release = {(a, b) for a, b in self.po if self.ins[b].order == "release" and self.ins[a].accesses}
        fences = (
            self.fenced("full") | self.fenced("load", before="load") | self.fenced("store", "store", "store")
        )
        return acquire | release | fences | self.atomics()

    def depends(self) -> set[Edge]:
        """dob"""
        addr = set(self.back("addr"))
        data = set(self.back("data"))
        ctrl = {
            (a, b) for a, branch in self.back("ctrl") for b in range(len(self.ins)) if (branch, b) in self.po
        }
        past = {(a, b) for a, k in addr for b in range(len(self.ins)) if (k, b) in self.po}
        own = {(a, b) for a, b in self.rf if self.events[a][0] == self.events[b][0]}
        forwarded = {(a, c) for a, b in addr | data for b2, c in own if b == b2}
        synchronised = {
            (a, b)
            for a, isb in ctrl | past
            if self.ins[isb].op == "fence" and self.ins[isb].order == "context"
            for b in range(len(self.ins))
            if (isb, b) in self.po and self.ins[b].op == "load"
        }
        writes = {(a, b) for a, b in ctrl | past if self.ins[b].op == "store"}
        return addr | data | forwarded | synchronised | writes

    def back(self, kind: str) -> Iterator[Edge]:
        for n, ins in enumerate(self.ins):
            for distance in getattr(ins, kind):
                yield n - distance, n


def acyclic(edges: set[Edge]) -> bool:
    after: dict[int, set[int]] = {}
    for a, b in edges:
        after.setdefault(a, set()).add(b)
    state: dict[int, int] = {}

    def visit(node: int) -> bool:
        state[node] = 1
        for following in after.get(node, ()):
            if state.get(following) == 1 or (following not in state and not visit(following)):
                return False
        state[node] = 2
        return True

    return all(visit(node) for node in list(after) if node not in state)
