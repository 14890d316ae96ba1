"""What the codec's tests share: every dtype and layout of torch and numpy, and comparison bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch

TORCH_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in TORCH_DTYPES if str(dtype).startswith(("torch.qint", "torch.quint"))]
PLAIN = [dtype for dtype in TORCH_DTYPES if dtype not in QUANTIZED]
DIFFERENTIABLE = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}
RAW = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Random bits, so that NaN payloads, subnormals and both zeros occur."""
    generator = random.Random(f"{dtype} {shape} {seed}")
    count = int(np.prod(shape, dtype=int))
    data = bytearray(generator.randbytes(count * dtype.itemsize))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not data:
        return torch.empty((*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).view(shape)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


# Name -> builder. The second element tells whether the strides must arrive as they were.
LAYOUTS: dict[str, tuple[Callable[[torch.dtype], torch.Tensor], bool]] = {
    "scalar": (lambda d: tensor(d), True),
    "empty": (lambda d: tensor(d, 0), True),
    "empty inside": (lambda d: tensor(d, 3, 0, 2), True),
    "one": (lambda d: tensor(d, 1, 1, 1), True),
    "vector": (lambda d: tensor(d, 129), True),
    "matrix": (lambda d: tensor(d, 12, 34), True),
    "offset view": (lambda d: tensor(d, 64, 9)[7:11], True),
    "row": (lambda d: tensor(d, 8, 40)[3], True),
    "transposed": (lambda d: tensor(d, 12, 34).T, True),
    "permuted": (lambda d: tensor(d, 3, 4, 5, 6).permute(2, 0, 3, 1), True),
    "channels last": (lambda d: tensor(d, 2, 5, 6, 3).permute(0, 3, 1, 2), True),
    "channels last 3d": (lambda d: tensor(d, 2, 3, 5, 6, 3).permute(0, 4, 1, 2, 3), True),
    "expanded": (lambda d: tensor(d, 5, 1).expand(5, 40), True),
    "expanded in front": (lambda d: tensor(d, 40).expand(3, 7, 40), True),
    "expanded scalar": (lambda d: tensor(d).expand(4, 5), True),
    "expanded, permuted": (lambda d: tensor(d, 4, 1, 6).expand(4, 9, 6).permute(2, 1, 0), True),
    "every other column": (lambda d: tensor(d, 12, 34)[:, ::2], False),
    "column": (lambda d: tensor(d, 64, 9)[:, 4], False),
    "expanded slices": (lambda d: tensor(d, 10, 1, 8)[::3].expand(4, 5, 8)[:, :, 2:5], False),
    "overlapping windows": (lambda d: tensor(d, 40).as_strided((30, 8), (1, 1)), False),
}


def bits(value: Any) -> bytes:
    """The bytes of a tensor or array in row-major order."""
    if not value.nbytes:
        return b""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().resolve_conj().resolve_neg()
        if value.dtype.itemsize in RAW:
            value = value.view(RAW[value.dtype.itemsize])
        return bytes(value.contiguous().numpy().tobytes())
    return bytes(np.ascontiguousarray(value).tobytes())


def same(left: Any, right: Any) -> bool:
    """Equal in class, dtype, shape and every bit; in structures, tuples and sets may arrive as lists."""
    if isinstance(left, (torch.Tensor, np.ndarray)):
        return (
            type(left) is type(right)
            and left.dtype == right.dtype
            and tuple(left.shape) == tuple(right.shape)
            and bits(left) == bits(right)
        )
    if isinstance(left, np.generic):
        # longlong arrives as int64, which is the same dtype.
        return (
            isinstance(right, np.generic) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and list(left) == list(right)
            and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, (list, tuple)):
        return isinstance(right, (list, tuple)) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and repr(left) == repr(right)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def inside(view: memoryview, value: torch.Tensor) -> bool:
    """Whether a view lies in the storage of a tensor."""
    storage = value.untyped_storage()
    return (
        storage.data_ptr() <= address(view)
        and address(view) + view.nbytes <= storage.data_ptr() + storage.nbytes()
    )


def received(frames: list[Any], shift: int = 0) -> list[memoryview]:
    """Copies of frames as a network delivers them: writable, `shift` bytes off alignment."""
    out = []
    for frame in frames:
        data = memoryview(frame)
        buffer = bytearray(shift + data.nbytes)
        buffer[shift:] = data
        out.append(memoryview(buffer)[shift:])
    return out


def leaves(value: Any) -> Iterator[Any]:
    """The tensors and arrays of a structure, in order."""
    if isinstance(value, msgspec.Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, (torch.Tensor, np.ndarray)):
        yield value
