"""Lockstep: Hypothesis says what happens next, and implementation and specification must agree on what it was."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from quiesce.model.adapter import Adapter, Divergence, Run
from quiesce.model.oracle import Oracle, Step
from quiesce.model.schedule import explain, shrink
from quiesce.model.values import State

ROUNDS = 4
"""Searches that a lockstep test is divided into; each prefers what those before it took least."""
_SHARES, _RANGE = 120, 1 << 16
STEPS = 60
"""Steps of a run unless told otherwise."""

Key = tuple[State, str, Any, State]


class Lockstep(RuleBasedStateMachine):
    """A run of the adapter `adapter`, which a subclass names; use `lockstep` unless you need the class."""

    adapter: type[Adapter]
    oracle: Oracle | None = None
    preferred: Counter[Key] = Counter()
    """How often each edge was taken before this search began; fixed during it, so that an example can be repeated."""
    taken: Counter[Key] = Counter()
    on_step: Callable[[State, Step], object] | None = None
    on_attempt: Callable[[Step], object] | None = None

    def __init__(self) -> None:
        super().__init__()
        self._attempted: Counter[Any] = Counter()
        self.run = Run(self.adapter(self.oracle or self.adapter.load()), self._took)

    def _took(self, state: State, step: Step) -> None:
        self.taken[state, step.action, step.parameters, step.state] += 1
        on_step = type(self).on_step
        if on_step:
            on_step(state, step)

    # Always the same range: an implementation that is not deterministic may offer something else the second time.
    @rule(choice=st.integers(0, _RANGE - 1))
    def go_on(self, choice: int) -> None:
        """One rule for all, so that Hypothesis does not leave whole actions out of a run."""
        offers = [step for step in self.run.offers() if step.action != "Done"]
        attempt = self._attempt()
        offers += [attempt] if attempt else []
        if not offers:
            return
        ends = list(itertools.accumulate(self._weights(offers)))
        chosen = offers[bisect.bisect(ends, choice * ends[-1] // _RANGE)]
        if chosen is attempt:
            self._attempted.update([chosen.action, (chosen.action, chosen.parameters)])
            if on_attempt := type(self).on_attempt:
                on_attempt(chosen)
        self.run.ask(chosen)
        violated = [name for state in self.run.states for name in self.run.oracle.violated(state)]
        if violated:
            raise Divergence(f"the specification itself violates {', '.join(violated)} here", self.run)

    def _attempt(self) -> Step | None:
        """The forbidden step attempted least in this run; one alone, so that most steps of a run lead somewhere."""
        return min(
            self.run.adapter.attempts(),
            key=lambda step: (self._attempted[step.action], self._attempted[step.action, step.parameters]),
            default=None,
        )

    def _weights(self, offers: list[Step]) -> list[int]:
        """Each action counts alike, but for what the adapter says of it; an edge seldom taken counts more."""
        here = self.run.states[0]
        alike = Counter(step.action for step in offers)
        found = []
        for step in offers:
            seen = self.preferred[here, step.action, step.parameters, step.state]
            found.append(
                self.run.adapter.weight(step) * _SHARES // alike[step.action] // (1 + min(seen, 3)) or 1
            )
        return found

    def teardown(self) -> None:
        self.run.close()


def lockstep(
    adapter: type[Adapter],
    *,
    small: str = "",
    examples: int | None = None,
    steps: int = STEPS,
    on_step: Callable[[State, Step], object] | None = None,
    on_attempt: Callable[[Step], object] | None = None,
    options: settings | None = None,
) -> Counter[Key]:
    """Run an adapter in lockstep; returns how often each edge of the specification was taken.

    `small` names one of the adapter's small models; otherwise its own model is used. `examples` runs of `steps` steps
    each are made, as many as the current Hypothesis profile says if None, in `ROUNDS` searches: each prefers steps
    that those before it took least. `on_step(state, step)` is called for each edge taken, `on_attempt(step)` for each
    forbidden step before it is asked for. Raises `Divergence`, shrunk, with its schedule as a TLA+ behaviour and as a
    test.
    """
    options = options or settings.default
    assert options is not None
    each = max(1, (examples or options.max_examples) // ROUNDS)
    taken: Counter[Key] = Counter()
    for number in range(ROUNDS):
        members = {
            "adapter": adapter,
            "oracle": adapter.load(small),
            "preferred": Counter(taken),
            "taken": taken,
            "on_step": staticmethod(on_step) if on_step else None,
            "on_attempt": staticmethod(on_attempt) if on_attempt else None,
        }
        machine = type(f"{adapter.__name__}{number or ''}", (Lockstep,), members)
        try:
            run_state_machine_as_test(
                machine,
                settings=settings(
                    options,
                    max_examples=each,
                    stateful_step_count=steps,
                    report_multiple_bugs=False,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        except Divergence as divergence:
            shrinks = Phase.shrink in options.phases
            raise explain(shrink(divergence) if shrinks else divergence, small) from None
        except Flaky as flaky:
            # Real sockets and processes: it need not happen again to have happened.
            for error in getattr(flaky, "exceptions", (flaky.__context__,)):
                if isinstance(error, Divergence):
                    raise explain(error, small) from None
            raise
    return taken
