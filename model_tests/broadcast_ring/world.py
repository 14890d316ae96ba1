"""A ring and its readers in one process, each call in a thread that stops at the edges of actions."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq
from model_tests.stepper import Stepper, Stop

from quiesce.broadcast_ring import BroadcastRing
from quiesce.events import Event
from quiesce.model import ModelValue
from quiesce.ring_codec import over
from quiesce.ring_memory import Process, start_time
from quiesce.ring_reader import RemoteReader, RingReader
from quiesce.ring_wire import HELLO, Hello, RingHandle
from quiesce.ring_writer import CLOSING, LEFT, OVERFLOWED, SLOT

MESSAGE, TOO_LONG = 256, 8192
"""How many numbers a message that fits a slot has, and one that does not."""
NONE = ModelValue("none")
KINDS = {SLOT: "slot", OVERFLOWED: "body", CLOSING: "close"}
NOTHING = {"kind": "close", "seq": 0, "slot": NONE}
BLANK = {"kind": "body", "seq": 0, "slot": NONE}
ARRIVAL_MS = 5000


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
    """One rank, and who sits there: a reader in a thread, whose tensors may die in another one."""

    stepper: Stepper
    dropper: Stepper
    reader: RingReader | None = None
    body: Body | None = None
    views: dict[int, list[tuple[int, torch.Tensor]]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    value: int | None = None

    def end(self) -> None:
        """The process is gone: it says nothing any more, and its call never ends."""
        if self.reader:
            if hasattr(self.reader, "_releaser"):
                self.reader._releaser._pid = -1
                self.reader._releaser._due = list  # type: ignore[method-assign]
                self.reader._releaser.tell = lambda notice: None  # type: ignore[method-assign]
            while self.stepper.running:
                self.stepper.resume(throw=Gone())
            while self.dropper.running:
                self.dropper.resume()
            self.views.clear()
            self.slots.clear()
            self.value = None
            self.reader._closed = True
            self.reader._context.destroy(linger=0)
        if self.body:
            self.body.end()


class Inbox:
    """The writer's socket, of which it is known what has come: it can be waited for though more lies before it."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._come: deque[zmq.Frame] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def await_one(self, kind: bytes) -> bool:
        """Whether a message of this kind came that had not come before."""
        while self._socket.poll(ARRIVAL_MS):
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._come += parts
            if parts[1].bytes == kind:
                return True
        return False

    def get(self, option: int) -> Any:
        return zmq.POLLIN if self._come and option == zmq.EVENTS else self._socket.get(option)

    def poll(self, timeout: int) -> int:
        return zmq.POLLIN if self._come else int(self._socket.poll(timeout))

    def recv(self, flags: int, copy: bool) -> zmq.Frame:
        return self._come.popleft() if self._come else self._socket.recv(flags, copy)


class Gone(BaseException):
    """Ends the thread of a call whose process is gone."""


def edges(event: Event) -> bool:
    return event.action != "Sleep" and (
        event.phase == "end" or (event.phase == "begin" and event.action in ("Fill", "Copy", "Release"))
    )


class World:
    """What the lockstep test acts upon, and what of it corresponds to the variables of the specification."""

    def __init__(
        self,
        ring_class: type[BroadcastRing],
        reader_class: type[RingReader],
        local: Sequence[ModelValue],
        remote: Sequence[ModelValue],
        slots: int,
        views: int,
        window: int,
        mortal: Collection[ModelValue],
        writer_mortal: bool,
    ) -> None:
        self.reader_class = type("Reader", (_Small, reader_class), {})
        self.remote_class = type("Remote", (_Small, RemoteReader), {})
        self.values = [*local, *remote]
        self.local, self.slots, self.views = len(local), slots, views
        self.window, self.mortal = window, mortal
        self.ring = ring_class(
            len(local), slots=slots, slot_bytes=8 * MESSAGE, window=window, patience=0.0, remote=len(remote),
            bind=f"ipc://@{secrets.token_hex(8)}" if remote else None,
        )  # fmt: skip
        self.inbox = self.ring._socket = Inbox(self.ring._socket)  # type: ignore[assignment]
        self.writer = Stepper(edges)
        self.writer_body = Body() if writer_mortal else None
        self.seats = [Seat(Stepper(edges), Stepper(edges)) for _ in self.values]
        self.loans: dict[int, torch.Tensor] = {}
        self.sent: torch.Tensor | None = None
        self.filling = False

    def join(self, rank: int) -> None:
        seat = self.seats[rank]
        seat.end()
        local = rank < self.local
        seat.body = Body() if local and self.values[rank] in self.mortal else None
        _Small.pid = 0 if not local else seat.body.process.pid if seat.body else os.getpid()
        _Small.writer_pid = self.writer_body.process.pid if self.writer_body else os.getpid()
        seat.reader = (self.reader_class if local else self.remote_class)(self.ring.handle, rank)
        self.hear(HELLO)

    def hear(self, kind: bytes) -> None:
        """Wait until what a reader has just said is at the writer."""
        assert self.inbox.await_one(kind), f"no message {kind!r} arrived"

    def receive(self, rank: int, arrives: bool) -> Stop:
        seat = self.seats[rank]
        reader = seat.reader
        assert reader is not None

        def call() -> Any:
            value = reader.receive(ARRIVAL_MS / 1e3 if arrives else 0.0)
            number = int(value[0])
            seat.value = number if bool((value == number).all()) else 0
            if number in seat.slots:
                # By its storage: a torch view of it would keep it alive.
                other = over(value.untyped_storage(), value.dtype, (8, value.numel() // 8))
                seat.views[number] = [value, other][: self.views]  # type: ignore[list-item]

        return seat.stepper.start(call)

    def kill_writer(self) -> None:
        """Its process is gone, with what it had not yet given to the kernel."""
        while self.writer.running:
            self.writer.resume(throw=Gone())
        self.ring._context.destroy(linger=0)
        self.ring._closed = True
        if self.writer_body:
            self.writer_body.end()

    def end(self) -> None:
        self.kill_writer()
        for seat in self.seats:
            seat.end()
        self.loans.clear()

    # What the specification's variables are here.

    def view(self) -> dict[str, Any]:
        ring = self.ring
        state = dict.fromkeys(ring._free, "free")
        state |= dict.fromkeys(ring._held, "held") | dict.fromkeys(ring._lent, "lent")
        if self.filling and ring._current is not None:
            state[ring._current] = "writing"
        value = self.values
        return {
            "step": "filling" if self.filling else ring._step,
            "current": slot_value(ring._current),
            "sequence": ring._sequence,
            "unsent": {value[rank] for rank in ring._unsent},
            "unposted": {value[rank] for rank in ring._unposted},
            "slot": {slot_value(slot): state[slot] for slot in range(self.slots)},
            "loaned": {slot_value(slot) for slot in ring._loaned},
            "holders": {slot_value(s): {value[r] for r in ring._holders[s]} for s in range(self.slots)},
            "admitted": {value[rank] for rank in ring._admitted()},
            "entries": {i: self._entry(i) for i in range(self.window)},
            "recyclable": {slot_value(slot) for slot in ring._recyclable()},
        }

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

    def seat(self, rank: int) -> dict[str, Any]:
        """What is to be seen of a reader."""
        seat = self.seats[rank]
        reader = seat.reader
        found: dict[str, Any] = {"cursor": None, "got": seat.value, "torn": self.torn(rank)}
        if reader is None or reader._cursor is None or rank not in self.ring._peers:
            return found
        found["cursor"] = reader._cursor
        if rank < self.local:
            words, peer = self.ring._memory.ranks[rank], self.ring._peers[rank]
            found["posts"] = words.posts.value() + len(reader._words.posts.taken)
            heard = peer.heard + len(words.notices.taken)
            pending = [words.ring[(heard + i) % len(words.ring)] for i in range(words.notices.value())]
            found["notices"] = tuple("leave" if n == LEFT else slot_value(n) for n in pending)
            opened = reader._opened
            found["opened"] = NOTHING
            if opened is not None:
                slot = slot_value(opened[2] if opened[0] == SLOT else None)
                found["opened"] = {"kind": KINDS[opened[0]], "seq": opened[1], "slot": slot}
        return found

    def torn(self, rank: int) -> set[int]:
        """The messages that a reader has a lease of, and that are not what was published."""
        views = self.seats[rank].views.items()
        return {number for number, tensors in views if not all(bool((t == number).all()) for t in tensors)}


class _Small:
    """Leases small messages unless it is told not to, and says that it is the process that stands for it."""

    lease_bytes = 8 * MESSAGE
    pid = 0
    writer_pid = 0

    def _open_memory(self: Any, handle: RingHandle) -> None:
        super()._open_memory(handle)  # type: ignore[misc]
        self._writer = Process(_Small.writer_pid, start_time(_Small.writer_pid) or 0)

    def _join(self: Any) -> None:
        pid = _Small.pid
        hello = Hello(self.rank, pid, start_time(pid) or 0 if pid else 0, self._nonce)
        self._socket.send_multipart(hello.pack(self._key))
