"""A schedule in three forms: what was asked of an adapter, a TLA+ behaviour that TLC checks, and a test."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from quiesce.model import tlc
from quiesce.model.adapter import Adapter, Asked, Divergence, Run
from quiesce.model.config import Config
from quiesce.model.errors import Disabled, ModelError, UnknownName
from quiesce.model.manifest import load
from quiesce.model.oracle import Oracle, Step
from quiesce.model.output import CheckResult
from quiesce.model.values import Function, ModelValue, State, Value, parse, show

MODULE = "Schedule"
_PREFIX = "value_"
SHRINKING_S, SHRINKING_RUNS = 10.0, 1_000
"""How long, and in how many runs, a schedule is made shorter."""
_LINE = re.compile(r"(\w+)(?:\((.*)\))?(?: #(\d+))?$")


def read(text: str, oracle: Oracle) -> list[Asked]:
    """The schedule in a text: one line a step, as "Take(b = b1)"."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _LINE.match(line)
        if match is None:
            raise ModelError(f"{line!r} is no step; write one as Action(parameter = value)")
        action, bound, outcome = match.groups()
        if action not in oracle.actions:
            raise UnknownName("action", action, oracle.actions)
        names = oracle.actions[action] if bound else ()
        values = re.fullmatch(", ".join(f"{name} = (.*)" for name in names), bound or "")
        if values is None:
            raise ModelError(f"{line!r} must give values to {', '.join(oracle.actions[action]) or 'nothing'}")
        parameters = {name: parse(value) for name, value in zip(names, values.groups(), strict=True)}
        found.append(Asked(action, Function(parameters), int(outcome or 0)))
    return found


def replay(adapter: type[Adapter], schedule: str, small: str = "") -> None:
    """Ask an adapter for the steps of a schedule, one after the other. Raises `Divergence`, as the first run did."""
    oracle = adapter.load(small)
    run = Run(adapter(oracle))
    try:
        for asked in read(schedule, oracle):
            run.ask(_step(run, asked))
    finally:
        run.close()


def shrink(divergence: Divergence) -> Divergence:
    """The same after fewer steps: leaves out of the schedule, part by part, what it comes apart without.

    Hypothesis does not see that steps lead back to where they began.
    """
    end, runs = time.monotonic() + SHRINKING_S, SHRINKING_RUNS
    kind = _kind(divergence)
    size = len(divergence.asked) // 2
    while size:
        shorter = False
        start = len(divergence.asked) - size
        while start >= 0:
            if not runs or time.monotonic() > end:
                return divergence
            runs -= 1
            asked = divergence.asked
            found = _again(divergence, [*asked[:start], *asked[start + size :]])
            if found and _kind(found) == kind:
                divergence, shorter = found, True
            start = min(start - max(1, size // 4), len(divergence.asked) - size)
        if not shorter:
            size = size // 2 if size > 8 else size - 1
        size = min(size, len(divergence.asked))
    return divergence


def _kind(divergence: Divergence) -> object:
    """What came apart, without the values seen: a shorter run in which this is the same shows the same fault."""
    if divergence.forbidden:
        return divergence.forbidden.action
    first, *lines = divergence.message.splitlines() or [""]
    return re.split(r": | \(the nearest", first)[0], [line.split(":")[0] for line in lines]


def _again(divergence: Divergence, schedule: Iterable[Asked]) -> Divergence | None:
    """How a schedule comes apart in a new run; None if it does not, or cannot be asked for."""
    try:
        run = Run(divergence.adapter(divergence.oracle))
        try:
            for asked in schedule:
                step = _step(run, asked)
                if not run.adapter.can(step):
                    return None
                run.ask(step)
        finally:
            run.close()
    except Divergence as found:
        return found
    except Exception:
        return None
    return None


def _step(run: Run, asked: Asked) -> Step:
    """The step that is asked for: one of the specification, or one that the adapter attempts although it is none."""
    try:
        return find(run, asked)
    except Disabled:
        for step in run.adapter.attempts():
            if (step.action, step.parameters) == (asked.action, asked.parameters):
                return step
        raise


def find(run: Run, asked: Asked) -> Step:
    """The step of the specification that is asked for, in one of the states that it may be in."""
    for state in run.states:
        steps = [
            step
            for step in run.oracle.successors(state)
            if (step.action, step.parameters) == (asked.action, asked.parameters)
        ]
        if steps:
            return steps[max(0, asked.outcome - 1) % len(steps)]
    raise run.oracle.why_disabled(run.states[0], asked.action, **asked.parameters)


def as_test(adapter: type[Adapter], asked: Iterable[Asked], small: str = "") -> str:
    """A test, complete, that asks the adapter for the same steps."""
    lines = "\n".join(map(str, asked))
    more = f", {small!r}" if small else ""
    return (
        f'import {adapter.__module__}\nfrom quiesce.model.schedule import replay\n\nSCHEDULE = r"""\n{lines}\n"""\n\n\n'
        f"def test_schedule() -> None:\n    replay({adapter.__module__}.{adapter.__qualname__}, SCHEDULE{more})\n"
    )


def as_behaviour(oracle: Oracle, steps: Sequence[Step], last: Step | None = None) -> tuple[str, Config]:
    """A module whose only behaviour is these steps, and then `last`; and its configuration.

    TLC finds no error if this is a behaviour of the specification, and a deadlock before the first step that is not.
    """
    values: dict[str, None] = {}
    lines = []
    before = oracle.initial()[0]
    for number, step in enumerate([*steps, *([last] if last else [])]):
        known = oracle.actions[step.action]
        arguments = ", ".join(
            _text(step.parameters[name], values) for name in known if name in step.parameters
        )
        conjuncts = [
            f"at = {number}",
            f"at' = {number + 1}",
            step.action + (f"({arguments})" if arguments else ""),
        ]
        if step is not last:
            conjuncts += _pins(oracle, before, step, values)
            before = step.state
        lines.append("    \\/ " + " /\\ ".join(conjuncts))
    names = [f"{_PREFIX}{name}" for name in values]
    text = "\n".join(
        [
            f"---- MODULE {MODULE} ----",
            f"EXTENDS {oracle.module.stem}",
            *([f"CONSTANTS {', '.join(names)}"] if names else []),
            "VARIABLE at",
            "ScheduleInit == Init /\\ at = 0",
            "ScheduleNext ==",
            *lines,
            f"    \\/ at = {len(lines)} /\\ UNCHANGED <<at, {', '.join(oracle.variables)}>>",
            "====",
            "",
        ]
    )
    constants = {**oracle.config.constants, **{f"{_PREFIX}{name}": f"= {name}" for name in values}}
    return text, Config(constants, {"init": ("ScheduleInit",), "next": ("ScheduleNext",)})


def _pins(oracle: Oracle, before: State, step: Step, values: dict[str, None]) -> list[str]:
    """What tells this outcome of an action from its others."""
    others = [
        other.state
        for other in oracle.successors(before)
        if (other.action, other.parameters) == (step.action, step.parameters)
    ]
    return [
        f"{name}' = {_text(value, values)}"
        for name, value in step.state.items()
        if any(other[name] != value for other in others)
    ]


def _text(value: Value, values: dict[str, None]) -> str:
    """The TLA+ text of a value, with model values as constants of the module: their own names may mean something."""

    def renamed(value: Value) -> Value:
        if isinstance(value, ModelValue):
            values[value.name] = None
            return ModelValue(_PREFIX + value.name)
        if isinstance(value, tuple):
            return tuple(map(renamed, value))
        if isinstance(value, frozenset):
            return frozenset(map(renamed, value))
        if isinstance(value, Function):
            return Function({renamed(key): renamed(item) for key, item in value.items()})
        return value

    return show(renamed(value))


def check(
    oracle: Oracle, steps: Sequence[Step], last: Step | None = None, timeout: float = 300.0
) -> CheckResult:
    """Let TLC's command line say whether the steps, and then `last`, are a behaviour: "holds", or "deadlock"."""
    text, config = as_behaviour(oracle, steps, last)
    with tempfile.TemporaryDirectory(prefix="quiesce-schedule-") as directory:
        module = Path(directory, f"{MODULE}.tla")
        module.write_text(text, encoding="utf-8")
        libraries = [oracle.module.parent, *load().libraries]
        return tlc.run(module, config, libraries=libraries, timeout=timeout, coverage=False, short=True)


def explain(divergence: Divergence, small: str = "") -> Divergence:
    """The same divergence, which says at its end how to see it again."""
    text, config = as_behaviour(divergence.oracle, divergence.behaviour, divergence.forbidden)
    verdict = (
        "a deadlock before its last step"
        if divergence.forbidden
        else "no error: only the implementation errs"
    )
    divergence.more = "\n".join(
        [
            f"\nThe same as a module for TLC, which finds {verdict} ({MODULE}.tla, then {MODULE}.cfg):\n",
            text,
            config.text(),
            "The same as a test:\n",
            as_test(divergence.adapter, divergence.asked, small),
        ]
    )
    return divergence
