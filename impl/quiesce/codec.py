"""Structures with tensors and numpy arrays, as a message of frames, and back.

The first frame is the payload: a header, then the structure in msgpack. Tensors below a threshold stand
inside the payload; each larger one is a frame of its own, which is the caller's memory and not a copy of
it. Nothing is pickled, and decoding runs no code that the message chooses.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

import msgspec
import numpy as np
import torch
from msgspec.msgpack import Ext as _Ext

from quiesce import arrays
from quiesce.errors import DecodeError, EncodeError, NotQuiescent

T = TypeVar("T")
# Any object with the buffer protocol: bytes, bytearray, memoryview, zmq.Frame. Python 3.12 has a name for it.
Buffer: TypeAlias = Any

ABORT = b""
DEFAULT_THRESHOLD = 256
DEFAULT_LIMIT = 16 << 30
THRESHOLD_VARIABLE = "QUIESCE_ZERO_COPY_THRESHOLD"
VERSION = 1

# 0xC1 is the one byte that msgpack never uses.
_MAGIC = b"\xc1QSC"
# magic, version, flags, reserved, number of frames of the message with the payload
_HEADER = struct.Struct("<4sBBHI")
_LOOKALIKE = 1
_EXT = 0x51
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


class Part(NamedTuple):
    """One out-of-band frame of an encoded message: a flat view of bytes, never empty.

    `aliases` says whether the view is the caller's memory, which must then stay unchanged until the
    message was sent, or a private copy. Either way the view keeps the memory alive.
    """

    view: memoryview
    aliases: bool


def zero_copy_threshold() -> int:
    """QUIESCE_ZERO_COPY_THRESHOLD in bytes, 256 if unset; ValueError if it is no whole number."""
    text = os.environ.get(THRESHOLD_VARIABLE)
    if text is None:
        return DEFAULT_THRESHOLD
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"{THRESHOLD_VARIABLE} is {text!r}; set it to a whole number of bytes, such as 256, or unset it"
        )
    return int(text)


def frame_count(payload: Buffer) -> int:
    """How many frames, itself included, the message has that this payload starts; DecodeError if none."""
    return _read_header(_flat(payload, 0))[0]


def check_frames(frames: Sequence[Buffer]) -> None:
    """Raise DecodeError unless the frames are one whole message, by its header; the content is not looked at.

    Refused are foreign and cut messages, and messages with a part of another one in front or behind.
    """
    _check([_flat(frame, index) for index, frame in enumerate(frames)])


def is_abort(frames: Sequence[Buffer]) -> bool:
    """Whether a sender gave this message up: an empty frame alone, or a cut message closed by an empty frame.

    No frame of a whole message is empty, so an empty last frame settles it, however many frames were
    announced.
    """
    if not frames or memoryview(frames[-1]).nbytes:
        return False
    return len(frames) == 1 or memoryview(frames[0])[:4] == _MAGIC


class _Outbox(threading.local):
    parts: list[Part] = []


class Encoder:
    """Encodes structures of plain values, Structs, dataclasses, tensors and numpy arrays.

    `threshold` is in bytes: smaller tensors travel inside the payload. None means the environment
    variable QUIESCE_ZERO_COPY_THRESHOLD, else 256. One encoder may be used by several threads. Autograd
    history, gradients, and memory or identity shared between objects do not travel; what would lose data
    is an EncodeError.
    """

    def __init__(self, threshold: int | None = None) -> None:
        if threshold is None:
            threshold = zero_copy_threshold()
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
            raise ValueError(f"threshold is {threshold!r}; give a whole number of bytes, 0 or more")
        self.threshold = threshold
        self._outbox = _Outbox()
        self._encode_into = msgspec.msgpack.Encoder(enc_hook=self._hook).encode_into

    def encode(self, obj: object) -> list[Buffer]:
        """Encode into a fresh payload and return the frames of the message. Raises EncodeError."""
        payload = bytearray()
        parts = self.encode_into(obj, payload)
        return [payload, *(part.view for part in parts)]

    def encode_into(self, obj: object, payload: bytearray) -> list[Part]:
        """Write the payload over `payload`, resized to fit, and return the other frames in order.

        The message is [payload, *views of the parts]. Raises EncodeError, after which `payload` is empty, and
        NotQuiescent if `payload` has to grow while somebody holds a view of it, who then sees torn bytes.
        """
        outbox = self._outbox
        # Saved and put back: a finalizer may run in the middle of this call and encode something itself.
        outer = outbox.parts
        parts: list[Part] = []
        outbox.parts = parts
        try:
            self._encode_into(obj, payload, _HEADER.size)
            flags = 0
            for view, _ in parts:
                if view[0] == 0xC1 and view[:4] == _MAGIC:
                    flags = _LOOKALIKE
            _HEADER.pack_into(payload, 0, _MAGIC, VERSION, flags, 0, len(parts) + 1)
        except BufferError as error:
            raise NotQuiescent("the payload is lent: a view of it is held; encode into another") from error
        except BaseException as error:
            _discard(payload)
            if isinstance(error, (EncodeError, MemoryError)) or not isinstance(error, Exception):
                raise
            raise EncodeError(f"cannot encode a {type(obj).__qualname__}: {error}") from error
        finally:
            outbox.parts = outer
        return parts

    def _hook(self, obj: Any) -> _Ext:
        cls = type(obj)
        if cls is _Tensor or cls is _Parameter:
            kind = arrays.TENSOR
            code, flags, shape, rest, data, aliases = arrays.tensor_parts(obj)
            if cls is _Parameter:
                flags |= arrays.PARAMETER
        elif cls is np.ndarray:
            kind = arrays.NDARRAY
            code, flags, shape, rest, data, aliases = arrays.ndarray_parts(obj)
        elif isinstance(obj, np.generic):
            kind = arrays.SCALAR
            code, flags, shape, rest, data, aliases = arrays.ndarray_parts(np.asarray(obj))
        else:
            raise EncodeError(_unsupported(obj))
        nbytes = data.nbytes
        # No frame may be empty: that is the mark of a message given up.
        if nbytes < self.threshold or not nbytes or kind == arrays.SCALAR:
            return _Ext(_EXT, arrays.descriptor(kind, code, flags, shape, 0, rest) + data.tobytes())
        parts = self._outbox.parts
        parts.append(Part(arrays.flat(data), aliases))
        return _Ext(_EXT, arrays.descriptor(kind, code, flags, shape, len(parts), rest))


class _Inboxes(threading.local):
    inbox: arrays.Inbox | None = None


class Decoder(Generic[T]):
    """Decodes messages into `type`, or into dicts, lists, plain values, tensors and arrays if it is Any.

    With `copy` no tensor shares memory with the frames. Without, a tensor that is a frame of its own
    shares the frame's memory, and keeps it alive, if that is writable and aligned for the dtype; tensors
    inside the payload are always copied. `limit_bytes` bounds, for one message, the bytes copied and the
    size of expanded tensors. One decoder may be used by several threads.
    """

    @overload
    def __init__(self: Decoder[Any], *, copy: bool = ..., limit_bytes: int = ...) -> None: ...
    @overload
    def __init__(self: Decoder[T], type: type[T], copy: bool = ..., limit_bytes: int = ...) -> None: ...
    @overload
    def __init__(self: Decoder[Any], type: Any, copy: bool = ..., limit_bytes: int = ...) -> None: ...
    def __init__(self, type: Any = Any, copy: bool = False, limit_bytes: int = DEFAULT_LIMIT) -> None:
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 0:
            raise ValueError(f"limit_bytes is {limit_bytes!r}; give a whole number of bytes, 0 or more")
        self.type = type
        self.copy = copy
        self.limit_bytes = limit_bytes
        self._inboxes = _Inboxes()
        decoder = msgspec.msgpack.Decoder(type, ext_hook=self._hook, dec_hook=_as_is)
        self._decode: Callable[[Buffer], T] = decoder.decode

    def decode(self, frames: Sequence[Buffer]) -> T:
        """The object in a message. Raises DecodeError, and then nothing decoded is kept."""
        return self.decode_with_report(frames)[0]

    def decode_with_report(self, frames: Sequence[Buffer]) -> tuple[T, tuple[int, ...]]:
        """The object, and the frames (0: the payload) whose memory it shares. Raises DecodeError."""
        views = [_flat(frame, index) for index, frame in enumerate(frames)]
        _check(views)
        inbox = arrays.Inbox(views, self.copy, self.limit_bytes)
        inboxes = self._inboxes
        outer = inboxes.inbox
        try:
            inboxes.inbox = inbox
            # An object of its own, whose death tells that no Raw or memoryview field looks into the payload.
            content = np.frombuffer(views[0], np.uint8, offset=_HEADER.size)
            looked_into = weakref.ref(content)
            obj = self._decode(content)
        except MemoryError:
            raise
        except Exception as error:
            raise DecodeError(f"not a message that decodes to {self.type!r}: {error}") from error
        finally:
            inboxes.inbox = outer
        if inbox.next != len(views):
            raise DecodeError(
                f"frames {inbox.next} to {len(views) - 1} belong to no tensor of {self.type!r}; "
                "decode into a type that has every tensor of the message"
            )
        del content
        return obj, tuple(inbox.aliased) if looked_into() is None else (0, *inbox.aliased)

    def _hook(self, code: int, data: memoryview) -> Any:
        inbox = self._inboxes.inbox
        if code != _EXT or inbox is None:
            raise DecodeError(f"an extension of unknown code {code}")
        return arrays.read_array(data, inbox)


def _as_is(type: Any, obj: Any) -> Any:
    # Tensors were built by the extension; msgspec then compares their class with the field's.
    return obj


def _flat(frame: Buffer, index: int) -> memoryview:
    try:
        return memoryview(frame).cast("B")
    except TypeError as error:
        raise DecodeError(f"frame {index} is not a contiguous buffer of bytes: {error}") from error


def _read_header(payload: memoryview) -> tuple[int, int]:
    if payload.nbytes < _HEADER.size or payload[:4] != _MAGIC:
        raise DecodeError(
            "the first frame is not a payload of this library: a foreign, cut or misplaced frame"
        )
    _, version, flags, reserved, count = _HEADER.unpack_from(payload)
    if version != VERSION or reserved or flags & ~_LOOKALIKE or not count:
        raise DecodeError(
            f"payload of version {version} with flags {flags}; this library reads version {VERSION}"
        )
    return count, flags


def _check(views: Sequence[memoryview]) -> None:
    if not views:
        raise DecodeError("a message has at least one frame, got none")
    if not views[-1].nbytes:
        raise DecodeError("the last frame is empty: the sender gave this message up")
    count, flags = _read_header(views[0])
    if count != len(views):
        raise DecodeError(
            f"the message has {count} frames, got {len(views)}: it was cut, or glued to another one"
        )
    for index in range(1, count):
        view = views[index]
        if not view.nbytes:
            raise DecodeError(f"frame {index} is empty, which no frame of a message is")
        if view[0] == 0xC1 and not flags and view[:4] == _MAGIC:
            raise DecodeError(
                f"frame {index} is the payload of another message: two messages were glued together"
            )


def _discard(payload: bytearray) -> None:
    try:
        payload.clear()
    except BufferError:
        # Lent, hence not ours to resize: at least nobody can take it for a message.
        payload[:4] = bytes(len(payload[:4]))


def _unsupported(obj: Any) -> str:
    name = f"{type(obj).__module__}.{type(obj).__qualname__}"
    if isinstance(obj, torch.Tensor):
        return (
            f"a {name} cannot be sent: a subclass of Tensor may hold more than its data; send plain tensors"
        )
    if isinstance(obj, np.ndarray):
        return (
            f"a {name} cannot be sent: a subclass of ndarray may hold more than data; send np.asarray of it"
        )
    return (
        f"a {name} cannot be sent, and nothing is pickled; make it a Struct, dataclass, dict, list, tuple, "
        "set, plain value, tensor or numpy array"
    )
