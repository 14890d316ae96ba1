"""The next-state relation taken apart: its named actions, and in a state their instances with parameters.

The walk goes down from the next-state formula through disjunctions, quantifiers, LET, INSTANCE and
definitions, as TLC does. It stops at the first formula that is none of these: an instance of the definition
around it. In the next-state formula itself it goes through IF, CASE and guards too. A quantifier over a set
that depends on the state is evaluated in each state; what does not depend on it is walked once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quiesce.model.bridge import Bridge
from quiesce.model.errors import SpecError
from quiesce.model.jvm import Classes
from quiesce.model.values import Function

LET, SUBSTITUTION, ASSUMED_SUBSTITUTION, LABEL, APPLICATION, OPERATOR_ARGUMENT = 10, 13, 30, 29, 9, 8
EXISTS, FORALL, CASE, CONJUNCTION_LIST, DISJUNCTION_LIST, IF = 2, 3, 4, 6, 7, 11
EQUAL, AND, OR, IN, UNCHANGED = 35, 36, 37, 42, 49
CONJUNCTIONS, DISJUNCTIONS = (CONJUNCTION_LIST, AND), (DISJUNCTION_LIST, OR)
CLEAR = 0
CONSTANT, STATE, ACTION = 0, 1, 2


@dataclass(frozen=True)
class Scope:
    """Where a walk is: TLC's context, the definition it is in, and the symbols bound since it was entered."""

    context: Any
    name: str
    symbols: tuple[Any, ...] = ()
    root: bool = True


@dataclass(frozen=True)
class Instance:
    """A named action with its parameters bound: `action` is TLC's, `node` the formula."""

    name: str
    parameters: Function
    node: Any
    context: Any
    action: Any


@dataclass(frozen=True)
class Lazy:
    """A part of the next-state relation that can be walked further only in a state."""

    node: Any
    scope: Scope


@dataclass
class Definition:
    """What is known of a named action without evaluating: its parameters, and the formulas it is made of."""

    parameters: tuple[str, ...]
    nodes: list[Any] = field(default_factory=list)


class Next:
    """The next-state relation of one loaded specification."""

    def __init__(self, classes: Classes, tool: Any, bridge: Bridge) -> None:
        self._tool = tool
        self._bridge = bridge
        self._opcodes = classes["tlc2.tool.BuiltInOPs"]
        self._action = classes["tlc2.tool.Action"]
        self._definition = classes["tla2sany.semantic.OpDefNode"]
        self._empty = classes["tlc2.tool.TLCState"].Empty
        spec = tool.getNextStateSpec()
        if spec is None:
            raise SpecError(
                "the configuration names no next-state relation: it needs SPECIFICATION, or INIT and NEXT"
            )
        context = classes["tlc2.util.Context"].Empty
        name = str(spec.getName())
        self._start = (spec.pred, Scope(spec.con or context, "Next" if name == "UnnamedAction" else name))
        self.definitions: dict[str, Definition] = {}
        self._define(*self._start, seen=())
        self._parts = list(self._walk(*self._start, None))
        self._by_name: dict[str, list[Instance | Lazy]] = {}

    def instances(self, state: Any, name: str | None = None) -> Iterator[Instance]:
        """All instances of all actions, or of one, in a state of TLC's, enabled or not, in the order of the formula."""
        for part in self._parts if name is None else self._named(name):
            if isinstance(part, Lazy):
                yield from (
                    found
                    for found in self._walk(part.node, part.scope, state)
                    if isinstance(found, Instance) and name in (None, found.name)
                )
            else:
                yield part

    def _named(self, name: str) -> list[Instance | Lazy]:
        if name not in self._by_name:
            self._by_name[name] = [
                part for part in self._parts if isinstance(part, Lazy) or part.name == name
            ]
        return self._by_name[name]

    def resolve(self, node: Any, context: Any) -> tuple[int, Any]:
        """An application's operator: its opcode if TLC has it built in, else 0 and what it is bound to."""
        operator = node.getOperator()
        opcode = int(self._opcodes.getOpCode(operator.getName()))
        if opcode:
            return opcode, None
        bound = self._tool.lookup(operator, context, False)
        if isinstance(bound, self._definition):
            return int(self._opcodes.getOpCode(bound.getName())), bound
        return 0, bound

    def peel(self, node: Any, context: Any) -> tuple[Any, Any]:
        """The formula under LET, labels and the substitutions of an INSTANCE, with its context."""
        while True:
            kind = node.getKind()
            if kind in (SUBSTITUTION, ASSUMED_SUBSTITUTION):
                outer = context
                for substitution in node.getSubsts():
                    value = self._tool.getVal(substitution.getExpr(), outer, False)
                    context = context.cons(substitution.getOp(), value)
            elif kind not in (LET, LABEL):
                return node, context
            node = node.getBody()

    def bind(self, definition: Any, node: Any, context: Any, state: Any) -> Any:
        """The context inside an applied definition; None if an argument needs a state and there is none."""
        inner = context
        for formal, argument in zip(definition.getParams(), node.getArgs(), strict=True):
            level = self.level(argument)
            if argument.getKind() not in (APPLICATION, *_VALUES) or level >= ACTION:
                value = self._tool.getVal(argument, context, False)
            elif level == CONSTANT or state is not None:
                value = self._evaluate(argument, context, state)
            else:
                return None
            inner = inner.cons(formal, value)
        return inner

    def level(self, node: Any) -> int:
        """0 for constants, 1 for what depends on the state, 2 for actions."""
        return int(node.getLevel()) if hasattr(node, "getLevel") else CONSTANT

    def contexts(self, node: Any, context: Any, state: Any) -> Iterator[Any]:
        """The contexts in which a quantifier's body is to hold."""
        before = self._empty if state is None else state
        enumerator = self._tool.contexts(node, context, before, self._empty, CLEAR)
        while (inner := enumerator.nextElement()) is not None:
            yield inner

    def _evaluate(self, node: Any, context: Any, state: Any) -> Any:
        before = self._empty if state is None else state
        return self._tool.eval(node, context, before, self._empty, CLEAR)

    def _true(self, node: Any, context: Any, state: Any) -> bool:
        return str(self._evaluate(node, context, state)) == "TRUE"

    def _walk(self, node: Any, scope: Scope, state: Any) -> Iterator[Instance | Lazy]:
        node, context = self.peel(node, scope.context)
        scope = replace(scope, context=context)
        if node.getKind() != APPLICATION:
            yield self._instance(node, scope)
            return
        opcode, bound = self.resolve(node, context)
        if not opcode and isinstance(bound, self._definition):
            inner = self.bind(bound, node, context, state)
            if inner is None:
                yield Lazy(node, scope)
            else:
                within = Scope(inner, str(bound.getName()), tuple(bound.getParams()), self._is_start(node))
                yield from self._walk(bound.getBody(), within, state)
        elif opcode in DISJUNCTIONS:
            for argument in node.getArgs():
                yield from self._walk(argument, scope, state)
        elif opcode == EXISTS:
            if state is None and any(self.level(bound) for bound in node.getBdedQuantBounds()):
                yield Lazy(node, scope)
            else:
                symbols = scope.symbols + _quantified(node)
                for inner in self.contexts(node, context, state):
                    yield from self._walk(
                        node.getArgs()[0], replace(scope, context=inner, symbols=symbols), state
                    )
        elif scope.root and (branches := self._branches(node, opcode)):
            guards = [guard for guard, _ in branches if guard is not None]
            if state is None and any(self.level(guard) for guard in guards):
                yield Lazy(node, scope)
            else:
                yield from self._choose(branches, opcode, scope, state)
        else:
            yield self._instance(node, scope)

    def _choose(
        self, branches: list[tuple[Any, Any]], opcode: int, scope: Scope, state: Any
    ) -> Iterator[Instance | Lazy]:
        if opcode in CONJUNCTIONS:
            if all(self._true(guard, scope.context, state) for guard, body in branches if body is None):
                body = next(body for _, body in branches if body is not None)
                yield from self._walk(body, scope, state)
            return
        for guard, body in branches:
            if guard is None or self._true(guard, scope.context, state):
                yield from self._walk(body, scope, state)
                return

    def _branches(self, node: Any, opcode: int) -> list[tuple[Any, Any]]:
        """Guards and bodies of an IF, a CASE, or a conjunction of guards and one named action."""
        arguments = list(node.getArgs())
        if opcode == IF:
            return [(arguments[0], arguments[1]), (None, arguments[2])]
        if opcode == CASE:
            return [tuple(pair.getArgs()) for pair in arguments]
        if opcode in CONJUNCTIONS:
            guards = [argument for argument in arguments if self.level(argument) < ACTION]
            rest = [argument for argument in arguments if self.level(argument) >= ACTION]
            if len(rest) == 1 and self._leads_to_names(rest[0]):
                return [*((guard, None) for guard in guards), (None, rest[0])]
        return []

    def _leads_to_names(self, node: Any) -> bool:
        while node.getKind() in (LET, LABEL):
            node = node.getBody()
        if node.getKind() != APPLICATION:
            return False
        operator = node.getOperator()
        opcode = int(self._opcodes.getOpCode(operator.getName()))
        if opcode in DISJUNCTIONS or opcode == EXISTS:
            return all(self._leads_to_names(argument) for argument in node.getArgs())
        return not opcode and isinstance(operator, self._definition)

    def _is_start(self, node: Any) -> bool:
        return bool(node.getUid() == self._start[0].getUid())

    def _instance(self, node: Any, scope: Scope) -> Instance:
        bound = {str(symbol.getName()): scope.context.lookup(symbol) for symbol in scope.symbols}
        values = {
            name: self._bridge.value(item) for name, item in bound.items() if self._bridge.is_value(item)
        }
        action = self._action(node, scope.context)
        return Instance(scope.name, Function(values), node, scope.context, action)

    def _define(self, node: Any, scope: Scope, seen: tuple[str, ...]) -> None:
        """The walk without evaluation: every branch, each quantifier's body once."""
        node, context = self.peel(node, scope.context)
        opcode, bound = self.resolve(node, context) if node.getKind() == APPLICATION else (0, None)
        if not opcode and isinstance(bound, self._definition):
            name = str(bound.getName())
            if name in seen:
                raise SpecError(f"the action {name} is defined by itself; TLC cannot enumerate that")
            for formal, argument in zip(bound.getParams(), node.getArgs(), strict=True):
                if argument.getKind() == OPERATOR_ARGUMENT:
                    context = context.cons(formal, self._tool.getVal(argument, context, False))
            within = Scope(context, name, tuple(bound.getParams()), self._is_start(node))
            self._define(bound.getBody(), within, (*seen, name))
        elif opcode in DISJUNCTIONS:
            for argument in node.getArgs():
                self._define(argument, scope, seen)
        elif opcode == EXISTS:
            symbols = scope.symbols + _quantified(node)
            self._define(node.getArgs()[0], replace(scope, context=context, symbols=symbols), seen)
        elif scope.root and node.getKind() == APPLICATION and (branches := self._branches(node, opcode)):
            for _, body in branches:
                if body is not None:
                    self._define(body, scope, seen)
        else:
            names = tuple(str(symbol.getName()) for symbol in scope.symbols)
            known = self.definitions.setdefault(scope.name, Definition(names))
            known.parameters = tuple(dict.fromkeys((*known.parameters, *names)))
            known.nodes.append(node)


_VALUES = (16, 17, 18)


def _quantified(node: Any) -> tuple[Any, ...]:
    return tuple(symbol for symbols in node.getBdedQuantSymbolLists() for symbol in symbols)
