"""What a ring and its readers have lent, and who holds the oldest; leases that grow old are told of."""

from __future__ import annotations

import logging

import pytest
import torch

from quiesce.borrowing import warn_of_loans
from quiesce.broadcast_ring import BroadcastRing
from quiesce.ring_reader import LEASE_BYTES, RingReader


def test_a_ring_knows_who_holds_what_and_a_reader_warns_of_old_leases(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "quiesce.broadcast_ring")
    warn_of_loans(0.0)
    try:
        with (
            BroadcastRing(readers=1, slots=1, slot_bytes=LEASE_BYTES) as ring,
            RingReader(ring.handle, rank=0) as reader,
        ):
            ring.wait_until_ready()
            assert (ring.counters().in_flight, ring.counters().holder, ring.counters().oldest_s) == (
                0,
                "",
                0.0,
            )
            ring.publish(torch.zeros(LEASE_BYTES, dtype=torch.uint8))
            leased = reader.receive()
            counters = ring.counters()
            assert (counters.in_flight, counters.messages, counters.fallbacks, counters.waits) == (1, 1, 0, 0)
            assert counters.holder.startswith("reader 0 (process ")
            assert counters.oldest_s > 0.0
            assert (reader.counters().in_flight, reader.counters().holder) == (1, "this process")

            ring.publish("beside", timeout=5)  # the lease keeps the only slot
            assert reader.receive() == "beside"
            assert (ring.counters().fallbacks, ring.counters().waits) == (1, 1)
            messages = [(record.name, record.getMessage()) for record in caplog.records]
            assert (
                "quiesce.broadcast_ring",
                "message 2 goes beside the slots: no slot came free",
            ) in messages
            (warning,) = [text for name, text in messages if name == "quiesce.borrowing"]
            assert "slot 0 of the ring to reader 0 has been lent for" in warning
            assert "test_a_ring_knows_who_holds_what" in warning

            del leased
            assert reader.counters().in_flight == 0
            ring.publish("again")
            assert reader.receive() == "again"
            assert reader.counters().messages == ring.counters().messages == 3
    finally:
        warn_of_loans(None)
