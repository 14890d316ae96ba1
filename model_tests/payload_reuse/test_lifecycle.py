"""The pool and the loan by themselves: bounds, the order in which buffers are looked at, and waiting."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from quiesce import lifecycle
from quiesce.errors import NotQuiescent, QuiesceTimeout
from quiesce.lifecycle import BufferPool, Loan


class Buffer(bytearray):
    """A buffer whose end can be observed."""


def owed(what: str, trackers: list[Any], touch: Any = None) -> Loan:
    loan = Loan(what, touch)
    for tracker in trackers:
        loan.add(tracker, None)
    return loan


def sized(pool: BufferPool[Buffer], size: int) -> Buffer:
    buffer = pool.take()
    buffer[:] = bytes(size)
    return buffer


def pool_of(free_limit: int = 100, free_bytes: int = 100) -> BufferPool[Buffer]:
    return BufferPool(Buffer, free_limit, free_bytes, size=len)


def tracked() -> tuple[threading.Event, zmq.MessageTracker]:
    """The event that libzmq sets when it lets go, and the tracker over it."""
    event = threading.Event()
    return event, zmq.MessageTracker(event)


@pytest.mark.parametrize("way", ["lent", "given back"])
@pytest.mark.parametrize(("limits", "kept"), [((2, 100), 2), ((100, 20), 2), ((100, 19), 1), ((0, 100), 0)])
def test_the_free_list_is_bounded_by_number_and_by_bytes(
    way: str, limits: tuple[int, int], kept: int
) -> None:
    pool = pool_of(*limits)
    for buffer in [sized(pool, 10) for _ in range(3)]:
        if way == "lent":
            pool.lend(buffer, [])
        else:
            pool.give_back(buffer)
    assert pool.settle() == (3 if way == "lent" else 0)
    assert (pool.free, pool.pending) == (kept, 0)


def test_bytes_taken_from_the_free_list_are_free_to_be_kept_again() -> None:
    pool = pool_of(free_bytes=10)
    first = sized(pool, 10)
    for _ in range(3):
        pool.give_back(first)
        assert pool.take() is first


def test_a_surplus_buffer_is_let_go_and_the_others_are_not() -> None:
    pool = pool_of(free_limit=1)
    buffers = [sized(pool, 1) for _ in range(2)]
    watched = [weakref.ref(buffer) for buffer in buffers]
    for buffer in buffers:
        pool.lend(buffer, [])
    del buffers, buffer
    pool.settle()
    assert [reference() is not None for reference in watched] == [True, False]


def test_a_buffer_is_free_only_when_all_its_trackers_are_done() -> None:
    pool = pool_of()
    (one, first), (other, second) = tracked(), tracked()
    pool.lend(pool.take(), [first, second])
    for event in (other, one):
        assert (pool.settle(), pool.free, pool.pending) == (0, 0, 1)
        event.set()
    assert (pool.settle(), pool.free, pool.pending) == (1, 1, 0)


def test_settling_in_passing_comes_to_every_buffer_in_turn() -> None:
    """Buffers that stay in flight for ever must not keep those behind them from being settled."""
    pool = pool_of()
    for _ in range(12):
        pool.lend(pool.take(), [tracked()[1]])
    for _ in range(12):
        pool.lend(pool.take(), [])
    settled = [pool.settle(8) for _ in range(3)]
    assert settled == [0, 4, 8]
    assert (pool.free, pool.pending) == (12, 12)


def test_settling_looks_at_no_more_buffers_than_it_is_told() -> None:
    pool = pool_of()
    for _ in range(20):
        pool.lend(Buffer(), [])
    assert [pool.settle(3), pool.settle(), pool.settle(100)] == [3, 8, 9]


@pytest.mark.parametrize("limits", [(-1, 0), (0, -1)])
def test_negative_limits_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="neither can be negative"):
        pool_of(*limits)


def test_closing_drops_every_buffer() -> None:
    pool = pool_of()
    event, tracker = tracked()
    buffers = [pool.take() for _ in range(2)]
    watched = [weakref.ref(buffer) for buffer in buffers]
    pool.give_back(buffers[0])
    pool.lend(buffers[1], [tracker])
    buffers.clear()
    pool.close(0, touch=event.set)
    assert (pool.free, pool.pending) == (0, 0)
    assert [reference() for reference in watched] == [None, None]
    pool.give_back(Buffer())
    assert pool.free == 0


def test_closing_says_how_many_buffers_are_still_read_and_may_be_repeated() -> None:
    pool = pool_of()
    events_ = [tracked(), tracked()]
    for _, tracker in events_:
        pool.lend(pool.take(), [tracker])
    pool.lend(pool.take(), [])
    with pytest.raises(NotQuiescent, match="2 buffer"):
        pool.close(0)
    assert (pool.free, pool.pending) == (0, 2)
    for event, _ in events_:
        event.set()
    pool.close(0)
    assert (pool.free, pool.pending) == (0, 0)


def test_a_loan_is_done_when_all_its_trackers_are() -> None:
    (one, first), (other, second) = tracked(), tracked()
    loan = owed("a tensor", [first, second])
    with pytest.raises(QuiesceTimeout, match=r"a tensor .* 2 frame"):
        loan.wait(0)
    other.set()
    assert "in flight" in repr(loan)
    with pytest.raises(QuiesceTimeout, match="1 frame"):
        loan.wait(0)
    one.set()
    loan.wait(0)
    assert loan.done
    assert "done" in repr(loan)
    assert Loan("nothing").done


def test_a_loan_is_looked_at_again_after_its_last_touch() -> None:
    event, tracker = tracked()
    owed("a tensor", [tracker], touch=event.set).wait(0)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The naps that `lifecycle` takes, on a clock that only naps move."""
    taken: list[float] = []
    clock = SimpleNamespace(sleep=taken.append, monotonic=lambda: sum(taken))
    monkeypatch.setattr(lifecycle, "time", clock)
    return taken


def test_waiting_naps_longer_and_longer_but_never_past_its_end(naps: list[float]) -> None:
    touched = []
    loan = owed("a tensor", [tracked()[1]], touch=lambda: touched.append(len(naps)))
    with pytest.raises(QuiesceTimeout):
        loan.wait(0.1)
    assert sum(naps) == pytest.approx(0.1)
    assert naps[:3] == [50e-6, 100e-6, 200e-6]
    assert max(naps) == 10e-3
    # Once before each nap, and once more at the end.
    assert touched == list(range(len(naps) + 1))
