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
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import forward_ad

from quiesce.errors import DecodeError, EncodeError

TENSOR, NDARRAY, SCALAR = range(3)
REQUIRES_GRAD, PARAMETER, LAYOUT = 1, 2, 4
MAX_AXES = 64

# The position in this list is the dtype's code on the wire: append only.
_TORCH_NAMES = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"),
    *("uint16", "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *(
        "bits8",
        "bits16",
        "bits1x8",
        "bits2x4",
        "bits4x2",
        "int1",
        "int2",
        "int3",
        "int4",
        "int5",
        "int6",
        "int7",
    ),
    *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
)
# None where the installed torch does not have the dtype.
_TORCH_DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _TORCH_NAMES]
_TORCH_CODES = {dtype: code for code, dtype in enumerate(_TORCH_DTYPES) if dtype is not None}
# Tensors of these become bytes by a cast in numpy, which is faster than a view in torch.
_CASTABLE = {dtype for dtype in _TORCH_DTYPES[:13] if dtype is not torch.bfloat16}
_NUMPY_DTYPE = re.compile(
    r"[<>|](?:[biufcSUV]\d{1,10}|[mM]8(?:\[\d{0,9}[a-zA-Z]{1,2}(?:/\d{1,9})?\])?)", re.ASCII
)
_HEAD = struct.Struct("<BBBBI")
_WITH_SHAPE = [struct.Struct(f"<BBBBI{n}Q") for n in range(MAX_AXES + 1)]
_SHAPES = [struct.Struct(f"<{n}Q") for n in range(MAX_AXES + 1)]
# Gone from newer versions of torch.
_has_names = getattr(torch.Tensor, "has_names", None)
_Tensor, _Parameter, _strided, _uint8 = torch.Tensor, torch.nn.Parameter, torch.strided, torch.uint8


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
        if index != self.next or index >= len(self.frames):
            raise DecodeError(
                f"a tensor names frame {index} where frame {self.next} of {len(self.frames)} is due"
            )
        view = self.frames[index]
        if view.nbytes != nbytes:
            raise DecodeError(f"frame {index} has {view.nbytes} bytes, its tensor needs {nbytes}")
        self.next += 1
        return view

    def spend(self, nbytes: int) -> None:
        self.budget -= nbytes
        if self.budget < 0:
            raise DecodeError(f"the message asks for more memory than the limit of {self.limit} bytes")


def pack(kind: int, code: int, flags: int, frame: int, shape: Sequence[int], rest: bytes) -> bytes:
    return _WITH_SHAPE[len(shape)].pack(kind, code, flags, len(shape), frame, *shape) + rest


def tensor_parts(tensor: torch.Tensor) -> tuple[int, int, Sequence[int], bytes, memoryview | None, bool]:
    """(dtype code, flags, shape, layout, bytes, whether the bytes are the caller's memory) of a tensor.

    The bytes are a flat view that keeps the storage alive; None if there are none. Raises EncodeError.
    """
    code = _TORCH_CODES.get(tensor.dtype)
    if (
        code is None
        or tensor.layout is not _strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.__dict__
        or (_has_names is not None and _has_names(tensor))
        or (forward_ad._current_level >= 0 and _tangent(tensor) is not None)
    ):
        raise EncodeError(_refusal(tensor))
    shape = tensor.shape
    if len(shape) > MAX_AXES:
        raise EncodeError(f"a tensor has {len(shape)} axes, at most {MAX_AXES} can be sent; reshape it")
    flags = 0
    if tensor.requires_grad:
        # The graph cannot travel: only a leaf arrives requiring gradients.
        if tensor.is_leaf:
            flags = REQUIRES_GRAD
        tensor = tensor.detach()
    nbytes = tensor.nbytes
    if not nbytes:
        return code, flags, shape, b"", None, False
    aliases, layout = True, b""
    try:
        if not tensor.is_cpu:
            tensor, aliases = tensor.cpu(), False
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            tensor, aliases = tensor.clone().resolve_conj().resolve_neg(), False
        if not tensor.is_contiguous():
            order, expanded, layout = _memory_order(shape, tensor.stride())
            tensor = _stored_once(tensor, expanded).permute(order)
            if not tensor.is_contiguous():
                tensor, aliases = tensor.contiguous(), False
            nbytes = tensor.nbytes
        if tensor.untyped_storage().nbytes() < nbytes:
            raise EncodeError(
                f"the storage of a tensor of {nbytes} bytes was freed or shrunk; send it before"
            )
        if tensor.dtype in _CASTABLE:
            view = tensor.numpy().data.cast("B")
        else:
            view = (tensor if tensor.ndim else tensor.reshape(1)).view(_uint8).numpy().data.cast("B")
    except (RuntimeError, NotImplementedError) as error:
        raise EncodeError(f"{_describe(tensor)} has no bytes that can be read: {error}") from error
    if layout:
        flags |= LAYOUT
    return code, flags, shape, layout, view, aliases


def ndarray_parts(array: NDArray[Any]) -> tuple[int, int, Sequence[int], bytes, memoryview | None, bool]:
    """The same for a numpy array; the dtype's name stands behind the layout and its length is the code."""
    name = _numpy_name(array.dtype)
    shape = array.shape
    flags, layout = 0, b""
    if not array.nbytes:
        return len(name), 0, shape, name, None, False
    aliases = True
    if not array.flags.c_contiguous:
        order, expanded, layout = _memory_order(shape, array.strides)
        array = _stored_once(array, expanded).transpose(order)
        if not array.flags.c_contiguous:
            array, aliases = np.ascontiguousarray(array), False
        if layout:
            flags = LAYOUT
    return len(name), flags, shape, layout + name, array.reshape(-1).view(np.uint8).data, aliases


def read_array(data: memoryview, inbox: Inbox) -> Any:
    """Build the tensor, array or numpy scalar that a descriptor describes.

    It shares memory with its frame where that is writable and aligned and the inbox does not ask for
    copies. Raises DecodeError, or ValueError, IndexError, RuntimeError or struct.error, if the descriptor
    is inconsistent.
    """
    kind, code, flags, ndim, index = _HEAD.unpack_from(data)
    if ndim > MAX_AXES:
        raise DecodeError(f"a tensor claims {ndim} axes, at most {MAX_AXES} are allowed")
    shape = _SHAPES[ndim].unpack_from(data, 8)
    end = 8 + 8 * ndim
    stored, order = shape, b""
    if flags & LAYOUT:
        order = bytes(data[end : end + ndim])
        stored = _stored_shape(shape, order)
        end += ndim
    if kind == TENSOR:
        dtype = _TORCH_DTYPES[code] if code < len(_TORCH_DTYPES) else None
        if dtype is None or flags & ~7:
            raise DecodeError(
                f"dtype {code} or flags {flags} unknown to this version, or to torch {torch.__version__}"
            )
        nbytes = math.prod(stored) * dtype.itemsize
        tensor = _build_tensor(*_data(data[end:], index, nbytes, inbox), dtype, stored, index, inbox)
        if order:
            inbox.spend(math.prod(shape) * dtype.itemsize)
            tensor = tensor.permute(_inverse(order)).expand(shape)
        if flags & PARAMETER:
            return _Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
        return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor
    if kind not in (NDARRAY, SCALAR) or flags & ~LAYOUT or (kind == SCALAR and (shape or index)):
        raise DecodeError(f"an array of kind {kind} with flags {flags}, shape {shape} and frame {index}")
    numpy_dtype = _numpy_dtype(bytes(data[end : end + code]))
    nbytes = math.prod(stored) * numpy_dtype.itemsize
    array = _build_ndarray(
        *_data(data[end + code :], index, nbytes, inbox), numpy_dtype, stored, index, inbox
    )
    if order:
        inbox.spend(math.prod(shape) * numpy_dtype.itemsize)
        array = array.transpose(_inverse(order))
        if array.shape != shape:
            array = np.broadcast_to(array, shape)
    return array if kind == NDARRAY else array[()]


def _data(inline: memoryview, index: int, nbytes: int, inbox: Inbox) -> tuple[memoryview, bool]:
    """The bytes of an array, and whether they must be copied."""
    if not index:
        if inline.nbytes != nbytes:
            raise DecodeError(f"an inline array has {inline.nbytes} bytes, its shape and dtype need {nbytes}")
        return inline, True
    if inline.nbytes:
        raise DecodeError(f"the descriptor of frame {index} is followed by {inline.nbytes} stray bytes")
    view = inbox.take(index, nbytes)
    return view, inbox.copy or view.readonly


def _build_tensor(
    view: memoryview, copy: bool, dtype: torch.dtype, shape: tuple[int, ...], index: int, inbox: Inbox
) -> torch.Tensor:
    nbytes = view.nbytes
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        _check_bool(view)
    if not copy:
        # torch keeps the object but not its export; this memoryview is nobody else's, and keeps the export.
        tensor = torch.frombuffer(view, dtype=dtype)
        copy = tensor.data_ptr() % min(dtype.itemsize, 8) != 0
    if not copy:
        inbox.aliased.append(index)
    else:
        inbox.spend(nbytes)
        if index:
            # Of torch's own allocation, hence 64-byte aligned.
            flat = torch.empty(nbytes, dtype=_uint8)
            flat.numpy()[:] = np.frombuffer(view, np.uint8)
            tensor = flat.view(dtype)
        else:
            tensor = torch.frombuffer(bytearray(view), dtype=dtype)
    return tensor if len(shape) == 1 else tensor.view(*shape) if shape else tensor[0]


def _build_ndarray(
    view: memoryview, copy: bool, dtype: np.dtype[Any], shape: tuple[int, ...], index: int, inbox: Inbox
) -> NDArray[Any]:
    if not view.nbytes:
        return np.empty(shape, dtype)
    if dtype.kind == "b":
        _check_bool(view)
    array: NDArray[Any] = np.frombuffer(view, np.uint8).view(dtype)
    if copy or not array.flags.aligned:
        inbox.spend(view.nbytes)
        array = array.copy()
    else:
        inbox.aliased.append(index)
    return array.reshape(shape)


def _check_bool(view: memoryview) -> None:
    # Any other byte is undefined behaviour in the kernels that would read it.
    if np.frombuffer(view, np.uint8).max() > 1:
        raise DecodeError("a bool tensor holds bytes other than 0 and 1")


def _memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[bool], bytes]:
    """The axes from outermost to innermost in memory, which of them are expanded, and both as bytes."""
    expanded = [n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True)]
    order = sorted(range(len(shape)), key=lambda axis: (not expanded[axis], -abs(strides[axis])))
    if order == sorted(order) and not any(expanded):
        return order, expanded, b""
    return order, expanded, bytes(axis | expanded[axis] << 7 for axis in order)


def _stored_once(array: Any, expanded: Sequence[bool]) -> Any:
    return array[tuple(slice(0, 1) if e else slice(None) for e in expanded)] if any(expanded) else array


def _stored_shape(shape: tuple[int, ...], order: bytes) -> tuple[int, ...]:
    if sorted(axis & 0x7F for axis in order) != list(range(len(shape))):
        raise DecodeError(
            f"the memory order {list(order)} of a tensor of {len(shape)} axes is no permutation"
        )
    return tuple(1 if axis & 0x80 else shape[axis & 0x7F] for axis in order)


def _inverse(order: bytes) -> list[int]:
    axes = [axis & 0x7F for axis in order]
    return sorted(range(len(axes)), key=axes.__getitem__)


def _tangent(tensor: torch.Tensor) -> torch.Tensor | None:
    tangent: torch.Tensor | None = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    return tangent


@lru_cache(maxsize=256)
def _numpy_name(dtype: np.dtype[Any]) -> bytes:
    name = dtype.str
    if dtype.hasobject:
        raise EncodeError(
            "a numpy array of Python objects cannot be sent; convert it to a plain dtype or to a list"
        )
    if dtype.names is not None or dtype.subdtype is not None:
        raise EncodeError(
            f"a structured numpy dtype cannot be sent ({dtype}); send its fields as separate arrays"
        )
    if dtype.char in "gG":
        raise EncodeError(
            "numpy longdouble differs between machines and cannot be sent; use float64 or complex128"
        )
    if dtype.metadata or not _NUMPY_DTYPE.fullmatch(name) or np.dtype(name) != dtype:
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
    elif tensor.dtype not in _TORCH_CODES:
        fix = "this dtype is unknown to the codec; send a view of it as uint8"
    elif tensor.__dict__:
        fix = f"its attributes ({', '.join(sorted(tensor.__dict__))}) would be lost; send tensor.detach()"
    elif _has_names is not None and _has_names(tensor):
        fix = "its axis names would be lost; send tensor.rename(None)"
    else:
        fix = "its forward-mode tangent would be lost; send the primal and the tangent"
    return f"{_describe(tensor)} cannot be sent: {fix}"
