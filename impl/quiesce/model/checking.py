"""Models and mutants held against the manifest: what must hold, holds; what must fail, fails as pinned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from quiesce.model import counterexamples, tlc
from quiesce.model.errors import UnknownName
from quiesce.model.manifest import DEADLOCK, SMALL, Manifest, Model, Mutant, load
from quiesce.model.naming import SEARCHED_STATES, named_counterexample, named_coverage
from quiesce.model.oracle import Oracle
from quiesce.model.output import VIOLATIONS, CheckResult, Progress

DEFAULT_TIMEOUT = 1800.0
"""Seconds a run may take unless told otherwise."""


@dataclass(frozen=True)
class Judgement:
    """A run held against the manifest: `problems` says, one sentence each, what is not as pinned.

    `answered` is False when TLC gave no answer at all (a parse error, a timeout, no memory).
    """

    entry: Model | Mutant
    result: CheckResult
    problems: tuple[str, ...]
    answered: bool = True

    @property
    def good(self) -> bool:
        """Whether everything is as the manifest says."""
        return not self.problems


def check(
    name: str | Model | Mutant,
    *,
    manifest: Manifest | None = None,
    workers: int = 1,
    heap: int = 2 << 30,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[Progress], None] | None = None,
    named: bool = True,
) -> CheckResult:
    """Run TLC on a model, or on a mutant, of the manifest.

    `heap` is in bytes, `timeout` in seconds. The result is TLC's; `judge` holds it against the manifest.
    With `named`, the coverage and the counterexample use the specification's names for its actions, and the
    steps of the counterexample have their parameters: TLC alone does not know them all. Raises `UnknownName`
    for a name that the manifest lacks.
    """
    manifest = manifest or load()
    entry = manifest.find(name) if isinstance(name, str) else name
    model = manifest.model(entry.name)
    module, config = manifest.directory / f"{model.module}.tla", manifest.config(entry)
    result = tlc.run(
        module,
        config,
        libraries=manifest.libraries,
        workers=workers,
        heap=heap,
        timeout=timeout,
        deadlock=isinstance(entry, Model) or entry.violates == DEADLOCK,
        coverage=isinstance(entry, Model),
        short=model.size == SMALL,
        progress=progress,
    )
    if not named or not (result.coverage or result.counterexample):
        return result
    oracle = Oracle.load(entry.name, manifest=manifest, constrained=result.holds)
    if result.holds:
        return replace(result, coverage=named_coverage(oracle, result.coverage))
    if result.counterexample:
        result = replace(result, counterexample=named_counterexample(oracle, result.counterexample))
        if isinstance(entry, Mutant) and result.violated == entry.violates:
            counterexamples.keep(entry, manifest, result)
    return result


def judge(entry: Model | Mutant, result: CheckResult) -> Judgement:
    """Hold the result of a run against what the manifest says of it."""
    if result.verdict != "holds" and result.verdict not in VIOLATIONS:
        return Judgement(entry, result, (f"no answer ({result.verdict}): {result.message}",), answered=False)
    problems = _of_mutant(entry, result) if isinstance(entry, Mutant) else _of_model(entry, result)
    return Judgement(entry, result, tuple(problems))


def _of_model(model: Model, result: CheckResult) -> list[str]:
    if not result.holds:
        what = f" {result.violated}" if result.violated else ""
        return [f"violated: {result.verdict}{what}. {result.message}".strip()]
    problems = []
    for name, seen in (("distinct", result.distinct), ("depth", result.depth)):
        pinned = getattr(model, name)
        if pinned is None:
            problems.append(f"{name} is not pinned; seen {seen:,} (quiesce check --pin writes it)")
        elif pinned != seen:
            problems.append(f"{name}: expected {pinned:,}, seen {seen:,}")
    return problems + _vacuous(model, result.coverage)


def _vacuous(model: Model, coverage: Mapping[str, int | None]) -> list[str]:
    problems = []
    for action, taken in coverage.items():
        if taken is None and action not in model.untaken:
            problems.append(
                f"cannot tell whether {action} is ever taken: TLC counts it under another name, and none of "
                f"{SEARCHED_STATES:,} states enables it; quantify over a constant set, or say why in `untaken`"
            )
        elif taken == 0 and action not in model.untaken:
            problems.append(f"the action {action} is never taken; mend the model, or say why in `untaken`")
        if taken and action in model.untaken:
            problems.append(f"the action {action} is taken, but `untaken` gives a reason why it is not")
    for action in model.untaken:
        if action not in coverage:
            problems.append(f"`untaken`: {UnknownName('action', action, coverage)}")
    return problems


def _of_mutant(mutant: Mutant, result: CheckResult) -> list[str]:
    if result.holds:
        return [f"survived: {mutant.violates} still holds with Fault = {mutant.name!r}"]
    if result.violated != mutant.violates:
        return [f"expected {mutant.violates} to be violated, but it was {result.violated or result.verdict}"]
    depth = len(result.counterexample.steps) if result.counterexample else 0
    if mutant.depth is None:
        return [f"depth is not pinned; seen {depth} (quiesce check --pin writes it)"]
    if mutant.depth != depth:
        return [f"depth of the counterexample: expected {mutant.depth}, seen {depth}"]
    return []
