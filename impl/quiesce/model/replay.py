"""Counterexamples both ways: what breaks a mutant, driven through a faulty variant and through the shipped code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from quiesce.model.adapter import Adapter, Asked, Divergence, Run
from quiesce.model.errors import Disabled, ModelError
from quiesce.model.manifest import Mutant, load
from quiesce.model.oracle import Oracle, Step
from quiesce.model.paths import spec_directory
from quiesce.model.schedule import find
from quiesce.model.values import State

SEARCHED_STATES = 20_000
"""States that are searched for a counterexample, at most."""


LIST = "model_tests/conformance/replayed.py"
"""Which mutants are not replayed, and why not, as tests have it too."""


@dataclass(frozen=True)
class Replay:
    """A counterexample, and what came of it.

    `violated` is what the specification loses at the end of `schedule`; `followed` how many of its steps the faulty
    variant took, `damage` what was wrong with it afterwards. The shipped implementation took `taken` steps, until one
    that it refused, for the reason `refusal` (empty if it took them all); `shipped_damage` is empty if it survived.
    """

    mutant: str
    violated: str
    schedule: tuple[str, ...]
    followed: int
    damage: str
    taken: int
    refusal: str
    shipped_damage: str

    @property
    def shown(self) -> bool:
        """Whether the faulty variant was damaged, and the shipped implementation was not."""
        return bool(self.damage) and not self.shipped_damage


@dataclass(frozen=True)
class Suite:
    """The adapters of a protocol: of the shipped implementation, of its faulty variants, and where each shows."""

    shipped: type[Adapter]
    variants: Mapping[str, type[Adapter]]
    shows_in: Mapping[str, str] = field(default_factory=dict)


def suite(protocol: str) -> Suite:
    """The adapters of a protocol, from the `model_tests` of this checkout."""
    root = spec_directory().parent
    if not (root / "model_tests" / protocol / "adapter.py").is_file():
        raise ModelError(
            f"replaying needs the adapters in model_tests/{protocol}, which {root} has not: run it in a checkout whose "
            "protocols are payload_reuse, broadcast_ring and stage_handoff"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    found: Suite = importlib.import_module(f"model_tests.{protocol}.adapter").SUITE
    return found


def not_replayed(name: str) -> str:
    """Why a mutant is not replayed, as `LIST` says; empty if it is. Raises `ModelError` outside a checkout."""
    mutant = load().find(name)
    if not isinstance(mutant, Mutant):
        return ""
    suite(mutant.protocol)
    listed: Mapping[str, str] = importlib.import_module("model_tests.conformance.replayed").NOT_REPLAYED
    return listed.get(name, "")


def replay(name: str) -> Replay:
    """Replay the shortest counterexample of a mutant. Raises `ModelError` if there is none that can be replayed."""
    mutant = load().find(name)
    if not isinstance(mutant, Mutant):
        raise ModelError(f"{name} is a model, and holds; replay one of its mutants")
    known = suite(mutant.protocol)
    if name not in known.variants:
        raise ModelError(
            f"{name} has no faulty variant that an adapter drives; quiesce check {name} shows its run in TLC"
        )
    variant = known.variants[name]
    small = known.shows_in.get(name, next(iter(variant.small)))
    broken, sound = variant.load(small, name), known.shipped.load(small)
    violated, steps = counterexample(broken, sound)
    asked = _as_asked(broken, steps)
    followed, damage = _faulty(variant(broken), steps)
    taken, refusal, shipped = _shipped(known.shipped(sound), asked)
    return Replay(name, violated, tuple(map(str, asked)), followed, damage, taken, refusal, shipped)


def counterexample(broken: Oracle, sound: Oracle) -> tuple[str, list[Step]]:
    """The shortest behaviour of a broken specification to a state that is bad, and what is bad about it.

    Bad is a false invariant; a state without any step; or one in which the sound specification has a step that the
    broken one lacks.
    """
    came: dict[State, tuple[State, Step] | None] = dict.fromkeys(broken.initial())
    todo = list(came)
    lacking: tuple[State, str] | None = None
    for state in todo:
        steps = broken.successors(state)
        bad = " and ".join(broken.violated(state)) or ("" if steps else "Deadlock")
        if bad:
            return bad, _path(came, state)
        if lacking is None:
            lacking = next(
                ((state, step.action) for step in sound.successors(state) if _lacks(steps, step)), None
            )
        if len(came) > SEARCHED_STATES:
            break
        for step in steps:
            if step.state not in came:
                came[step.state] = state, step
                todo.append(step.state)
    if lacking:
        return f"{lacking[1]} is never taken", _path(came, lacking[0])
    raise ModelError(
        f"no state within {len(came):,} breaks an invariant: the fault only shows in that something never happens; "
        "quiesce check shows how"
    )


def _lacks(steps: tuple[Step, ...], wanted: Step) -> bool:
    return not any((step.action, step.parameters) == (wanted.action, wanted.parameters) for step in steps)


def _path(came: Mapping[State, tuple[State, Step] | None], state: State) -> list[Step]:
    found = []
    while before := came[state]:
        state, step = before
        found.append(step)
    return found[::-1]


def _as_asked(oracle: Oracle, steps: list[Step]) -> list[Asked]:
    found = []
    state = oracle.initial()[0]
    for step in steps:
        alike = [
            other.state
            for other in oracle.successors(state)
            if (other.action, other.parameters) == (step.action, step.parameters)
        ]
        found.append(
            Asked(step.action, step.parameters, alike.index(step.state) + 1 if len(alike) > 1 else 0)
        )
        state = step.state
    return found


def _faulty(adapter: Adapter, steps: list[Step]) -> tuple[int, str]:
    """Drive a faulty variant; how many steps it took as the mutant does, and the damage done.

    Where it departs from the mutant it is asked for the rest of the steps all the same.
    """
    run = Run(adapter)
    followed = 0
    departed = ""
    try:
        for step in steps:
            if departed:
                run.force(step)
                continue
            try:
                if run.adapter.can(step):
                    run.ask(step)
                    followed += 1
            except Divergence as divergence:
                departed = divergence.message
        return followed, adapter.damage()
    finally:
        run.close()


def _shipped(adapter: Adapter, schedule: list[Asked]) -> tuple[int, str, str]:
    """Drive the shipped implementation until it refuses a step; the steps taken, why not the next, and any damage."""
    run = Run(adapter)
    taken, refusal = 0, ""
    try:
        for asked in schedule:
            try:
                step = find(run, asked)
            except Disabled as disabled:
                refusal = str(disabled)
                if not run.refuses(Step(asked.action, asked.parameters, run.states[0])):
                    return taken, refusal, f"it did {asked} all the same"
                break
            if run.adapter.can(step):
                run.ask(step)
                taken += 1
        return taken, refusal, adapter.damage()
    except Divergence as divergence:
        return taken, refusal, divergence.message
    finally:
        run.close()
