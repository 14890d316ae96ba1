"""A signal handler's exception at any moment of a call of the ring: nothing but the message in hand is lost."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress

import pytest
import torch
from model_tests.broadcast_ring.processes import START_S
from model_tests.conftest import PROFILE
from model_tests.moments import Interruption, at_each

from quiesce.broadcast_ring import BroadcastRing
from quiesce.errors import Closed, QuiesceTimeout
from quiesce.ring_reader import LEASE_BYTES, RemoteReader, RingReader

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="no table of exceptions to tell moments by"),
    # An exception in a finalizer goes nowhere but to the log.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SMALL, LEASED, BESIDE = 100, LEASE_BYTES, 3 * LEASE_BYTES
SLOTS = 4
STRIDE = 1 if PROFILE == "nightly" else 3
"""Every so many moments is struck; all of them nightly."""


class Pair:
    """A ring and its one reader, which hold each other to what was published."""

    def __init__(self, reader_class: type[RingReader]) -> None:
        remote = reader_class is RemoteReader
        bind = f"ipc://@{secrets.token_hex(8)}" if remote else None
        self.ring = BroadcastRing(
            int(not remote), slots=SLOTS, slot_bytes=LEASED, remote=int(remote), bind=bind
        )
        self.reader_class = reader_class
        self.reader = reader_class(self.ring.handle, 0)
        self.held: list[torch.Tensor] = []
        self.last = 0

    def publish(self, number: int, size: int) -> None:
        self.ring.publish(torch.full((size,), number, dtype=torch.uint8), START_S)

    def loan(self, number: int, size: int) -> None:
        self.ring.publish(self.ring.empty((size,), torch.uint8, START_S).fill_(number), START_S)

    def take(self, value: torch.Tensor | None) -> None:
        """Whole, and later than the one before."""
        if value is not None:
            assert bool((value == value[0]).all()), "a message is torn"
            assert int(value[0]) > self.last, f"message {int(value[0])} came after {self.last}"
            self.last = int(value[0])
            self.held = [*self.held[-1:], value]

    def go_on(self, size: int) -> None:
        """Everything works, what is held stays as it was, and all slots are free when nothing is."""
        for number in range(10, 13):
            self.publish(number, size)
            while self.last != number:
                self.take(self.reader.receive(START_S))
            assert all(bool((value == value[0]).all()) for value in self.held), "a lease has changed"
        self.held.clear()
        assert size > LEASED or not self.ring.counters().fallbacks
        self.publish(13, SMALL)
        self.take(self.reader.receive(START_S))
        self.held.clear()
        if self.reader_class is RingReader:
            self.ring._collect()
            assert sorted(self.ring._free) == list(range(SLOTS)), "a slot stays held"

    def close(self) -> None:
        self.reader.close()
        self.ring.close()
        assert self.reader._context.closed
        assert self.ring._context.closed
        assert self.ring._memory.fd == -1


@pytest.mark.parametrize("reader_class", [RingReader, RemoteReader])
@pytest.mark.parametrize("size", [SMALL, LEASED, BESIDE])
@pytest.mark.parametrize("call", ["publish", "loan", "receive", "look", "drop"])
def test_a_call_interrupted_anywhere_loses_one_message_at_most(
    reader_class: type[RingReader], size: int, call: str
) -> None:
    if call == "loan" and size > LEASED:
        pytest.skip("no slot is that large")
    if call == "drop" and (size != LEASED or reader_class is RemoteReader):
        pytest.skip("nothing is leased")

    def attempt(interruption: Interruption) -> None:
        pair = Pair(reader_class)
        try:
            pair.ring.wait_until_ready(START_S)
            pair.publish(1, size)
            pair.take(pair.reader.receive(START_S))
            if call == "receive":
                pair.publish(2, size)
                pair.take(interruption.during(lambda: pair.reader.receive(START_S)))
            elif call == "look":
                with suppress(QuiesceTimeout):
                    interruption.during(lambda: pair.reader.receive(0.0))
            elif call == "drop":
                interruption.during(pair.held.clear)
            else:
                interruption.during(lambda: getattr(pair, call)(2, size))
            pair.go_on(size)
        finally:
            pair.close()

    at_each(attempt, STRIDE)


@pytest.mark.parametrize("reader_class", [RingReader, RemoteReader])
def test_letting_a_reader_in_may_be_interrupted_anywhere(reader_class: type[RingReader]) -> None:
    def attempt(interruption: Interruption) -> None:
        pair = Pair(reader_class)
        try:
            interruption.during(lambda: pair.ring.wait_until_ready(START_S))
            pair.ring.wait_until_ready(START_S)
            pair.go_on(SMALL)
        finally:
            pair.close()

    at_each(attempt, STRIDE)


@pytest.mark.parametrize("reader_class", [RingReader, RemoteReader])
@pytest.mark.parametrize("size", [SMALL, LEASED])
def test_a_reader_closed_again_after_an_interruption_leaves_its_rank(
    reader_class: type[RingReader], size: int
) -> None:
    def attempt(interruption: Interruption) -> None:
        pair = Pair(reader_class)
        try:
            pair.ring.wait_until_ready(START_S)
            pair.publish(1, size)
            pair.take(pair.reader.receive(START_S))
            interruption.during(pair.reader.close)
            pair.reader.close()
            assert pair.reader._context.closed
            pair.held.clear()
            pair.ring._collect()
            pair.reader = reader_class(pair.ring.handle, 0)
            pair.ring.wait_until_ready(START_S)
            pair.go_on(size)
        finally:
            pair.close()

    at_each(attempt, STRIDE)


def test_a_ring_closed_again_after_an_interruption_tells_its_readers() -> None:
    def attempt(interruption: Interruption) -> None:
        pair = Pair(RingReader)
        try:
            pair.ring.wait_until_ready(START_S)
            pair.publish(1, SMALL)
            interruption.during(pair.ring.close)
            pair.ring.close()
            pair.take(pair.reader.receive(START_S))
            with pytest.raises(Closed):
                pair.reader.receive(START_S)
        finally:
            pair.close()

    at_each(attempt, STRIDE)


def test_interrupted_calls_leave_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))

    def attempt(interruption: Interruption) -> None:
        pair = Pair(RingReader)
        interruption.during(lambda: pair.ring.wait_until_ready(START_S))
        pair.close()

    at_each(attempt, 3 * STRIDE)
    assert len(os.listdir("/proc/self/fd")) <= before
