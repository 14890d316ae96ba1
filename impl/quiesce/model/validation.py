"""Whether what was observed is a behaviour of a specification, given steps that nobody observes.

`explains` is for observations in a known order. `search` is for events that took some time, in several threads and
processes: their steps may have been taken in any order that their begins and ends allow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from quiesce.model.errors import Disabled, UnknownName
from quiesce.model.oracle import Oracle, label
from quiesce.model.values import State, freeze, show

Outcome = Literal["accepted", "rejected", "undetermined"]


@dataclass(frozen=True)
class Condition:
    """What an observation tells beside its parameters.

    `name` is an operator in TLA+, applied to `arguments`; `holds` is the same of the states before and after the step.
    """

    name: str
    arguments: tuple[Any, ...]
    holds: Callable[[State, State], bool]

    def __str__(self) -> str:
        told = ", ".join(show(freeze(argument)) for argument in self.arguments)
        return f"{self.name}({told})" if told else self.name


def never(name: str) -> Condition:
    """What no step fulfils: an event that contradicts the trace itself. `name` is an operator of no arguments."""
    return Condition(name, (), lambda *_: False)


@dataclass(frozen=True)
class Observation:
    """An action that was seen to happen, with what is known of its parameters and of the state after it.

    An `optional` one may have happened: it began and was not seen to end, or it may change nothing. `rebase`, where
    given, moves the counters of the state before it, so that a step that only the last one allows can be taken.
    """

    action: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    where: Condition | None = None
    optional: bool = False
    rebase: Callable[[State], State] | None = None

    def __str__(self) -> str:
        return label(self.action, {name: freeze(value) for name, value in self.parameters.items()})

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for observations that the same steps fit."""
        after = tuple((name, freeze(value)) for name, value in self.after.items())
        return str(self), after, self.where and str(self.where), bool(self.rebase)


@dataclass(frozen=True)
class Explanation:
    """The answer of `explains`.

    "accepted": some behaviour fits; `states` are those it may have ended in. "rejected": none fits, and the
    observation numbered `at` (from 0) is the first that cannot be explained; `states` are those it could have
    been in before it, `enabled` the actions possible there, `reason` the first false conjunct. "undetermined":
    more than the allowed number of states would have to be looked at before the observation numbered `at`.
    """

    outcome: Outcome
    at: int
    states: tuple[State, ...] = ()
    enabled: tuple[str, ...] = ()
    reason: Disabled | None = None
    message: str = ""

    @property
    def accepted(self) -> bool:
        """Whether the observations are a behaviour of the specification."""
        return self.outcome == "accepted"


@dataclass(frozen=True)
class Span:
    """An event: its steps were taken in this order between `begin` and `end`, clock readings.

    The spans of one `line` follow each other. Clocks are compared only within one `domain`.
    """

    steps: tuple[Observation, ...]
    line: int = 0
    begin: float = 0.0
    end: float = math.inf
    domain: str = ""


@dataclass(frozen=True)
class _Place:
    """One step of one span, and how many steps of each line must have been taken before it."""

    span: int
    step: Observation
    needs: tuple[int, ...]


class History:
    """Spans, arranged for the search. `order` are the spans by their ends; those without an end are left out."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = [span for span in spans if span.steps]
        count = 1 + max((span.line for span in self.spans), default=0)
        members: list[list[int]] = [[] for _ in range(count)]
        for number, span in enumerate(self.spans):
            members[span.line].append(number)
        ends = [[self.spans[number].end for number in line] for line in members]
        starts = [[0] for _ in range(count)]
        for line, numbers in enumerate(members):
            for number in numbers:
                starts[line].append(starts[line][-1] + len(self.spans[number].steps))
        self.after = [0] * len(self.spans)
        self.lines: list[list[_Place]] = [[] for _ in range(count)]
        for line, numbers in enumerate(members):
            for rank, number in enumerate(numbers):
                span = self.spans[number]
                needs = tuple(
                    0
                    if other == line
                    or not members[other]
                    or self.spans[members[other][0]].domain != span.domain
                    else starts[other][bisect_left(ends[other], span.begin)]
                    for other in range(count)
                )
                self.lines[line] += (_Place(number, step, needs) for step in span.steps)
                self.after[number] = starts[line][rank + 1]
        ended = [number for number, span in enumerate(self.spans) if span.end < math.inf]
        self.order = sorted(ended, key=lambda number: (self.spans[number].end, number))
        self.length = sum(len(line) for line in self.lines)

    def covered(self, cut: tuple[int, ...], known: int) -> int:
        """How many spans, in the order of their ends, are over at `cut`; at least `known`."""
        while known < len(self.order):
            number = self.order[known]
            if cut[self.spans[number].line] < self.after[number]:
                break
            known += 1
        return known


class Walk:
    """The behaviours of an oracle's specification, remembered as they are asked for.

    `hidden` actions may be taken unseen. `urgent` ones are hidden actions that disable nothing and change nothing
    for others, so that taking them at once loses no behaviour. `canonical` gives a state by which all that behave
    alike can stand for each other; what both assume is shown by tests.
    """

    def __init__(
        self,
        oracle: Oracle,
        hidden: Collection[str] = (),
        urgent: Collection[str] = (),
        canonical: Callable[[State], State] = lambda state: state,
    ) -> None:
        for name in (*hidden, *urgent):
            if name not in oracle.actions:
                raise UnknownName("action", name, oracle.actions)
        self.oracle = oracle
        self.hidden = tuple(sorted(set(hidden) - set(urgent)))
        self._urgent = tuple(sorted(urgent))
        self._canonical = canonical
        self.states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._settled: dict[State, int] = {}
        self._hidden: dict[int, tuple[int, ...]] = {}
        self._matches: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._layers: dict[int, tuple[set[int], list[list[int]]]] = {}

    def number(self, state: Mapping[str, Any]) -> int:
        """The number of the canonical state that stands for `state`, with all urgent steps taken."""
        state = self.oracle.state(state)
        found = self._settled.get(state)
        if found is None:
            now = self._canonical(state)
            while self._urgent:
                urgent = (step for action in self._urgent for step in self.oracle.steps(now, action))
                if (step := next(urgent, None)) is None:
                    break
                now = self._canonical(step.state)
            if now not in self._numbers:
                self._numbers[now] = len(self.states)
                self.states.append(now)
            found = self._settled[state] = self._numbers[now]
        return found

    def matches(self, number: int, seen: Observation) -> tuple[int, ...]:
        """The states that a step which fits `seen` leads to."""
        key = (number, *seen.key)
        found = self._matches.get(key)
        if found is None:
            before = self.states[number]
            if seen.rebase:
                before = seen.rebase(before)
            fit = (
                self.number(step.state)
                for step in self.oracle.steps(before, seen.action, **seen.parameters)
                if all(step.state[name] == freeze(value) for name, value in seen.after.items())
                and (seen.where is None or seen.where.holds(before, step.state))
            )
            found = self._matches[key] = tuple(dict.fromkeys(fit))
        return found

    def _unseen(self, number: int) -> tuple[int, ...]:
        """Where one hidden step leads."""
        found = self._hidden.get(number)
        if found is None:
            state = self.states[number]
            steps = (step for action in self.hidden for step in self.oracle.steps(state, action))
            found = self._hidden[number] = tuple(dict.fromkeys(self.number(step.state) for step in steps))
        return found

    def layer(self, number: int, depth: int) -> list[int]:
        """The states that `depth` hidden steps lead to, and no fewer; none when all were seen before."""
        seen, layers = self._layers.setdefault(number, ({number}, [[number]]))
        while len(layers) <= depth and layers[-1]:
            found = dict.fromkeys(
                target for state in layers[-1] for target in self._unseen(state) if target not in seen
            )
            seen.update(found)
            layers.append(list(found))
        return layers[depth] if depth < len(layers) else []

    def reached(self, number: int, seen: Observation, complete: bool, bound: int) -> tuple[int, ...] | None:
        """Where `seen` leads after any hidden steps; unless `complete`, after as few of them as will do.

        None if more than `bound` states would have to be looked at.
        """
        found: dict[int, None] = {}
        looked = depth = 0
        while layer := self.layer(number, depth):
            looked += len(layer)
            if looked > bound:
                return None
            for state in layer:
                found.update(dict.fromkeys(self.matches(state, seen)))
            if found and not complete:
                break
            depth += 1
        return tuple(found)

    def around(self, numbers: Collection[int], most: int) -> list[int]:
        """The states that hidden steps lead to from any of these, at least those themselves and about `most`."""
        found = dict.fromkeys(numbers)
        for number in numbers:
            depth = 1
            while len(found) < most and (layer := self.layer(number, depth)):
                found.update(dict.fromkeys(layer))
                depth += 1
        return list(found)


@dataclass(frozen=True)
class Finding:
    """The outcome of a search: `covered` spans in the order of their ends are explained, `states` come after them."""

    outcome: Outcome
    covered: int
    states: tuple[int, ...]


def search(
    walk: Walk, history: History, initial: Collection[int], *, complete: bool = True, bound: int = 20_000
) -> Finding:
    """Look for a behaviour with exactly these steps, in an order that the spans allow, and hidden ones between.

    Unless `complete`, hidden steps are taken only where a step needs them, and as few as will do; that is fast, and
    only "accepted" can be believed. `bound` limits how many states may be possible at a time.
    """
    start = (0,) * len(history.lines)
    nodes: dict[tuple[int, ...], dict[int, None]] = {start: dict.fromkeys(initial)}
    coverage = {start: history.covered(start, 0)}
    best, waiting = coverage[start], _waiting(history, start, coverage[start], nodes[start])
    for _ in range(history.length):
        following: dict[tuple[int, ...], dict[int, None]] = {}
        covered: dict[tuple[int, ...], int] = {}
        for cut, states in nodes.items():
            for line, places in enumerate(history.lines):
                taken = cut[line]
                if taken == len(places):
                    continue
                place = places[taken]
                if any(have < need for have, need in zip(cut, place.needs, strict=True)):
                    continue
                after = (*cut[:line], taken + 1, *cut[line + 1 :])
                targets = following.get(after, {})
                for state in states:
                    reached = walk.reached(state, place.step, complete, bound)
                    if reached is None:
                        return Finding("undetermined", coverage[cut], tuple(states))
                    targets.update(dict.fromkeys(reached))
                if place.step.optional:
                    targets.update(states)
                if targets and after not in following:
                    following[after] = targets
                    covered[after] = history.covered(after, coverage[cut])
        if sum(map(len, following.values())) > bound:
            return Finding("undetermined", max(covered.values()), ())
        if not following:
            return Finding("rejected", best, tuple(waiting))
        for cut, states in following.items():
            if covered[cut] > best:
                best, waiting = covered[cut], {}
            if covered[cut] == best:
                waiting.update(_waiting(history, cut, best, states))
        nodes, coverage = following, covered
    return Finding(
        "accepted", len(history.order), tuple(dict.fromkeys(s for states in nodes.values() for s in states))
    )


def _waiting(
    history: History, cut: tuple[int, ...], covered: int, states: dict[int, None]
) -> dict[int, None]:
    """The states in which the span that ends next is the next of its line."""
    if covered == len(history.order):
        return {}
    number = history.order[covered]
    places = history.lines[history.spans[number].line]
    taken = cut[history.spans[number].line]
    if taken == len(places) or places[taken].span != number:
        return {}
    needed = all(have >= need for have, need in zip(cut, places[taken].needs, strict=True))
    return dict(states) if needed else {}


def explains(
    oracle: Oracle,
    observations: Sequence[Observation],
    *,
    hidden: Collection[str] = (),
    initial: Iterable[Mapping[str, Any]] | None = None,
    bound: int = 20_000,
) -> Explanation:
    """Look for a behaviour of the specification in which exactly these observations are made, in this order.

    Any number of steps of the `hidden` actions may lie before, between and after them; an action that is both
    observed and hidden may be either. `initial` are the states to start from, all initial states if None.
    `bound` limits how many states may be possible before one observation; the search keeps them all, so that a
    rejection holds for every interleaving.
    """
    walk = Walk(oracle, hidden)
    for item in observations:
        check_names(oracle, item)
    starts = [walk.number(state) for state in (oracle.initial() if initial is None else initial)]
    history = History([Span((item,), 0, at, at) for at, item in enumerate(observations)])
    found = search(walk, history, starts, bound=bound)
    states = tuple(walk.states[number] for number in found.states)
    if found.outcome == "accepted":
        return Explanation("accepted", len(observations), states)
    at, item = found.covered, observations[found.covered]
    if found.outcome == "undetermined":
        message = f"more than {bound:,} states are possible before observation {at}, {item}; allow more"
        return Explanation("undetermined", at, states, message=message)
    enabled, reason, why = blame(walk, found.states, item)
    message = f"observation {at}, {item}, fits no behaviour: {why}"
    return Explanation("rejected", at, states, enabled, reason, message)


def check_names(oracle: Oracle, item: Observation) -> None:
    """Raise `UnknownName` for an action, parameter or variable that the specification lacks."""
    if item.action not in oracle.actions:
        raise UnknownName("action", item.action, oracle.actions)
    for name in item.parameters:
        if name not in oracle.actions[item.action]:
            raise UnknownName(f"parameter of {item.action}", name, oracle.actions[item.action])
    for name in item.after:
        if name not in oracle.variables:
            raise UnknownName("variable", name, oracle.variables)


def blame(
    walk: Walk, numbers: Collection[int], item: Observation
) -> tuple[tuple[str, ...], Disabled | None, str]:
    """Why no step fits in any of these states: what is enabled there, the first false conjunct, and a sentence."""
    nearest = walk.around(numbers, _EXPLAINED)
    states = [walk.states[number] for number in nearest]
    enabled = tuple(
        dict.fromkeys(name for state in states[:_EXPLAINED] for name in walk.oracle.enabled(state))
    )
    possible = f"{len(states):,} states were possible before it"
    if not states:
        return enabled, None, f"there is no state to start from. {possible}"
    bare = Observation(item.action, item.parameters, rebase=item.rebase)
    if any(walk.matches(number, bare) for number in nearest):
        seen = f"{item.where}" if item.where else "what was seen of the state after it"
        return enabled, None, f"the action is possible, but never with {seen}. {possible}"
    reasons = [
        walk.oracle.why_disabled(item.rebase(state) if item.rebase else state, item.action, **item.parameters)
        for state in states[:_EXPLAINED]
    ]
    reason = next((reason for reason in reasons if reason.conjunct), reasons[0])
    return enabled, reason, f"{reason}. {possible}"


_EXPLAINED = 50
