"""What must happen does: no post is slept through, no publication waits for ever, no death goes unnoticed."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch
from model_tests.broadcast_ring.faults import (
    DeathUnnoticed,
    ForgetPendingBody,
    HoldersAfterPosts,
    JoinerWaitsForTheDead,
    LoanAfterClose,
    NoOverflow,
    SkipLostBody,
    SleepAfterCheck,
    StaleNotices,
    WriterDeathUnnoticed,
)
from model_tests.broadcast_ring.processes import START_S, Child, RingHandle, until

from quiesce.broadcast_ring import BroadcastRing
from quiesce.errors import Closed, PeerDied, QuiesceError, QuiesceTimeout
from quiesce.ring_reader import LEASE_BYTES, RemoteReader, RingReader

ELEMENTS = 1 << 18
"""Elements of four bytes in a message that is leased."""


@pytest.mark.parametrize(("reader_class", "slept_through"), [(RingReader, False), (SleepAfterCheck, True)])
def test_a_post_before_sleep_is_not_slept_through(
    reader_class: type[RingReader], slept_through: bool
) -> None:
    """The message comes after the reader looked and before it sleeps; no second look may be needed."""
    sleeps = []
    with BroadcastRing(1, slots=2, slot_bytes=4096) as ring:

        def publish() -> None:
            if len(sleeps) == 1:
                ring.publish("late")

        class Probe(reader_class):  # type: ignore[misc,valid-type]
            def _sleep(self, seconds: float) -> bool:
                assert self._words.posts.value() == 0 or sleeps
                sleeps.append(seconds)
                if reader_class is RingReader:
                    publish()
                return bool(super()._sleep(seconds))

            def about_to_sleep(self) -> None:
                publish()

        with Probe(ring.handle, 0) as reader:
            ring.wait_until_ready(START_S)
            assert reader.receive(START_S) == "late"
    assert (len(sleeps) > 1) is slept_through


@pytest.mark.parametrize(("ring_class", "completes"), [(BroadcastRing, True), (NoOverflow, False)])
def test_publishing_does_not_wait_for_leases(ring_class: type[BroadcastRing], completes: bool) -> None:
    with (
        ring_class(1, slots=2, slot_bytes=LEASE_BYTES, patience=0.001) as ring,
        RingReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(START_S)
        kept = []
        for value in range(2):
            ring.publish(torch.full((LEASE_BYTES,), value, dtype=torch.uint8))
            kept.append(reader.receive(START_S))
        if completes:
            ring.publish(torch.full((LEASE_BYTES,), 2, dtype=torch.uint8), START_S)
            kept.append(reader.receive(START_S))
            with pytest.raises(QuiesceTimeout, match=r"slot 0 by reader 0 \(process \d+\)"):
                ring.empty((1,), timeout=0.01)
            assert all(bool((tensor == value).all()) for value, tensor in enumerate(kept))
            # Out of order: the younger lease ends first, and its slot comes free.
            del kept[1]
            assert ring.empty((1,), timeout=START_S).shape == (1,)
        else:
            with pytest.raises(QuiesceTimeout):
                ring.publish(torch.zeros(LEASE_BYTES, dtype=torch.uint8), START_S)


@pytest.mark.parametrize(("ring_class", "completes"), [(BroadcastRing, True), (DeathUnnoticed, False)])
def test_a_dead_reader_is_noticed(ring_class: type[BroadcastRing], completes: bool) -> None:
    with (
        ring_class(1, slots=2, slot_bytes=4096, window=2) as ring,
        Child("read_all", ring.handle.to_json(), 0, 0) as child,
    ):
        ring.wait_until_ready(START_S)
        child.end()
        if completes:
            for _ in range(4):
                ring.publish("nobody", START_S)
        else:
            ring.publish("nobody")
            with pytest.raises(QuiesceTimeout, match="reader 0"):
                ring.publish("nobody", 0.5)


@pytest.mark.parametrize(("reader_class", "notices"), [(RingReader, True), (WriterDeathUnnoticed, False)])
def test_a_dead_writer_is_noticed(reader_class: type[RingReader], notices: bool) -> None:
    with (
        Child("write_all", "", [1], 10**6, 1) as child,
        reader_class(RingHandle.from_json(child.hears()), 0) as reader,
    ):
        reader.wait_until_ready(START_S)
        child.end()

        def drain() -> None:
            while True:
                reader.receive(1.0)

        with pytest.raises(PeerDied if notices else QuiesceTimeout):
            drain()


@pytest.mark.parametrize(("reader_class", "notices"), [(RingReader, True), (JoinerWaitsForTheDead, False)])
def test_a_writer_that_dies_before_it_lets_a_reader_in(reader_class: type[RingReader], notices: bool) -> None:
    with (
        Child("write_all", "Admit.begin.1", [1], 1, 1) as child,
        reader_class(RingHandle.from_json(child.hears()), 0) as reader,
    ):
        child.exit_code()
        with pytest.raises(PeerDied if notices else QuiesceTimeout):
            reader.wait_until_ready(1.0)


@pytest.mark.parametrize(("reader_class", "got"), [(RingReader, []), (SkipLostBody, ["after it"])])
def test_what_follows_a_lost_body_is_not_received(reader_class: type[RingReader], got: list[str]) -> None:
    """Most of a body is still in the writer when it is killed; the next message lies in its slot, and is posted."""
    writer = Child("write_to_a_stopped_reader", 64 << 20)
    handle = writer.hears()
    reader = Child("stop_then_read", handle, reader_class)
    try:
        assert writer.hears() == "published"
        writer.end()
        assert reader.process.pid
        os.kill(reader.process.pid, signal.SIGCONT)
        assert reader.hears() == got
    finally:
        for process in (writer, reader):
            process.end()


@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_reader_that_left_is_replaced(remote: bool) -> None:
    """By one of the same process, before anything is published: readiness hears of the leaving too."""
    readers, bind = (0, f"ipc://@{secrets.token_hex(8)}") if remote else (1, None)
    reader_class = RemoteReader if remote else RingReader
    with BroadcastRing(readers, slots=2, slot_bytes=LEASE_BYTES, remote=int(remote), bind=bind) as ring:
        for number in range(3):
            with reader_class(ring.handle, 0) as reader:
                ring.wait_until_ready(START_S)
                ring.publish(number)
                assert reader.receive(START_S) == number
            if remote:
                until(lambda: _is_missing(ring))
        assert _is_missing(ring)


def test_a_rank_is_taken_while_its_leases_live() -> None:
    with BroadcastRing(1, slots=2, slot_bytes=LEASE_BYTES) as ring:
        with RingReader(ring.handle, 0) as reader:
            ring.wait_until_ready(START_S)
            ring.publish(torch.ones(LEASE_BYTES, dtype=torch.uint8))
            lease = reader.receive(START_S)
        with RingReader(ring.handle, 0) as reader:
            assert ring._socket.poll(1e3 * START_S)
            assert _is_missing(ring)
            with pytest.raises(QuiesceError, match="keeps leases"):
                reader.wait_until_ready(START_S)
        assert bool((lease == 1).all())
        del lease
        with RingReader(ring.handle, 0) as reader:
            ring.wait_until_ready(START_S)
            ring.publish("again")
            assert reader.receive(START_S) == "again"


def test_one_that_never_was_let_in_is_replaced() -> None:
    with BroadcastRing(1, slots=2, slot_bytes=4096) as ring:
        RingReader(ring.handle, 0).close()
        assert ring._socket.poll(1e3 * START_S)
        until(lambda: _is_missing(ring))
        with RingReader(ring.handle, 0) as reader:
            ring.wait_until_ready(START_S)
            ring.publish("here")
            assert reader.receive(START_S) == "here"


def _take_and_let_go(handle: RingHandle, told: Connection) -> None:
    with RingReader(handle, 0) as reader:
        value = reader.receive(START_S)
        del value
        told.send("let go")
        told.poll(START_S)


def _keeps_its_lease(ring_class: type[BroadcastRing]) -> bool:
    """Whether a lease lasts though the reader before was killed with word of its release on the way."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with ring_class(1, slots=1, slot_bytes=2 << 20) as ring:
        first = spawn.Process(target=_take_and_let_go, args=(ring.handle, theirs))
        first.start()
        try:
            ring.wait_until_ready(START_S)
            ring.publish(torch.zeros(ELEMENTS), START_S)
            assert ours.poll(START_S)
        finally:
            first.kill()
            first.join(START_S)
        with RingReader(ring.handle, 0) as reader:
            assert ring._socket.poll(int(1e3 * START_S)), "no greeting came"
            ring.publish(torch.full((ELEMENTS,), 2.0), START_S)
            kept = reader.receive(START_S)
            ring.publish(torch.full((ELEMENTS,), 3.0), START_S)
            return bool((kept == 2.0).all())


@pytest.mark.parametrize(("ring_class", "keeps"), [(BroadcastRing, True), (StaleNotices, False)])
def test_what_a_dead_reader_told_is_not_its_successors(ring_class: type[BroadcastRing], keeps: bool) -> None:
    """Lockstep rarely lets a reader die at this moment and another come to the one slot."""
    assert _keeps_its_lease(ring_class) is keeps


@pytest.mark.parametrize(("ring_class", "comes_free"), [(BroadcastRing, True), (HoldersAfterPosts, False)])
def test_a_reader_may_let_go_before_the_next_is_told(
    ring_class: type[BroadcastRing], comes_free: bool
) -> None:
    class Eager(ring_class):  # type: ignore[misc,valid-type]
        """Its first reader has received, and let go, before the second is posted."""

        def _post(self, rank: int) -> None:
            super()._post(rank)
            if self._sequence == 1:
                assert readers[rank].receive(START_S) == "early"
                self._collect()

    with (
        Eager(2, slots=1, slot_bytes=4096) as ring,
        RingReader(ring.handle, 0) as first,
        RingReader(ring.handle, 1) as second,
    ):
        readers = [first, second]
        ring.wait_until_ready(START_S)
        ring.publish("early")
        ring._collect()
        assert (ring._free == [0]) is comes_free


@pytest.mark.parametrize(("reader_class", "got"), [(RingReader, ["body", 1]), (ForgetPendingBody, [1])])
def test_a_body_may_come_after_the_wait_for_it_ran_out(
    reader_class: type[RingReader], got: list[object]
) -> None:
    may_send = threading.Event()

    class Slow(BroadcastRing):
        """Announces a body, and sends it when it may."""

        def _send_body(self, rank: int) -> None:
            may_send.wait(START_S)
            super()._send_body(rank)

    with Slow(1, slots=1, slot_bytes=4096) as ring, reader_class(ring.handle, 0) as reader:
        ring.wait_until_ready(START_S)
        body = torch.zeros(LEASE_BYTES, dtype=torch.uint8)
        publisher = threading.Thread(target=ring.publish, args=(body,))
        publisher.start()
        until(lambda: reader._words.posts.value() or None)
        with pytest.raises(QuiesceTimeout):
            reader.receive(0.01)
        may_send.set()
        publisher.join(START_S)
        ring.publish(1)
        received = [reader.receive(START_S) for _ in got]
        assert ["body" if isinstance(value, torch.Tensor) else value for value in received] == got


class Interrupted(RingReader):
    """Ctrl-C when the greeting has been sent."""

    def _join(self) -> None:
        super()._join()
        raise KeyboardInterrupt


class InterruptedFar(Interrupted, RemoteReader):
    """The same of a remote one."""


@pytest.mark.parametrize("reader_class", [Interrupted, InterruptedFar])
def test_one_that_is_interrupted_while_it_greets_leaves_no_trace(reader_class: type[RingReader]) -> None:
    remote = reader_class is InterruptedFar
    readers, bind = (0, f"ipc://@{secrets.token_hex(8)}") if remote else (1, None)
    with BroadcastRing(readers, slots=2, slot_bytes=4096, remote=int(remote), bind=bind) as ring:
        with pytest.raises(KeyboardInterrupt) as kept:
            reader_class(ring.handle, 0)
        assert ring._socket.poll(1e3 * START_S)
        until(lambda: _is_missing(ring))
        with (RemoteReader if remote else RingReader)(ring.handle, 0) as reader:
            ring.wait_until_ready(START_S)
            ring.publish("here")
            assert reader.receive(START_S) == "here"
        assert kept.value is not None


def _is_missing(ring: BroadcastRing) -> bool:
    try:
        ring.wait_until_ready(0.0)
    except QuiesceTimeout as error:
        return "attached as rank 0" in str(error)
    return False


def test_a_reader_that_was_away_passes_over_any_number_of_pings() -> None:
    """A writer that waits sends each remote reader two a second, whomever it waits for."""
    bind = f"ipc://@{secrets.token_hex(8)}"
    with (
        BroadcastRing(0, slots=1, slot_bytes=4096, remote=1, bind=bind) as ring,
        RemoteReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(START_S)
        peer = ring._peers[0]
        for _ in range(sys.getrecursionlimit()):
            peer.probed = float("-inf")
            ring._probe(peer)
        ring.publish("here", START_S)
        assert reader.receive(START_S) == "here"


def test_two_threads_share_a_reader() -> None:
    """Every message is received once, by one of them."""
    got: list[int] = []
    with BroadcastRing(1, slots=4, slot_bytes=4096) as ring, RingReader(ring.handle, 0) as reader:
        ring.wait_until_ready(START_S)

        def receive() -> None:
            for _ in range(50):
                got.append(reader.receive(START_S))

        threads = [threading.Thread(target=receive) for _ in range(2)]
        for thread in threads:
            thread.start()
        for index in range(100):
            ring.publish(index, START_S)
        for thread in threads:
            thread.join(START_S)
    assert sorted(got) == list(range(100))


def test_leases_end_in_any_thread() -> None:
    """Views die in other threads while the reader receives; every slot comes back."""
    with (
        BroadcastRing(1, slots=4, slot_bytes=LEASE_BYTES) as ring,
        RingReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(START_S)
        kept: list[torch.Tensor] = []
        stop = threading.Event()

        def drop() -> None:
            while not stop.is_set():
                if kept:
                    kept.pop()

        threads = [threading.Thread(target=drop) for _ in range(2)]
        for thread in threads:
            thread.start()
        for value in range(60):
            ring.publish(torch.full((LEASE_BYTES,), value, dtype=torch.uint8), START_S)
            tensor = reader.receive(START_S)
            assert int(tensor[-1]) == value
            kept.append(tensor.view(2, -1)[1])
            del tensor
        until(lambda: not kept)
        stop.set()
        for thread in threads:
            thread.join(START_S)
        ring._collect()
        assert sorted(ring._free) == [0, 1, 2, 3]


@pytest.mark.parametrize(("ring_class", "refuses"), [(BroadcastRing, True), (LoanAfterClose, False)])
def test_a_closed_ring_gives_out_nothing(ring_class: type[BroadcastRing], refuses: bool) -> None:
    with ring_class(1, slots=2, slot_bytes=4096) as ring:
        before = ring.empty((1,), torch.int64).fill_(7)
        ring.close()
        if refuses:
            for call in (partial(ring.empty, (1,)), partial(ring.publish, "late"), ring.wait_until_ready):
                with pytest.raises(Closed):
                    call()
            assert sorted(ring._loaned) == [1]
            assert ring._free == [0]
        else:
            assert ring.empty((1,)).shape == (1,)
        assert int(before) == 7


def test_an_error_that_is_raised_again_keeps_no_frames() -> None:
    with BroadcastRing(1, slots=2, slot_bytes=4096) as ring, RingReader(ring.handle, 0) as reader:
        ring.wait_until_ready(START_S)
        ring.close()
        depths = []
        for _ in range(3):
            with pytest.raises(Closed) as caught:
                reader.receive(START_S)
            depths.append(len(caught.traceback))
        assert depths[1] == depths[2]
