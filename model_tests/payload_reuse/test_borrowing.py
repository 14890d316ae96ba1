"""Loans that grow old are told of, with the line that borrowed; counters say what is lent; metrics show them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quiesce import borrowing
from quiesce.borrowing import Borrowing, warn_of_loans
from quiesce.host_staging import HostStaging
from quiesce.lifecycle import BufferPool, Loan
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
