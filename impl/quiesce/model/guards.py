"""Why an action cannot be taken: its first conjunct that is false."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiesce.model.actions import ACTION, APPLICATION, CLEAR, CONJUNCTIONS, IF, Instance, Next
from quiesce.model.jvm import Classes


@dataclass(frozen=True)
class Reason:
    """The text of a false conjunct, where it stands, and how many conjuncts before it were true."""

    text: str
    location: str
    depth: int


class FirstFalse:
    """Finds the first false conjunct of an action's instance."""

    def __init__(self, classes: Classes, tool: Any, relation: Next, directories: Sequence[Path]) -> None:
        self._tool = tool
        self._next = relation
        self._directories = directories
        self._definition = classes["tla2sany.semantic.OpDefNode"]
        self._nothing = classes["tlc2.tool.impl.ActionItemList"].Empty
        self._fun = classes["tlc2.tool.TLCStateFun"].Empty
        self._empty = classes["tlc2.tool.TLCState"].Empty
        self._cost = classes["tlc2.tool.coverage.CostModel"].DO_NOT_RECORD
        self._throwable = classes.throwable
        self._sources: dict[str, list[str]] = {}

    def of(self, instance: Instance, before: Any) -> Reason:
        """The reason why `instance` has no successor of `before`; it must have none."""
        return self._find(instance.node, instance.context, before, 0)

    def _find(self, node: Any, context: Any, before: Any, depth: int) -> Reason:
        node, context = self._next.peel(node, context)
        if node.getKind() != APPLICATION:
            return self._reason(node, depth)
        opcode, bound = self._next.resolve(node, context)
        if opcode in CONJUNCTIONS:
            arguments = list(node.getArgs())
            for index, argument in enumerate(arguments):
                if not self._possible(arguments[: index + 1], context, before):
                    if self._stands_alone(argument, context, before):
                        return self._reason(argument, depth + index)
                    return self._find(argument, context, before, depth + index)
            return Reason("a constraint of the model", "in its configuration", depth + len(arguments))
        if opcode == IF and self._next.level(node) >= ACTION:
            test, yes, no = node.getArgs()
            chosen = str(self._tool.eval(test, context, before, self._empty, CLEAR)) == "TRUE"
            return self._find(yes if chosen else no, context, before, depth)
        if not opcode and isinstance(bound, self._definition) and self._next.level(node) >= ACTION:
            inner = self._next.bind(bound, node, context, before)
            return self._find(bound.getBody(), inner, before, depth)
        if self._possible([node], context, before):
            return Reason("a constraint of the model", "in its configuration", depth + 1)
        return self._reason(node, depth)

    def _stands_alone(self, conjunct: Any, context: Any, before: Any) -> bool:
        """Whether a conjunct that is false after others is true, or has no meaning, without them."""
        try:
            return self._possible([conjunct], context, before)
        except self._throwable:
            return True

    def _possible(self, conjuncts: list[Any], context: Any, before: Any) -> bool:
        rest = self._nothing
        for conjunct in reversed(conjuncts[1:]):
            rest = rest.cons(conjunct, context, self._cost, 1)
        return self._tool.enabled(conjuncts[0], rest, context, before, self._fun) is not None

    def _reason(self, node: Any, depth: int) -> Reason:
        place = node.getLocation()
        module = str(place.source())
        return Reason(self._text(node, module, place), f"line {place.beginLine()} of {module}", depth)

    def _text(self, node: Any, module: str, place: Any) -> str:
        lines = self._lines(module)
        if place.endLine() > len(lines):
            return str(node.getHumanReadableImage())
        chosen = lines[place.beginLine() - 1 : place.endLine()]
        chosen[-1] = chosen[-1][: place.endColumn()]
        chosen[0] = chosen[0][place.beginColumn() - 1 :]
        return " ".join(" ".join(chosen).split())

    def _lines(self, module: str) -> list[str]:
        if module not in self._sources:
            found = (directory / f"{module}.tla" for directory in self._directories)
            file = next((path for path in found if path.is_file()), None)
            self._sources[module] = file.read_text(encoding="utf-8").splitlines() if file else []
        return self._sources[module]
