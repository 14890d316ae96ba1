"""Events that took some time, in several threads and machines: any order that their clocks allow will do."""

from __future__ import annotations

import math

import pytest

from quiesce.model.manifest import Manifest
from quiesce.model.oracle import Oracle
from quiesce.model.validation import Condition, Finding, History, Observation, Span, Walk, search
from quiesce.model.values import ModelValue

P1, P2 = ModelValue("p1"), ModelValue("p2")
SENT = Observation("Send", {"p": P1, "q": P2})
READ = Observation("Read", {"p": P2})


@pytest.fixture(scope="module")
def walk(own_manifest: Manifest) -> Walk:
    return Walk(Oracle.load("post", manifest=own_manifest), {"Deliver"})


def looked(walk: Walk, *spans: Span, complete: bool = True) -> Finding:
    starts = [walk.number(state) for state in walk.oracle.initial()]
    return search(walk, History(spans), starts, complete=complete)


@pytest.mark.parametrize("complete", [True, False])
def test_events_that_overlap_may_have_happened_in_either_order(walk: Walk, complete: bool) -> None:
    late, early = Span((SENT,), 0, 5, 10), Span((READ,), 1, 0, 6)
    assert looked(walk, late, early, complete=complete).outcome == "accepted"


@pytest.mark.parametrize("complete", [True, False])
def test_an_end_before_a_begin_is_an_order(walk: Walk, complete: bool) -> None:
    finding = looked(walk, Span((SENT,), 0, 5, 10), Span((READ,), 1, 0, 4), complete=complete)
    assert (finding.outcome, finding.covered) == ("rejected", 0)
    assert finding.states


def test_clocks_of_different_machines_are_not_compared(walk: Walk) -> None:
    spans = Span((SENT,), 0, 5, 10, "here"), Span((READ,), 1, 0, 4, "there")
    assert looked(walk, *spans).outcome == "accepted"


def test_a_thread_is_an_order_whatever_its_clock_says(walk: Walk) -> None:
    spans = Span((READ,), 0, 5, 10), Span((SENT,), 0, 5, 10)
    assert looked(walk, *spans).outcome == "rejected"


def test_what_may_have_happened_need_not(walk: Walk) -> None:
    begun = Span((Observation("Send", {"p": P1, "q": P2}, optional=True),), 0, 0, math.inf)
    assert looked(walk, begun).outcome == "accepted"
    assert looked(walk, begun, Span((READ,), 1, 3, 4)).outcome == "accepted"
    assert looked(walk, Span((READ,), 1, 3, 4)).outcome == "rejected"


def test_the_steps_of_one_event_keep_their_order_and_others_come_between(walk: Walk) -> None:
    both = Span((SENT, SENT), 0, 0, 10)
    assert looked(walk, both, Span((READ,), 1, 4, 6)).outcome == "accepted"
    assert looked(walk, Span((READ, SENT), 0, 0, 10)).outcome == "rejected"


def test_a_condition_is_asked_of_the_states_around_the_step(walk: Walk) -> None:
    def some(count: int) -> Observation:
        holds = Condition("Sent", (count,), lambda before, after: after["sent"][P1] == count)
        return Observation("Send", {"p": P1, "q": P2}, where=holds)

    assert looked(walk, Span((some(1),), 0, 0, 1)).outcome == "accepted"
    assert looked(walk, Span((some(2),), 0, 0, 1)).outcome == "rejected"


def test_counters_can_be_moved_before_a_step(walk: Walk) -> None:
    """As for a step that only the last message allows."""
    (start,) = walk.oracle.initial()
    third = Observation("Send", {"p": P1, "q": P2}, rebase=lambda state: walk.oracle.state(dict(start)))
    spans = [Span((SENT,), 0, 0, 1), Span((READ,), 0, 2, 3), Span((SENT,), 0, 4, 5), Span((third,), 0, 6, 7)]
    assert looked(walk, *spans).outcome == "accepted"
    assert looked(walk, *spans[:3], Span((SENT,), 0, 6, 7)).outcome == "rejected"
