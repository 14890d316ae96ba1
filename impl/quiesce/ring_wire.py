"""What writer and readers of a broadcast ring say to each other over ZMQ: greetings, bodies, acknowledgements.

Connections are known by the ring's secret: a greeting, a welcome and the head of every body carry a digest that
only its holders can make, so that no pickle is loaded that somebody else sent. The bytes of tensors are not
digested; over a network that is not trusted, tunnel the connection.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

from quiesce.codec import Buffer, Decoder, Encoder
from quiesce.errors import DecodeError, ResourceExhausted
from quiesce.ring_codec import PickleCodec
from quiesce.ring_memory import digest

HELLO, BYE, ACK, WELCOME, REFUSED, BODY, CLOSE, PING = b"H", b"B", b"A", b"W", b"R", b"D", b"C", b"P"
LONGEST_WORD = 256
"""Bytes of the longest part that a reader says; a connection on which a longer one comes is closed."""
DEFAULT_TIMEOUT_S = 30.0
MODULUS = 1 << 64
"""Sequence numbers are counted modulo this."""
_HELLO = struct.Struct("<IQQ16s16s")
_HEAD = struct.Struct("<cQ16s")


class Codec:
    """How objects become frames: `pickle` between processes that trust each other, `msgpack` otherwise."""

    NAMES = ("pickle", "msgpack")

    def __init__(self, name: str) -> None:
        if name not in self.NAMES:
            raise ValueError(f"serializer is {name!r}; choose one of {', '.join(self.NAMES)}")
        pickled = PickleCodec()
        self.encode = pickled.encode if name == "pickle" else Encoder().encode
        self.decode: Any = pickled.decode if name == "pickle" else Decoder().decode


@dataclass(frozen=True)
class RingHandle:
    """All that another process needs to attach: plain values, so it can be pickled or sent as JSON.

    It holds the ring's secret: whoever has it can read the ring, and pretend to be its writer. The repr does not
    show it.
    """

    pid: int
    fd: int
    ranks: int
    remote: int
    endpoint: str
    remote_endpoint: str
    serializer: str
    secret: str = field(repr=False)

    def to_json(self) -> str:
        """One JSON object; keep it as secret as the ring's messages."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RingHandle:
        """DecodeError if the text is not a handle."""
        try:
            handle = msgspec.json.decode(text, type=cls)
            bytes.fromhex(handle.secret)
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"not the JSON of a ring handle: {error}") from error
        return handle

    @property
    def key(self) -> bytes:
        return bytes.fromhex(self.secret)


class Deadline:
    """A moment, given as seconds from now."""

    def __init__(self, seconds: float) -> None:
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"timeout is {seconds!r}; give a number of seconds, 0 or more")
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def over(self) -> bool:
        return self.left <= 0


class Hello(NamedTuple):
    rank: int
    pid: int
    started: int
    nonce: bytes

    def pack(self, key: bytes) -> list[bytes]:
        fields = (self.rank, self.pid, self.started, self.nonce)
        return [HELLO, _HELLO.pack(*fields, digest(key, HELLO, repr(fields).encode()))]

    @classmethod
    def unpack(cls, key: bytes, parts: Sequence[bytes]) -> Hello | None:
        """None unless it is a greeting from somebody who knows the secret."""
        if len(parts) != 2 or len(parts[1]) != _HELLO.size:
            return None
        *fields, mark = _HELLO.unpack(parts[1])
        hello = cls(*fields)
        return hello if hmac.compare_digest(mark, digest(key, HELLO, repr(tuple(fields)).encode())) else None


def pack_head(kind: bytes, key: bytes, nonce: bytes, sequence: int, frames: Sequence[Buffer] = ()) -> bytes:
    """The first part of what the writer says; it vouches for the pickle and for the lengths of the rest."""
    return _HEAD.pack(kind, sequence, _mark(kind, key, nonce, sequence, frames))


def unpack_head(key: bytes, nonce: bytes, parts: Sequence[zmq.Frame]) -> tuple[bytes, int]:
    """Kind and sequence number. DecodeError unless the writer of the ring said it to this reader."""
    if not parts or len(parts[0].buffer) != _HEAD.size:
        raise DecodeError("a message over ZMQ is not from a broadcast ring")
    kind, sequence, mark = _HEAD.unpack(parts[0].buffer)
    if not hmac.compare_digest(mark, _mark(kind, key, nonce, sequence, [part.buffer for part in parts[1:]])):
        raise DecodeError("a message over ZMQ was not made by the writer of this ring for this reader")
    return kind, sequence


def _mark(kind: bytes, key: bytes, nonce: bytes, sequence: int, frames: Sequence[Buffer]) -> bytes:
    lengths = struct.pack(f"<{len(frames)}Q", *(memoryview(frame).nbytes for frame in frames))
    return digest(
        key, kind, nonce, sequence.to_bytes(8, "little"), lengths, bytes(frames[0]) if frames else b""
    )


def received(frames: Sequence[zmq.Frame], copy_below: int) -> list[Buffer]:
    """The frames of a body as the codec wants them: over ZMQ's memory if that is large and aligned."""
    buffers: list[Buffer] = [bytes(frames[0].buffer)]
    for frame in frames[1:]:
        array = np.frombuffer(frame.buffer, np.uint8)
        if array.nbytes < copy_below or array.ctypes.data % 16 or not array.flags.writeable:
            array = array.copy()
        buffers.append(array)
    return buffers


_DESCRIPTORS = 10  # more than libzmq takes for a context's threads and a first socket


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context whose sockets never make an exit hang.

    ResourceExhausted if there are fewer descriptors left than it takes: libzmq ends the process then.
    """
    spare: list[int] = []
    try:
        spare += (os.open(os.devnull, os.O_RDONLY) for _ in range(_DESCRIPTORS))
    except OSError as error:
        raise ResourceExhausted(
            error.errno, f"cannot open a socket ({error.strerror}); raise the limit of open files"
        ) from error
    finally:
        for descriptor in spare:
            os.close(descriptor)
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made.linger = 0
    return made


@contextmanager
def opening(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[None]:
    """What is opened in it is closed if that fails. ResourceExhausted if there are no descriptors left."""
    try:
        yield
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise ResourceExhausted(
                error.errno, f"cannot open a socket ({error.strerror}); raise the limit of open files"
            ) from error
        raise


def new_secret() -> bytes:
    return os.urandom(32)
