"""Loans that grow old are told of, with the line that borrowed; counters say what is lent; metrics show them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from prometheus_client import CollectorRegistry

from quiesce import borrowing
from quiesce.borrowing import Borrowing, warn_of_loans
from quiesce.host_staging import HostStaging
from quiesce.lifecycle import BufferPool, Loan
from quiesce.metrics import Metrics
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.streams import CpuBackend


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Time as the test says; watching is off again afterwards."""
    now = [100.0]
    monkeypatch.setattr(borrowing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    yield now
    warn_of_loans(None)


def borrow_here() -> tuple[Loan, Any]:
    tracker = SimpleNamespace(done=False)
    loan = Loan("message 7")
    loan.add(tracker, None)
    return loan, tracker


def test_an_old_loan_is_told_of_once_with_the_stack_of_its_borrower(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_loans(2.0)
    loan, _ = borrow_here()
    clock[0] += 2.0
    assert not loan.done
    assert caplog.records == []
    clock[0] += 0.5
    assert not loan.done
    assert not loan.done
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("quiesce.borrowing", logging.WARNING)
    text = record.getMessage()
    assert text.startswith("message 7 has been lent for 2.5 s, more than the 2 s allowed; it was borrowed at")
    assert "in borrow_here" in text
    assert 'loan = Loan("message 7")' in text


def test_a_loan_that_ends_in_time_or_is_not_watched_is_not_told_of(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    unwatched, _ = borrow_here()
    warn_of_loans(1.0)
    watched, tracker = borrow_here()
    tracker.done = True
    clock[0] += 10.0
    assert watched.done
    assert not unwatched.done
    warn_of_loans(None)
    assert not borrow_here()[0].done
    assert caplog.records == []


def test_a_buffer_that_does_not_come_back_is_told_of_when_its_pool_looks(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_loans(1.0)
    pool = BufferPool(bytearray)
    tracker = SimpleNamespace(done=False)
    pool.lend(pool.take(), [tracker])
    clock[0] += 1.5
    assert pool.since == 100.0
    assert pool.settle() == 0
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "a reused buffer has been lent for 1.5 s, more than the 1 s allowed"
    ]
    tracker.done = True
    assert pool.settle() == 1
    assert pool.since is None


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_is_a_number_of_seconds(limit: float) -> None:
    with pytest.raises(ValueError, match="give a number of seconds"):
        warn_of_loans(limit)


def test_not_watching_keeps_no_stack() -> None:
    assert Borrowing()._stack is None


def test_staging_counts_buffers_made_and_waits(clock: list[float]) -> None:
    with HostStaging(CpuBackend(), nbytes=64, limit=1) as staging:
        staged = staging.stage(torch.arange(4))
        staged.settle()
        tracker = SimpleNamespace(done=False)
        staged.lend([tracker])
        clock[0] += 3.0
        counters = staging.counters()
        assert (counters.in_flight, counters.oldest_s, counters.holder) == (1, 3.0, "whoever it was lent to")
        with pytest.raises(TimeoutError):
            staging.stage(torch.arange(4), timeout=0.0)
        tracker.done = True
        staging.stage(torch.arange(4)).discard()
        counters = staging.counters()
        assert (counters.messages, counters.fallbacks, counters.waits) == (2, 1, 1)


def test_a_sender_counts_and_shows_its_counters_until_it_dies() -> None:
    context: zmq.Context[Any] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://counted")
    push.connect("inproc://counted")
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    labels = {"name": "outputs", "kind": "PayloadSender"}

    def shown(metric: str) -> float | None:
        return registry.get_sample_value(metric, labels)

    with PayloadReceiver(pull) as receiver:
        with PayloadSender(push) as sender:
            metrics.watch("outputs", sender)
            assert shown("quiesce_in_flight") == 0.0
            sender.lend(torch.zeros(100_000))
            received = receiver.receive()
            counters = sender.counters()
            assert (counters.messages, counters.fallbacks, counters.waits) == (1, 1, 0)
            assert counters.holder == "the reader of message 1"
            assert counters.oldest_s > 0.0
            # The tensor, and the buffer of the payload, which nobody has looked at since.
            assert shown("quiesce_in_flight") == counters.in_flight == 2
            assert shown("quiesce_messages_total") == 1.0
            age = shown("quiesce_oldest_loan_seconds")
            assert age is not None
            assert age >= counters.oldest_s
            del received
            sender.settle()
        assert (sender.counters().in_flight, sender.counters().holder) == (0, "")
        del sender
        gc.collect()  # a loan can touch its sender's socket, and so refers to the sender
    assert shown("quiesce_messages_total") is None
    context.term()


def test_a_wait_for_room_is_counted_once_a_message() -> None:
    context: zmq.Context[Any] = zmq.Context()
    with PayloadSender(context.socket(zmq.PUSH)) as sender:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                sender.send(1, timeout=0.01)
        assert (sender.counters().waits, sender.counters().in_flight) == (2, 0)
    context.term()
