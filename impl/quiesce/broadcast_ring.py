"""The broadcast ring: one writer, many readers, tensors in shared memory.

This is what a writer calls; its actions are in `quiesce.ring_writer`, and the readers' end is `quiesce.ring_reader`.
Between calls nothing runs: the writer hears its readers, admits new ones and forgets dead ones while it is in
`publish`, `empty` or `wait_until_ready`.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import zmq

from quiesce.borrowing import Counters, age
from quiesce.errors import Closed, NotQuiescent, PeerDied, QuiesceTimeout, ResourceExhausted, WrongProcess
from quiesce.lifecycle import seconds
from quiesce.ring_codec import over
from quiesce.ring_memory import SLICE_S, Layout, RingMemory, round_up
from quiesce.ring_wire import (
    DEFAULT_TIMEOUT_S,
    LONGEST_WORD,
    Codec,
    Deadline,
    RingHandle,
    context,
    new_secret,
    opening,
)
from quiesce.ring_writer import BODY_WINDOW, LOAN_AT, RingWriter
from quiesce.turns import Turns, abandon_at_exit

R = TypeVar("R")
_log = logging.getLogger(__name__)


class BroadcastRing(RingWriter):
    """The writing end: `publish` to all readers, or build a tensor in the ring with `empty` and publish that.

    `readers` processes of this machine take ranks 0, 1, ...; `remote` readers, reached over `bind` (an endpoint such
    as "tcp://127.0.0.1:*"), take the ranks after them. There are `slots` pieces of memory of `slot_bytes` bytes each,
    reserved at once. A message that finds no slot, because it is larger or because leases keep all of them for
    longer than `patience` seconds, is sent over ZMQ instead. `window` is how many messages a reader may be
    behind, less one; a power of two. `spin` is how many seconds a waiting writer looks before it sleeps. The first
    message's number is one more than `first_sequence`. ResourceExhausted if there is no memory for the slots,
    ValueError for what cannot be. Methods may be called by any thread of the process that made the ring.
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
        patience, spin = seconds(patience), seconds(spin)
        # Room beside the largest tensor for the pickle of its message.
        layout = Layout(
            readers, slots, window, round_up(slot_bytes + 2 * LOAN_AT, mmap.ALLOCATIONGRANULARITY)
        )
        self._codec = Codec(serializer)
        key = new_secret()
        memory = RingMemory.create(layout, key)
        self._pid = os.getpid()
        self._patience = patience
        self._turn = Turns("this ring")
        self._context = context()
        with opening(self._context):
            socket = self._context.socket(zmq.ROUTER)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDHWM, 0)  # what is in flight is bounded by the windows
            socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_WORD)
            endpoint = f"ipc://@quiesce-{secrets.token_hex(16)}"
            socket.bind(endpoint)
            remote_endpoint = ""
            if bind is not None:
                socket.bind(bind)
                remote_endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.handle = RingHandle(
            self._pid,
            memory.fd,
            readers,
            remote,
            endpoint,
            remote_endpoint,
            serializer,
            key.hex(),
        )
        """What other processes attach with."""

        self._closed = False
        abandon_at_exit(self)
        self._lent_at: dict[int, float] = {}
        self._messages = self._overflows = self._waits = 0
        self._waited = False
        super().__init__(memory, key, socket, remote, spin, first_sequence)

    def wait_until_ready(self, timeout: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until every rank has a reader; what is published before goes only to those already there.

        PeerDied if a reader dies meanwhile, QuiesceTimeout, naming the missing, after `timeout` seconds. A reader
        that has left is missing.
        """
        self._in_turn(timeout, self._await_readers)

    def _await_readers(self, deadline: Deadline) -> None:
        while True:
            self._collect()
            self._greet()
            lost = self._bury()
            if lost:
                raise PeerDied(
                    f"reader {', '.join(map(str, lost))} ended before all were ready; start it again"
                )
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
        flat = self._in_turn(timeout, lambda deadline: self._await_loan(nbytes, deadline))
        return over(torch.from_numpy(flat).untyped_storage(), dtype, shape)

    def _await_loan(self, nbytes: int, deadline: Deadline) -> Any:
        slot = self._await_slot(deadline)
        if slot is None:
            raise QuiesceTimeout(f"no slot came free within {deadline.seconds:g} s; {self._who_holds()}")
        return self._loan(slot, nbytes)

    def publish(self, obj: object, timeout: float = DEFAULT_TIMEOUT_S) -> int:
        """Send `obj` to every reader that is attached; returns its sequence number.

        The caller may change its memory when this returns, except that of a tensor made by `empty`. After
        QuiesceTimeout (a reader is too far behind; the message says which and how far) or EncodeError nothing
        was sent, to nobody.
        """
        return self._in_turn(timeout, lambda deadline: self._publish_now(obj, deadline))

    def _publish_now(self, obj: object, deadline: Deadline) -> int:
        self._greet()
        frames = self._codec.encode(obj)
        loan, plan = self._plan(frames)
        self._await_room(deadline, self._memory.layout.window if plan else BODY_WINDOW)
        slot = loan
        if slot is None and plan is not None:
            patience = Deadline(min(deadline.left, self._patience))
            slot = self._await_slot(patience)
            if slot is None:
                self._await_room(deadline, BODY_WINDOW)
        if slot is None or plan is None:
            self._overflow(frames)
            self._overflows += 1
            why = "it is too large" if plan is None else "no slot came free"
            _log.debug("message %d goes beside the slots: %s", self._sequence, why)
        else:
            try:
                self._take(slot)
                self._fill(slot, frames, plan)
            except BaseException:
                self._give_up(slot)
                raise
            self._publish(slot, frames, plan)
            self._lent_at[slot] = time.monotonic()
        self._messages += 1
        return self._complete()

    def counters(self) -> Counters:
        """Which slots are lent; a fallback is a message sent beside the slots, a wait one for a reader."""
        lent = {slot: self._lent_at[slot] for slot in tuple(self._lent) if slot in self._lent_at}
        first = min(lent, key=lambda slot: lent[slot], default=None)
        holder = ""
        if first is not None:
            ranks = sorted(self._holders[first])
            holder = (
                ", ".join(f"reader {rank} ({self._peers.get(rank, 'gone')})" for rank in ranks)
                or "the writer"
            )
        return Counters(
            in_flight=len(lent),
            oldest_s=age(None if first is None else lent[first]),
            holder=holder,
            messages=self._messages,
            fallbacks=self._overflows,
            waits=self._waits,
        )

    def exclude(self, rank: int) -> None:
        """Forget a remote reader that has become unreachable; a local one is forgotten only when it has ended."""
        self._in_turn(DEFAULT_TIMEOUT_S, lambda deadline: self._exclude_now(rank))

    def _exclude_now(self, rank: int) -> None:
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

        Bodies on their way are given `timeout` seconds. Nobody can attach any more. The memory is freed with the ring,
        its readers and the last lease.
        """
        if self._memory.fd >= 0 and os.getpid() == self._pid:
            deadline = Deadline(timeout)
            self._turn.take(timeout, lambda: self._close_now(deadline))

    def _close_now(self, deadline: Deadline) -> None:
        self._complete()
        if not self._closed:
            self._greet()  # who has greeted is let in, and told that this is the end
            self._close()
            self._closed = True
        self._complete()
        # What a remote reader has yet to receive dies with the connection.
        while not self._context.closed and self._remote_behind() and not deadline.over:
            self._socket.poll(int(1e3 * min(deadline.left, SLICE_S)))
            self._greet()
        self._context.destroy(linger=int(min(1e3 * deadline.left, 2**31 - 1)))
        self._memory.close()

    def _abandon(self) -> None:
        """Without a word: readers find the writer dead, and what of this they have received is whole."""
        self._turn.take(1.0, self._destroy)

    def _destroy(self) -> None:
        self._closed = True
        self._context.destroy(linger=0)
        self._memory.close()

    def __enter__(self) -> BroadcastRing:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _bury(self) -> list[int]:
        lost = super()._bury()
        for rank in lost:
            _log.info("reader %d has ended and is forgotten", rank)
        return lost

    def _wait(self, deadline: Deadline, peers: list[Any]) -> None:
        self._waits += not self._waited
        self._waited = True
        super()._wait(deadline, peers)

    def _in_turn(self, timeout: float, call: Callable[[Deadline], R]) -> R:
        """One caller at a time, in the process that made the ring; what it waits for the others counts."""
        deadline = Deadline(timeout)
        if os.getpid() != self._pid:
            raise WrongProcess(
                "the ring was made in another process; create one here, or attach by its handle"
            )
        return self._turn.take(timeout, lambda: call(self._begin(deadline)))

    def _begin(self, deadline: Deadline) -> Deadline:
        if self._closed:
            raise Closed("the ring is closed")
        self._complete()
        self._find_lost()
        self._waited = False
        return deadline
