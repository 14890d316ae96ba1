"""Every dtype in every layout arrives bit by bit, and only the bytes of the view travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_tests.codec.samples import (
    DIFFERENTIABLE,
    LAYOUTS,
    PLAIN,
    RAW,
    bits,
    inside,
    received,
    same,
    tensor,
)

from quiesce.codec import Decoder, Encoder

INLINE = Encoder(threshold=1 << 30)
FRAMED = Encoder(threshold=0)
SHARING = Decoder()
COPYING = Decoder(copy=True)


def every_way(value: Any) -> list[Any]:
    """Encoded inline and framed; decoded from aligned, misaligned and read-only frames, shared and copied."""
    framed = FRAMED.encode(value)
    return [
        SHARING.decode(INLINE.encode(value)),
        SHARING.decode(received(framed)),
        SHARING.decode(received(framed, shift=1)),
        SHARING.decode([bytes(frame) for frame in framed]),
        COPYING.decode(framed),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_dtype_and_layout(dtype: torch.dtype, layout: str) -> None:
    build, keeps_strides = LAYOUTS[layout]
    value = build(dtype)
    for result in every_way(value):
        assert same(value, result)
        if keeps_strides and value.numel():
            assert [s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1] == [
                s for s, n in zip(value.stride(), value.shape, strict=True) if n > 1
            ]
        if "expanded" not in layout:
            # Writable, and nobody else's.
            result.view(RAW.get(dtype.itemsize, dtype))[...] = 0
            assert bits(result) == bytes(result.nbytes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bits8, torch.complex64], ids=str)
def test_only_the_bytes_of_the_view_travel(dtype: torch.dtype, layout: str) -> None:
    """A part is as long as the elements stored, and lies in the caller's memory exactly if it says so."""
    build, keeps_strides = LAYOUTS[layout]
    value = build(dtype)
    parts = FRAMED.encode_into(value, bytearray())
    stored = 1
    for n, stride in zip(value.shape, value.stride(), strict=True):
        stored *= n if stride else 1
    assert sum(part.view.nbytes for part in parts) == stored * dtype.itemsize
    for part in parts:
        assert part.aliases == keeps_strides == inside(part.view, value)
        assert part.view.format == "B"
        assert part.view.ndim == 1
        assert part.view.c_contiguous


@pytest.mark.parametrize("dtype", sorted(DIFFERENTIABLE, key=str), ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    """Leaves and Parameters arrive requiring gradients; the result of an operation arrives as its value."""
    for value in (tensor(dtype, 30), tensor(dtype)):
        leaf = value.clone().requires_grad_()
        for result in every_way(leaf):
            assert result.requires_grad
            assert result.is_leaf
            assert same(leaf, result)
        for requires_grad in (True, False):
            parameter = torch.nn.Parameter(value.clone(), requires_grad=requires_grad)
            for result in every_way(parameter):
                assert type(result) is torch.nn.Parameter
                assert result.requires_grad == requires_grad
                assert bits(parameter) == bits(result)
    for value in (leaf.clone(), leaf.view(1, 1).T):
        for result in every_way(value):
            assert not result.requires_grad
            assert same(value, result)


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_bits(dtype: torch.dtype) -> None:
    value = tensor(dtype, 9, 40)
    conjugate = value.conj()
    views = [conjugate, conjugate.T, conjugate[:, ::3], conjugate[0, 0]]
    if dtype is not torch.complex32:
        views += [conjugate.imag, conjugate.imag.T, torch._neg_view(value)]
    for view in views:
        assert view.is_conj() or view.is_neg()
        (part, *_) = FRAMED.encode_into(view, bytearray())
        assert not part.aliases
        for result in every_way(view):
            assert not result.is_conj()
            assert not result.is_neg()
            assert same(view, result)


def test_negative_bit_of_a_dtype_that_numpy_lacks() -> None:
    view = torch._neg_view(torch.arange(100, dtype=torch.bfloat16))
    assert all(same(view, result) for result in every_way(view))


def test_inference_tensors_and_default_device() -> None:
    with torch.inference_mode():
        value = tensor(torch.float32, 300)
        assert all(same(value, result) for result in every_way(value))
    frames = FRAMED.encode(value)
    with torch.device("meta"):
        assert same(value, COPYING.decode(frames))


ARRAYS = {
    **{
        char: np.frombuffer(np.random.default_rng(3).bytes(640), char).reshape(4, -1)
        for char in "bBhHiIlLqQefdFD"
    },
    "bool": np.arange(60).reshape(4, 15) % 3 == 0,
    "datetime64": np.arange(60).astype("M8[ns]").reshape(4, 15),
    "datetime64 of 25 s": np.arange(60).astype("M8[25s]"),
    "datetime64 without unit": np.full(9, "NaT", "M8"),
    "timedelta64": np.arange(60).astype("m8[us]"),
    "strings": np.array([["a", "bcd"], ["", "\U0001f600"]]),
    "bytes": np.array([b"a", b"bcd"]),
    "void": np.frombuffer(bytes(range(60)), "V5"),
    "big endian": np.arange(60, dtype=">f8").reshape(4, 15),
    "big endian strings": np.array(["ab", "c"], dtype=">U2"),
    "big endian dates": np.arange(9).astype(">M8[D]"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    base = ARRAYS[name]
    read_only = base.copy()
    read_only.flags.writeable = False
    views = {
        "as it is": base,
        "0-dim": base.reshape(-1)[0:1].reshape(()),
        "empty": base[:0],
        "Fortran": np.asfortranarray(base),
        "reversed": base[::-1],
        "strided": base.reshape(-1)[::2],
        "read-only": read_only,
        "misaligned": np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view(base.dtype),
    }
    for view in views.values():
        for result in every_way(view):
            assert same(view, result)
            assert result.flags.writeable
            assert result.flags.aligned
            assert result.flags.f_contiguous == view.flags.f_contiguous or not view.flags.f_contiguous
    broadcast = np.broadcast_to(np.resize(base, 4)[:, None], (4, 50))
    (part,) = FRAMED.encode_into(broadcast, bytearray())
    assert part.view.nbytes == 4 * base.dtype.itemsize
    for result in every_way(broadcast):
        assert same(broadcast, result)
        assert result.strides == broadcast.strides


@pytest.mark.parametrize("name", ARRAYS)
def test_numpy_scalars(name: str) -> None:
    scalar = ARRAYS[name].reshape(-1)[1]
    for result in every_way({"x": scalar}):
        assert same(scalar, result["x"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_device_tensors_are_staged(layout: str) -> None:
    value = LAYOUTS[layout][0](torch.bfloat16).cuda()
    parts = FRAMED.encode_into(value, bytearray())
    assert not any(part.aliases for part in parts)
    for result in every_way(value):
        assert same(value.cpu(), result)
