"""The reading end of the broadcast ring.

The actions are those of `spec/BroadcastRing.tla`, in its order. Two of them have no code: `Drop` is Python letting
go of a view, `Kill` and `Exit` are what happens to a process.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import zmq

from quiesce.borrowing import Borrowing, Counters, age
from quiesce.codec import Buffer
from quiesce.errors import (
    Closed,
    DecodeError,
    PeerDied,
    QuiesceError,
    QuiesceTimeout,
    ResourceExhausted,
    WrongProcess,
)
from quiesce.events import action
from quiesce.lifecycle import seconds
from quiesce.ring_memory import SLICE_S, Process, RingMemory, copied, start_time
from quiesce.ring_wire import (
    ACK,
    BODY,
    BYE,
    CLOSE,
    DEFAULT_TIMEOUT_S,
    MODULUS,
    REFUSED,
    WELCOME,
    Codec,
    Deadline,
    Hello,
    RingHandle,
    context,
    opening,
    received,
    unpack_head,
)
from quiesce.ring_writer import CLOSING, LEFT, SLOT
from quiesce.turns import Turns

R = TypeVar("R")

LEASE_BYTES = 1 << 20
"""Buffers from this size on are received without copying, bytes; smaller ones are copied out."""
HEARTBEAT_MS = 1000
"""How often a remote reader looks whether its writer's machine is still there; five times that is too long."""


def _anew(error: QuiesceError) -> QuiesceError:
    """The same error without a traceback: one that is kept would keep the callers' frames, and their leases, alive."""
    return type(error)(*error.args)


class RingReader:
    """The end of one reader of this machine; it may be used by several threads, which then take turns.

    `spin` is how many seconds a waiting reader looks for a message before it sleeps; 0 burns no CPU. `receive` gives
    every message published since the writer let this rank in, once and in order.
    """

    lease_bytes = LEASE_BYTES

    def __init__(self, handle: RingHandle, rank: int, *, spin: float = 0.0) -> None:
        """PeerDied if the writer has gone, QuiesceError if its memory cannot be opened from here."""
        if not isinstance(handle, RingHandle):
            raise TypeError(
                f"handle is a {type(handle).__name__}; give a ring's handle (RingHandle.from_json)"
            )
        self.rank = rank
        self._pid = os.getpid()
        self._key = handle.key
        self._codec = Codec(handle.serializer)
        self._spin = seconds(spin)
        self._turn = Turns("this reader")
        self._nonce = os.urandom(16)
        self._writer_name = f"process {handle.pid}"
        self._cursor: int | None = None
        self._ended: QuiesceError | None = None
        self._closed = False
        self._received = 0
        self._opened: tuple[int, int, int, int, int] | None = None
        self._heard: list[zmq.Frame] = []
        self._open_memory(handle)
        self._context = context()
        with opening(self._context):
            self._socket = self._context.socket(zmq.DEALER)
            # What is in flight is bounded by the windows; and over ipc a reader at its mark would lose what the writer
            # sent last before it closed.
            self._socket.setsockopt(zmq.RCVHWM, 0)
            # Not -1: what had been received would be lost with the connection. One that broke is not taken up again,
            # since it may have lost messages; a billion is the most that libzmq adds to itself without overflow.
            self._socket.setsockopt(zmq.RECONNECT_IVL, 10**9)
            self._monitor = self._socket.get_monitor_socket(
                zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
            )
            self._connect(handle)
        try:
            self._join()
        except BaseException:
            # The greeting may be on its way: with no goodbye behind it the rank would be taken as long as we live.
            self._close()
            raise

    # ------------------------------------------------------------------------------------------ what callers use

    def wait_until_ready(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until the writer has let this reader in, which it does in its next call.

        QuiesceTimeout, PeerDied, or QuiesceError if the rank is taken or is none of the ring's.
        """
        self._in_turn(timeout, self._await_welcome)

    def receive(self, timeout: float = DEFAULT_TIMEOUT_S) -> Any:
        """The next message. Tensors in it are writable and this reader's own.

        Buffers of LEASE_BYTES and more lie in the ring; their slot is the reader's until the last view of them is
        gone, in whichever thread. QuiesceTimeout after `timeout` seconds loses nothing. Closed when the writer has
        closed and everything was received, PeerDied when it died. DecodeError skips the message. ResourceExhausted if
        there is no descriptor or memory left to lease it with: call again.
        """
        return self._in_turn(timeout, self._receive_now)

    def _receive_now(self, deadline: Deadline) -> Any:
        self._await_welcome(deadline)
        for slot, lease in self._leases():
            lease.look(f"slot {slot} of the ring to reader {self.rank}")
        frames = self._next_frames(deadline)
        self._received += 1
        return self._codec.decode(frames)

    def counters(self) -> Counters:
        """What is leased by this reader, whose own code holds it. There is no fallback; waits are not counted."""
        since = min((lease.since for _, lease in self._leases()), default=None)
        return Counters(
            in_flight=len(self._leases()),
            oldest_s=age(since),
            holder="" if since is None else "this process",
            messages=self._received,
            fallbacks=0,
            waits=0,
        )

    def close(self) -> None:
        """Receive no more. Leases stay valid, and end as before. May be called twice.

        QuiesceTimeout if another thread keeps receiving.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._turn.take(DEFAULT_TIMEOUT_S, self._close)

    def _close(self) -> None:
        if self._opened is not None and self._opened[0] == SLOT:
            # Opened and never copied, since an exception came in between: its slot is let go all the same.
            slot, self._opened = self._opened[2], None
            self._releaser.owed |= {slot}
        self._pay()
        if self._cursor is None:
            self._say([BYE])
        elif self._ended is None:
            self._leave()
        self._context.destroy(linger=int(1e3 * SLICE_S))
        self._closed = True

    def __enter__(self) -> RingReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ the actions

    @action("Join", lambda self, result: {"r": self.rank})
    def _join(self) -> None:
        hello = Hello(self.rank, self._pid, start_time(self._pid) or 0, self._nonce)
        self._socket.send_multipart(hello.pack(self._key))

    @action("Sleep", lambda self, result, seconds: {"r": self.rank})
    def _sleep(self, seconds: float) -> bool:
        return self._words.posts.wait(seconds)  # SYNC(open.wait)

    @action("Open", lambda self, result: {"r": self.rank, "message": self._cursor})
    def _open(self) -> None:
        due = (self._cursor + 1) % MODULUS  # type: ignore[operator]
        entry = self._memory.entries[due % self._memory.layout.window]
        sequence, what, table_at, count = entry[0], entry[1], entry[2], entry[3]
        self._check_due(sequence, due)
        closed = None
        if what >> 32 == CLOSING:
            closed = Closed("the writer has closed the ring and everything was received")
        # From here to the post nothing of Python's is called, and so no exception comes in between.
        del self._words.posts.taken[0]
        self._cursor = due
        self._ended = closed
        if closed is None:
            self._opened = what >> 32, sequence, what & LEFT, table_at, count
        self._words.passed.post()  # SYNC(pass.post)
        self._memory.doorbell.post()  # SYNC(doorbell.post)

    @action("Copy", lambda self, result, slot, pieces: {"r": self.rank, "s": slot})
    def _copy(self, slot: int, pieces: list[tuple[int, int]]) -> list[Buffer]:
        frames = [self._copied(slot, at, nbytes) for at, nbytes in pieces]
        # Nothing is called in between: it is opened, or owed.
        self._opened = None
        self._releaser.owed |= {slot}
        return frames

    @action("Lease", lambda self, result, slot, pieces: {"r": self.rank, "s": slot})
    def _lease(self, slot: int, pieces: list[tuple[int, int]]) -> list[Buffer]:
        layout = self._memory.layout
        end = max(at + nbytes for at, nbytes in pieces)
        # A mapping of its own, private: what this reader writes stays with it, and the death of the mapping is
        # the death of the last view. The slot is not released before its memory is gone from this process.
        try:
            mapping = mmap.mmap(
                self._memory.fd,
                end,
                mmap.MAP_PRIVATE,
                mmap.PROT_READ | mmap.PROT_WRITE,
                offset=layout.slot_at(slot),
            )
        except OSError as error:
            raise ResourceExhausted(
                error.errno,
                f"cannot lease slot {slot} ({error.strerror}); nothing is lost: raise the limit of open files or of "
                "memory, or let leases go, and receive again",
            ) from error
        frames: list[Buffer] = [
            np.frombuffer(mapping, np.uint8, nbytes, at)
            if nbytes >= self.lease_bytes
            else self._copied(slot, at, nbytes)
            for at, nbytes in pieces
        ]
        lease = weakref.ref(mapping, self._releaser.unmapped)
        _leases.add(lease)
        borrowing = Borrowing()
        # Nothing is called in between: it is opened, and the end of the mapping lets nothing go; or it is leased.
        self._opened = None
        self._releaser.leases[slot] = lease, borrowing
        return frames

    @action("TakeBody", lambda self, result, parts: {"r": self.rank})
    def _take_body(self, parts: list[zmq.Frame]) -> list[Buffer]:
        self._opened, self._heard = None, []
        return received(parts, self.lease_bytes)

    @action("TimeOut", lambda self, result, deadline: {"r": self.rank})
    def _time_out(self, deadline: Deadline) -> QuiesceTimeout:
        """R7: nothing changes; the next call goes on from here."""
        return QuiesceTimeout(f"reader {self.rank} received nothing within {deadline.seconds:g} s; try again")

    @action("Leave", lambda self, result: {"r": self.rank})
    def _leave(self) -> None:
        self._words.left[0] = self._cursor  # type: ignore[assignment]
        # Once: a second notice might be taken for one of the next reader of this rank.
        if not self._releaser.has_left:
            self._releaser.tell(LEFT)

    @action("FindWriterDead", lambda self, result: {"r": self.rank})
    def _find_writer_dead(self) -> QuiesceError:
        whole = "nothing"
        if self._cursor is not None:
            whole = f"everything up to message {self._cursor - bool(self._opened)}"
        how = "ended without closing the ring"
        if not self._writer_is_gone():
            how = "closed the ring while a message was on its way"
        self._ended = PeerDied(
            f"the writer, {self._writer_name}, {how}; reader {self.rank} received {whole}, "
            "and what had not been sent by then is lost"
        )
        return _anew(self._ended)

    # -------------------------------------------------------------------------------------------------- what helps

    def _open_memory(self, handle: RingHandle) -> None:
        if not 0 <= self.rank < handle.ranks:
            raise ValueError(f"rank is {self.rank}; the ring has local ranks 0 to {handle.ranks - 1}")
        self._memory = RingMemory.attach(handle.pid, handle.fd, self._key)
        self._writer = Process(handle.pid, start_time(handle.pid) or 0)
        self._words = self._memory.ranks[self.rank]
        self._releaser = _Releaser(self._memory, self.rank)

    def _connect(self, handle: RingHandle) -> None:
        self._socket.connect(handle.endpoint)

    def _leases(self) -> list[tuple[int, Borrowing]]:
        return [(slot, borrowing) for slot, (_, borrowing) in list(self._releaser.leases.items())]

    def _writer_is_gone(self) -> bool:
        return self._writer.has_ended()

    def _is_cut_off(self) -> bool:
        return bool(self._monitor.poll(0))

    def _say(self, parts: list[bytes]) -> None:
        with suppress(zmq.Again):  # the writer has gone; what it sent before can still be received
            self._socket.send_multipart(parts, zmq.NOBLOCK)

    def _await_welcome(self, deadline: Deadline) -> None:
        while self._cursor is None:
            said = self._hear(deadline)
            if said is None:
                raise QuiesceTimeout(
                    f"after {deadline.seconds:g} s the writer has not let reader {self.rank} in; it does so while it "
                    "publishes or waits until ready"
                )
            kind, sequence, parts = said
            if kind == REFUSED:
                self._ended = QuiesceError(
                    f"the writer refused reader {self.rank}: {bytes(parts[0].buffer).decode()}"
                )
                raise _anew(self._ended)
            self._heard = []
            if kind == WELCOME:
                self._cursor = sequence

    def _next_frames(self, deadline: Deadline) -> list[Buffer]:
        self._pay()
        if self._opened is None:
            self._await_post(deadline)
            self._open()
            if self._ended:
                raise _anew(self._ended)
        assert self._opened is not None
        kind, due, slot, table_at, count = self._opened
        if kind != SLOT:
            return self._await_body(deadline)
        layout = self._memory.layout
        if slot >= layout.slots or table_at + 16 * count > layout.slot_bytes:
            raise self._broken(due)
        words = struct.unpack_from(f"<{2 * count}Q", self._memory.mapping, layout.slot_at(slot) + table_at)
        pieces = list(zip(words[::2], words[1::2], strict=True))
        if any(at + nbytes > layout.slot_bytes for at, nbytes in pieces):
            raise self._broken(due)
        if any(nbytes >= self.lease_bytes for _, nbytes in pieces):
            return self._lease(slot, pieces)
        frames = self._copy(slot, pieces)
        self._pay()
        return frames

    def _pay(self) -> None:
        self._releaser.pay()

    def _broken(self, due: int) -> QuiesceError:
        return QuiesceError(f"what message {due} says of its slot cannot be: the ring is broken; attach anew")

    def _await_post(self, deadline: Deadline) -> None:
        posts = self._words.posts
        if posts.spin(min(self._spin, deadline.left)):  # SYNC(open.wait)
            return
        while True:
            if self._sleep(min(deadline.left, SLICE_S)):
                return
            if self._writer_is_gone():
                if posts.try_wait():  # SYNC(open.wait)
                    return
                raise self._find_writer_dead()
            if deadline.over:
                raise self._time_out(deadline)

    def _await_body(self, deadline: Deadline) -> list[Buffer]:
        """The body of the opened entry (R6); an older one, of a message that was given up, is dropped."""
        assert self._opened is not None
        due = self._opened[1]
        while True:
            kind, sequence, parts = self._next_said(deadline)
            if kind == BODY and sequence == due:
                return self._take_body(parts)
            self._heard = []

    def _next_said(self, deadline: Deadline) -> tuple[bytes, int, list[zmq.Frame]]:
        said = self._hear(deadline)
        if said is None:
            raise self._time_out(deadline)
        return said

    def _hear(self, deadline: Deadline) -> tuple[bytes, int, list[zmq.Frame]] | None:
        """What the writer says next over ZMQ: of which kind, of which message, and its parts. None at the deadline.

        It stays in `_heard`, and is heard again, until it is taken, whatever exception comes in between.
        """
        while self._listen(deadline):
            try:
                return (*unpack_head(self._key, self._nonce, self._heard), self._heard[1:])
            except DecodeError:
                cut = not len(self._heard[-1])
                self._heard = []
                if not cut:  # by an exception at the writer, which then says all of it again
                    raise
        return None

    def _listen(self, deadline: Deadline) -> bool:
        """Whether `_heard` is a whole message by the deadline. PeerDied if nothing can come any more."""
        while not self._heard or self._heard[-1].more:
            while not self._socket.poll(int(1e3 * min(deadline.left, SLICE_S))):
                if (self._writer_is_gone() or self._is_cut_off()) and not self._socket.poll(
                    int(1e3 * SLICE_S)
                ):
                    raise self._find_writer_dead()
                if deadline.over:
                    return False
            # Received and kept by one call: no exception but one within pyzmq comes in between.
            self._heard.extend(map(self._socket.recv, (zmq.NOBLOCK,), (False,)))  # type: ignore[arg-type]
        return True

    def _copied(self, slot: int, at: int, nbytes: int) -> Buffer:
        start = self._memory.layout.slot_at(slot) + at
        return copied(self._memory.view[start : start + nbytes])

    def _check_due(self, sequence: int, due: int) -> None:
        if sequence != due:
            raise QuiesceError(
                f"reader {self.rank} was told of message {due} and found {sequence}: the ring is broken"
            )

    def _in_turn(self, timeout: float, call: Callable[[Deadline], R]) -> R:
        deadline = Deadline(timeout)
        if os.getpid() != self._pid:
            raise WrongProcess(
                "this reader was made in another process; attach one here by the ring's handle"
            )
        return self._turn.take(timeout, lambda: call(self._begin(deadline)))

    def _begin(self, deadline: Deadline) -> Deadline:
        if self._closed:
            raise Closed("this reader is closed")
        if self._ended:
            raise _anew(self._ended)
        return deadline


class RemoteReader(RingReader):
    """The end of a reader of another machine: every message comes over ZMQ."""

    def _open_memory(self, handle: RingHandle) -> None:
        if not handle.ranks <= self.rank < handle.ranks + handle.remote:
            raise ValueError(
                f"rank is {self.rank}; the ring has remote ranks {handle.ranks} to {handle.ranks + handle.remote - 1}"
            )

    def _connect(self, handle: RingHandle) -> None:
        self._writer_name += f" at {handle.remote_endpoint}"
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 5 * HEARTBEAT_MS)
        self._socket.connect(handle.remote_endpoint)

    @action("Join", lambda self, result: {"r": self.rank})
    def _join(self) -> None:
        self._socket.send_multipart(Hello(self.rank, 0, 0, self._nonce).pack(self._key))

    @action("TakeBody", lambda self, result, kind, parts: {"r": self.rank})
    def _take_next(self, kind: bytes, parts: list[zmq.Frame]) -> list[Buffer]:
        """The next message, or none if it is the last word of the writer."""
        self._heard, self._cursor = [], (self._cursor + 1) % MODULUS  # type: ignore[operator]
        self._say([ACK, self._cursor.to_bytes(8, "little")])
        if kind == CLOSE:
            self._ended = Closed("the writer has closed the ring and everything was received")
            return []
        return received(parts, self.lease_bytes)

    @action("Leave", lambda self, result: {"r": self.rank})
    def _leave(self) -> None:
        self._say([BYE])

    def _leases(self) -> list[tuple[int, Borrowing]]:
        return []

    def _pay(self) -> None:
        """Nothing is held in shared memory."""

    def _writer_is_gone(self) -> bool:
        return self._is_cut_off()

    def _next_frames(self, deadline: Deadline) -> list[Buffer]:
        due = (self._cursor + 1) % MODULUS  # type: ignore[operator]
        kind, sequence, parts = self._next_said(deadline)
        # Besides what is due come pings, and for the second time what an exception at the writer came behind.
        while kind not in (BODY, CLOSE) or (sequence - due) % MODULUS >= MODULUS // 2:
            self._heard = []
            kind, sequence, parts = self._next_said(deadline)
        self._check_due(sequence, due)
        frames = self._take_next(kind, parts)
        if self._ended:
            raise _anew(self._ended)
        return frames


class _Releaser:
    """Tells the writer which slots this process has let go: from any thread, from within any other call.

    Leases end when Python frees memory, which may be in the middle of this very object's work. So what is to be told
    stands in `owed` or `leases` until it was, and whoever finds nobody at it tells it.
    """

    def __init__(self, memory: RingMemory, rank: int) -> None:
        self.rank = rank
        self._memory = memory
        self._words = memory.ranks[rank]
        self._pid = os.getpid()
        self._paying = threading.Lock()
        self._told = 0
        self.owed: set[int] = set()
        """Slots let go of which the writer is still to be told."""
        self.leases: dict[int, tuple[weakref.ref[mmap.mmap], Borrowing]] = {}
        """The mappings of leased slots. One that is gone is owed."""
        self.has_left = False

    @action("Release", lambda self, result, slot: {"r": self.rank, "s": slot})
    def release(self, slot: int) -> None:
        """R4: the copy has ended, or the last view of the lease is gone."""
        self.tell(slot)

    def pay(self) -> None:
        """Tell all that is owed, also what an exception came in front of."""
        while self._due():
            mine: list[bool] = []
            try:
                # One call into C takes the lock and notes it: no exception comes in between.
                mine.extend(filter(None, map(self._paying.acquire, (False,))))
                if not mine:
                    return  # who is at it looks again when it has done
                for slot in self._due():
                    self.release(slot)
            finally:
                if mine:
                    self._paying.release()

    def _due(self) -> list[int]:
        gone = [slot for slot, (mapping, _) in list(self.leases.items()) if mapping() is None]
        return [*self.owed, *gone]

    def tell(self, notice: int) -> None:
        ring = self._words.ring
        size = len(ring)
        # From here to the post nothing of Python's is called, and so no exception and no thread comes in between.
        ring[self._told % size] = notice
        self._told += 1
        self.has_left |= notice == LEFT
        self.owed -= {notice}
        if notice in self.leases:
            del self.leases[notice]
        self._words.notices.post()  # SYNC(release.post)
        self._memory.doorbell.post()  # SYNC(doorbell.post)

    def unmapped(self, lease: weakref.ref[mmap.mmap]) -> None:
        _leases.discard(lease)
        if os.getpid() == self._pid:  # not for the copy of a lease in a forked child
            self.pay()


# The weak references to leased mappings: they must outlive the reader that took them.
_leases: set[weakref.ref[mmap.mmap]] = set()
