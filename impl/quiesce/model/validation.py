"""Whether what was observed is a behaviour of a specification, given steps that nobody observes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quiesce.model.errors import Disabled, UnknownName
from quiesce.model.oracle import Oracle, Step, label
from quiesce.model.values import State, freeze

Outcome = Literal["accepted", "rejected", "undetermined"]


@dataclass(frozen=True)
class Observation:
    """An action that was seen to happen, with what is known of its parameters and of the state after it."""

    action: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return label(self.action, {name: freeze(value) for name, value in self.parameters.items()})


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
    for name in hidden:
        if name not in oracle.actions:
            raise UnknownName("action", name, oracle.actions)
    for item in observations:
        _check(oracle, item)
    possible = dict.fromkeys(
        oracle.initial() if initial is None else (oracle.state(state) for state in initial)
    )
    for at, item in enumerate(observations):
        before = _closure(oracle, possible, frozenset(hidden), bound)
        if before is None:
            message = f"more than {bound:,} states are possible before observation {at}, {item}; allow more"
            return Explanation("undetermined", at, tuple(possible), message=message)
        possible = dict.fromkeys(
            step.state for state in before for step in oracle.successors(state) if _fits(step, item)
        )
        if not possible:
            return _rejection(oracle, at, item, tuple(before))
    return Explanation("accepted", len(observations), tuple(possible))


def _check(oracle: Oracle, item: Observation) -> None:
    if item.action not in oracle.actions:
        raise UnknownName("action", item.action, oracle.actions)
    for name in item.parameters:
        if name not in oracle.actions[item.action]:
            raise UnknownName(f"parameter of {item.action}", name, oracle.actions[item.action])
    for name in item.after:
        if name not in oracle.variables:
            raise UnknownName("variable", name, oracle.variables)


def _closure(
    oracle: Oracle, states: Mapping[State, None], hidden: frozenset[str], bound: int
) -> dict[State, None] | None:
    """Everything reachable by hidden steps alone; None if that is more than `bound` states."""
    seen = dict(states)
    todo = list(states) if hidden else []
    while todo:
        if len(seen) > bound:
            return None
        for step in oracle.successors(todo.pop()):
            if step.action in hidden and step.state not in seen:
                seen[step.state] = None
                todo.append(step.state)
    return seen


def _fits(step: Step, item: Observation) -> bool:
    return (
        step.action == item.action
        and all(step.parameters.get(name) == freeze(value) for name, value in item.parameters.items())
        and all(step.state[name] == freeze(value) for name, value in item.after.items())
    )


def _rejection(oracle: Oracle, at: int, item: Observation, states: tuple[State, ...]) -> Explanation:
    enabled = tuple(dict.fromkeys(name for state in states for name in oracle.enabled(state)))
    reason = None
    taken = [state for state in states if any(_fits(step, _bare(item)) for step in oracle.successors(state))]
    if not states:
        why = "there is no state to start from"
    elif taken:
        why = "the action is possible, but never with what was seen of the state after it"
    else:
        reasons = [
            oracle.why_disabled(state, item.action, **item.parameters) for state in states[:_EXPLAINED]
        ]
        reason = next((reason for reason in reasons if reason.conjunct), reasons[0])
        why = str(reason)
    message = (
        f"observation {at}, {item}, fits no behaviour: {why}. {len(states):,} states were possible before it"
    )
    return Explanation("rejected", at, states, enabled, reason, message)


def _bare(item: Observation) -> Observation:
    return Observation(item.action, item.parameters)


_EXPLAINED = 50
