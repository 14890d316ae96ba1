"""Real processes over a real ring: wraps, sizes around each threshold, kills, stops, and late readers."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
from quiesce.ring_wire import MODULUS, RingHandle

ROOT = Path(__file__).parents[2]
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


def test_every_way_to_start_a_process() -> None:
    """One reader is forked, one spawned, one of the fork server, and one an unrelated program that is given JSON."""
    methods = ["fork", "spawn", "forkserver"]
    names = set(os.listdir("/dev/shm"))
    with BroadcastRing(4, slots=4, slot_bytes=SLOT_BYTES) as ring:
        started = []
        for rank, method in enumerate(methods):
            context: Any = multiprocessing.get_context(method)
            process = context.Process(target=processes.read_all, args=(ring.handle.to_json(), rank, 1))
            process.start()
            started.append(process)
        program = _exec("read_all", ring.handle.to_json(), 3, 1)
        try:
            ring.wait_until_ready(2 * START_S)
            publish_all(ring, 20)
            ring.close(START_S)
            assert program.communicate(timeout=START_S) == ("20\n", "")
            assert program.returncode == 0
            for process in started:
                process.join(START_S)
                assert process.exitcode == 0
        finally:
            program.kill()
            for process in started:
                process.kill()
    assert {name for name in os.listdir("/dev/shm") if "quiesce" in name} <= names


def _exec(function: str, *arguments: object, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A function of `processes` in a program that shares nothing with this process."""
    command = [*before, sys.executable, "-W", "error", "-m", processes.__name__, function]
    return subprocess.Popen(
        [*command, *map(json.dumps, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


# Edges that need an occasion of their own; the other tests run into all others.
TIMES_OUT, FINDS_WRITER_DEAD = "TimeOut", "FindWriterDead"
READER_GONE = ("Exclude", "HearLeave", "Vacate")


def _edges(*classes: type) -> list[str]:
    actions = [action for cls in classes for action in events.actions(cls)]
    return [f"{action}.{phase}" for action in actions for phase in ("begin", "end")]


READER_EDGES, WRITER_EDGES = _edges(RingReader, _Releaser), _edges(BroadcastRing)


def _of(edges: list[str], *actions: str) -> list[str]:
    return [edge for edge in edges if edge.split(".")[0] in actions]


def _except(edges: list[str], *actions: str) -> list[str]:
    return [edge for edge in edges if edge.split(".")[0] not in actions]


def test_every_edge_is_killed_at() -> None:
    """The names above are actions: none is left out because it was renamed."""
    assert len(_of(READER_EDGES, TIMES_OUT, FINDS_WRITER_DEAD)) == 4
    assert len(_of(WRITER_EDGES, *READER_GONE)) == 6


@pytest.mark.parametrize("edge", _except(READER_EDGES, TIMES_OUT, FINDS_WRITER_DEAD))
def test_reader_killed(edge: str) -> None:
    """A reader dies at this edge; the writer and the other reader go on, and a new one takes the rank."""
    with BroadcastRing(2, slots=2, slot_bytes=SLOT_BYTES, window=4, patience=0.5) as ring:
        handle = ring.handle.to_json()
        most = 5 if edge.startswith("Leave") else None
        # The first time: how often a slot is free for it, rather than overflow, depends on the readers' speed.
        fault = f"{edge}.1"
        victim = Child("read_all", handle, 0, 1 if most else 0, fault, False, START_S, most)
        other = Child("read_all", handle, 1, 0)
        try:
            if edge.startswith(("Join", "Sleep")):
                # It dies before anything is published, and perhaps before the other one has come.
                processes.until(lambda: _is_ready(ring) or ring._is_admitted(1))
            else:
                ring.wait_until_ready(2 * START_S)
            publish_all(ring, 12)
            assert victim.exit_code() == -signal.SIGKILL
            assert _go_on(ring, 12) == 24
            assert other.hears() >= 24
            _all_slots_come_back(ring, other)
        finally:
            for process in (victim, other):
                process.end()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "body"])
@pytest.mark.parametrize("edge", _of(READER_EDGES, TIMES_OUT))
def test_reader_killed_as_it_times_out(edge: str, busy: bool) -> None:
    """While no message comes, or a body does not; the other reader's waits run out as well, and it misses nothing."""
    with BroadcastRing(2, slots=2, slot_bytes=SLOT_BYTES, window=4, patience=0.001) as ring:
        handle = ring.handle.to_json()
        fault = f"{edge}.1.busy" if busy else f"{edge}.2"
        victim = Child("read_all", handle, 0, 0, fault, False, 0.05)
        other = Child("read_all", handle, 1, 0, "", False, 0.05)
        died = []

        def body_does_not_come(event: events.Event) -> None:
            if (event.action, event.phase) == ("SendBody", "begin") and not died:
                died.append(victim.exit_code())

        try:
            ring.wait_until_ready(2 * START_S)
            with events.observe(body_does_not_come):
                ring.publish({"index": 0, "numbers": numbers(0, SLOT_BYTES // 4 if busy else 10)}, START_S)
            assert (died or [victim.exit_code()]) == [-signal.SIGKILL]
            assert _go_on(ring, 1) == 24
            assert other.hears() == 25
            _all_slots_come_back(ring, other)
        finally:
            for process in (victim, other):
                process.end()


def _go_on(ring: BroadcastRing, first: int) -> int:
    """A new reader takes the dead one's rank; how many of 24 messages it received, before the ring was closed."""
    heir = Child("read_all", ring.handle.to_json(), 0, 0)
    try:
        processes.until(lambda: _is_ready(ring))
        publish_all(ring, 24, first)
        ring.close(START_S)
        return int(heir.hears())
    finally:
        heir.end()


def _all_slots_come_back(ring: BroadcastRing, last: Child) -> None:
    """No death has cost the ring a slot."""
    assert last.exit_code() == 0
    ring._bury()
    ring._collect()
    assert sorted(ring._free) == [0, 1], ring._who_holds()


def _is_ready(ring: BroadcastRing) -> bool:
    try:
        ring.wait_until_ready(0.2)
    except (errors.PeerDied, errors.QuiesceTimeout):
        return False
    return True


@pytest.mark.parametrize("edge", _except(WRITER_EDGES, *READER_GONE))
def test_writer_killed(edge: str) -> None:
    """A writer dies at this edge: readers receive what was posted, whole and in order, and then PeerDied."""
    writer = Child("write_all", f"{edge}.{1 if edge[:5] in ('Close', 'Admit') else 3}", SIZES, 24, 1)
    try:
        handle = RingHandle.from_json(writer.hears())
        with RingReader(handle, 0) as reader:
            _receive_to_the_end(reader)
        assert writer.exit_code() == -signal.SIGKILL
        assert not os.path.exists(f"/proc/{handle.pid}/fd/{handle.fd}")
    finally:
        writer.end()


def _receive_to_the_end(reader: RingReader) -> int:
    """How many messages came, whole and in order, before PeerDied."""
    count = 0
    while True:
        try:
            processes.check(reader.receive(START_S), count)
        except errors.PeerDied:
            return count
        count += 1


@pytest.mark.parametrize("edge", _of(WRITER_EDGES, *READER_GONE))
def test_writer_killed_as_a_reader_goes(edge: str) -> None:
    """A reader died (Exclude), left with a lease (HearLeave), or has let it go (Vacate), and now the writer dies.

    The other reader receives all that was published and then PeerDied; the lease outlives the writer.
    """
    sizes = [LEASE_BYTES // 8, 1000]
    with Child("write_all", f"{edge}.1", sizes, 24, 2, START_S) as writer:
        handle = RingHandle.from_json(writer.hears())
        inode = _segment(handle)
        if edge.startswith("Exclude"):
            goer = Child("read_all", handle.to_json(), 0, 1, "Open.end.3")
        else:
            goer = Child("read_some", handle.to_json(), 0, 3, edge.startswith("Vacate"))
        with goer:
            count = _survive(handle, 1)
            assert writer.exit_code() == -signal.SIGKILL
            assert writer.last_words() == list(range(count))
            assert count >= 3
            if edge.startswith("Exclude"):
                assert goer.exit_code() == -signal.SIGKILL
            else:
                assert goer.hears() == 3
                assert goer.exit_code() == 0
            with pytest.raises(errors.PeerDied, match="gone"):
                RingReader(handle, 0)
            processes.until(lambda: not processes.who_has(inode))


# The writer dies between two messages; with an entry posted whose body will never come; before it lets the victim in.
WRITER_DEATHS = {"Return.end.4": 4, "SendBody.begin.1": 1, "Admit.begin.2": 0}


@pytest.mark.parametrize("death", WRITER_DEATHS)
@pytest.mark.parametrize("edge", _of(READER_EDGES, FINDS_WRITER_DEAD))
def test_reader_killed_as_it_finds_the_writer_dead(edge: str, death: str) -> None:
    """The other reader receives what was posted and then PeerDied, and nothing is left of the three."""
    sizes = [10, SLOT_BYTES // 4] if death.startswith("SendBody") else [10, LEASE_BYTES // 8]
    writer = Child("write_all", death, sizes, 24, 2, START_S)
    victims: list[Child] = []
    try:
        handle = RingHandle.from_json(writer.hears())
        inode = _segment(handle)
        start = lambda: victims.append(Child("read_all", handle.to_json(), 0, 0, f"{edge}.1"))  # noqa: E731
        assert _survive(handle, 1, start) == WRITER_DEATHS[death]
        assert [process.exit_code() for process in (writer, *victims)] == [-signal.SIGKILL] * 2
        processes.until(lambda: not processes.who_has(inode))
    finally:
        for process in (writer, *victims):
            process.end()


def _segment(handle: RingHandle) -> int:
    inode = os.stat(f"/proc/{handle.pid}/fd/{handle.fd}").st_ino
    assert processes.who_has(inode) == {str(handle.pid)}
    return inode


def _survive(handle: RingHandle, rank: int, once_in: Callable[[], object] = lambda: None) -> int:
    """Receive until the writer has died; then this reader leaves no thread."""
    torch.zeros(1 << 20).add_(1)  # torch starts its threads with the first large tensor
    threads = len(os.listdir("/proc/self/task"))
    with RingReader(handle, rank) as reader:
        reader.wait_until_ready(START_S)
        once_in()
        count = _receive_to_the_end(reader)
        with pytest.raises(errors.PeerDied):
            reader.receive(START_S)
    del reader
    gc.collect()  # an error that was raised refers to the reader
    processes.until(lambda: len(os.listdir("/proc/self/task")) == threads)
    return count


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


@pytest.mark.parametrize(
    ("slot_bytes", "says"), [(4 << 20, "all of it came through"), (1 << 45, "fewer or smaller")]
)
def test_small_dev_shm(slot_bytes: int, says: str) -> None:
    """With /dev/shm of 2 MiB a ring of 8 MiB works: a memfd lies in no mount; and too much is an error there too."""
    inside = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    mount = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"'
    if (
        not shutil.which("unshare")
        or subprocess.run([*inside, mount, "sh", "true"], capture_output=True).returncode
    ):
        pytest.skip("this user may not make a user and mount namespace")
    program = _exec("create", slot_bytes, before=(*inside, mount, "sh"))
    try:
        said, complaint = program.communicate(timeout=2 * START_S)
    finally:
        program.kill()
    assert program.returncode == 0, complaint
    assert says in said
    assert not complaint


def test_a_stranger_cannot_attach() -> None:
    with BroadcastRing(1, slots=2, slot_bytes=4096) as ring:
        with pytest.raises(errors.DecodeError, match="not the ring of this handle"):
            RingMemory.attach(ring.handle.pid, ring.handle.fd, bytes(32))
        assert os.stat(f"/proc/self/fd/{ring.handle.fd}").st_mode & 0o777 == 0o600
        assert ring.handle.secret not in repr(ring.handle)
