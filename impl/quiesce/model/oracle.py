"""Stepping through a specification, in this process, with TLC's own evaluator."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiesce.model.actions import CLEAR, Instance, Next
from quiesce.model.bridge import Bridge
from quiesce.model.config import Config
from quiesce.model.errors import Disabled, SpecError, UnknownName
from quiesce.model.guards import FirstFalse
from quiesce.model.jvm import Classes
from quiesce.model.manifest import Manifest, Mutant, load
from quiesce.model.values import Function, State, Value, freeze, show

CACHED_STATES = 100_000
"""States whose successors an oracle remembers before it starts afresh."""

_loaded: dict[tuple[Path, str, bool], Oracle] = {}
_loading = threading.RLock()


@dataclass(frozen=True)
class Step:
    """One transition: the action, the values its parameters are bound to, and the state it leads to."""

    action: str
    parameters: Function
    state: State

    def __repr__(self) -> str:
        return f"{label(self.action, self.parameters)} ->\n{self.state!r}"


def label(action: str, parameters: Mapping[str, Value]) -> str:
    """An action with its parameters, as "Send(p = p1, q = p2)"."""
    bound = ", ".join(f"{name} = {show(value)}" for name, value in parameters.items())
    return f"{action}({bound})" if bound else action


class Oracle:
    """A specification that says what may happen next.

    All methods may be called from any thread; one works at a time. A state is a `State`, or any mapping with
    a value for each variable. Successors outside the model's CONSTRAINT or ACTION_CONSTRAINT are left out, as
    by TLC, unless the oracle was loaded with `constrained=False`. SYMMETRY and VIEW are ignored.
    """

    def __init__(
        self, module: Path, config: Config, searched: list[Path] | None = None, *, constrained: bool = True
    ) -> None:
        directories = [module.parent, *(searched or [])]
        config = config.without(("property", "symmetry", "view"))
        self._lock = threading.RLock()
        self._classes = Classes()
        with tempfile.TemporaryDirectory(prefix="quiesce-oracle-") as scratch:
            file = Path(scratch, "oracle.cfg")
            file.write_text(config.text(), encoding="utf-8")
            self._tool = self._classes.tool(module.stem, file, directories)
        self.module = module
        self.config = config
        self._constrained = constrained and bool(self._tool.hasStateOrActionConstraints())
        self._bridge = Bridge(self._classes, self._tool)
        self._next = Next(self._classes, self._tool, self._bridge)
        self._false = FirstFalse(self._classes, self._tool, self._next, directories)
        self._invariants = list(zip(config.invariants, self._tool.getInvariants(), strict=True))
        self._root = self._tool.getSpecProcessor().getRootModule()
        self._empty = self._classes["tlc2.tool.TLCState"].Empty
        self._context = self._classes["tlc2.util.Context"].Empty
        self._successors: dict[State, tuple[Step, ...]] = {}
        self._forbidden: dict[tuple[State, str], tuple[Function, ...]] = {}

    @classmethod
    def load(
        cls,
        name: str,
        fault: str = "none",
        *,
        set: Mapping[str, str] | None = None,
        manifest: Manifest | None = None,
        constrained: bool = True,
    ) -> Oracle:
        """The oracle of a model, or of a mutant, of the manifest; loaded once a process.

        `fault` switches a mutant of that model on; `set` overrides constants, as in the manifest. Raises
        `UnknownName` for names the manifest lacks.
        """
        manifest = manifest or load()
        entry = manifest.find(name)
        model = manifest.model(name)
        config = manifest.config(model)
        if isinstance(entry, Mutant):
            fault = entry.name
        if fault != "none":
            mutant = manifest.find(fault)
            if not isinstance(mutant, Mutant):
                raise UnknownName("mutant", fault, manifest.mutants)
            config = config.override(mutant.overrides)
        config = config.override(set or {})
        module = manifest.directory / f"{model.module}.tla"
        key = (module, config.text(), constrained)
        with _loading:
            if key not in _loaded:
                _loaded[key] = oracle = cls(module, config, manifest.libraries, constrained=constrained)
                if not oracle._tool.hasStateOrActionConstraints():
                    _loaded[module, config.text(), not constrained] = oracle
            return _loaded[key]

    @property
    def actions(self) -> dict[str, tuple[str, ...]]:
        """All named actions of the next-state relation, taken or not, with the names of their parameters."""
        return {name: known.parameters for name, known in self._next.definitions.items()}

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables, in the order of their declaration."""
        return self._bridge.variables

    @property
    def invariants(self) -> tuple[str, ...]:
        """The names of the invariants of the configuration."""
        return tuple(name for name, _ in self._invariants)

    def initial(self) -> tuple[State, ...]:
        """The initial states."""
        with self._evaluating("the initial states"):
            found = self._tool.getInitStates()
            return tuple(dict.fromkeys(self._bridge.state(found.elementAt(i)) for i in range(found.size())))

    def successors(self, state: Mapping[str, Any]) -> tuple[Step, ...]:
        """All steps from `state`, in the order of the next-state relation; each transition once."""
        with self._evaluating("the successors of a state"):
            state = self._bridge.checked(state)
            known = self._successors.get(state)
            if known is None:
                if len(self._successors) >= CACHED_STATES:
                    self._successors.clear()
                before = self._bridge.java_state(state)
                steps = (
                    step for instance in self._next.instances(before) for step in self._take(instance, before)
                )
                known = self._successors[state] = tuple(dict.fromkeys(steps))
            return known

    def step(self, state: Mapping[str, Any], action: str, **parameters: Any) -> tuple[State, ...]:
        """The states that `action`, with these parameters, may lead to from `state`.

        Parameters left out may have any value. Raises `Disabled`, naming the first false conjunct, if there
        is no such step.
        """
        self._known(action, parameters)
        wanted = {name: freeze(value) for name, value in parameters.items()}
        found = tuple(
            step.state
            for step in self.successors(state)
            if step.action == action and all(step.parameters.get(name) == wanted[name] for name in wanted)
        )
        if not found:
            raise self.why_disabled(state, action, **parameters)
        return tuple(dict.fromkeys(found))

    def steps(self, state: Mapping[str, Any], action: str, **parameters: Any) -> tuple[Step, ...]:
        """All steps of one action from `state`; parameters left out may have any value.

        The others are not evaluated, which is quicker than `successors` where few are wanted, and nothing is kept.
        """
        self._known(action, parameters)
        wanted = {name: freeze(value) for name, value in parameters.items()}
        with self._evaluating(f"the steps of {action}"):
            before = self._bridge.java_state(self._bridge.checked(state))
            steps = (
                step
                for instance in self._next.instances(before, action)
                if all(instance.parameters.get(name) == value for name, value in wanted.items())
                for step in self._take(instance, before)
            )
            return tuple(dict.fromkeys(steps))

    def forbidden(self, state: Mapping[str, Any], action: str) -> tuple[Function, ...]:
        """The parameters with which `action` cannot be taken in `state`.

        What only a CONSTRAINT of the model leaves out is not among them, and neither are values that the next-state
        relation does not range over in this state.
        """
        self._known(action, {})
        with self._evaluating(f"the guards of {action}"):
            state = self._bridge.checked(state)
            found = self._forbidden.get((state, action))
            if found is None:
                if len(self._forbidden) >= CACHED_STATES:
                    self._forbidden.clear()
                before = self._bridge.java_state(state)
                possible: dict[Function, bool] = {}
                for instance in self._next.instances(before, action):
                    parameters = instance.parameters
                    if not possible.get(parameters):
                        taken = self._tool.getNextStates(instance.action, before)
                        possible[parameters] = bool(taken.size())
                found = tuple(parameters for parameters, taken in possible.items() if not taken)
                self._forbidden[state, action] = found
            return found

    def enabled(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """The actions that can be taken in `state`, with their parameters, as "Send(p = p1, q = p2)"."""
        return tuple(dict.fromkeys(label(step.action, step.parameters) for step in self.successors(state)))

    def why_disabled(self, state: Mapping[str, Any], action: str, **parameters: Any) -> Disabled:
        """Why `action` cannot be taken in `state`: the first false conjunct of its nearest instance."""
        self._known(action, parameters)
        wanted = {name: freeze(value) for name, value in parameters.items()}
        asked = label(action, wanted)
        with self._evaluating(f"the guards of {action}"):
            state = self._bridge.checked(state)
            before = self._bridge.java_state(state)
            instances = [instance for instance in self._next.instances(before) if instance.name == action]
            matching = [
                instance
                for instance in instances
                if all(instance.parameters.get(name) == value for name, value in wanted.items())
            ]
            if not matching:
                offered = ", ".join(sorted({label(action, item.parameters) for item in instances})[:8])
                message = f"{asked} is no instance of the next-state relation in this state; " + (
                    f"there are {offered}" if offered else "there is none of that name"
                )
                return Disabled(action, message)
            reasons = [self._false.of(instance, before) for instance in matching]
            reason = max(reasons, key=lambda item: item.depth)
            message = f"{asked} is disabled: {reason.text} is false, {reason.location}"
            return Disabled(action, message, reason.text, reason.location)

    def violated(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the invariants that are false in `state`."""
        with self._evaluating("an invariant"):
            java = self._bridge.java_state(self._bridge.checked(state))
            return tuple(name for name, action in self._invariants if not self._tool.isValid(action, java))

    def evaluate(self, name: str, state: Mapping[str, Any] | None = None, *arguments: Any) -> Value:
        """The value of a named operator or constant, in `state` if it depends on the state."""
        with self._evaluating(name):
            java = self._empty if state is None else self._bridge.java_state(self._bridge.checked(state))
            for constant in self._root.getConstantDecls():
                if str(constant.getName()) == name and not arguments:
                    known = self._tool.lookup(constant)
                    if self._bridge.is_value(known):
                        return self._bridge.value(known)
                    # The configuration puts a definition in its place.
                    value = self._tool.eval(known.getBody(), self._context, java, self._empty, CLEAR)
                    return self._bridge.value(value)
            operator = self._root.getOpDef(name)
            if operator is None:
                known = [str(definition.getName()) for definition in self._root.getOpDefs()]
                known += [str(constant.getName()) for constant in self._root.getConstantDecls()]
                raise UnknownName("operator or constant", name, known)
            formals = list(operator.getParams())
            if len(formals) != len(arguments):
                raise SpecError(f"{name} takes {len(formals)} arguments, not {len(arguments)}")
            context = self._context
            for formal, argument in zip(formals, arguments, strict=True):
                context = context.cons(formal, self._bridge.java(freeze(argument)))
            return self._bridge.value(self._tool.eval(operator.getBody(), context, java, self._empty, CLEAR))

    def state(self, values: Mapping[str, Any]) -> State:
        """A state from plain Python values, one for each variable; dicts, lists and sets are frozen."""
        return self._bridge.checked(values)

    def _known(self, action: str, parameters: Mapping[str, Any]) -> None:
        if action not in self._next.definitions:
            raise UnknownName("action", action, self._next.definitions)
        for name in parameters:
            if name not in self._next.definitions[action].parameters:
                raise UnknownName(f"parameter of {action}", name, self._next.definitions[action].parameters)

    def _take(self, instance: Instance, before: Any) -> Iterator[Step]:
        found = self._tool.getNextStates(instance.action, before)
        count = found.size()
        if not count:
            return
        for index in range(count):
            after = found.elementAt(index)
            if not after.allAssigned():
                names = ", ".join(sorted(str(variable.getName()) for variable in after.getUnassigned()))
                raise SpecError(f"{label(instance.name, instance.parameters)} leaves unassigned: {names}")
            if self._constrained and not (
                self._tool.isInModel(after) and self._tool.isInActions(before, after)
            ):
                continue
            yield Step(instance.name, instance.parameters, self._bridge.state(after))

    @contextmanager
    def _evaluating(self, what: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except self._classes.throwable as error:
                text = self._classes.message(error)
                raise SpecError(f"TLC cannot evaluate {what} of {self.module.stem}: {text}") from None
