"""Receiving what a `PayloadSender` sent: sync and asyncio, a message whole or not at all."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import zmq
import zmq.asyncio

from quiesce.codec import Decoder, is_abort
from quiesce.errors import Closed, DecodeError, QuiesceTimeout
from quiesce.lifecycle import seconds
from quiesce.payload_reuse import TIMEOUT, check_socket, translating
from quiesce.turns import Turns

T = TypeVar("T")
_NOBLOCK = int(zmq.NOBLOCK)


@dataclass(frozen=True)
class Received(Generic[T]):
    """A message as it arrived.

    `prefix` are the frames in front of it, such as a routing id. `aliases_sender` says that tensors of `value` may be
    the sender's own memory (inproc): a write on either side may show on the other, and the sender waits for their end.
    """

    value: T
    prefix: tuple[bytes, ...]
    aliases_sender: bool


class _Receiver(Generic[T]):
    def __init__(
        self, socket: zmq.Socket[Any], decoder: Decoder[T] | None, prefix: int, plain: zmq.Socket[bytes]
    ) -> None:
        if socket.type in (zmq.PUSH, zmq.PUB):
            raise ValueError(
                f"a {zmq.SocketType(socket.type).name} socket cannot receive; its peer has the receiver"
            )
        if not isinstance(prefix, int) or prefix < 0:
            raise ValueError(f"prefix is {prefix!r}; it is the number of frames in front of a message")
        self._socket = socket
        self._plain = plain
        self._turns = Turns("this receiver")
        self._decoder: Decoder[Any] = decoder or Decoder()
        self._prefix = prefix
        self._unexpected = socket.type == zmq.ROUTER and not prefix
        self.aborted = 0
        """Messages that their sender gave up halfway, and that were passed over."""

    def _take(self) -> Received[T] | None:
        """The next message if there is one: taken as a whole or not at all, whatever interrupts it."""
        self._turns.check_process()
        while True:
            frames: list[zmq.Frame] = []
            try:
                more = True
                with translating("nothing was received"):
                    while more:
                        frames.append(self._plain.recv(_NOBLOCK, copy=False))
                        more = frames[-1].more
            except zmq.Again:
                return None
            except Closed:
                raise
            except BaseException:
                while self._plain.get(zmq.RCVMORE):
                    self._plain.recv(zmq.NOBLOCK)
                raise
            prefix, body = frames[: self._prefix], frames[self._prefix :]
            # A message may be cut within its prefix, too: no whole message ends with an empty frame.
            if is_abort(body) or (not body and not len(frames[-1])):
                self.aborted += 1
                continue
            try:
                value, shared = self._decoder.decode_with_report(body)
            except DecodeError as error:
                if not self._unexpected:
                    raise
                raise DecodeError(
                    f"{error}; a ROUTER socket puts a routing id in front: pass prefix=1"
                ) from error
            return Received(value, tuple(f.bytes for f in prefix), bool(shared) and _is_inproc(body[0]))

    def _nothing_came(self, timeout: float) -> QuiesceTimeout:
        where = self._plain.getsockopt_string(zmq.LAST_ENDPOINT)
        return QuiesceTimeout(f"no message came from {where} within {timeout} s; call again to go on waiting")

    def _close(self) -> None:
        self._socket.close(linger=0)


class PayloadReceiver(_Receiver[T]):
    """Receives what a `PayloadSender` sent, on a ZMQ socket of any type that receives. Threads take turns.

    `decoder` says which type to build and whether tensors may share memory with the frames; `prefix` is how many frames
    stand in front of each message (1 on a ROUTER socket, whose first frame is the routing id).
    """

    @overload
    def __init__(
        self: PayloadReceiver[Any], socket: zmq.Socket[bytes], decoder: None = None, *, prefix: int = 0
    ) -> None: ...
    @overload
    def __init__(
        self: PayloadReceiver[T], socket: zmq.Socket[bytes], decoder: Decoder[T], *, prefix: int = 0
    ) -> None: ...
    def __init__(
        self, socket: zmq.Socket[bytes], decoder: Decoder[Any] | None = None, *, prefix: int = 0
    ) -> None:
        check_socket("a receiver", socket)
        if isinstance(socket, zmq.asyncio.Socket):
            raise TypeError("this socket is for asyncio; use AsyncPayloadReceiver")
        super().__init__(socket, decoder, prefix, socket)

    def receive(self, timeout: float = TIMEOUT) -> Received[T]:
        """The next message. QuiesceTimeout if none came within `timeout` seconds.

        Raises DecodeError for a message that is not one of this library's, or is inconsistent; it is gone then, and the
        next call returns the next message. Raises Closed. An exception that comes from outside while it is decoded (a
        signal handler that raises) takes the message with it.
        """
        deadline = time.monotonic() + seconds(timeout)
        return self._turns.take(timeout, lambda: self._receive_until(deadline, timeout))

    def close(self) -> None:
        """Close the socket. Messages already received stay valid. QuiesceTimeout if another thread keeps receiving."""
        self._turns.take(TIMEOUT, self._close)

    def _receive_until(self, deadline: float, timeout: float) -> Received[T]:
        while (received := self._take()) is None:
            left = deadline - time.monotonic()
            with translating("nothing was received"):
                ready = left > 0 and self._socket.poll(max(1, int(left * 1000)))
            if not ready:
                raise self._nothing_came(timeout)
        return received

    def __enter__(self) -> PayloadReceiver[T]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsyncPayloadReceiver(_Receiver[T]):
    """`PayloadReceiver` for a `zmq.asyncio.Socket`. A cancelled `receive` has taken nothing."""

    @overload
    def __init__(
        self: AsyncPayloadReceiver[Any], socket: zmq.asyncio.Socket, decoder: None = None, *, prefix: int = 0
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncPayloadReceiver[T], socket: zmq.asyncio.Socket, decoder: Decoder[T], *, prefix: int = 0
    ) -> None: ...
    def __init__(
        self, socket: zmq.asyncio.Socket, decoder: Decoder[Any] | None = None, *, prefix: int = 0
    ) -> None:
        check_socket("a receiver", socket)
        if not isinstance(socket, zmq.asyncio.Socket):
            raise TypeError("this socket is not for asyncio; use PayloadReceiver")
        super().__init__(socket, decoder, prefix, zmq.Socket.shadow(socket))
        self._events = socket

    async def receive(self, timeout: float = TIMEOUT) -> Received[T]:
        """The next message; raises as `PayloadReceiver.receive` does."""
        deadline = time.monotonic() + seconds(timeout)
        while (received := self._take()) is None:
            left = deadline - time.monotonic()
            with translating("nothing was received"):
                ready = left > 0 and await self._poll(max(1, int(left * 1000)))
            if not ready:
                raise self._nothing_came(timeout)
        return received

    def close(self) -> None:
        """Close the socket, also while a task waits in `receive`. Messages already received stay valid."""
        self._close()

    async def _poll(self, milliseconds: int) -> bool:
        """Wait for a message. Closed, rather than CancelledError, if the receiver is closed meanwhile."""
        polled = asyncio.ensure_future(self._events.poll(milliseconds))
        try:
            # Not awaited itself: a socket that is closed cancels it, which is no cancellation of this task.
            await asyncio.wait([polled])
        finally:
            polled.cancel()
        if polled.cancelled():
            raise Closed("nothing was received: the receiver was closed meanwhile")
        return bool(polled.result())

    async def __aenter__(self) -> AsyncPayloadReceiver[T]:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()


def _is_inproc(frame: zmq.Frame) -> bool:
    # Over ipc and tcp the handshake left its properties on every frame; inproc has no handshake.
    try:
        frame.get("Socket-Type")
    except zmq.ZMQError:
        return True
    return False
