"""States that stand for each other in a validation behave alike: the specifications walked at random, both ways."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from model_tests.conftest import PROFILE

from quiesce.model import case_payload, case_ring, case_stage
from quiesce.model.case import Case
from quiesce.model.traces import Event
from quiesce.model.validation import Walk
from quiesce.model.values import State

WALKS = {"dev": 6, "ci": 12, "nightly": 1_500}[PROFILE]
STEPS = 70


def event(action: str, number: int, subject: int = 1, **fields: object) -> Event:
    return Event(Path("f"), number, "p", 1, "C", subject, action, 10 * number, 10 * number + 5, "end", fields)


def payload() -> Case:
    """Small enough to be walked, with peers that die, interruptions and a lent tensor."""
    (case,) = case_payload.cases(
        [
            event("Take", 1, 2, buffer=1, free_limit=1),
            event("Encode", 2, 1, message=1, buffer=1, shape=[[True, False], [True, True]]),
            event("Abort", 3, 1),
        ]
    )
    return case


def ring() -> Case:
    (case,) = case_ring.cases(
        [
            event("Join", 1, 5, r=0),
            event("Join", 2, 6, r=1),
            event("Publish", 3, 1, s=1, window=2, message=1),
            event("Exclude", 4, 1, r=0),
            event("FindWriterDead", 5, 6, r=1),
        ]
    )
    return case


def stage() -> Case:
    (case,) = case_stage.cases(
        [
            event("BeforeForward", 1, 1, r=0),
            event("BeforeForward", 2, 1, r=0),
            event("SendMetadata", 3, 1, r=0, max_pending=2, message=0),
            event("ReceiveMetadata", 4, 2, r=1, message=0),
        ]
    )
    return case


CASES: dict[str, tuple[Callable[[], Case], Callable[[State], bool]]] = {
    "payload": (payload, lambda state: state["number"] < 12),
    "ring": (ring, lambda state: state["sequence"] < 6),
    "stage": (stage, lambda state: max(state["step"]) < 14),
}
"""The case, and how far its counters may go before the last message or step is near."""

Label = tuple[str, tuple[tuple[str, object], ...], int]


def labels(walk: Walk, state: State, taken: frozenset[str]) -> set[Label]:
    """What can be seen or done in a state, and what it leads to; without the steps that are taken at once."""
    return {
        (step.action, tuple(step.parameters.items()), walk.number(step.state))
        for step in walk.oracle.successors(state)
        if step.action not in taken and step.action != "Done"
    }


@pytest.mark.parametrize("protocol", list(CASES))
def test_a_state_and_the_one_that_stands_for_it_allow_the_same(protocol: str) -> None:
    make, goes_on = CASES[protocol]
    case = make()
    at_once = case.settled | case.urgent
    met: Counter[str] = Counter()
    for number in range(WALKS):
        choose = random.Random(number)
        walk = case.walk(case.worlds[number % len(case.worlds)])
        state = choose.choice(walk.oracle.initial())
        for _ in range(STEPS):
            if not goes_on(state):
                break
            here = walk.number(state)
            settled = state
            while at_once:
                steps = [step for step in walk.oracle.successors(settled) if step.action in at_once]
                if not steps:
                    break
                step = choose.choice(steps)
                assert walk.number(step.state) == here, f"{step.action} makes a difference in\n{settled!r}"
                settled = step.state
            assert labels(walk, settled, at_once) == labels(walk, walk.states[here], at_once), repr(settled)
            assert labels(walk, state, at_once) <= labels(walk, settled, at_once), repr(state)
            steps = [step for step in walk.oracle.successors(state) if step.action != "Done"]
            if not steps:
                break
            # Rare actions, such as those of a second message, are as likely as those that loop.
            fewest = min(met[step.action] for step in steps)
            step = choose.choice([s for s in steps if met[s.action] <= fewest + 5 * choose.random() * WALKS])
            met[step.action] += 1
            state = step.state
    assert len(met) > 10, met
