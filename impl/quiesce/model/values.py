"""TLA+ values as Python values: hashable, immutable, equal exactly when TLC calls them equal.

| TLA+ | Python |
|---|---|
| integer, boolean, string | `int`, `bool`, `str` |
| model value | `ModelValue` |
| set | `frozenset` |
| tuple, sequence, function over 1..n | `tuple` |
| record, any other function | `Function` |

TLC prints values and this module reads them back, so its command line and its evaluator share one reader.
Python holds `True == 1`; a specification whose states differ only by that is not told apart here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from quiesce.model.errors import ModelError

Value = Any


@dataclass(frozen=True, order=True)
class ModelValue:
    """A constant of the model that equals nothing but itself, such as `p1` in `People = {p1, p2}`."""

    name: str

    def __repr__(self) -> str:
        return self.name


class Function(Mapping[Any, Any]):
    """An immutable, hashable mapping: a TLA+ record or function.

    Equal to any mapping with the same items. A function whose domain is 1..n is a tuple instead.
    """

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[Any, Any] | None = None, /, **fields: Any) -> None:
        self._items: dict[Any, Any] = {**(items or {}), **fields}
        self._hash: int | None = None

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Function):
            return self._items == other._items
        return self._items == other if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __repr__(self) -> str:
        return show(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._items,)


class State(Function):
    """A state of a specification: variable name -> value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(f"/\\ {name} = {show(value)}" for name, value in self.items())


def freeze(value: Any) -> Value:
    """`value` with dicts, lists and sets turned into the immutable forms of the table above, at any depth."""
    if isinstance(value, bool | int | str | ModelValue):
        return value
    if isinstance(value, Mapping):
        return _canonical({freeze(key): freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    if isinstance(value, set | frozenset):
        return frozenset(freeze(item) for item in value)
    raise ModelError(f"{value!r} ({type(value).__name__}) has no TLA+ counterpart; see quiesce.model.values")


def _canonical(items: dict[Any, Any]) -> Value:
    if all(type(key) is int for key in items) and set(items) == set(range(1, len(items) + 1)):
        return tuple(items[index] for index in range(1, len(items) + 1))
    return Function(items)


def show(value: Value) -> str:
    """The TLA+ text of a value, with sets and functions in a fixed order."""
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int | ModelValue):
        return repr(value)
    if isinstance(value, str):
        return f'"{_escape(value)}"'
    if isinstance(value, tuple):
        return f"<<{', '.join(map(show, value))}>>"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(show, value)))}}}"
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and _IDENTIFIER.fullmatch(key) for key in value):
            return f"[{', '.join(f'{key} |-> {show(item)}' for key, item in value.items())}]"
        return f"({' @@ '.join(f'{show(key)} :> {show(item)}' for key, item in value.items())})"
    raise ModelError(f"{value!r} ({type(value).__name__}) has no TLA+ counterpart; see quiesce.model.values")


_IDENTIFIER = re.compile(r"\w+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r", "\f": "\\f"}
_UNESCAPES = {escaped[1]: plain for plain, escaped in _ESCAPES.items()}


def _escape(text: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in text)


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _UNESCAPES.get(match[1], match[1]), text)


_TOKEN = re.compile(r'\s*(?:"((?:[^"\\]|\\.)*)"|(-?\d+)|(\w+)|(<<|>>|\|->|:>|@@|\.\.|[{}\[\](),:\\]|->))')


def parse(text: str) -> Value:
    """Read a value as TLC prints it."""
    reader = _Reader(text)
    value = reader.value()
    if reader.kind is not None:
        reader.fail()
    return value


class _Reader:
    """Recursive descent over the tokens; `kind` is 1 string, 2 integer, 3 word, 4 symbol, None at the end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.kind: int | None = None
        self.token = ""
        self.advance()

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            if self.text[self.position :].strip():
                self.fail()
            self.kind, self.token = None, ""
            return
        self.position = match.end()
        self.kind = match.lastindex
        self.token = match[match.lastindex or 0]

    def fail(self) -> None:
        raise ModelError(
            f"cannot read the TLA+ value {self.text[:200]!r} near character {self.position}; "
            "it may be infinite, or an expression that TLC left unevaluated"
        )

    def symbol(self, expected: str) -> bool:
        if self.kind == 4 and self.token == expected:
            self.advance()
            return True
        return False

    def need(self, expected: str) -> None:
        if not self.symbol(expected):
            self.fail()

    def value(self) -> Value:
        left = self.atom()
        if self.symbol(".."):
            return frozenset(range(left, self.atom() + 1))
        if self.kind == 4 and self.token == "\\":
            return self.product(left)
        return left

    def product(self, first: Value) -> Value:
        factors = [first]
        while self.symbol("\\"):
            if self.kind != 3 or self.token not in ("X", "times"):
                self.fail()
            self.advance()
            factors.append(self.atom())
        return frozenset(product(*factors))

    def atom(self) -> Value:
        kind, token = self.kind, self.token
        self.advance()
        if kind == 1:
            return _unescape(token)
        if kind == 2:
            return int(token)
        if kind == 3:
            return {"TRUE": True, "FALSE": False}[token] if token in ("TRUE", "FALSE") else ModelValue(token)
        if token == "{":
            return frozenset(self.items("}"))
        if token == "<<":
            return tuple(self.items(">>"))
        if token == "[":
            return self.record()
        if token == "(":
            return self.function()
        return self.fail()

    def items(self, closing: str) -> list[Value]:
        found: list[Value] = []
        while not self.symbol(closing):
            if found:
                self.need(",")
            found.append(self.value())
        return found

    def record(self) -> Value:
        fields: dict[str, Value] = {}
        while not self.symbol("]"):
            if fields:
                self.need(",")
            name = self.token
            self.advance()
            self.need("|->")
            fields[name] = self.value()
        return Function(fields)

    def function(self) -> Value:
        items: dict[Value, Value] = {}
        while not self.symbol(")"):
            key = self.value()
            if not items and self.symbol(")"):
                return key
            self.need(":>")
            items[key] = self.value()
            if not self.symbol("@@") and not (self.kind == 4 and self.token == ")"):
                self.fail()
        return _canonical(items)


def parse_state(text: str) -> State:
    """Read a state as TLC prints it: one conjunct a variable, or a single equation."""
    found: dict[str, Value] = {}
    for conjunct in re.split(r"^/\\ ", text.strip(), flags=re.MULTILINE):
        if conjunct.strip():
            name, _, value = conjunct.partition("=")
            found[name.strip()] = parse(value)
    return State(found)
