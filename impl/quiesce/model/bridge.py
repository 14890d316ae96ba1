"""Values and states to and from TLC's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quiesce.model.errors import ModelError, UnknownName
from quiesce.model.jvm import Classes
from quiesce.model.values import ModelValue, State, Value, freeze, parse, show

_REMEMBERED = 100_000


class Bridge:
    """The two directions for one loaded specification.

    From Java, values travel as the text that TLC prints and are read once a text: a state costs one call.
    """

    def __init__(self, classes: Classes, tool: Any) -> None:
        self._classes = classes
        self._strings = classes["util.UniqueString"]
        self._empty = classes["tlc2.tool.TLCState"].Empty
        self._value = classes["tlc2.value.impl.Value"]
        declared = sorted(tool.getSpecProcessor().getVariablesNodes(), key=lambda node: int(node.getUid()))
        self.variables = tuple(str(variable.getName()) for variable in declared)
        models = classes["tlc2.value.impl.ModelValue"].mvs
        self._models = {str(model.val): model for model in models or [] if model is not None}
        self._texts: dict[str, Value] = {}
        self._conjuncts: dict[str, tuple[str, Value]] = {}
        self._states: dict[State, Any] = {}

    def is_value(self, thing: Any) -> bool:
        """Whether a thing bound in one of TLC's contexts is a value, and not an operator."""
        return isinstance(thing, self._value)

    def value(self, java: Any) -> Value:
        """A value of TLC's as a Python value."""
        java.deepNormalize()
        text = str(java.toString())
        if text not in self._texts:
            _make_room(self._texts)
            self._texts[text] = parse(text)
        return self._texts[text]

    def state(self, java: Any) -> State:
        """A state of TLC's as a Python state."""
        java.deepNormalize()
        found = {}
        text = str(java.toString())
        for conjunct in ("\n" + text).split("\n/\\ ") if text.startswith("/\\ ") else ["", text]:
            known = self._conjuncts.get(conjunct)
            if known is None:
                if not conjunct.strip():
                    continue
                _make_room(self._conjuncts)
                name, _, value = conjunct.partition("=")
                known = self._conjuncts[conjunct] = (name.strip(), parse(value))
            found[known[0]] = known[1]
        state = State({name: found[name] for name in self.variables})
        if state not in self._states:
            _make_room(self._states)
            self._states[state] = java
        return state

    def checked(self, values: Mapping[str, Any]) -> State:
        """A mapping from variables to values as a state; raises if a variable is missing or unknown."""
        if isinstance(values, State) and values in self._states:
            return values
        for name in values:
            if name not in self.variables:
                raise UnknownName("variable", name, self.variables)
        missing = [name for name in self.variables if name not in values]
        if missing:
            raise ModelError(
                f"a state needs a value for each variable; there is none for {', '.join(missing)}"
            )
        return State({name: freeze(values[name]) for name in self.variables})

    def java_state(self, state: State) -> Any:
        """A state of TLC's from a checked Python state."""
        if state not in self._states:
            _make_room(self._states)
            java = self._empty.createEmpty()
            for name, value in state.items():
                java = java.bind(self._strings.uniqueStringOf(name), self.java(value))
            java.deepNormalize()
            self._states[state] = java
        return self._states[state]

    def java(self, value: Value) -> Any:
        """A value of TLC's from a frozen Python value."""
        classes = self._classes
        if isinstance(value, bool):
            return classes["tlc2.value.impl.BoolValue"](value)
        if isinstance(value, int):
            if not -(2**31) <= value < 2**31:
                raise ModelError(f"{value} does not fit TLC's integers of 32 bits")
            return classes["tlc2.value.impl.IntValue"].gen(value)
        if isinstance(value, str):
            return classes["tlc2.value.impl.StringValue"](value)
        if isinstance(value, ModelValue):
            if value.name not in self._models:
                raise UnknownName("model value", value.name, self._models)
            return self._models[value.name]
        if isinstance(value, tuple):
            return classes["tlc2.value.impl.TupleValue"](self._values(value))
        if isinstance(value, frozenset):
            return classes["tlc2.value.impl.SetEnumValue"](self._values(value), False)
        if isinstance(value, Mapping):
            items = self._values(value.values())
            if value and all(isinstance(key, str) for key in value):
                names = classes.array(
                    "util.UniqueString", [self._strings.uniqueStringOf(key) for key in value]
                )
                return classes["tlc2.value.impl.RecordValue"](names, items, False)
            return classes["tlc2.value.impl.FcnRcdValue"](self._values(value), items, False)
        raise ModelError(f"{show(value)} cannot be given to TLC")

    def _values(self, values: Any) -> Any:
        return self._classes.array("tlc2.value.impl.Value", [self.java(value) for value in values])


def _make_room(memo: dict[Any, Any]) -> None:
    if len(memo) >= _REMEMBERED:
        memo.clear()
