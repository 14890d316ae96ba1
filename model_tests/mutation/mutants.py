"""Which mutants of the protocol modules there are: cosmic-ray finds the places, and makes the changes."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EXPRESSIONS = ("expr", "xor_expr", "and_expr", "shift_expr", "arith_expr", "term", "power")
"""What a binary operator stands in, as parso calls it."""


@dataclass(frozen=True)
class Mutation:
    """One change that cosmic-ray makes: its operator, and which of the operator's places in the module."""

    module: str
    operator: str
    occurrence: int
    line: int
    text: str


def mutations(module: str, root: Path = ROOT) -> list[Mutation]:
    """All mutants of a module, but for those of annotations, which nothing evaluates."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = source_of(module, root).read_text(encoding="utf-8")
    lines = source.splitlines()
    idle = list(_annotations(source))
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments():
            continue
        places = [(node, begin) for node in nodes for begin, _ in kind().mutation_positions(node)]
        found += [
            Mutation(module, name, number, begin[0], lines[begin[0] - 1].strip())
            for number, (node, begin) in enumerate(places)
            # A star in a signature or a call is no operator, although cosmic-ray takes it for one.
            if ("BinaryOperator" not in name or node.parent.type in EXPRESSIONS)
            and not any(first <= begin < last for first, last in idle)
        ]
    return found


def _annotations(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(ast.parse(source)):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(annotation, ast.expr):
                assert annotation.end_lineno is not None
                assert annotation.end_col_offset is not None
                yield (
                    (annotation.lineno, annotation.col_offset),
                    (annotation.end_lineno, annotation.end_col_offset),
                )


def source_of(module: str, root: Path = ROOT) -> Path:
    """Where a module is in a checkout."""
    return root / "impl" / "quiesce" / f"{module}.py"


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The source of the module with the change made."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = source_of(mutation.module, root).read_text(encoding="utf-8")
    changed = mutate_code(source, get_operator(mutation.operator)(), mutation.occurrence)
    assert isinstance(changed, str)
    return changed


def in_turn(modules: Sequence[str], seed: int, root: Path = ROOT) -> list[Mutation]:
    """All mutants, one of each module after the other, each module's in an order that the seed gives.

    However many are tried, they are spread evenly over the modules, and over each module.
    """
    orders = []
    for module in modules:
        found = mutations(module, root)
        random.Random(f"{seed} {module}").shuffle(found)
        orders.append(found)
    return [mutation for turn in zip_longest(*orders) for mutation in turn if mutation]


def difference(before: str, after: str) -> str:
    """The first line that differs, as it was and as it became."""
    for one, other in zip(before.splitlines(), after.splitlines(), strict=False):
        if one != other:
            return f"{one.strip()}  ->  {other.strip()}"
    return "lines at the end differ"


def statement(source: str, line: int) -> tuple[int, int]:
    """The first and the last line of the innermost statement around a line; of a compound one, its head."""
    best = line, line
    width = float("inf")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        body = getattr(node, "body", None)
        last = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno
        assert last is not None
        if first <= line <= last and last - first < width:
            best, width = (first, last), last - first
    return best
