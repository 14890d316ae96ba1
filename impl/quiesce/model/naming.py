"""The names that TLC's command line cannot give to actions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quiesce.model.oracle import Oracle
from quiesce.model.output import Counterexample, TraceStep

SEARCHED_STATES = 5_000
"""States that are looked through, at most, for actions that TLC took under another name."""


def named_coverage(oracle: Oracle, taken: Mapping[str, int | None]) -> dict[str, int | None]:
    """How often each action was taken, given the counts that TLC printed.

    TLC's count where it has one. It books an action under a quantifier over a set that depends on the state,
    or one of an instance, on the formula around it; such actions are looked for by stepping, and counted as 1
    when found. None stands for an action that is neither found nor ruled out within `SEARCHED_STATES`.
    """
    unnamed = any(count for name, count in taken.items() if name not in oracle.actions)
    counts: dict[str, int | None] = {name: taken[name] for name in oracle.actions if taken.get(name)}
    missing = [name for name in oracle.actions if name not in counts]
    if not missing or not unnamed:
        return {name: counts.get(name, 0) for name in oracle.actions}
    found, complete = _search(oracle, set(missing))
    for name in missing:
        counts[name] = 1 if name in found else 0 if complete or name in taken else None
    return {name: counts[name] for name in oracle.actions}


def _search(oracle: Oracle, wanted: set[str]) -> tuple[set[str], bool]:
    """The wanted actions that some reachable state enables, and whether all reachable states were seen."""
    seen = set(oracle.initial())
    todo = list(seen)
    found: set[str] = set()
    while todo and found != wanted:
        if len(seen) > SEARCHED_STATES:
            return found, False
        for step in oracle.successors(todo.pop()):
            if step.action in wanted:
                found.add(step.action)
            if step.state not in seen:
                seen.add(step.state)
                todo.append(step.state)
    return found, not todo


def named_counterexample(oracle: Oracle, trace: Counterexample) -> Counterexample:
    """The same counterexample with each step's action as the specification names it, and its parameters."""
    steps = [TraceStep("Init", oracle.state(trace.steps[0].state))]
    for item in trace.steps[1:]:
        after = oracle.state(item.state)
        match = next((step for step in oracle.successors(steps[-1].state) if step.state == after), None)
        if match is None:
            steps.append(TraceStep(item.action, after))
        else:
            steps.append(TraceStep(match.action, after, dict(match.parameters)))
    return replace(trace, steps=tuple(steps))
