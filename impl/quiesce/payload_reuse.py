"""Messages over ZMQ from payload buffers that are encoded into again and again: `spec/PayloadReuse.tla` in code.

Methods marked as actions stand in the order of the specification, and the comments cite its rules P1 to P8.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import zmq
import zmq.asyncio

from quiesce.borrowing import Counters, age
from quiesce.codec import ABORT, Buffer, Encoder
from quiesce.errors import Closed, NotQuiescent, PeerDied, QuiesceTimeout
from quiesce.events import action
from quiesce.lifecycle import FREE_LIMIT, BufferPool, Loan, Tracker, seconds
from quiesce.turns import Turns, abandon_at_exit

_log = logging.getLogger(__name__)

COPY_THRESHOLD = 65_536
"""Bytes from which a frame is sent without copying; below, libzmq's copy is cheaper than a tracker."""
TIMEOUT = 10.0
"""Seconds that sending and receiving wait unless told otherwise."""
_LOANS_LOOKED_AT = 4  # a message: enough to keep up, and flat in the number open
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 10e-3  # seconds between two tries at a peer that has no room
_MOMENT = 1.0  # seconds after the linger period in which libzmq lets go of what it could not send
_EARLY = 5e-3  # seconds before its end, to tell what was sent from what is dropped then
_ALIGNMENT = 64  # bytes between the starts of tensors copied into a buffer
_LAST, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # joining enums takes longer than sending


class PayloadBuffer:
    """What is encoded into: the payload, and a body for copies of large tensors, which only grows."""

    def __init__(self) -> None:
        self.payload = bytearray()
        self.body = bytearray()
        self._views: list[memoryview] = []

    def __len__(self) -> int:
        return len(self.payload) + len(self.body)

    def view(self, memory: bytearray, start: int, stop: int) -> memoryview:
        """A view of part of the buffer, which cannot be resized until `reclaim`."""
        view = memoryview(memory)[start:stop]
        self._views.append(view)
        return view

    def keep(self, view: memoryview) -> memoryview:
        """Keep memory that is not the buffer's alive, and then released, with it."""
        self._views.append(view)
        return view

    def reclaim(self) -> None:
        """Release the views; explicitly, because pyzmq drops its references a moment after the tracker fired."""
        for view in self._views:
            view.release()
        self._views.clear()


class _Frame(NamedTuple):
    """A frame to send, and whose memory it is.

    "buffer": reused memory, or kept with it until its trackers are done; "caller": lent by the caller; "frame": copied
    by libzmq when it is sent.
    """

    view: memoryview
    owner: str


@dataclass
class _Message:
    """A message on its way out: what to send, and the tracker of each part sent so far."""

    number: int
    buffer: PayloadBuffer
    frames: list[_Frame] = field(default_factory=list)
    trackers: list[Tracker] = field(default_factory=list)
    begun: bool = False
    loan: Loan = field(default_factory=lambda: Loan("nothing"))

    def over(self, owner: str) -> list[Tracker]:
        return [
            tracker
            for tracker, frame in zip(self.trackers, self.frames, strict=False)
            if frame.owner == owner
        ]


def _number(sender: PayloadSender, result: object, message: _Message, *rest: object) -> dict[str, object]:
    return {"message": message.number, "buffer": id(message.buffer)}


def _encoded(sender: PayloadSender, result: object, message: _Message, *rest: object) -> dict[str, object]:
    shape = [[f.view.nbytes >= COPY_THRESHOLD, f.owner == "caller"] for f in message.frames]
    return {"message": message.number, "buffer": id(message.buffer), "shape": shape}


def _part(sender: PayloadSender, sent: bool, message: _Message) -> dict[str, object]:
    tracker = message.trackers[-1] if sent else _DONE
    return {
        "message": message.number,
        "part": len(message.trackers),
        "of": len(message.frames),
        "sent": sent,
        "tracker": None if tracker is _DONE else id(tracker),
    }


class PayloadSender:
    """Sends structures with tensors over a ZMQ socket of any type that sends, but REQ and REP, from buffers it reuses.

    The sender takes the socket over: nobody else may use it, and `close` closes it. Calls from several threads are
    taken one after the other. `send` copies the caller's tensors before it returns; `lend` does not, and returns a
    `Loan` that says when they may be written again. `encoder` decides what travels as a frame of its own, and
    `free_limit` is how many reusable buffers are kept.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], *, encoder: Encoder | None = None, free_limit: int = FREE_LIMIT
    ) -> None:
        check_socket("a sender", socket)
        if isinstance(socket, zmq.asyncio.Socket):
            raise TypeError("a sender needs a plain zmq.Socket; give it zmq.Socket.shadow(socket)")
        if socket.type in (zmq.PULL, zmq.SUB):
            raise ValueError(
                f"a {zmq.SocketType(socket.type).name} socket cannot send; its peer has the sender"
            )
        if socket.type in (zmq.REQ, zmq.REP):
            raise ValueError("REQ and REP sockets cannot end a message that was cut; use DEALER and ROUTER")
        self._socket = socket
        self._encoder = encoder or Encoder()
        self._turns = Turns("this sender")
        abandon_at_exit(self)
        self._closed = False
        self._number = self._waits = 0
        self._loans: deque[Loan] = deque()
        self.pool = BufferPool(PayloadBuffer, free_limit, size=len, settled=PayloadBuffer.reclaim)

    def send(self, obj: object, *, timeout: float = TIMEOUT, prefix: Sequence[bytes] = ()) -> None:
        """Send `obj`; when this returns, the caller may write its tensors.

        `prefix` are frames to send in front, such as the routing id that a ROUTER socket needs. Waits at most `timeout`
        seconds for room. Raises EncodeError and QuiesceTimeout, after which nothing was sent; PeerDied, after which
        the message does not arrive; Closed; WrongProcess after a fork. The stream is in step after every error.
        """
        self._transmit(obj, False, timeout, prefix)

    def lend(self, obj: object, *, timeout: float = TIMEOUT, prefix: Sequence[bytes] = ()) -> Loan:
        """Send `obj` without copying its large tensors; they must not be written until the loan returned is done.

        Over inproc that is when the receiver dropped what it received. Tensors below `COPY_THRESHOLD` bytes, and those
        that have to be copied because they are not contiguous, are not lent. Raises as `send` does; what had been lent
        by then stays in `loans`.
        """
        return self._transmit(obj, True, timeout, prefix).loan

    @property
    def loans(self) -> tuple[Loan, ...]:
        """The loans that are not done, those of messages that failed halfway included."""
        return tuple(loan for loan in tuple(self._loans) if not loan.done)

    def counters(self) -> Counters:
        """What is lent now; a fallback is a buffer that had to be made, a wait one for a peer to have room."""
        lent = {loan.since: f"the reader of {loan.what}" for loan in self.loans}
        since = self.pool.since  # once: other threads change it
        if since is not None:
            lent[since] = "the reader of a reused buffer"
        first = min(lent, default=None)
        return Counters(
            in_flight=self.pool.pending + len(self.loans),
            oldest_s=age(first),
            holder="" if first is None else lent[first],
            messages=self._number,
            fallbacks=self.pool.made,
            waits=self._waits,
        )

    def _transmit(self, obj: object, lend: bool, timeout: float, prefix: Sequence[bytes]) -> _Message:
        if isinstance(prefix, (bytes, bytearray, memoryview, str)):
            raise TypeError(f"prefix is {prefix!r}; give a list of frames, such as [b'id']")
        heading = [_Frame(memoryview(bytes(memoryview(frame))), "frame") for frame in prefix]
        deadline = time.monotonic() + seconds(timeout)
        return self._turns.take(timeout, lambda: self._transmit_now(obj, lend, deadline, timeout, heading))

    def _transmit_now(
        self, obj: object, lend: bool, deadline: float, timeout: float, heading: list[_Frame]
    ) -> _Message:
        self._check()
        self.pool.settle()
        for _ in range(min(_LOANS_LOOKED_AT, len(self._loans))):
            if not self._loans[0].done:
                self._loans.rotate(-1)
            else:
                self._loans.popleft()
        self._number += 1
        message = _Message(self._number, self.pool.take())
        if lend:
            message.loan = Loan(f"message {message.number}", self.touch)
            # Before the first part goes out: whatever exception comes, the caller can find it.
            self._loans.append(message.loan)
        try:
            self._encode(message, obj, lend)
            message.frames[:0] = heading
            self._send_parts(message, deadline, timeout)
        except BaseException as error:
            # A traceback keeps the frames it passed alive, and with them what we want to see settled.
            traceback.clear_frames(error.__traceback__)
            if not message.begun:
                message.loan.clear()
                message.buffer.reclaim()
                self.pool.give_back(message.buffer)
            else:
                self._abort(message)
                _log.info("message %d was given up: %s", message.number, error)
            raise
        finally:
            if message.begun:
                self.pool.lend(message.buffer, self._asked(message))
        return message

    def _owe(self, message: _Message, tracker: Tracker, frame: _Frame) -> None:
        """P7: what the caller has to wait for before it writes its tensors."""
        message.loan.add(tracker, frame.view)

    @action("Encode", _encoded)
    def _encode(self, message: _Message, obj: object, lend: bool) -> None:
        buffer = message.buffer
        buffer.reclaim()
        parts = self._encoder.encode_into(obj, buffer.payload)
        message.frames.append(_Frame(buffer.view(buffer.payload, 0, len(buffer.payload)), "buffer"))
        copied = [] if lend else [p for p in parts if p.aliases and p.view.nbytes >= COPY_THRESHOLD]
        room = sum(_aligned(part.view.nbytes) for part in copied)
        if len(buffer.body) < room:
            buffer.body = bytearray(room)
        start = 0
        for part in parts:
            if part.view.nbytes < COPY_THRESHOLD:
                message.frames.append(_Frame(part.view, "frame"))
            elif not part.aliases:
                message.frames.append(_Frame(buffer.keep(part.view), "buffer"))
            elif lend:
                message.frames.append(_Frame(part.view, "caller"))
            else:
                view = buffer.view(buffer.body, start, start + part.view.nbytes)
                view[:] = part.view
                message.frames.append(_Frame(view, "buffer"))
                start += _aligned(part.view.nbytes)

    def _send_parts(self, message: _Message, deadline: float, timeout: float) -> None:
        nap = _SHORTEST_NAP
        while not self._send_part(message):
            self._waits += nap == _SHORTEST_NAP
            left = deadline - time.monotonic()
            with translating(f"message {message.number} was not sent"):
                room = left > 0 and self._socket.poll(max(1, int(left * 1000)), zmq.POLLOUT)
            if not room:
                self._send_times_out(message, timeout)
            # A ROUTER socket says that there is room if any of its peers has some.
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP)
        while len(message.trackers) < len(message.frames):
            if not self._send_part(message):
                self._part_refused(message)

    @action("SendPart", _part)
    def _send_part(self, message: _Message) -> bool:
        """P3: send the next part; False if it was refused, which only the first is for want of room."""
        frame = message.frames[len(message.trackers)]
        first = not message.trackers
        flags = _MORE if len(message.trackers) + 1 < len(message.frames) else _LAST
        data: Buffer = frame.view
        copy = frame.view.nbytes < COPY_THRESHOLD
        tracker: Tracker = _DONE
        if not copy:
            data = zmq.Frame(data, track=True, copy=False)
            tracker = data.tracker
        # Noted before it is sent, and taken back only if the socket says that it refused the part: whatever exception
        # comes in between, the part may have been taken.
        if frame.owner == "caller":
            self._owe(message, tracker, frame)
        message.begun = True
        message.trackers.append(tracker)
        try:
            self._socket.send(data, flags, copy=copy)
        except zmq.Again:
            message.trackers.pop()
            message.begun = not first
            return False
        except zmq.ZMQError as error:
            message.trackers.pop()
            message.begun = not first
            raise _translated(error, f"message {message.number} was not sent") from None
        finally:
            # An exception's traceback must not keep the frame, or its tracker would not fire.
            del data
        return True

    @action("SendTimesOut", _number)
    def _send_times_out(self, message: _Message, timeout: float) -> None:
        """P2: nothing was sent."""
        raise QuiesceTimeout(
            f"message {message.number} was not sent: no peer took it within {timeout} s (none connected, or all at "
            "their high-water mark); nothing was lost, send it again"
        )

    @action("PartRefused", _number)
    def _part_refused(self, message: _Message) -> None:
        """P3: libzmq dropped what was begun, and the rest must not follow."""
        self._forget(message)
        where = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        raise PeerDied(
            f"message {message.number} was not delivered: its peer ({where}) went away after {len(message.trackers)} "
            f"of {len(message.frames)} frames; later messages are not affected"
        )

    @action("Abort", _number)
    def _abort(self, message: _Message) -> None:
        """P3: end a message that was cut off: the next one must neither be glued to it nor swallowed for it."""
        try:
            self._socket.send(ABORT, zmq.NOBLOCK)
        except zmq.Again:
            # The pipe is gone, and what was begun in it; or all had been sent, and there is no room for the mark.
            if len(message.trackers) < len(message.frames):
                self._forget(message)
        except zmq.ZMQError:
            # The socket or its context is closed.
            return

    def _forget(self, message: _Message) -> None:
        """P4: libzmq leaks the parts of a message that it refuses in the middle, and their trackers never fire.

        Nor does anybody read them, since parts are shown to a reader only with the last one.
        """
        message.trackers = [_DONE] * len(message.trackers)
        message.loan.clear()

    def _asked(self, message: _Message) -> list[Tracker]:
        """P4: the trackers of every frame over the reused memory that was sent."""
        return message.over("buffer")

    def settle(self) -> int:
        """P5: recycle every buffer that nobody reads any more, and return how many were."""

        def look_at_all() -> int:
            self._check()
            self._look()
            return self.pool.settle(self.pool.pending)

        return self._turns.take(TIMEOUT, look_at_all)

    def touch(self) -> None:
        """Let the socket notice that a peer died. While another call uses the socket, that call does."""
        self._turns.check_process()
        if not self._turns.mine:
            with suppress(QuiesceTimeout):
                self._turns.take(0.0, lambda: None if self._closed else self._look())

    @action("Touch")
    def _look(self) -> None:
        """P5: without this, trackers of frames for a peer that died never fire."""
        with translating("nothing was settled"):
            self._socket.get(zmq.EVENTS)

    @action("Close")
    def _close(self, timeout: float) -> None:
        """P8: close so that every tracker fires, after `timeout` seconds at the latest."""
        self._socket.close(linger=int(min(timeout * 1000, 2**31 - 1)))

    def close(self, timeout: float = 5.0) -> None:
        """Close the socket, giving what is queued `timeout` seconds to be sent, and wait until nothing is read.

        What is not sent by then libzmq drops; a warning is logged if it shows, as it does of large frames. Sent is not
        received: over ipc libzmq drops what the kernel still has for a receiver that is at its `RCVHWM`. Raises
        NotQuiescent if memory is still read a second later, which a receiver in this process (inproc) can cause;
        closing again goes on waiting. QuiesceTimeout if another thread keeps using the sender.
        """
        deadline = time.monotonic() + seconds(timeout)
        self._turns.take(timeout, lambda: self._close_now(deadline))

    def _abandon(self) -> None:
        self.close(timeout=0.0)

    def _close_now(self, deadline: float) -> None:
        where = ""
        if not self._closed:
            with suppress(zmq.ZMQError):
                where = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            self._close(_left(deadline))
            self._closed = True
        if not (unsent := self._still_read(deadline - _EARLY)):
            return
        if held := self._still_read(deadline + _MOMENT):
            raise NotQuiescent(
                f"still being read after closing: {', '.join(held)}. A receiver in this process holds frames of them, "
                "or libzmq lost them with a peer that died; drop what was received, then close again"
            )
        # Over inproc it stays with the receiver, who may have taken it meanwhile.
        if where and not where.startswith("inproc:"):
            _log.warning(
                "lost as far as is known: %s. The sender for %s was closed, or the interpreter exited, before it was "
                "sent; close with more time, while there is a peer",
                ", ".join(unsent),
                where,
            )

    def _still_read(self, deadline: float) -> list[str]:
        """Wait until nothing is, and say what is at the deadline."""
        held, lent = [], []
        try:
            self.pool.close(_left(deadline))
        except NotQuiescent:
            held.append(f"{self.pool.pending} buffer(s)")
        for loan in self.loans:
            try:
                loan.wait(_left(deadline))
            except QuiesceTimeout:
                lent.append(loan.what)
        if lent:
            held.append(f"{len(lent)} loan(s), the first of {lent[0]}")
        return held

    def _check(self) -> None:
        if self._closed:
            raise Closed("this sender was closed")

    def __enter__(self) -> PayloadSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except NotQuiescent:
            if error is None:
                raise


class _AlwaysDone:
    done = True

    def wait(self, timeout: float) -> None:
        return None


_DONE = _AlwaysDone()


def check_socket(whose: str, socket: object) -> None:
    """TypeError unless it is a ZMQ socket."""
    if not isinstance(socket, zmq.Socket):
        raise TypeError(
            f"{whose} needs a zmq.Socket, not a {type(socket).__name__}; make one with zmq.Context().socket(...), and "
            "bind or connect it"
        )


def _left(deadline: float) -> float:
    return max(round(deadline - time.monotonic(), 3), 0.0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _translated(error: zmq.ZMQError, what: str) -> Exception:
    if error.errno == zmq.EHOSTUNREACH:
        return PeerDied(f"{what}: no peer has the routing id it is for")
    if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
        return Closed(f"{what}: the socket or its context was closed")
    return error


@contextmanager
def translating(what: str) -> Iterator[None]:
    """Raise this library's errors for those of a socket that is gone."""
    try:
        yield
    except zmq.Again:
        raise
    except zmq.ZMQError as error:
        raise _translated(error, what) from None
