"""One tensor or numpy array, as a descriptor and flat bytes, and back.

A descriptor is a few bytes inside the msgpack payload (an extension value), little endian: kind, dtype,
flags and number of axes (1 byte each), frame (4 bytes), the shape (8 bytes an axis); with the flag LAYOUT
one byte an axis, the axes from outermost to innermost in memory, bit 7 set where the axis is expanded and
stored once; for numpy the name of the dtype. Behind it stands the data if the frame is 0 (inline), else
that frame of the message is the data.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import forward_ad

from quiesce.errors import DecodeError, EncodeError

TENSOR, NDARRAY, SCALAR = range(3)
REQUIRES_GRAD, PARAMETER, LAYOUT = 1, 2, 4
MAX_AXES = 64

# The position in this list is the dtype's code on the wire: append only.
_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"),
    *("uint16", "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
)
# Dtypes that numpy lacks pass through it as unsigned integers of their size.
_RAW = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_Codec: TypeAlias = tuple[torch.dtype, torch.dtype | None, np.dtype[Any]]


def _codecs() -> Iterator[_Codec | None]:
    """By code: dtype, what it is in numpy for torch (None: itself) and for numpy; None if torch lacks it."""
    for name in _NAMES:
        dtype = getattr(torch, name, None)
        if dtype is None:
            yield None
        elif name in np.sctypeDict:
            yield dtype, None, np.dtype(name)
        else:
            yield dtype, _RAW[dtype.itemsize], np.dtype(f"u{dtype.itemsize}")


_CODECS = tuple(_codecs())
_CODES = {codec[0]: code for code, codec in enumerate(_CODECS) if codec is not None}
# What memoryview.cast accepts, which is the fastest way to flat bytes.
_CASTABLE = {np.dtype(char) for char in "?bBhHiIlLqQefd"}
_NUMPY_DTYPE = re.compile(
    r"[<>|](?:[biufcSUV][1-9]\d{0,9}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}(?:/\d{1,9})?\])?)", re.ASCII
)
_HEAD = struct.Struct("<BBBBI")
_WITH_SHAPE = [struct.Struct(f"<BBBBI{n}Q") for n in range(MAX_AXES + 1)]
_SHAPES = [struct.Struct(f"<{n}Q") for n in range(MAX_AXES + 1)]
# Gone from newer versions of torch.
_has_names = getattr(torch.Tensor, "has_names", None)
_Parameter, _strided = torch.nn.Parameter, torch.strided

# Code, flags, shape and rest of the descriptor, the data C-contiguous, and whether it is the caller's memory.
Parts: TypeAlias = tuple[int, int, Sequence[int], bytes, NDArray[Any], bool]


class Inbox:
    """The out-of-band frames of one message while it is decoded: each is taken once, in order."""

    __slots__ = ("aliased", "budget", "copy", "frames", "limit", "next")

    def __init__(self, frames: Sequence[memoryview], copy: bool, limit: int) -> None:
        self.frames = frames
        self.copy = copy
        self.limit = self.budget = limit
        self.next = 1
        self.aliased: list[int] = []

    def take(self, index: int, nbytes: int) -> memoryview:
        """The frame of that index, which must be the next one and have that many bytes; else DecodeError."""
        if index != self.next or index >= len(self.frames):
            raise DecodeError(
                f"an array names frame {index}, due is {self.next} of {len(self.frames)} frames"
            )
        view = self.frames[index]
        if view.nbytes != nbytes:
            raise DecodeError(f"frame {index} has {view.nbytes} bytes, its shape and dtype need {nbytes}")
        self.next += 1
        return view

    def spend(self, nbytes: int) -> None:
        """Take so many bytes off what the message may allocate; DecodeError once that is used up."""
        self.budget -= nbytes
        if self.budget < 0:
            raise DecodeError(f"the message asks for more memory than the limit of {self.limit} bytes")


def descriptor(kind: int, code: int, flags: int, shape: Sequence[int], frame: int, rest: bytes) -> bytes:
    """The bytes that stand for an array in the payload; `frame` 0 means that its data follow."""
    ndim = len(shape)
    head = _WITH_SHAPE[ndim].pack(kind, code, flags, ndim, frame, *shape)
    return head + rest if rest else head


def tensor_parts(tensor: torch.Tensor) -> Parts:
    """Take a tensor apart; one that its bytes cannot bring back is an EncodeError."""
    code = _CODES.get(tensor.dtype)
    if code is not None and not tensor.__dict__ and _has_names is None and forward_ad._current_level < 0:
        # The common case, in half the time: numpy refuses whatever the rest of this function is for.
        raw = _CODECS[code][1]  # type: ignore[index]
        plain = raw is None or not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj())
        try:
            array = (tensor if raw is None else tensor.view(raw)).numpy() if plain else None
        except (RuntimeError, TypeError, ValueError):
            array = None
        if array is not None:
            reach = tensor.storage_offset() * array.itemsize + array.nbytes
            if array.flags.c_contiguous and tensor.untyped_storage().nbytes() >= reach:
                return code, 0, array.shape, b"", array, True
    if (
        code is None
        or tensor.layout is not _strided
        or tensor.is_nested
        or tensor.is_meta
        or tensor.__dict__
        or (_has_names is not None and _has_names(tensor))
        or (forward_ad._current_level >= 0 and _tangent(tensor) is not None)
    ):
        raise EncodeError(_refusal(tensor))
    shape = tensor.shape
    flags, layout, aliases = 0, b"", True
    if len(shape) > MAX_AXES:
        raise EncodeError(f"a tensor of {len(shape)} axes cannot be sent, at most {MAX_AXES}; reshape it")
    if tensor.requires_grad:
        # The graph cannot travel: only a leaf arrives requiring gradients.
        flags = REQUIRES_GRAD if tensor.is_leaf else 0
        tensor = tensor.detach()
    try:
        if tensor.is_neg() or tensor.is_conj():
            tensor, aliases = tensor.resolve_conj().resolve_neg(), False
        raw = _CODECS[code][1]  # type: ignore[index]
        if raw is not None:
            tensor = tensor.view(raw)
        contiguous = tensor.is_contiguous()
        reach = tensor.nbytes
        if not contiguous:
            order, stored, layout, elements = _memory_order(shape, tensor.stride())
            reach = elements * tensor.itemsize
        if tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.itemsize + reach:
            raise EncodeError(
                f"{_describe(tensor)} has lost its storage, freed or shrunk; send it before that"
            )
        if not contiguous:
            tensor = tensor[stored].permute(order) if stored else tensor.permute(order)
            if not tensor.is_contiguous():
                tensor, aliases = tensor.contiguous(), False
            if layout:
                flags |= LAYOUT
        if not tensor.is_cpu:
            tensor, aliases = tensor.cpu(), False
        array = tensor.numpy()
    except (RuntimeError, NotImplementedError) as error:
        raise EncodeError(f"{_describe(tensor)} has no bytes that can be read: {error}") from error
    return code, flags, shape, layout, array, aliases


def ndarray_parts(array: NDArray[Any]) -> Parts:
    """Take a numpy array apart; the length of the dtype's name is the code, the name follows the layout."""
    name = _numpy_name(array.dtype)
    if array.dtype.metadata:
        raise EncodeError(f"the metadata of the dtype {array.dtype} would be lost; send it beside the array")
    shape = array.shape
    flags, layout, aliases = 0, b"", True
    if not array.flags.c_contiguous:
        order, stored, layout, _ = _memory_order(shape, array.strides)
        array = array[stored].transpose(order)
        if not array.flags.c_contiguous:
            array, aliases = np.ascontiguousarray(array), False
        if layout:
            flags = LAYOUT
    return len(name), flags, shape, layout + name, array, aliases


def flat(array: NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array of at least one byte, without a copy; they keep its memory alive."""
    if array.dtype in _CASTABLE:
        return array.data.cast("B")
    return array.reshape(-1).view(np.uint8).data


def read_array(data: memoryview, inbox: Inbox) -> Any:
    """Build the tensor, array or numpy scalar that a descriptor describes.

    It shares memory with its frame where that is writable and aligned and the inbox does not ask for copies.
    Raises DecodeError, or ValueError, IndexError, RuntimeError or struct.error, if the descriptor is
    inconsistent.
    """
    kind, code, flags, ndim, index = _HEAD.unpack_from(data)
    if ndim > MAX_AXES:
        raise DecodeError(f"an array claims {ndim} axes, at most {MAX_AXES} are allowed")
    shape = _SHAPES[ndim].unpack_from(data, 8)
    end = 8 + 8 * ndim
    stored, inverse = shape, None
    if flags & LAYOUT:
        stored, inverse = _stored_shape(shape, bytes(data[end : end + ndim]))
        end += ndim
    if kind == TENSOR:
        codec = _CODECS[code] if code < len(_CODECS) else None
        if codec is None or flags & ~(REQUIRES_GRAD | PARAMETER | LAYOUT):
            raise DecodeError(f"dtype {code} or flags {flags} unknown here, or to torch {torch.__version__}")
        torch_dtype, raw, dtype = codec
    elif kind in (NDARRAY, SCALAR) and not flags & ~LAYOUT and (kind == NDARRAY or not (shape or index)):
        dtype = _numpy_dtype(bytes(data[end : end + code]))
        end += code
    else:
        raise DecodeError(f"an array of kind {kind} with flags {flags}, shape {shape} and frame {index}")

    nbytes = math.prod(stored) * dtype.itemsize
    view = data[end:]
    if not index:
        if view.nbytes != nbytes:
            raise DecodeError(f"an inline array has {view.nbytes} bytes, its shape and dtype need {nbytes}")
        copy = True
    elif view.nbytes:
        raise DecodeError(f"the descriptor of frame {index} is followed by {view.nbytes} stray bytes")
    else:
        view = inbox.take(index, nbytes)
        copy = inbox.copy or view.readonly
    # Not np.ndarray(stored, dtype, view): that holds the owner of the memory but no export, and a bytearray
    # could be resized under the array.
    array: NDArray[Any] = np.frombuffer(view, dtype).reshape(stored) if nbytes else np.empty(stored, dtype)
    if dtype.kind == "b" and nbytes and array.view(np.uint8).max() > 1:
        # Undefined behaviour in the kernels that would read it.
        raise DecodeError("a bool array holds bytes other than 0 and 1")
    if copy or not array.flags.aligned:
        inbox.spend(nbytes)
        # Frames are copied into memory of torch, which is aligned to 64 bytes; numpy's is to 16.
        array = _torch_copy(array, raw or torch_dtype) if kind == TENSOR and index else array.copy()
    else:
        inbox.aliased.append(index)

    if kind == TENSOR:
        tensor = torch.from_numpy(array)
        if raw is not None:
            tensor = tensor.view(torch_dtype)
        if inverse is not None:
            tensor = tensor.permute(inverse)
            if tensor.shape != shape:
                inbox.spend(math.prod(shape) * dtype.itemsize)
                tensor = tensor.expand(shape)
        if flags & PARAMETER:
            return _Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
        return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor
    if inverse is not None:
        array = array.transpose(inverse)
        if array.shape != shape:
            inbox.spend(math.prod(shape) * dtype.itemsize)
            array = np.broadcast_to(array, shape)
    return array if kind == NDARRAY else array[()]


def _torch_copy(array: NDArray[Any], dtype: torch.dtype) -> NDArray[Any]:
    copy: NDArray[Any] = torch.empty(array.shape, dtype=dtype, device="cpu").numpy()
    copy[...] = array
    return copy


@lru_cache(maxsize=1024)
def _memory_order(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[slice, ...], bytes, int]:
    """How to bring an array that has elements into the order of its memory, each element once.

    Axes from outermost to innermost; slices that leave one element of expanded axes, () if none is; both as
    a layout, b"" if nothing changes; how many elements it reaches over, if the strides are in elements.
    """
    expanded = [n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True)]
    order = tuple(sorted(range(len(shape)), key=lambda axis: (not expanded[axis], -abs(strides[axis]))))
    stored = tuple(slice(0, 1) if e else slice(None) for e in expanded) if any(expanded) else ()
    layout = b""
    if stored or order != tuple(range(len(shape))):
        layout = bytes(axis | expanded[axis] << 7 for axis in order)
    return order, stored, layout, 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


@lru_cache(maxsize=1024)
def _stored_shape(shape: tuple[int, ...], layout: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape in memory, and the permutation that brings it back."""
    axes = [axis & 0x7F for axis in layout]
    if sorted(axes) != list(range(len(shape))):
        raise DecodeError(f"the memory order {list(layout)} of {len(shape)} axes is no permutation")
    stored = tuple(1 if axis & 0x80 else shape[axis & 0x7F] for axis in layout)
    return stored, tuple(sorted(range(len(axes)), key=axes.__getitem__))


def _tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    tangent: torch.Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


@lru_cache(maxsize=256)
def _numpy_name(dtype: np.dtype[Any]) -> bytes:
    name = dtype.str
    if dtype.hasobject:
        raise EncodeError("a numpy array of Python objects cannot be sent; make it a plain dtype or a list")
    if dtype.names is not None or dtype.subdtype is not None:
        raise EncodeError(f"a structured numpy dtype cannot be sent ({dtype}); send its fields one by one")
    if dtype.char in "gG":
        raise EncodeError("numpy longdouble differs between machines; send float64 or complex128")
    if not _NUMPY_DTYPE.fullmatch(name) or np.dtype(name) != dtype:
        raise EncodeError(f"the numpy dtype {dtype!r} cannot be sent; view it as a plain dtype such as uint8")
    return name.encode("ascii")


@lru_cache(maxsize=256)
def _numpy_dtype(name: bytes) -> np.dtype[Any]:
    text = name.decode("ascii")
    if not _NUMPY_DTYPE.fullmatch(text):
        raise DecodeError(f"{text!r} is not the name of a plain numpy dtype")
    dtype = np.dtype(text)
    if dtype.char in "gG" or dtype.hasobject:
        raise DecodeError(f"the numpy dtype {text} is not portable and is refused")
    return dtype


def _describe(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    return f"a {kind.__module__}.{kind.__qualname__} ({tensor.dtype}, {tensor.layout}, on {tensor.device})"


def _refusal(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        fix = "it has no data; materialise it first"
    elif tensor.is_nested:
        fix = "nested tensors are refused; send the tensors in it as a list"
    elif tensor.is_quantized:
        fix = "its scale and zero point would be lost; send int_repr() and the quantiser's parameters"
    elif tensor.layout is not _strided:
        fix = "only strided tensors are sent; send its indices and values, or to_dense()"
    elif tensor.dtype not in _CODES:
        fix = "this dtype is unknown to the codec; send a view of it as uint8"
    elif tensor.__dict__:
        fix = f"its attributes ({', '.join(sorted(tensor.__dict__))}) would be lost; send tensor.detach()"
    elif _has_names is not None and _has_names(tensor):
        fix = "its axis names would be lost; send tensor.rename(None)"
    else:
        fix = "its forward-mode tangent would be lost; send the primal and the tangent"
    return f"{_describe(tensor)} cannot be sent: {fix}"
