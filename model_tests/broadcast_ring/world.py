"""A ring and its readers in one process, each call in a thread that stops at the edges of actions."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from dataclasses import dataclass, field
from typing import Any

import torch
from model_tests.stepper import Stepper, Stop

from quiesce.broadcast_ring import BroadcastRing
from quiesce.events import Event
from quiesce.model import ModelValue
from quiesce.ring_memory import Process, start_time
from quiesce.ring_reader import RemoteReader, RingReader
from quiesce.ring_wire import Hello, RingHandle
from quiesce.ring_writer import CLOSING, LEFT, OVERFLOWED, SLOT

WINDOW = 4
LOCAL, REMOTE = (0, 1), (2,)
SLOTS = (0, 1)
COPIED, LEASED, TOO_LONG = 160, 256, 8192
"""How many numbers a message of each kind has."""
NONE = ModelValue("none")
KINDS = {SLOT: "slot", OVERFLOWED: "body", CLOSING: "close"}
NOTHING = {"kind": "close", "seq": 0, "slot": NONE}
BLANK = {"kind": "body", "seq": 0, "slot": NONE}
ARRIVAL_MS = 5000
WELCOME_MS = 200


def rank_value(rank: int) -> ModelValue:
    return ModelValue(f"r{rank + 1}")


def slot_value(slot: int | None) -> ModelValue:
    return NONE if slot is None else ModelValue(f"s{slot + 1}")


class Body:
    """A process that stands for a reader or the writer: the other watches it, and it can be stopped and killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def start_dying(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Seat:
    """One rank, and who sits there."""

    stepper: Stepper
    reader: RingReader | None = None
    body: Body | None = None
    views: dict[int, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    leased: int | None = None

    def end(self) -> None:
        """The process is gone: it says nothing any more, and its call never ends."""
        if self.reader:
            if hasattr(self.reader, "_releaser"):
                self.reader._releaser._pid = -1
            while self.stepper.running:
                self.stepper.resume(throw=Gone())
            self.views.clear()
            self.reader._closed = True
            self.reader._context.destroy(linger=0)
        if self.body:
            self.body.end()


class Gone(BaseException):
    """Ends the thread of a call whose process is gone."""


def edges(event: Event) -> bool:
    return event.action != "Sleep" and (
        event.phase == "end" or (event.phase == "begin" and event.action in ("Fill", "Copy"))
    )


class World:
    """What the lockstep test acts upon, and what of it corresponds to the variables of the specification."""

    def __init__(self, ring_class: type[BroadcastRing], reader_class: type[RingReader]) -> None:
        self.reader_class = type("Reader", (_Small, reader_class), {})
        self.remote_class = type("Remote", (_Small, RemoteReader), {})
        self.ring = ring_class(
            len(LOCAL), slots=len(SLOTS), slot_bytes=8 * LEASED, window=WINDOW, patience=0.0,
            remote=len(REMOTE), bind=f"ipc://@{secrets.token_hex(8)}",
        )  # fmt: skip
        self.writer = Stepper(edges)
        self.writer_body = Body()
        self.seats = {rank: Seat(Stepper(edges)) for rank in (*LOCAL, *REMOTE)}
        self.loans: dict[int, torch.Tensor] = {}
        self.sent: torch.Tensor | None = None
        self.filling = False

    def join(self, rank: int) -> None:
        seat = self.seats[rank]
        seat.end()
        seat.body = Body() if rank in LOCAL else None
        _Small.pid = seat.body.process.pid if seat.body else 0
        _Small.writer_pid = self.writer_body.process.pid
        seat.reader = (self.reader_class if rank in LOCAL else self.remote_class)(self.ring.handle, rank)
        assert self.ring._socket.poll(ARRIVAL_MS), "the greeting did not arrive"

    def receive(self, rank: int, arrives: bool) -> Stop:
        seat = self.seats[rank]
        reader = seat.reader
        assert reader is not None

        def call() -> Any:
            if reader._cursor is None:
                reader.wait_until_ready(ARRIVAL_MS / 1e3)
            value = reader.receive(ARRIVAL_MS / 1e3 if arrives else 0.0)
            seat.views[int(value[0])] = [value, value.view(8, -1)]  # type: ignore[list-item]
            return int(value[0]) if bool((value == value[0]).all()) else 0

        return seat.stepper.start(call)

    def kill_writer(self) -> None:
        """Its process is gone, with what it had not yet given to the kernel."""
        for seat in self.seats.values():
            if seat.reader and not seat.reader._closed and seat.reader._cursor is None:
                seat.reader._socket.poll(WELCOME_MS)  # the specification knows of no answer that is lost
        while self.writer.running:
            self.writer.resume(throw=Gone())
        self.ring._context.destroy(linger=0)
        self.ring._closed = True
        self.writer_body.end()

    def end(self) -> None:
        self.kill_writer()
        for seat in self.seats.values():
            seat.end()
        self.loans.clear()

    # What the specification's variables are here.

    def view(self) -> dict[str, Any]:
        ring = self.ring
        state = dict.fromkeys(ring._free, "free")
        state |= dict.fromkeys(ring._held, "held") | dict.fromkeys(ring._lent, "lent")
        if self.filling and ring._current is not None:
            state[ring._current] = "writing"
        return {
            "step": "filling" if self.filling else ring._step,
            "current": slot_value(ring._current),
            "sequence": ring._sequence,
            "unsent": {rank_value(rank) for rank in ring._unsent},
            "unposted": {rank_value(rank) for rank in ring._unposted},
            "slot": {slot_value(slot): state[slot] for slot in SLOTS},
            "loaned": {slot_value(slot) for slot in ring._loaned},
            "holders": {slot_value(s): {rank_value(r) for r in ring._holders[s]} for s in SLOTS},
            "admitted": {rank_value(rank) for rank in ring._admitted()},
            "entries": {i: self._entry(i) for i in range(WINDOW)},
            "seats": {rank_value(rank): self._seat(rank) for rank in ring._peers if self._seated(rank)},
            "recyclable": {slot_value(slot) for slot in ring._recyclable()},
        }

    def _seated(self, rank: int) -> bool:
        reader = self.seats[rank].reader
        return reader is not None and reader._cursor is not None

    def _entry(self, index: int) -> dict[str, Any]:
        sequence, what, _, _ = self.ring._memory.entries[index]
        if not sequence:
            return BLANK
        kind = what >> 32
        return {
            "kind": KINDS[kind],
            "seq": sequence,
            "slot": slot_value(what & LEFT if kind == SLOT else None),
        }

    def _seat(self, rank: int) -> dict[str, Any]:
        reader = self.seats[rank].reader
        assert reader is not None
        seat: dict[str, Any] = {"cursor": reader._cursor}
        if rank in LOCAL:
            words, peer = self.ring._memory.ranks[rank], self.ring._peers[rank]
            seat["posts"] = words.posts.value() + reader._tokens
            pending = [words.ring[(peer.heard + i) % len(words.ring)] for i in range(words.notices.value())]
            seat["notices"] = ["leave" if n == LEFT else slot_value(n) for n in pending]
            opened = reader._opened
            seat["opened"] = (
                NOTHING
                if opened is None
                else {
                    "kind": KINDS[opened[0]],
                    "seq": opened[1],
                    "slot": slot_value(opened[2] if opened[0] == SLOT else None),
                }
            )
        return seat


class _Small:
    """Leases small messages, and says that it is the process that stands for it."""

    lease_bytes = 8 * LEASED
    pid = 0
    writer_pid = 0

    def _open_memory(self: Any, handle: RingHandle) -> None:
        super()._open_memory(handle)  # type: ignore[misc]
        self._writer = Process(_Small.writer_pid, start_time(_Small.writer_pid) or 0)

    def _join(self: Any) -> None:
        pid = _Small.pid
        hello = Hello(self.rank, pid, start_time(pid) or 0 if pid else 0, self._nonce)
        self._socket.send_multipart(hello.pack(self._key))
