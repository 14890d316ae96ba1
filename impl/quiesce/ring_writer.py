"""What the writer of a broadcast ring does, action by action, in the order of `spec/BroadcastRing.tla`.

The rules R1 to R9 are stated there. `quiesce.broadcast_ring` puts the actions together.
"""

from __future__ import annotations

import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import zmq

from quiesce.codec import Buffer
from quiesce.errors import QuiesceError, QuiesceTimeout
from quiesce.events import action
from quiesce.ring_memory import LINE, SLICE_S, Process, RingMemory, copy, round_up
from quiesce.ring_wire import (
    ACK,
    BODY,
    BYE,
    CLOSE,
    HELLO,
    MODULUS,
    PING,
    REFUSED,
    WELCOME,
    Deadline,
    Hello,
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
PROBE_S = 0.5
"""Seconds between two looks at the connection of a remote reader that is waited for."""
MOST_WORDS = 1024
"""Messages of readers that are heard at a time."""
_NO_SLOT = 0
_READABLE = int(zmq.POLLIN)  # operations on its enum cost microseconds


class _Peer:
    """A reader as the writer knows it."""

    def __init__(self, hello: Hello, identity: bytes, passed: int) -> None:
        self.nonce = hello.nonce
        self.identity = identity
        self.process = Process(hello.pid, hello.started) if hello.pid else None
        self.passed = passed
        self.probed = time.monotonic()
        self.heard = 0
        self.admitted = True

    def __str__(self) -> str:
        return f"process {self.process.pid}" if self.process else "remote"

    def is_gone(self) -> bool:
        """Whether its process has ended, or its connection, if it is remote."""
        return self.process.has_ended() if self.process else not self.identity


class RingWriter:
    """The writer's part of a ring, for one thread at a time; `quiesce.broadcast_ring` sees to that."""

    def __init__(
        self,
        memory: RingMemory,
        key: bytes,
        socket: zmq.Socket[bytes],
        remote: int,
        spin: float,
        first_sequence: int,
    ) -> None:
        self._memory = memory
        self._key = key
        self._socket = socket
        self._ranks = memory.layout.ranks + remote
        self._spin = spin
        self._step = "idle"
        self._current: int | None = None
        self._sequence = first_sequence % MODULUS
        self._unsent: set[int] = set()
        self._unposted: set[int] = set()
        self._body: list[Buffer] = []
        self._free = list(range(memory.layout.slots))
        self._held: set[int] = set()
        self._lent: dict[int, int] = {}
        self._loaned: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._heard: list[zmq.Frame] = []
        self._holders: list[set[int]] = [set() for _ in range(memory.layout.slots)]
        self._peers: dict[int, _Peer] = {}

    # ------------------------------------------------------------------------------------------------ the actions

    @action("Loan", lambda self, result, slot, nbytes: {"s": slot})
    def _loan(self, slot: int, nbytes: int) -> Any:
        self._free.remove(slot)
        self._held.add(slot)
        start = self._memory.layout.slot_at(slot) + LOAN_AT
        flat = np.frombuffer(self._memory.mapping, np.uint8, nbytes, start)
        # Not on the tensor: views and numpy arrays outlive it, and all of them hold this array.
        self._loaned[slot] = nbytes, weakref.ref(flat, partial(_dropped, self._memory))
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
        lent = slot in self._loaned
        table: list[int] = []
        for frame, at in zip(frames, plan[1:], strict=True):
            nbytes = memoryview(frame).nbytes
            if not (lent and _address(frame) == self._memory.address + start + at):
                copy(self._memory.view[start + at : start + at + nbytes], frame)
            table += at, nbytes
        struct.pack_into(f"<{len(table)}Q", self._memory.mapping, start + plan[0], *table)
        self._step = "filled"

    @action("Publish", lambda self, result, slot, *_: {"s": slot, **self._announced})
    def _publish(self, slot: int, frames: list[Buffer], plan: list[int]) -> None:
        far = self._far()
        if far:
            self._body = self._private(frames)
        self._held.discard(slot)
        self._announce(SLOT, slot, plan[0], len(frames), far)

    @action("Overflow", lambda self, *_: self._announced)
    def _overflow(self, frames: list[Buffer]) -> None:
        # R6: the caller may write its memory when publish returns, long before ZMQ has read the last of it.
        self._body = self._private(frames)
        self._announce(OVERFLOWED, _NO_SLOT, 0, len(frames), self._admitted())

    @action("SendBody", lambda self, result, rank: {"r": rank})
    def _send_body(self, rank: int) -> None:
        peer = self._peers[rank]
        head = pack_head(BODY if self._body else CLOSE, self._key, peer.nonce, self._sequence, self._body)
        if not self._say(peer.identity, [head, *self._body], copy=False) and peer.process is None:
            # Gone: a local reader's end is seen by its process, a remote one's here.
            peer.identity = b""
        # Only now: after an exception it is sent again, and who has it passes over the second.
        self._unsent.discard(rank)

    @action("Post", lambda self, result, rank: {"r": rank})
    def _post(self, rank: int) -> None:
        # Nothing of Python's is called in between.
        self._unposted -= {rank}
        self._memory.ranks[rank].posts.post()  # SYNC(announce.post)

    @action("Return")
    def _return(self) -> None:
        self._current = None
        self._body = []
        self._step = "idle"

    @action("Close", lambda self, *_: self._announced)
    def _close(self) -> None:
        self._body = []
        self._announce(CLOSING, _NO_SLOT, 0, 0, self._far())

    @action("Admit", lambda self, result, hello, identity: {"r": hello.rank})
    def _admit(self, hello: Hello, identity: bytes) -> None:
        if self._is_local(hello.rank):
            self._memory.ranks[hello.rank].reset()
        # The welcome orders the reset before the reader's first wait: it goes through the kernel. SYNC(admit.send)
        self._say(identity, [pack_head(WELCOME, self._key, hello.nonce, self._sequence)])
        # Only now: after an exception its greeting is heard again, and answered again.
        self._peers[hello.rank] = _Peer(hello, identity, self._sequence)

    @action("HearRelease", lambda self, result, rank, slot: {"r": rank, "s": slot})
    def _hear_release(self, rank: int, slot: int) -> None:
        self._holders[slot].discard(rank)

    @action("HearLeave", lambda self, result, rank, at: {"r": rank})
    def _hear_leave(self, rank: int, at: int) -> None:
        self._peers[rank].admitted = False
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

    def _announce(self, kind: int, slot: int, table_at: int, frames: int, unsent: set[int]) -> None:
        sequence = (self._sequence + 1) % MODULUS
        entry = self._memory.entries[sequence % self._memory.layout.window]
        entry[0], entry[1], entry[2], entry[3] = sequence, kind << 32 | slot, table_at, frames
        local = {rank for rank in self._admitted() if self._is_local(rank)}
        holders = set(local)
        # From here on nothing is called, and so nothing comes in between: it is announced to all readers, or was not.
        self._sequence = sequence
        self._unposted = local
        self._unsent = unsent
        if kind == SLOT:
            self._holders[slot] = holders
            self._lent[slot] = sequence
        self._step = "posting"

    @property
    def _announced(self) -> dict[str, int]:
        """What a trace tells of the entry just written."""
        return {"message": self._sequence, "window": self._memory.layout.window}

    def _complete(self) -> int:
        """Finish the publication under way, also one that an exception cut short between two readers."""
        if self._step == "posting":
            for rank in sorted(self._unposted):
                self._post(rank)
            for rank in sorted(self._unsent):
                self._send_body(rank)
            self._return()
        return self._sequence

    def _find_lost(self) -> None:
        """A slot that an exception left on no list is held, and so recycled when nobody reads it."""
        slots = self._memory.layout.slots
        if len(self._free) + len(self._held) + len(self._lent) < slots:
            self._held |= {*range(slots)} - {*self._free, *self._lent}

    @staticmethod
    def _private(frames: list[Buffer]) -> list[Buffer]:
        return [np.array(np.frombuffer(frame, np.uint8)) for frame in frames]

    def _plan(self, frames: list[Buffer]) -> tuple[int | None, list[int] | None]:
        """The loan that carries the message, if one does; and where in a slot its table and frames go."""
        size = self._memory.layout.slot_bytes
        sizes = [16 * len(frames), *(memoryview(frame).nbytes for frame in frames)]
        best = max(self._loans_in(frames), default=None) if self._loaned else None
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
        at, places = 0, []
        for nbytes in sizes:
            places.append(at)
            at = round_up(at + nbytes, LINE)
        return None, places if places[-1] + sizes[-1] <= size else None

    def _loans_in(self, frames: list[Buffer]) -> Iterator[tuple[int, int]]:
        loans = {slot: nbytes for slot, (nbytes, _) in self._loaned.items() if slot in self._held}
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
                del passed.taken[0]
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
        doorbell = self._memory.doorbell
        while doorbell.try_wait():  # SYNC(doorbell.wait)
            del doorbell.taken[0]
        for slot in [slot for slot, (_, flat) in self._loaned.items() if flat() is None]:
            self._drop_loan(slot)
        for rank in [rank for rank, peer in self._peers.items() if peer.process]:
            self._hear(rank)
        for slot in self._recyclable():
            self._recycle(slot)

    def _hear(self, rank: int) -> None:
        words, peer = self._memory.ranks[rank], self._peers[rank]
        while words.notices.try_wait():  # SYNC(hear.wait)
            # Taken until it is done: hearing a notice again after an exception does no harm.
            notice = words.ring[peer.heard % len(words.ring)]
            if notice == LEFT:
                self._hear_leave(rank, words.left[0])
            elif notice < len(self._holders):
                self._hear_release(rank, notice)
            else:
                raise QuiesceError(
                    f"reader {rank} ({peer}) let go of a slot {notice}: the ring is broken; make it anew"
                )
            peer.heard += 1
            del words.notices.taken[0]
        self._vacate_if_empty(rank)

    def _vacate_if_empty(self, rank: int) -> None:
        if not self._peers[rank].admitted and not any(rank in holders for holders in self._holders):
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

    def _bury(self) -> list[int]:
        """Forget the readers whose processes have ended (R5), and the remote ones whose connection is gone.

        Returns those that had not left.
        """
        for peer in self._peers.values():
            self._probe(peer)
        gone = [rank for rank, peer in self._peers.items() if peer.is_gone()]
        lost = [rank for rank in gone if self._peers[rank].admitted]
        for rank in gone:
            self._exclude(rank)
        return lost

    def _probe(self, peer: _Peer) -> None:
        """Whether the connection of a remote reader still stands is known only by sending."""
        if peer.process is None and peer.identity and time.monotonic() - peer.probed > PROBE_S:
            peer.probed = time.monotonic()
            if not self._say(peer.identity, [pack_head(PING, self._key, peer.nonce, self._sequence)]):
                peer.identity = b""

    def _greet(self) -> None:
        """Hear what came over ZMQ: readers that join, and what remote ones have received."""
        for _ in range(MOST_WORDS):  # a flood must not keep the writer
            # Kept until it is dealt with: to hear it again after an exception does no harm.
            while not self._heard or self._heard[-1].more:
                if not int(self._socket.get(zmq.EVENTS)) & _READABLE:
                    return
                self._heard.extend(map(self._socket.recv, (zmq.NOBLOCK,), (False,)))  # type: ignore[arg-type]
            identity, *parts = (frame.bytes for frame in self._heard)
            rank = next((rank for rank, peer in self._peers.items() if peer.identity == identity), None)
            if parts and parts[0] == HELLO:
                self._hear_hello(identity, Hello.unpack(self._key, parts))
            elif rank is not None and parts == [BYE]:
                self._hear_leave(rank, self._peers[rank].passed)
                self._vacate_if_empty(rank)
            elif rank is not None and len(parts) == 2 and parts[0] == ACK and len(parts[1]) == 8:
                self._peers[rank].passed = int.from_bytes(parts[1], "little")
            self._heard = []

    def _hear_hello(self, identity: bytes, hello: Hello | None) -> None:
        if hello is None:
            return
        objection = ""
        peer = self._peers.get(hello.rank)
        if peer and peer.nonce == hello.nonce:
            return  # heard twice, since an exception came after the first time
        if peer:
            self._probe(peer)
        if peer and peer.is_gone():
            self._exclude(hello.rank)
        elif peer and peer.process:
            self._hear(hello.rank)  # it may have left, before this greeting was sent
        peer = self._peers.get(hello.rank)
        if peer:
            objection = f"rank {hello.rank} is taken by {peer}"
            if not peer.admitted:
                objection += ", which has left but keeps leases; try again when they have ended"
        elif hello.rank >= self._ranks or self._is_local(hello.rank) != bool(hello.pid):
            objection = (
                f"rank {hello.rank} is not one of the ring's {'local' if hello.pid else 'remote'} ranks"
            )
        if objection:
            frames = [objection.encode()]
            self._say(identity, [pack_head(REFUSED, self._key, hello.nonce, 0, frames), *frames])
        else:
            self._admit(hello, identity)

    def _say(self, identity: bytes, parts: Sequence[Buffer], copy: bool = True) -> bool:
        """Send a message to one peer; False if it has hung up."""
        try:
            self._socket.send_multipart([identity, *parts], zmq.NOBLOCK, copy=copy)
        except zmq.ZMQError:
            return False
        except BaseException:
            # It came between two parts, perhaps: what is cut has to end, or the next message is glued to it.
            with suppress(zmq.ZMQError):
                self._socket.send(b"", zmq.NOBLOCK)
            raise
        return True

    def _is_local(self, rank: int) -> bool:
        return rank < self._memory.layout.ranks

    def _is_admitted(self, rank: int) -> bool:
        return rank in self._peers and self._peers[rank].admitted

    def _admitted(self) -> set[int]:
        return {rank for rank, peer in self._peers.items() if peer.admitted}

    def _far(self) -> set[int]:
        return {rank for rank in self._admitted() if not self._is_local(rank)}

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


def _dropped(memory: RingMemory, _: object) -> None:
    # May run anywhere, in any thread, in the middle of anything: so it only wakes who waits for a slot.
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
