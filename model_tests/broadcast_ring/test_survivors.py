"""Mutants made by machine that the other tests did not notice, and what is now asked so that they are."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from model_tests.broadcast_ring.processes import START_S, until
from model_tests.forking import forked, status

from quiesce import events
from quiesce.broadcast_ring import BroadcastRing
from quiesce.errors import NotQuiescent, QuiesceError, QuiesceTimeout, ResourceExhausted
from quiesce.ring_memory import SLICE_S
from quiesce.ring_reader import LEASE_BYTES, RemoteReader, RingReader
from quiesce.ring_wire import ACK
from quiesce.ring_writer import LOAN_AT, SLOT

REMOTE = f"ipc://@{secrets.token_hex(8)}"


@contextmanager
def joined(**options: Any) -> Iterator[tuple[BroadcastRing, RingReader]]:
    """A ring and its reader, both in this process."""
    with (
        BroadcastRing(1, **{"slots": 2, "slot_bytes": LEASE_BYTES, **options}) as ring,
        RingReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(START_S)
        yield ring, reader


@pytest.mark.parametrize(
    ("readers", "options", "told"),
    [
        (-1, {"remote": 2, "bind": REMOTE}, "readers is -1"),
        (2, {"remote": -1}, "remote is -1"),
        (0, {}, "readers is 0"),
        (1025, {}, "give 1 to 1024"),
        (1000, {"remote": 25, "bind": REMOTE}, "give 1 to 1024"),
        (1, {"slots": 0}, "slots is 0"),
        (1, {"slots": 4097}, "give 1 to 4096 slots"),
        (1, {"slot_bytes": 0}, "of 0 bytes"),
        (1, {"window": 1}, "window is 1"),
        (1, {"window": 48}, "window is 48"),
        (1, {"remote": 1}, "go together"),
        (1, {"bind": REMOTE}, "go together"),
    ],
)
def test_rings_that_cannot_be_are_refused(readers: int, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        BroadcastRing(readers, **{"slots": 1, "slot_bytes": 1, **options})


def test_the_largest_and_the_smallest_rings_are_made() -> None:
    BroadcastRing(1, slots=4096, slot_bytes=1, window=2).close()
    BroadcastRing(1024, slots=1, slot_bytes=1).close()


def test_a_ring_of_remote_readers_alone() -> None:
    """Its readers are told of ranks by the errors, and of the end by an acknowledged last word."""
    with BroadcastRing(0, slots=1, slot_bytes=1, remote=2, bind=REMOTE) as ring:
        for rank in (-1, 2):
            with pytest.raises(ValueError, match="remote ranks 0 to 1"):
                RemoteReader(ring.handle, rank)
        with RemoteReader(ring.handle, 0) as first, RemoteReader(ring.handle, 1) as second:
            ring.wait_until_ready(START_S)
            for number in range(3):
                ring.publish(number)
                assert first.receive(START_S) == second.receive(START_S) == number
            until(lambda: (ring._greet(), not ring._remote_behind())[1])
            ring.exclude(1)
            assert not ring._is_admitted(1)
            ring.exclude(1)  # nobody is there any more
            ring.publish("left")
            assert first.receive(START_S) == "left"


def test_only_a_local_reader_that_has_ended_is_excluded() -> None:
    with joined() as (ring, reader):
        with pytest.raises(NotQuiescent, match=r"reader 0 .* still runs"):
            ring.exclude(0)
        with pytest.raises(ValueError, match="local ranks 0 to 0"):
            RingReader(ring.handle, 1)
        ring.publish("still here")
        assert reader.receive(START_S) == "still here"


def test_a_loan_may_fill_its_slot_and_no_more() -> None:
    with joined() as (ring, reader):
        room = ring._memory.layout.slot_bytes - LOAN_AT
        with pytest.raises(ResourceExhausted, match=f"of {room + 1} bytes does not fit a slot of {room};"):
            ring.empty((room + 1,), torch.uint8)
        loan = ring.empty((room,), torch.uint8)
        loan.fill_(9)
        ring.publish(loan)
        assert bool((reader.receive(START_S) == 9).all())


def test_who_keeps_the_slots_is_said() -> None:
    with joined() as (ring, reader):
        ring.publish(torch.zeros(LEASE_BYTES, dtype=torch.uint8))
        lease = reader.receive(START_S)
        loan = ring.empty((1,))
        with pytest.raises(QuiesceTimeout, match=r"slot \d by reader 0 \(process \d+\)") as caught:
            ring.empty((1,), timeout=0)
        assert "by the writer" in str(caught.value)
        del lease, loan


def test_slots_beyond_the_first_few_are_found() -> None:
    with joined(slots=40, slot_bytes=4096) as (ring, reader):
        for number in range(80):
            ring.publish(number)
            assert reader.receive(START_S) == number


def test_what_is_small_is_copied_and_what_is_large_is_leased() -> None:
    with joined(slot_bytes=2 * LEASE_BYTES) as (ring, reader):
        for nbytes, leased in ((LEASE_BYTES - 1, 0), (LEASE_BYTES, 1), (LEASE_BYTES + 1, 1)):
            ring.publish(torch.zeros(nbytes, dtype=torch.uint8))
            kept = reader.receive(START_S)
            assert reader.counters().in_flight == leased, nbytes
            del kept


def test_a_forked_child_lets_nothing_go_and_closes_nothing() -> None:
    with joined() as (ring, reader):
        ring.publish(torch.zeros(LEASE_BYTES, dtype=torch.uint8))
        held = [reader.receive(START_S)]
        for call in (held.clear, reader.close, ring.close):
            assert status(forked(call, 20)) == 0
        ring._collect()
        assert ring.counters().in_flight == 1
        ring.publish("goes on")
        assert reader.receive(START_S) == "goes on"


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_notice_of_no_slot_is_a_broken_ring(beyond: int) -> None:
    with joined() as (ring, reader):
        reader._releaser.tell(ring._memory.layout.slots + beyond)
        with pytest.raises(QuiesceError, match=f"let go of a slot {2 + beyond}: the ring is broken"):
            ring._collect()
        ring._memory.ranks[0].notices.taken.clear()


@pytest.mark.parametrize("broken", ["slot", "table", "count", "frame"])
def test_an_entry_that_cannot_be_is_a_broken_ring(broken: str) -> None:
    """What the reader is told of a slot never leads it out of the slot."""
    with joined() as (ring, reader):
        sequence = ring.publish([1])
        layout = ring._memory.layout
        entry = ring._memory.entries[sequence % layout.window]
        if broken == "slot":
            entry[1] = SLOT << 32 | layout.slots
        elif broken == "table":
            entry[2] = layout.slot_bytes - 16 * entry[3] + 1
        elif broken == "count":
            entry[3] = layout.slot_bytes // 16 + 1
        else:
            at = layout.slot_at(entry[1]) + entry[2]
            ring._memory.view[at + 8 : at + 16] = layout.slot_bytes.to_bytes(8, "little")
        with pytest.raises(QuiesceError, match=f"what message {sequence} says of its slot cannot be"):
            reader.receive(START_S)
        reader._opened = None


def test_what_a_reader_that_leaves_had_not_received_is_the_writers_again() -> None:
    """And what it had received and leases is not, whatever the numbers are and wherever they begin again."""
    for first in (0, 2**63 - 2, 2**64 - 2):
        with BroadcastRing(1, slots=4, slot_bytes=LEASE_BYTES, first_sequence=first) as ring:
            reader = RingReader(ring.handle, 0)
            ring.wait_until_ready(START_S)
            ring.publish(torch.zeros(LEASE_BYTES, dtype=torch.uint8))
            lease = reader.receive(START_S)
            for _ in range(2):
                ring.publish(torch.zeros(LEASE_BYTES, dtype=torch.uint8))
            ring._collect()
            assert ring.counters().in_flight == 3
            reader.close()
            ring._collect()
            assert ring.counters().in_flight == 1
            del lease
            ring._collect()
            assert ring.counters().in_flight == 0
            assert not ring._peers


@pytest.mark.parametrize(
    "words",
    [[b"A"], [ACK], [ACK, bytes(7)], [ACK, bytes(9)], [ACK, bytes(8), b""], [b"?", bytes(8)], [b""]],
    ids=repr,
)
def test_odd_words_of_a_reader_change_nothing(words: list[bytes]) -> None:
    with (
        BroadcastRing(0, slots=1, slot_bytes=1, remote=1, bind=REMOTE) as ring,
        RemoteReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(START_S)
        passed = ring._peers[0].passed
        reader._socket.send_multipart(words)
        ring.publish("after them")
        assert reader.receive(START_S) == "after them"
        until(lambda: (ring._greet(), ring._peers[0].passed == passed + 1)[1])


def test_every_action_of_ring_and_reader_is_told() -> None:
    """All but those of readers that are lost or replaced, and of a writer that dies."""
    seen: list[str] = []
    with (
        events.observe(lambda event: event.phase == "end" and seen.append(event.action)),
        joined() as (ring, reader),
    ):
        ring.publish("copied")
        reader.receive(START_S)
        ring.publish(torch.zeros(LEASE_BYTES, dtype=torch.uint8))
        lease = reader.receive(START_S)
        loan = ring.empty((1,))
        del lease, loan
        ring._collect()
        ring.publish(bytes(4 * LEASE_BYTES))
        reader.receive(START_S)
        with pytest.raises(QuiesceTimeout):
            reader.receive(0)
    assert set(seen) == {
        *("Loan", "DropLoan", "Take", "Fill", "Publish", "Overflow", "SendBody", "Post", "Return", "Close"),
        *("Admit", "HearRelease", "Recycle", "Join", "Sleep", "Open", "Copy", "Lease", "TakeBody", "TimeOut"),
        *("Leave", "Release"),
    }


def test_a_reader_that_is_behind_is_waited_for_as_long_as_is_said() -> None:
    """Longer than the writer sleeps at a time, and the error says who is how far behind."""
    with joined(window=2) as (ring, reader):
        ring.publish(1)
        with pytest.raises(QuiesceTimeout, match=r"reader 0 \(process \d+\) is 1 messages behind after 0 s"):
            ring.publish(2, timeout=0)
        later = threading.Timer(3 * SLICE_S, reader.receive)
        later.start()
        assert ring.publish(2, START_S) == 2
        later.join(START_S)
        assert not later.is_alive()
        assert reader.receive(START_S) == 2
        assert ring.counters().waits == 2
