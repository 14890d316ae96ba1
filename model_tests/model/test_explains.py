"""Observations are held against a specification, with steps that nobody observes."""

from __future__ import annotations

import pytest

from quiesce.model.errors import UnknownName
from quiesce.model.manifest import Manifest
from quiesce.model.oracle import Oracle
from quiesce.model.validation import Observation, explains
from quiesce.model.values import ModelValue

P1, P2 = ModelValue("p1"), ModelValue("p2")
SENT = Observation("Send", {"p": P1, "q": P2})
READ = Observation("Read", {"p": P2})


@pytest.fixture(scope="module")
def post(own_manifest: Manifest) -> Oracle:
    return Oracle.load("post", manifest=own_manifest)


def test_a_behaviour_is_accepted_step_by_step(post: Oracle) -> None:
    answer = explains(post, [SENT, Observation("Deliver"), READ])
    assert answer.accepted
    assert answer.at == 3
    assert [state["seen"] for state in answer.states] == [{(P1, P2)}]


def test_hidden_steps_fill_the_gaps(post: Oracle) -> None:
    assert explains(post, [SENT, READ, SENT, READ], hidden={"Deliver"}).accepted
    assert explains(post, [READ], hidden={"Deliver", "Send"}).accepted


def test_without_hidden_steps_the_gap_is_rejected_where_it_is(post: Oracle) -> None:
    answer = explains(post, [SENT, READ])
    assert (answer.outcome, answer.at) == ("rejected", 1)
    assert "Deliver(letter = " in " ".join(answer.enabled)
    assert answer.reason is not None
    assert answer.reason.conjunct == "desk[p] # Nobody"
    assert answer.message.startswith(
        "observation 1, Read(p = p2), fits no behaviour: Read(p = p2) is disabled"
    )


CORRUPTED = {
    "an event is missing": ([SENT, SENT, READ], 2),
    "an event is doubled": ([SENT, READ, READ], 2),
    "events are swapped": ([READ, SENT], 0),
    "another reader": ([SENT, Observation("Read", {"p": P1})], 1),
    "a letter too many": ([SENT, READ, SENT, READ, SENT], 4),
    "never to oneself": ([Observation("Send", {"p": P1, "q": P1})], 0),
}


@pytest.mark.parametrize("kind", CORRUPTED)
def test_corrupted_observations_are_rejected_at_the_right_one(kind: str, post: Oracle) -> None:
    observations, at = CORRUPTED[kind]
    hidden = set() if kind == "an event is missing" else {"Deliver"}
    answer = explains(post, observations, hidden=hidden)
    assert (answer.outcome, answer.at) == ("rejected", at)


def test_nothing_observed_is_a_behaviour(post: Oracle) -> None:
    assert explains(post, []).accepted


def test_what_was_seen_of_the_state_must_fit(post: Oracle) -> None:
    assert explains(post, [Observation("Send", {"p": P1}, {"sent": {P1: 1, P2: 0}})]).accepted
    answer = explains(post, [Observation("Send", {"p": P1}, {"sent": {P1: 2, P2: 0}})])
    assert answer.outcome == "rejected"
    assert "never with what was seen of the state after it" in answer.message


def test_a_search_that_grows_too_large_is_undetermined(post: Oracle) -> None:
    answer = explains(post, [READ], hidden={"Send", "Deliver"}, bound=3)
    assert (answer.outcome, answer.at) == ("undetermined", 0)
    assert not answer.accepted
    assert "more than 3 states are possible before observation 0" in answer.message


def test_a_search_may_start_anywhere(post: Oracle) -> None:
    (start,) = post.initial()
    (sent,) = post.step(start, "Send", p=P1)
    assert explains(post, [READ], hidden={"Deliver"}, initial=[dict(sent)]).accepted
    assert explains(post, [SENT, READ], hidden={"Deliver"}, initial=[]).outcome == "rejected"


def test_wrong_names_are_errors_and_no_rejections(post: Oracle) -> None:
    with pytest.raises(UnknownName, match="did you mean 'Send'"):
        explains(post, [Observation("Sendd")])
    with pytest.raises(UnknownName, match="did you mean 'Deliver'"):
        explains(post, [], hidden={"Delivr"})
    with pytest.raises(UnknownName, match="no parameter of Send"):
        explains(post, [Observation("Send", {"r": 1})])
    with pytest.raises(UnknownName, match="no variable"):
        explains(post, [Observation("Send", {}, {"bax": 1})])
