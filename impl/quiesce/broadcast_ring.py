"""The broadcast ring: one writer, many readers, tensors in shared memory.

The actions are those of `spec/BroadcastRing.tla`, in its order: the writer's are here, the readers' in
`quiesce.ring_reader`. The rules R1 to R9 are stated there. Between calls nothing runs: the writer hears its
readers, admits new ones and forgets dead ones while it is in `publish`, `empty` or `wait_until_ready`.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import zmq

from quiesce.codec import Buffer
from quiesce.errors import Closed, NotQuiescent, PeerDied, QuiesceTimeout, ResourceExhausted, WrongProcess
from quiesce.events import action
from quiesce.ring_codec import over
from quiesce.ring_memory import LINE, SLICE_S, Layout, Process, RingMemory, round_up
from quiesce.ring_wire import (
    ACK,
    BODY,
    BYE,
    CLOSE,
    HELLO,
    MODULUS,
    REFUSED,
    WELCOME,
    Codec,
    Deadline,
    Hello,
    RingHandle,
    context,
    new_secret,
    pack_head,
)

SLOT, OVERFLOWED, CLOSING = range(3)
"""What an entry announces: a message in a slot, one whose body comes over ZMQ, or the end."""
LEFT = 0xFFFFFFFF
"""The notice of a reader that leaves, where others name a slot."""
LOAN_AT = 4096
"""Offset in its slot of a tensor made by `empty`, bytes; the pickle of its message goes before it."""
BODY_WINDOW = 8
"""Messages a reader may be behind when one is sent over ZMQ; bounds the memory that bodies take."""
DEFAULT_TIMEOUT_S = 30.0
_NO_SLOT = 0


class _Peer:
    """A reader as the writer knows it."""

    def __init__(self, hello: Hello, identity: bytes, passed: int) -> None:
        self.nonce = hello.nonce
        self.identity = identity
        self.process = Process(hello.pid, hello.started) if hello.pid else None
        self.passed = passed
        self.heard = 0
        self.admitted = True

    def __str__(self) -> str:
        return f"process {self.process.pid}" if self.process else "remote"


class BroadcastRing:
    """The writing end: `publish` to all readers, or build a tensor in the ring with `empty` and publish that.

    `readers` processes of this machine take ranks 0, 1, ...; `remote` readers, reached over `bind` (an endpoint such
    as "tcp://127.0.0.1:*"), take the ranks after them. There are `slots` pieces of memory of `slot_bytes` bytes each,
    reserved at once. A message that finds no slot, because it is larger or because leases keep all of them for
    longer than `patience` seconds, is sent over ZMQ instead. `window` is how many messages a reader may be
    behind, less one; a power of two. Methods may be called by any thread of the process that made the ring.
    """

    def __init__(
        self,
        readers: int,
        *,
        slots: int = 8,
        slot_bytes: int = 16 << 20,
        remote: int = 0,
        bind: str | None = None,
        serializer: str = "pickle",
        window: int = 64,
        patience: float = 0.05,
        spin: float = 0.0,
        first_sequence: int = 0,
    ) -> None:
        if readers < 0 or remote < 0 or not 0 < readers + remote <= 1024:
            raise ValueError(f"readers is {readers} and remote is {remote}; give 1 to 1024 in all")
        if not 0 < slots <= 4096 or slot_bytes <= 0:
            raise ValueError(
                f"slots is {slots} of {slot_bytes} bytes; give 1 to 4096 slots of at least a byte"
            )
        if window < 2 or window & (window - 1):
            raise ValueError(f"window is {window}; give a power of two, 2 or more")
        if bool(remote) != (bind is not None):
            raise ValueError(
                "remote readers and the endpoint to bind for them go together; give both or neither"
            )
        # Room beside the largest tensor for the pickle of its message.
        layout = Layout(
            readers, slots, window, round_up(slot_bytes + 2 * LOAN_AT, mmap.ALLOCATIONGRANULARITY)
        )
        self._codec = Codec(serializer)
        self._key = new_secret()
        self._memory = RingMemory.create(layout, self._key)
        self._bytes = np.frombuffer(self._memory.mapping, np.uint8)
        self._pid = os.getpid()
        self._patience = patience
        self._spin = spin
        self._turn = threading.Lock()
        self._context = context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # what is in flight is bounded by the windows
        endpoint = f"ipc://@quiesce-{secrets.token_hex(16)}"
        self._socket.bind(endpoint)
        remote_endpoint = ""
        if bind is not None:
            self._socket.bind(bind)
            remote_endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.handle = RingHandle(
            self._pid,
            self._memory.fd,
            readers,
            remote,
            endpoint,
            remote_endpoint,
            serializer,
            self._key.hex(),
        )
        """What other processes attach with."""

        self._closed = False
        self._step = "idle"
        self._current: int | None = None
        self._sequence = first_sequence % MODULUS
        self._unsent: set[int] = set()
        self._unposted: set[int] = set()
        self._body: list[Buffer] = []
        self._free = list(range(slots))
        self._held: set[int] = set()
        self._lent: dict[int, int] = {}
        self._loaned: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._dropped: deque[int] = deque()
        self._holders: list[set[int]] = [set() for _ in range(slots)]
        self._peers: dict[int, _Peer] = {}

    # ------------------------------------------------------------------------------------------ what callers use

    def wait_until_ready(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until every rank has a reader; what is published before goes only to those already there.

        PeerDied if a reader dies meanwhile, QuiesceTimeout, naming the missing, after `timeout` seconds.
        """
        with self._turns(timeout) as deadline:
            while True:
                before = set(self._peers)
                self._greet()
                self._bury()
                lost = sorted(before - set(self._peers))
                if lost:
                    raise PeerDied(f"reader {lost[0]} ended before all were ready; start it again")
                missing = [rank for rank in range(self._ranks) if not self._is_admitted(rank)]
                if not missing:
                    return
                if deadline.over:
                    raise QuiesceTimeout(
                        f"after {deadline.seconds:g} s no reader has attached as rank {', '.join(map(str, missing))}"
                    )
                self._socket.poll(int(1e3 * min(deadline.left, SLICE_S)))

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, timeout: float = DEFAULT_TIMEOUT_S
    ) -> torch.Tensor:
        """A tensor, not initialised, that lies in a slot of the ring: publishing it copies nothing.

        A message carries one such tensor, or views of it, for free; others in it are copied. The tensor may be
        written until it is published, and by nobody afterwards. Its slot is taken until the tensor and its views
        are gone. ResourceExhausted if it is larger than a slot, QuiesceTimeout if no slot comes free.
        """
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        layout = self._memory.layout
        if nbytes > layout.slot_bytes - LOAN_AT:
            raise ResourceExhausted(
                f"a tensor of {nbytes} bytes does not fit a slot of {layout.slot_bytes - LOAN_AT}; "
                "create the ring with a larger slot_bytes"
            )
        with self._turns(timeout) as deadline:
            slot = self._await_slot(deadline)
            if slot is None:
                raise QuiesceTimeout(f"no slot came free within {deadline.seconds:g} s; {self._who_holds()}")
            flat = self._loan(slot, nbytes)
        return over(torch.from_numpy(flat).untyped_storage(), dtype, shape)

    def publish(self, obj: object, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        """Send `obj` to every reader that is attached; returns its sequence number.

        The caller may change its memory when this returns, except that of a tensor made by `empty`. After
        QuiesceTimeout (a reader is too far behind; the message says which and how far) or EncodeError nothing
        was sent, to nobody.
        """
        with self._turns(timeout) as deadline:
            self._greet()
            frames = self._codec.encode(obj)
            loan, plan = self._plan(frames)
            self._await_room(deadline, self._memory.layout.window - 1 if plan else BODY_WINDOW)
            slot = loan
            if slot is None and plan is not None:
                patience = Deadline(min(deadline.left, self._patience))
                slot = self._await_slot(patience)
                if slot is None:
                    self._await_room(deadline, BODY_WINDOW)
            if slot is None or plan is None:
                self._overflow(frames)
            else:
                try:
                    self._take(slot)
                    self._fill(slot, frames, plan)
                except BaseException:
                    self._give_up(slot)
                    raise
                self._publish(slot, frames, plan)
            return self._complete()

    def exclude(self, rank: int) -> None:
        """Forget a remote reader that has become unreachable; a local one is forgotten only when it has ended."""
        with self._turns(DEFAULT_TIMEOUT_S):
            peer = self._peers.get(rank)
            if peer is None:
                return
            if peer.process and not peer.process.has_ended():
                raise NotQuiescent(
                    f"reader {rank} ({peer}) still runs and may be reading the ring's memory; end it first"
                )
            self._exclude(rank)

    def close(self, timeout: float = 1.0) -> None:
        """Let readers receive what was published, then Closed; leases stay valid. May be called twice.

        Bodies on their way are given `timeout` seconds. The memory is freed with its last lease.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with self._turns(timeout) as deadline:
            self._close()
            self._complete()
            self._closed = True
            # What a remote reader has yet to receive dies with the connection.
            while self._remote_behind() and not deadline.over:
                self._socket.poll(int(1e3 * min(deadline.left, SLICE_S)))
                self._greet()
            self._context.destroy(linger=int(1e3 * timeout))

    def __enter__(self) -> BroadcastRing:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ the actions

    @action("Loan", lambda self, result, slot, nbytes: {"s": slot})
    def _loan(self, slot: int, nbytes: int) -> Any:
        self._free.remove(slot)
        self._held.add(slot)
        start = self._memory.layout.slot_at(slot) + LOAN_AT
        flat = np.frombuffer(self._memory.mapping, np.uint8, nbytes, start)
        # Not on the tensor: views and numpy arrays outlive it, and all of them hold this array.
        self._loaned[slot] = nbytes, weakref.ref(flat, partial(_dropped, self._dropped, self._memory, slot))
        return flat

    @action("DropLoan", lambda self, result, slot: {"s": slot})
    def _drop_loan(self, slot: int) -> None:
        del self._loaned[slot]

    @action("Take", lambda self, result, slot: {"s": slot})
    def _take(self, slot: int) -> None:
        if slot not in self._held:
            self._free.remove(slot)
            self._held.add(slot)
        self._current = slot
        self._step = "taken"

    @action("Fill", lambda self, result, slot, frames, plan: {"s": slot})
    def _fill(self, slot: int, frames: list[Buffer], plan: list[int]) -> None:
        self._step = "filling"
        start = self._memory.layout.slot_at(slot)
        table: list[int] = []
        for frame, at in zip(frames, plan[1:], strict=True):
            source = np.frombuffer(frame, np.uint8)
            target = self._bytes[start + at : start + at + source.nbytes]
            if source.ctypes.data != target.ctypes.data:
                target[:] = source
            table += at, source.nbytes
        struct.pack_into(f"<{len(table)}Q", self._memory.mapping, start + plan[0], *table)
        self._step = "filled"

    @action("Publish", lambda self, result, slot, frames, plan: {"s": slot})
    def _publish(self, slot: int, frames: list[Buffer], plan: list[int]) -> None:
        readers = self._admitted()
        self._held.discard(slot)
        self._holders[slot] = {rank for rank in readers if self._is_local(rank)}
        self._announce(SLOT, slot, plan[0], len(frames))
        self._lent[slot] = self._sequence
        self._unsent = {rank for rank in readers if not self._is_local(rank)}
        if self._unsent:
            self._body = self._private(frames)

    @action("Overflow")
    def _overflow(self, frames: list[Buffer]) -> None:
        # R6: the caller may write its memory when publish returns, long before ZMQ has read the last of it.
        self._body = self._private(frames)
        self._announce(OVERFLOWED, _NO_SLOT, 0, len(frames))
        self._unsent = self._admitted()

    @action("SendBody", lambda self, result, rank: {"r": rank})
    def _send_body(self, rank: int) -> None:
        self._unsent.discard(rank)
        peer = self._peers[rank]
        head = pack_head(BODY if self._body else CLOSE, self._key, peer.nonce, self._sequence, self._body)
        try:
            self._socket.send_multipart([peer.identity, head, *self._body], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            # Gone: a local reader's end is seen by its process, a remote one's by its silence.
            if peer.process is None:
                peer.identity = b""

    @action("Post", lambda self, result, rank: {"r": rank})
    def _post(self, rank: int) -> None:
        self._unposted.discard(rank)
        self._memory.ranks[rank].posts.post()  # SYNC(announce.post)

    @action("Return")
    def _return(self) -> None:
        self._current = None
        self._body = []
        self._step = "idle"

    @action("Close")
    def _close(self) -> None:
        self._body = []
        self._announce(CLOSING, _NO_SLOT, 0, 0)
        self._unsent = {rank for rank in self._admitted() if not self._is_local(rank)}

    @action("Admit", lambda self, result, hello, identity: {"r": hello.rank})
    def _admit(self, hello: Hello, identity: bytes) -> None:
        if self._is_local(hello.rank):
            self._memory.ranks[hello.rank].reset()
        self._peers[hello.rank] = _Peer(hello, identity, self._sequence)
        # The welcome orders the reset before the reader's first wait: it goes through the kernel. SYNC(admit.send)
        self._say(identity, [pack_head(WELCOME, self._key, hello.nonce, self._sequence)])

    @action("HearRelease", lambda self, result, rank, slot: {"r": rank, "s": slot})
    def _hear_release(self, rank: int, slot: int) -> None:
        self._holders[slot].discard(rank)

    @action("HearLeave", lambda self, result, rank: {"r": rank})
    def _hear_leave(self, rank: int) -> None:
        self._peers[rank].admitted = False
        at = self._memory.ranks[rank].left[0]
        for slot, sequence in self._lent.items():
            if 0 < (sequence - at) % MODULUS < MODULUS // 2:
                self._holders[slot].discard(rank)

    @action("Exclude", lambda self, result, rank: {"r": rank})
    def _exclude(self, rank: int) -> None:
        del self._peers[rank]
        for holders in self._holders:
            holders.discard(rank)

    @action("Vacate", lambda self, result, rank: {"r": rank})
    def _vacate(self, rank: int) -> None:
        del self._peers[rank]

    @action("Recycle", lambda self, result, slot: {"s": slot})
    def _recycle(self, slot: int) -> None:
        self._lent.pop(slot, None)
        self._held.discard(slot)
        self._free.append(slot)

    # -------------------------------------------------------------------------------------------------- what helps

    def _announce(self, kind: int, slot: int, table_at: int, frames: int) -> None:
        self._sequence = (self._sequence + 1) % MODULUS
        entry = self._memory.entries[self._sequence % self._memory.layout.window]
        entry[0], entry[1], entry[2], entry[3] = self._sequence, kind << 32 | slot, table_at, frames
        self._unposted = {rank for rank in self._admitted() if self._is_local(rank)}
        self._step = "posting"

    def _complete(self) -> int:
        """Finish the publication under way, also one that an exception cut short between two readers."""
        if self._step == "posting":
            for rank in sorted(self._unposted):
                self._post(rank)
            for rank in sorted(self._unsent):
                self._send_body(rank)
            self._return()
        return self._sequence

    @staticmethod
    def _private(frames: list[Buffer]) -> list[Buffer]:
        return [np.array(np.frombuffer(frame, np.uint8)) for frame in frames]

    def _plan(self, frames: list[Buffer]) -> tuple[int | None, list[int] | None]:
        """The loan that carries the message, if one does; and where in a slot its table and frames go."""
        size = self._memory.layout.slot_bytes
        sizes = [16 * len(frames), *(memoryview(frame).nbytes for frame in frames)]
        best = max(self._loans_in(frames), default=None)
        if best is not None:
            nbytes, slot = best
            start = self._memory.layout.slot_at(slot)
            loan_end = round_up(LOAN_AT + nbytes, LINE)
            addresses = [-1, *(_address(frame) - self._memory.address - start for frame in frames)]
            inside = [LOAN_AT <= at < LOAN_AT + nbytes for at in addresses]
            plan = _place(
                sizes,
                [(0, LOAN_AT), (loan_end, size)],
                [a if i else None for a, i in zip(addresses, inside, strict=True)],
            )
            if plan is not None:
                return slot, plan
        return None, _place(sizes, [(0, size)], [None] * len(sizes))

    def _loans_in(self, frames: list[Buffer]) -> Iterator[tuple[int, int]]:
        loans = {slot: nbytes for slot, (nbytes, _) in self._loaned.items() if slot in self._held}
        if not loans:
            return
        layout, base = self._memory.layout, self._memory.address
        for frame in frames[1:]:
            slot = (_address(frame) - base - layout.slots_at) // layout.slot_bytes
            if slot in loans:
                yield loans[slot], slot

    def _await_room(self, deadline: Deadline, window: int) -> None:
        """Wait until every reader is less than `window` messages behind."""
        window = min(window, self._memory.layout.window - 1)
        while True:
            late = [
                rank
                for rank, peer in self._peers.items()
                if peer.admitted and self._behind(rank, peer) >= window
            ]
            if not late:
                return
            self._wait(deadline, [self._peers[rank] for rank in late])
            if deadline.over:
                worst = max(
                    late, key=lambda rank: self._behind(rank, self._peers[rank]) if rank in self._peers else 0
                )
                if worst not in self._peers or self._behind(worst, self._peers[worst]) < window:
                    continue
                raise QuiesceTimeout(
                    f"reader {worst} ({self._peers[worst]}) is {self._behind(worst, self._peers[worst])} messages "
                    f"behind after {deadline.seconds:g} s; nothing was sent, publish again when it has caught up"
                )

    def _behind(self, rank: int, peer: _Peer) -> int:
        if peer.process:
            passed = self._memory.ranks[rank].passed
            while passed.try_wait():  # SYNC(room.wait)
                peer.passed = (peer.passed + 1) % MODULUS
        return (self._sequence - peer.passed) % MODULUS

    def _await_slot(self, deadline: Deadline) -> int | None:
        """A free slot, the one freed last, since it is still in the cache; None if the deadline passed."""
        while True:
            self._collect()
            if self._free:
                return self._free[-1]
            if deadline.over:
                return None
            self._wait(deadline, list(self._peers.values()))

    def _wait(self, deadline: Deadline, peers: list[_Peer]) -> None:
        """Sleep until a reader rings, one of `peers` acknowledges, or a slice has passed; then look who died."""
        seconds = min(deadline.left, SLICE_S)
        if any(peer.process for peer in peers) or not peers:
            doorbell = self._memory.doorbell
            if doorbell.spin(min(self._spin, seconds)) or doorbell.wait(seconds):  # SYNC(doorbell.wait)
                self._collect()
                return
        else:
            self._socket.poll(int(1e3 * seconds))
        self._greet()
        self._bury()
        self._collect()

    def _collect(self) -> None:
        """Hear all that readers have told, and recycle what they let go."""
        while self._memory.doorbell.try_wait():  # SYNC(doorbell.wait)
            pass
        while self._dropped:
            self._drop_loan(self._dropped.popleft())
        for rank in [rank for rank, peer in self._peers.items() if peer.process]:
            self._hear(rank)
        for slot in self._recyclable():
            self._recycle(slot)

    def _hear(self, rank: int) -> None:
        words, peer = self._memory.ranks[rank], self._peers[rank]
        while words.notices.try_wait():  # SYNC(hear.wait)
            notice = words.ring[peer.heard % len(words.ring)]
            peer.heard += 1
            if notice == LEFT:
                self._hear_leave(rank)
            else:
                self._hear_release(rank, notice)
        if not peer.admitted and not any(rank in holders for holders in self._holders):
            self._vacate(rank)

    def _recyclable(self) -> list[int]:
        return [
            slot
            for slot in (*self._lent, *self._held)
            if slot not in self._loaned and slot != self._current and not self._holders[slot]
        ]

    def _give_up(self, slot: int) -> None:
        """Nothing was announced; the slot is the writer's again, or its loan's."""
        self._current = None
        self._step = "idle"

    def _bury(self) -> None:
        """Forget the readers whose processes have ended (R5), and the remote ones whose connection is gone."""
        for rank, peer in list(self._peers.items()):
            if peer.process.has_ended() if peer.process else not peer.identity:
                self._exclude(rank)

    def _greet(self) -> None:
        """Hear what came over ZMQ: readers that join, and what remote ones have received."""
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            rank = next((rank for rank, peer in self._peers.items() if peer.identity == identity), None)
            if parts and parts[0] == HELLO:
                self._hear_hello(identity, Hello.unpack(self._key, parts))
            elif rank is not None and parts == [BYE]:
                self._exclude(rank)
            elif rank is not None and len(parts) == 2 and parts[0] == ACK and len(parts[1]) == 8:
                self._peers[rank].passed = int.from_bytes(parts[1], "little")

    def _hear_hello(self, identity: bytes, hello: Hello | None) -> None:
        if hello is None:
            return
        objection = ""
        peer = self._peers.get(hello.rank)
        if peer and (peer.process.has_ended() if peer.process else not peer.identity):
            self._exclude(hello.rank)
            peer = None
        if peer:
            objection = f"rank {hello.rank} is taken by {peer}"
        elif hello.rank >= self._ranks or self._is_local(hello.rank) != bool(hello.pid):
            objection = (
                f"rank {hello.rank} is not one of the ring's {'local' if hello.pid else 'remote'} ranks"
            )
        if objection:
            frames = [objection.encode()]
            self._say(identity, [pack_head(REFUSED, self._key, hello.nonce, 0, frames), *frames])
        else:
            self._admit(hello, identity)

    def _say(self, identity: bytes, parts: list[bytes]) -> None:
        try:
            self._socket.send_multipart([identity, *parts], zmq.NOBLOCK)
        except zmq.ZMQError:
            return  # it hung up before it was answered

    @contextmanager
    def _turns(self, timeout: float) -> Iterator[Deadline]:
        """One caller at a time, in the process that made the ring."""
        deadline = Deadline(timeout)
        if os.getpid() != self._pid:
            raise WrongProcess(
                "the ring was made in another process; create one here, or attach by its handle"
            )
        if not self._turn.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise QuiesceTimeout(f"another thread has used the ring for {timeout:g} s")
        try:
            if self._closed:
                raise Closed("the ring is closed")
            self._complete()
            yield deadline
        finally:
            self._turn.release()

    @property
    def _ranks(self) -> int:
        return self.handle.ranks + self.handle.remote

    def _is_local(self, rank: int) -> bool:
        return rank < self.handle.ranks

    def _is_admitted(self, rank: int) -> bool:
        return rank in self._peers and self._peers[rank].admitted

    def _admitted(self) -> set[int]:
        return {rank for rank, peer in self._peers.items() if peer.admitted}

    def _remote_behind(self) -> bool:
        return any(
            peer.identity and self._behind(r, peer) for r, peer in self._peers.items() if not peer.process
        )

    def _who_holds(self) -> str:
        held = [
            f"slot {slot} by "
            + (", ".join(f"reader {r} ({self._peers[r]})" for r in sorted(holders)) or "the writer")
            for slot, holders in enumerate(self._holders)
            if slot not in self._free
        ]
        return f"held are {'; '.join(held)}"


def _dropped(dropped: deque[int], memory: RingMemory, slot: int, _: object) -> None:
    # May run anywhere, in any thread, in the middle of anything: so it only leaves word.
    dropped.append(slot)
    memory.doorbell.post()  # SYNC(doorbell.post)


def _address(frame: Buffer) -> int:
    return int(np.frombuffer(frame, np.uint8).ctypes.data) if memoryview(frame).nbytes else 0


def _place(sizes: list[int], regions: list[tuple[int, int]], fixed: list[int | None]) -> list[int] | None:
    """Offsets for pieces of these sizes in the first region each fits, in order; None if one fits nowhere."""
    starts = [start for start, _ in regions]
    places = []
    for size, place in zip(sizes, fixed, strict=True):
        if place is None:
            for i, (_, end) in enumerate(regions):
                if starts[i] + size <= end:
                    place, starts[i] = starts[i], round_up(starts[i] + size, LINE)
                    break
            else:
                return None
        places.append(place)
    return places
