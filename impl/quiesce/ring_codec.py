"""Any Python object with its tensors, as a pickle and the memory of the tensors beside it, and back.

For processes that trust each other: a pickle runs what it names. `quiesce.codec` is the one to use otherwise,
and has the same two methods.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import forward_ad

from quiesce.codec import Buffer
from quiesce.errors import DecodeError, EncodeError

INLINE_BYTES = 1024
"""Smaller buffers stand inside the pickle, bytes."""
_LONE = b"T"  # a pickle begins with 0x80
Head = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Element type, shape, strides and flags of a tensor."""
_Bytes = tuple[torch.Tensor, torch.UntypedStorage, int, int]
"""A tensor without gaps, its storage, how many bytes of it, and from where."""
_PLAIN, _PARAMETER, _GRAD, _CONJ, _NEG = 0, 1, 2, 4, 8
_NUMPYS = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
"""The element types that numpy has."""


def over(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A tensor over a storage, contiguous if no stride is given; `offset` is in elements."""
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    tensor: torch.Tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return tensor


class PickleCodec:
    """Pickle protocol 5 with out-of-band buffers and a reducer for tensors; for use by one thread at a time.

    Plain CPU tensors and Parameters travel as the bytes they reach over, with their strides, conjugate and
    negative bits and `requires_grad`; a tensor with gaps travels as its elements. Tensors of one message over the
    same bytes arrive sharing memory. Every other tensor (subclasses, sparse, quantized, on a device, with
    attributes, hooks or tangents) is left to torch's own reducer. A message that is one such tensor needs no pickler.
    """

    def encode(self, obj: object) -> list[Buffer]:
        """The pickle, then the out-of-band buffers, which are the caller's memory. Raises EncodeError."""
        buffers: list[Buffer] = []

        def beside(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < INLINE_BYTES:
                return True
            buffers.append(view)
            return False

        stream = io.BytesIO()
        pickler = _Pickler(stream, protocol=5, buffer_callback=beside)
        try:
            if _is_plain(obj):
                head, bytes_at = _describe(obj)
                return [_lone(*head), *([_flat(head, bytes_at)] if bytes_at else [])]
            pickler.dump(obj)
        except (EncodeError, MemoryError):
            raise
        except Exception as error:
            raise EncodeError(f"cannot pickle a {type(obj).__qualname__}: {error}") from error
        return [stream.getbuffer(), *buffers]

    def decode(self, frames: Sequence[Buffer]) -> Any:
        """The object, over the memory of the frames. Raises DecodeError."""
        try:
            if bytes(frames[0][:1]) == _LONE:
                head = _head_of(bytes(frames[0]))
                if _is_usual(*head):
                    return _usual(frames[1], *head[:2])
                return _rebuild(frames[1] if len(frames) > 1 else None, *head)
            return pickle.loads(frames[0], buffers=frames[1:])
        except MemoryError:
            raise
        except Exception as error:
            raise DecodeError(f"cannot load the pickle of a message: {error!r}") from error


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By address and length, so that tensors over the same bytes share one entry, hence one memory there.
        self._flats: dict[tuple[int, int], tuple[_Flat | bytearray, torch.Tensor]] = {}

    def reducer_override(self, obj: Any) -> Any:
        if not _is_plain(obj):
            return NotImplemented
        head, bytes_at = _describe(obj)
        flat = None
        if bytes_at:
            tensor, storage, nbytes, start = bytes_at
            key = storage.data_ptr() + start, nbytes
            flat, _ = self._flats.get(key, (None, None))
            if flat is None:
                array = _flat(head, bytes_at)
                flat = bytearray(array) if nbytes < INLINE_BYTES else _Flat(array)
                # With its owner: the address of a copy made here would be given to the next one.
                self._flats[key] = flat, tensor
        return (_usual, (flat, *head[:2])) if _is_usual(*head) else (_rebuild, (flat, *head))


class _Flat:
    """Bytes of a tensor: pickled once, however many tensors lie over them."""

    __slots__ = ("array",)

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array: Any = array

    def __reduce__(self) -> Any:
        return _itself, (pickle.PickleBuffer(self.array),)


def _is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(tensor, torch.Tensor)
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor.__dict__)
        and not tensor._backward_hooks
        and not (forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None)  # type: ignore[no-untyped-call]
        and not getattr(tensor, "has_names", bool)()
    )


def _describe(tensor: torch.Tensor) -> tuple[Head, _Bytes | None]:
    """What makes the tensor again; and its bytes, unless it has none."""
    flags = _PARAMETER if type(tensor) is torch.nn.Parameter else _PLAIN
    if tensor.requires_grad:
        flags |= _GRAD
        tensor = tensor.detach()
    span = tensor.numel() if tensor.is_contiguous() else _span(tensor)
    if span > tensor.numel():
        tensor = tensor.detach().contiguous()
        span = tensor.numel()
    if tensor.is_conj():
        flags |= _CONJ
    if tensor.is_neg():
        flags |= _NEG
    bytes_at = None
    if span:
        size, nbytes = tensor.element_size(), span * tensor.element_size()
        storage, start = tensor.untyped_storage(), int(tensor.storage_offset()) * size
        if storage.nbytes() < start + nbytes:
            raise EncodeError("a tensor has lost its storage, freed or shrunk; send it before that")
        bytes_at = tensor, storage, nbytes, start
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), flags), bytes_at


@functools.lru_cache(256)
def _lone(*head: Any) -> bytes:
    """The first frame of a message that is one tensor, in place of a pickle."""
    return _LONE + pickle.dumps(head, protocol=5)


@functools.lru_cache(1024)
def _is_usual(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], flags: int) -> bool:
    """Whether a tensor has nothing about it but bytes, dtype and shape."""
    usual = flags == _PLAIN and (dtype in _NUMPYS or dtype is torch.bfloat16) and 0 not in shape
    return usual and torch.empty(shape, device="meta").stride() == stride


@functools.lru_cache(256)
def _head_of(lone: bytes) -> Head:
    head: Head = pickle.loads(lone[1:])
    return head


def _flat(head: Head, bytes_at: _Bytes) -> NDArray[np.uint8]:
    tensor, storage, nbytes, start = bytes_at
    if head[0] in _NUMPYS and _is_usual(*head):
        return tensor.numpy().reshape(-1).view(np.uint8)
    array: NDArray[np.uint8] = over(storage, torch.uint8, (nbytes,), (1,), start).numpy()
    return array


def _span(tensor: torch.Tensor) -> int:
    """How many elements lie between the first and the last of a tensor, both counted; 0 if it has none."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _itself(buffer: Buffer) -> Buffer:
    return buffer


def _usual(buffer: Buffer, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.frombuffer(buffer, dtype=dtype)
    return tensor if len(shape) == 1 else tensor.view(shape)


def _rebuild(
    buffer: Buffer | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    flags: int,
) -> torch.Tensor:
    array = np.frombuffer(b"" if buffer is None else buffer, np.uint8)
    storage = torch.from_numpy(array).untyped_storage() if array.size else torch.empty(0).untyped_storage()
    tensor = over(storage, dtype, shape, stride)
    if flags & _CONJ:
        tensor = tensor.conj()
    if flags & _NEG:
        tensor = torch._neg_view(tensor)
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _GRAD))
    return tensor.requires_grad_() if flags & _GRAD else tensor
