"""Real processes over a real ring: wraps, sizes around each threshold, kills, stops, and late readers."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from model_tests.broadcast_ring import processes
from model_tests.broadcast_ring.processes import START_S, Child, numbers

from quiesce import errors, events
from quiesce.broadcast_ring import BroadcastRing
from quiesce.ring_codec import INLINE_BYTES
from quiesce.ring_memory import RingMemory
from quiesce.ring_reader import LEASE_BYTES, RingReader, _Releaser
from quiesce.ring_wire import MODULUS

SLOT_BYTES = 2 << 20
# One number is 8 bytes: around being inline, being leased, and being too long for a slot.
SIZES = [
    size // 8 + more for size in (INLINE_BYTES, LEASE_BYTES, SLOT_BYTES + 8192) for more in (-1, 0, 1)
] + [1]


def publish_all(ring: BroadcastRing, rounds: int, first: int = 0) -> None:
    for index in range(first, first + rounds):
        tensor = numbers(index, SIZES[index % len(SIZES)])
        if index % 3 == 1 and tensor.nbytes <= SLOT_BYTES:
            loan = ring.empty(tensor.shape, tensor.dtype)
            loan.copy_(tensor)
            tensor = loan
            del loan
        ring.publish({"index": index, "numbers": tensor}, START_S)
        if index % 3 != 1:
            tensor.fill_(-1)  # the caller's memory is the caller's again


@pytest.mark.parametrize(("readers", "remote", "keep"), [(1, 0, 0), (2, 0, 3), (4, 0, 1), (1, 1, 1)])
def test_every_reader_sees_the_sequence(readers: int, remote: int, keep: int) -> None:
    """Many wraps, messages of every kind, leases kept beyond the wrap, a sequence number that wraps."""
    bind = "tcp://127.0.0.1:*" if remote else None
    with BroadcastRing(
        readers, slots=keep + 3, slot_bytes=SLOT_BYTES, window=8, patience=0.001, remote=remote, bind=bind,
        first_sequence=MODULUS - 50,
    ) as ring:  # fmt: skip
        handle = ring.handle.to_json()
        started = [
            Child("read_all", handle, rank, keep, "", rank >= readers) for rank in range(readers + remote)
        ]
        try:
            ring.wait_until_ready(START_S)
            publish_all(ring, 120)
            ring.close(START_S)
            assert [child.hears() for child in started] == [120] * (readers + remote)
        finally:
            for process in started:
                process.end()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing(method: str) -> None:
    """The handle pickles, and readers may be forked or spawned."""
    context: Any = multiprocessing.get_context(method)
    with BroadcastRing(1, slots=4, slot_bytes=SLOT_BYTES) as ring:
        process = context.Process(target=processes.read_all, args=(ring.handle.to_json(), 0, 1))
        process.start()
        ring.wait_until_ready(START_S)
        publish_all(ring, 20)
        ring.close(START_S)
        process.join(START_S)
        assert process.exitcode == 0


READER_EDGES = [
    f"{action}.{phase}"
    for cls in (RingReader, _Releaser)
    for action in events.actions(cls)
    for phase in ("begin", "end")
    if action not in ("TimeOut", "FindWriterDead", "Leave")
]
WRITER_EDGES = [
    f"{action}.{phase}"
    for action in events.actions(BroadcastRing)
    for phase in ("begin", "end")
    if action not in ("Exclude", "HearLeave", "Vacate")
]


@pytest.mark.parametrize("edge", READER_EDGES)
def test_reader_killed(edge: str) -> None:
    """A reader dies at this edge; the writer and the other reader go on, and a new one takes the rank."""
    with BroadcastRing(2, slots=2, slot_bytes=SLOT_BYTES, window=4, patience=0.001) as ring:
        handle = ring.handle.to_json()
        victim = Child("read_all", handle, 0, 0, f"{edge}.{1 if edge.startswith('Join') else 2}")
        other = Child("read_all", handle, 1, 0)
        try:
            if edge.startswith("Join"):
                assert victim.exit_code() == -signal.SIGKILL
                processes.until(lambda: _is_ready(ring) or ring._is_admitted(1))
            else:
                ring.wait_until_ready(2 * START_S)
            publish_all(ring, 12)
            assert victim.exit_code() == -signal.SIGKILL
            heir = Child("read_all", handle, 0, 0)
            processes.until(lambda: _is_ready(ring))
            publish_all(ring, 24, 12)
            ring.close(START_S)
            assert other.hears() >= 24
            assert heir.hears() == 24
        finally:
            for process in (victim, other):
                process.end()


def _is_ready(ring: BroadcastRing) -> bool:
    try:
        ring.wait_until_ready(0.2)
    except (errors.PeerDied, errors.QuiesceTimeout):
        return False
    return True


@pytest.mark.parametrize("edge", WRITER_EDGES)
def test_writer_killed(edge: str) -> None:
    """A writer dies at this edge: readers receive what was posted, whole and in order, and then PeerDied."""
    writer = Child("write_all", f"{edge}.{1 if edge[:5] in ('Close', 'Admit') else 3}", SIZES, 24, 1)
    try:
        handle = processes.RingHandle.from_json(writer.hears())
        with RingReader(handle, 0) as reader:
            count, outcome = 0, None
            while outcome is None:
                try:
                    processes.check(reader.receive(START_S), count)
                    count += 1
                except errors.PeerDied as error:
                    outcome = error
        assert writer.exit_code() == -signal.SIGKILL
        assert not os.path.exists(f"/proc/{handle.pid}/fd/{handle.fd}")
    finally:
        writer.end()


def test_stopped_reader_is_not_taken_for_dead() -> None:
    """A stopped reader holds the writer up, within bounds, and nothing is lost when it goes on."""
    with BroadcastRing(1, slots=2, slot_bytes=SLOT_BYTES, window=4, patience=0.001) as ring:
        process = Child("read_all", ring.handle.to_json(), 0, 0)
        try:
            ring.wait_until_ready(START_S)
            ring.publish({"index": 0, "numbers": numbers(0, 10)})
            os.kill(process.process.pid, signal.SIGSTOP)
            published, refusal = 1, ""
            while not refusal and published < 10:
                try:
                    ring.publish({"index": published, "numbers": numbers(published, 10)}, 0.5)
                    published += 1
                except errors.QuiesceTimeout as error:
                    refusal = str(error)
            assert "reader 0" in refusal
            assert "messages behind" in refusal
            os.kill(process.process.pid, signal.SIGCONT)
            publish_all(ring, 20, published)
            ring.close(START_S)
            assert process.hears() == published + 20
        finally:
            process.end()


def test_late_reader_starts_with_the_next_message() -> None:
    with BroadcastRing(2, slots=4, slot_bytes=SLOT_BYTES) as ring:
        early = Child("read_all", ring.handle.to_json(), 0, 1)
        late = None
        try:
            while not ring._is_admitted(0):
                _is_ready(ring)
            publish_all(ring, 10)
            late = Child("read_all", ring.handle.to_json(), 1, 1)
            ring.wait_until_ready(START_S)
            publish_all(ring, 10, 10)
            ring.close(START_S)
            assert (early.hears(), late.hears()) == (20, 10)
        finally:
            for process in (early, late):
                if process:
                    process.end()


def test_nothing_is_left() -> None:
    """No name in /dev/shm, no descriptor, no thread, whether or not a lease outlives both ends."""
    threads, fds = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    names = set(os.listdir("/dev/shm"))
    ring = BroadcastRing(1, slots=2, slot_bytes=SLOT_BYTES)
    reader = RingReader(ring.handle, 0)
    ring.wait_until_ready(START_S)
    ring.publish(torch.ones(LEASE_BYTES // 4))
    lease = reader.receive()
    assert set(os.listdir("/dev/shm")) == names
    reader.close()
    ring.close()
    del ring, reader
    assert bool((lease == 1).all())
    del lease
    assert len(os.listdir("/proc/self/fd")) == fds
    processes.until(lambda: len(os.listdir("/proc/self/task")) == threads)


def test_no_memory() -> None:
    """Shared memory is reserved at once: too much is an error, not a SIGBUS or an out-of-memory kill later."""
    with pytest.raises(errors.ResourceExhausted, match="fewer or smaller slots"):
        BroadcastRing(1, slots=4, slot_bytes=1 << 45)
    child = Child("create_within", 4 << 20)
    try:
        assert "fewer or smaller slots" in child.hears()
    finally:
        child.end()


def test_a_stranger_cannot_attach() -> None:
    with BroadcastRing(1, slots=2, slot_bytes=4096) as ring:
        with pytest.raises(errors.DecodeError, match="not the ring of this handle"):
            RingMemory.attach(ring.handle.pid, ring.handle.fd, bytes(32))
        assert os.stat(f"/proc/self/fd/{ring.handle.fd}").st_mode & 0o777 == 0o600
        assert ring.handle.secret not in repr(ring.handle)
