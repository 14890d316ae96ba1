"""Holding an implementation to a model: what its adapter says, and the run that keeps both in step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from quiesce.model.case import Case, plain
from quiesce.model.errors import ModelError, UnknownName
from quiesce.model.manifest import Manifest
from quiesce.model.oracle import Oracle, Step, label
from quiesce.model.traces import Trace
from quiesce.model.values import Function, State, freeze

Method = TypeVar("Method", bound=Callable[..., Any])
Reason = Callable[[State, Step], bool]
"""Whether a reason applies to a step from a state."""


class Call(NamedTuple):
    """How an action is asked for: the adapter's method, and whether the implementation decides what it does."""

    method: str
    decides: bool


class Asked(NamedTuple):
    """What an adapter was asked for; `outcome` says which, from 1, if the action may end in several states."""

    action: str
    parameters: Function
    outcome: int = 0

    def __str__(self) -> str:
        return label(self.action, self.parameters) + (f" #{self.outcome}" if self.outcome else "")


class Report(NamedTuple):
    """A step that the implementation was seen to take; not `certain`: taken wherever it can be."""

    action: str
    parameters: Mapping[str, Any]
    certain: bool = True
    where: Callable[[State], bool] = lambda state: True


def does(*actions: str) -> Callable[[Method], Method]:
    """Mark a method of an adapter: it makes these actions happen, and is given the parameters of the one wanted."""
    return _marked(actions, False)


def lets(*actions: str) -> Callable[[Method], Method]:
    """Mark a method of an adapter: it lets the implementation go on, which takes one of these actions itself.

    The method is given the `Step` that is hoped for, and reports what happened with `happened`; nothing, if the
    implementation did nothing.
    """
    return _marked(actions, True)


def _marked(actions: tuple[str, ...], decides: bool) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        method.__quiesce_calls__ = (actions, decides)  # type: ignore[attr-defined]
        return method

    return mark


class Adapter:
    """What a model's actions and variables are in an implementation. One adapter lives for one run.

    A subclass names its `model` and the `constants` it changes there, makes actions happen in methods marked
    `@does` and `@lets`, says in `view` what the implementation shows, and in `facts` what a state of the
    specification shows of the same. `hidden` are actions that happen unseen at any time. `small` are other
    constants, by name, under which the model is small enough for its complete graph to be walked; `reasons` say,
    one sentence each, which steps of those graphs the implementation never takes. `own` are actions asked for by
    `@does` that the implementation takes only if it may, as it does those of `@lets`; their methods return False
    where it refused. Where the specification forbids them they are asked for too: see `attempts`.

    `__init__` brings the implementation to an initial state; `close` leaves nothing
    behind, wherever the run stopped, and is called also when `__init__` of a subclass has returned and no more.
    """

    model: ClassVar[str] = ""
    constants: ClassVar[Mapping[str, str]] = {}
    small: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    hidden: ClassVar[frozenset[str]] = frozenset()
    reasons: ClassVar[Mapping[str, Reason]] = {}
    own: ClassVar[frozenset[str]] = frozenset()
    manifest: ClassVar[Manifest | None] = None

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.states = oracle.initial()
        """The states that the specification may be in; while something is asked for, those before it."""
        self.reported: list[Report] = []

    @classmethod
    def load(cls, small: str = "", fault: str = "none") -> Oracle:
        """The oracle of the adapter's model: with its constants, or with those of `small` instead."""
        if not cls.model:
            raise ModelError(f"{cls.__name__} says no `model`; give it the name of a model of the manifest")
        if small and small not in cls.small:
            raise UnknownName("small model", small, cls.small)
        constants = cls.small[small] if small else cls.constants
        return Oracle.load(cls.model, fault, set=constants, manifest=cls.manifest)

    def view(self) -> Mapping[str, Any]:
        """What the implementation shows now, by names of your choice."""
        raise NotImplementedError

    def facts(self, state: State) -> Mapping[str, Any]:
        """The same of a state of the specification; equal to `view()` exactly when both agree."""
        raise NotImplementedError

    def can(self, step: Step) -> bool:
        """Whether `step` can be asked for where the implementation stands now, be it allowed or one of `attempts`."""
        return True

    def attempts(self) -> list[Step]:
        """Steps that lockstep asks for although the specification forbids them now: the implementation must refuse.

        Unless told otherwise, those of `@lets` and of `own` that no state allows and `can` does not rule out. A
        refusal is told as anywhere: a method of `@lets` reports nothing, one of `@does` returns False.
        """
        first, *others = self.states
        found = []
        for action, call in self.calls().items():
            if call.decides or action in self.own:
                elsewhere = [set(self.oracle.forbidden(state, action)) for state in others]
                found += [
                    Step(action, parameters, first)
                    for parameters in self.oracle.forbidden(first, action)
                    if all(parameters in forbidden for forbidden in elsewhere)
                ]
        return [step for step in found if self.can(step)]

    def weight(self, step: Step) -> int:
        """How often lockstep chooses a step, relative to others; 1 or more."""
        return 1

    def damage(self) -> str:
        """Let the implementation go on to its end, unobserved; what is wrong with what it did, empty if nothing is.

        Only `quiesce replay` asks, last before `close`.
        """
        return ""

    def close(self) -> None:
        """End the implementation, wherever it stands."""

    @does("Done")
    def done(self) -> None:
        """Nothing is left to do."""

    @classmethod
    def record(cls, directory: Path) -> None:
        """Run the implementation as it is used, each process recorded into `directory` by `quiesce.recording.record`.

        What is recorded is judged, as `cases` says. NotImplementedError if there is no such run: nothing is judged.
        """
        raise NotImplementedError

    @classmethod
    def cases(cls, trace: Trace) -> list[Case]:
        """What a recording means: unless told otherwise, events are the actions called so, fields their parameters."""
        return [plain(cls.model, cls.constants, trace.events, cls.hidden, cls.manifest)]

    def happened(
        self, action: str, /, *, where: Callable[[State], bool] = lambda state: True, **parameters: Any
    ) -> None:
        """Report a step of the implementation; a `@does` method that reports none did what it was asked to.

        `where` says which states after it are possible, if the action has several outcomes and this is known of it.
        """
        self.reported.append(Report(action, parameters, where=where))

    def wherever(self, action: str, /, **parameters: Any) -> None:
        """Report a step that was taken if it could be, unseen."""
        self.reported.append(Report(action, parameters, certain=False))

    @classmethod
    def calls(cls) -> dict[str, Call]:
        """How each action is asked for; the others happen by themselves, or not at all."""
        found: dict[str, Call] = {}
        for base in reversed(cls.__mro__):
            for name, method in vars(base).items():
                actions, decides = getattr(method, "__quiesce_calls__", ((), False))
                found.update(dict.fromkeys(actions, Call(name, decides)))
        return found


class Divergence(AssertionError):
    """The implementation did what the specification does not, or did not do what it does.

    `hint` is said behind the steps, and `more` last.

    `asked` is what the adapter was asked for, in order; `behaviour` the steps of the specification that this came
    to. If `forbidden`, the last of them is none: the specification does not allow it there.
    """

    def __init__(self, message: str, run: Run, forbidden: Step | None = None) -> None:
        self.message = message
        self.oracle = run.adapter.oracle
        self.adapter = type(run.adapter)
        self.asked = tuple(run.asked)
        self.behaviour = tuple(run.behaviour())
        self.forbidden = forbidden
        self.hint = self.more = ""
        super().__init__(message)

    def __str__(self) -> str:
        steps = [label(step.action, step.parameters) for step in self.behaviour]
        lines = [f"{number:>4}  {step}" for number, step in enumerate(steps, 1)]
        if self.forbidden:
            lines.append(
                f"{len(steps) + 1:>4}  {label(self.forbidden.action, self.forbidden.parameters)}  <-- here"
            )
        return "\n".join([self.message, "what was done:", *lines, *filter(None, [self.hint, self.more])])


@dataclass(frozen=True)
class _Node:
    """A state that the specification may be in, and how it came there; `sure` if in one way only."""

    state: State
    step: Step | None = None
    before: _Node | None = None
    sure: bool = True


class Run:
    """One implementation, and the states of the specification that it may be in; usually there is one.

    `taken(source, step)` is called for every edge of the specification that was certainly taken.
    """

    def __init__(self, adapter: Adapter, taken: Callable[[State, Step], object] | None = None) -> None:
        self.adapter = adapter
        self.oracle = adapter.oracle
        self.asked: list[Asked] = []
        self._calls = adapter.calls()
        for method, returned in (
            ("view", "what the implementation shows"),
            ("facts", "what a state shows of it"),
        ):
            if getattr(type(adapter), method) is getattr(Adapter, method):
                raise ModelError(
                    f"{type(adapter).__name__} has no method `{method}`; it must return {returned}, as a mapping"
                )
        for name in {*self._calls, *adapter.hidden} - {"Done"}:
            if name not in self.oracle.actions:
                raise UnknownName("action", name, self.oracle.actions)
        self._taken = taken
        self._nodes = [_Node(state) for state in self.oracle.initial()]
        self._known: _Node | None = None
        self._compare()

    @property
    def states(self) -> tuple[State, ...]:
        """The states that the specification may be in."""
        return tuple(node.state for node in self._nodes)

    def behaviour(self) -> list[Step]:
        """The steps that led to the first of the states."""
        found: list[Step] = []
        node: _Node | None = self._nodes[0]
        while node and node.step:
            found.append(node.step)
            node = node.before
        return found[::-1]

    def offers(self) -> list[Step]:
        """The steps that can be asked for.

        What the adapter does must be possible in all states, what the implementation decides itself in one.
        """
        found: dict[tuple[str, Function, State | None], Step] = {}
        count: dict[tuple[str, Function, State | None], int] = {}
        for node in self._nodes:
            keys = {}
            for step in self.oracle.successors(node.state):
                call = self._calls.get(step.action)
                if call:
                    keys[step.action, step.parameters, step.state if call.decides else None] = step
            for key, step in keys.items():
                found.setdefault(key, step)
                count[key] = count.get(key, 0) + 1
        return [
            step
            for key, step in found.items()
            if (key[2] is not None or count[key] == len(self._nodes)) and self.adapter.can(step)
        ]

    def ask(self, step: Step) -> bool:
        """Ask for a step, follow what happened, compare; whether it was this step. Raises `Divergence`."""
        if any(self._matching(state, step.action, step.parameters) for state in self.states):
            return self._ask(step)
        try:
            return self._ask(step)
        except Divergence as divergence:
            divergence.hint = self._hint(step)
            raise

    def _hint(self, step: Step) -> str:
        """What an adapter may have got wrong where a forbidden step was asked for."""
        call = self._calls[step.action]
        refused = "reports nothing" if call.decides else "returns False"
        return (
            f"{label(step.action, step.parameters)} was asked for although it is forbidden (`attempts`). If the "
            f"implementation did refuse it, let the adapter say so: `{call.method}` then {refused} and raises nothing. "
            "If it need not refuse, because nobody asks for it there, let `can` say so."
        )

    def _ask(self, step: Step) -> bool:
        happened = self._call(step)
        if not happened and not (self._calls[step.action].decides and self.adapter.reported):
            # It could not happen: so the specification is in none of the states that allow it.
            left = [
                node for node in self._nodes if not self._matching(node.state, step.action, step.parameters)
            ]
            if not left:
                wanted = label(step.action, step.parameters)
                raise Divergence(
                    f"the specification allows {wanted}, but the implementation did not do it", self
                )
            self._nodes = left
        self._compare()
        return happened

    def refuses(self, step: Step) -> bool:
        """Ask for a step that the specification does not allow; whether the implementation did not take it.

        Steps of its surroundings are not asked for. Afterwards the run is at its end.
        """
        call = self._calls.get(step.action)
        if (
            call is None
            or not (call.decides or step.action in self.adapter.own)
            or not self.adapter.can(step)
        ):
            return True
        with contextlib.suppress(Exception):
            self._invoke(step)
        return not self._took(step)

    def force(self, step: Step) -> None:
        """Ask for a step whatever comes of it, and follow nothing: the run is at its end."""
        self.adapter.states = self.states
        with contextlib.suppress(Exception):
            self._invoke(step)

    def close(self) -> None:
        """End the implementation."""
        self.adapter.close()

    def _call(self, step: Step) -> bool:
        adapter = self.adapter
        call = self._calls[step.action]
        self.asked.append(self._asked(step))
        try:
            answer = self._invoke(step)
        except Divergence:
            raise
        except Exception as error:
            wanted = label(step.action, step.parameters)
            raise Divergence(f"{wanted} failed: {type(error).__name__}: {error}", self) from error
        reports = list(adapter.reported)
        if not reports and answer is not False and not call.decides:
            reports.append(Report(step.action, step.parameters))
        for report in reports:
            self._follow(report)
        self.adapter.reported[:] = reports
        return self._took(step)

    def _took(self, step: Step) -> bool:
        return any(
            report.action == step.action
            and all(step.parameters.get(key) == freeze(value) for key, value in report.parameters.items())
            for report in self.adapter.reported
        )

    def _invoke(self, step: Step) -> object:
        call = self._calls[step.action]
        self.adapter.reported.clear()
        method = getattr(self.adapter, call.method)
        return method(step) if call.decides else method(**step.parameters)

    def _asked(self, step: Step) -> Asked:
        outcomes: list[State] = []
        for node in self._nodes:
            outcomes = [found.state for found in self._matching(node.state, step.action, step.parameters)]
            if step.state in outcomes:
                break
        several = len(outcomes) > 1 and step.state in outcomes
        return Asked(step.action, step.parameters, outcomes.index(step.state) + 1 if several else 0)

    def _follow(self, report: Report) -> None:
        reached: dict[State, _Node] = {}
        for node in self._closure() if report.certain else self._nodes:
            steps = self._matching(node.state, report.action, report.parameters)
            steps = [step for step in steps if report.where(step.state)]
            if not steps and not report.certain:
                reached.setdefault(node.state, node)
            for step in steps:
                known = reached.get(step.state)
                if known is None:
                    reached[step.state] = _Node(step.state, step, node)
                elif known.sure:
                    reached[step.state] = _Node(known.state, known.step, known.before, sure=False)
        if not reached:
            state = self.states[0]
            reason = self.oracle.why_disabled(state, report.action, **report.parameters)
            step = Step(report.action, Function({k: freeze(v) for k, v in report.parameters.items()}), state)
            raise Divergence(f"the implementation did what the specification forbids: {reason}", self, step)
        self._nodes = list(reached.values())

    def _closure(self) -> list[_Node]:
        """The nodes, and what hidden steps lead to from them."""
        found = {node.state: node for node in self._nodes}
        todo = list(found.values()) if self.adapter.hidden else []
        while todo:
            node = todo.pop()
            for step in self.oracle.successors(node.state):
                if step.action in self.adapter.hidden and step.state not in found:
                    # Nobody saw it, so that it was certainly taken only if there is no other way.
                    found[step.state] = _Node(step.state, step, node)
                    todo.append(found[step.state])
        return list(found.values())

    def _matching(self, state: State, action: str, parameters: Mapping[str, Any]) -> list[Step]:
        wanted = {name: freeze(value) for name, value in parameters.items()}
        if action not in self.oracle.actions:
            raise UnknownName("action", action, self.oracle.actions)
        return [
            step
            for step in self.oracle.successors(state)
            if step.action == action and all(step.parameters.get(name) == wanted[name] for name in wanted)
        ]

    def _compare(self) -> None:
        """Keep the states that look like the implementation; there must be one."""
        try:
            view = dict(self.adapter.view())
        except Exception as error:
            raise Divergence(
                f"the implementation cannot be viewed: {type(error).__name__}: {error}", self
            ) from error
        nodes = self._nodes
        if self.adapter.hidden and not any(self.adapter.facts(node.state) == view for node in nodes):
            nodes = self._closure()
        facts = [dict(self.adapter.facts(node.state)) for node in nodes]
        kept = [node for node, fact in zip(nodes, facts, strict=True) if fact == view]
        if not kept:
            nearest = min(facts, key=lambda fact: len(list(_differences(view, fact))))
            lines = [
                f"  {name}: {shown!r}, but {wanted!r}" for name, shown, wanted in _differences(view, nearest)
            ]
            more = f" (the nearest of {len(facts)} possible states)" if len(facts) > 1 else ""
            raise Divergence(
                f"the implementation shows, but the specification has{more}:\n" + "\n".join(lines), self
            )
        self._nodes = kept
        self.adapter.states = self.states
        if len(kept) == 1:
            self._credit(kept[0])

    def _credit(self, node: _Node) -> None:
        """Count the edges up to here, unless some other way may have led here."""
        passed: list[_Node] = []
        here: _Node | None = node
        while here is not None and here is not self._known:
            passed.append(here)
            here = here.before
        self._known = node
        if self._taken and all(one.sure for one in passed):
            for one in reversed(passed):
                if one.step and one.before:
                    self._taken(one.before.state, one.step)


def _differences(view: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*view, *facts]):
        shown, wanted = view.get(name, "nothing of it"), facts.get(name, "nothing of it")
        if shown != wanted:
            yield name, shown, wanted
