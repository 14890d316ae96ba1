"""Everything that may be published arrives as it was, over a real ring."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from model_tests.broadcast_ring.processes import START_S

from quiesce.broadcast_ring import BroadcastRing
from quiesce.errors import EncodeError, ResourceExhausted, WrongProcess
from quiesce.ring_reader import LEASE_BYTES, RingReader

DTYPES = [
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
]
SHAPES = [(), (0, 3), (7,), (40, 50)]


class Pair:
    """A writer and its reader."""

    def __init__(self, serializer: str) -> None:
        self.ring = BroadcastRing(1, slots=4, slot_bytes=4 << 20, serializer=serializer)
        self.reader = RingReader(self.ring.handle, 0)
        self.ring.wait_until_ready(START_S)

    def through(self, obj: object) -> Any:
        self.ring.publish(obj)
        return self.reader.receive(START_S)


@pytest.fixture(scope="module", params=["pickle", "msgpack"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.reader.close()
    made.ring.close()


@pytest.fixture(scope="module")
def pickled() -> Iterator[Pair]:
    made = Pair("pickle")
    yield made
    made.reader.close()
    made.ring.close()


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().resolve_conj().resolve_neg().contiguous().untyped_storage())[: tensor.nbytes]


@pytest.mark.parametrize("rows", [2, 30, 300])
def test_many_columns_in_one_message(pair: Pair, rows: int) -> None:
    """Tensors with gaps are copied, and no copy is taken for another that had its address."""
    matrix = torch.arange(rows * 33.0).view(rows, 33)
    columns = [matrix[:, i] for i in range(33)]
    assert all(map(torch.equal, pair.through(columns), columns))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(pickled: Pair, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.empty(shape, dtype=dtype)
    source = torch.arange(max(tensor.nbytes, 1), dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    if tensor.numel():
        tensor.set_(source.untyped_storage(), 0, tensor.shape, tensor.stride())
    got = pickled.through(tensor)
    assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert bytes(got.untyped_storage())[: tensor.nbytes] == bytes(tensor.untyped_storage())[: tensor.nbytes]


def layouts() -> dict[str, torch.Tensor]:
    real, imaginary = torch.randn(40, 60), torch.randn(40, 60, dtype=torch.complex64)
    return {
        "plain": real,
        "transposed": real.T,
        "channels last": torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last),
        "expanded": torch.randn(4).expand(100_000, 4),
        "gaps": torch.randn(100, 100)[:, ::3],
        "one row of many": torch.randn(1000, 1000)[5],
        "conjugate": imaginary.conj(),
        "negative": torch._neg_view(torch.randn(500)),
        "imaginary part of a conjugate": imaginary.conj().imag,
        "leased": torch.randn(LEASE_BYTES // 4),
        "leased and transposed": torch.randn(600, 700).T,
        "requires gradients": torch.randn(30, requires_grad=True),
        "a result with gradients": torch.randn(30, requires_grad=True) * 2,
        "a parameter": torch.nn.Parameter(torch.randn(30, 30)),
        "a frozen parameter": torch.nn.Parameter(torch.randn(3), requires_grad=False),
    }


@pytest.mark.parametrize("name", list(layouts()))
def test_layouts(pickled: Pair, name: str) -> None:
    tensor = layouts()[name]
    got = pickled.through([tensor])[0]
    assert type(got) is type(tensor)
    assert torch.equal(got, tensor)
    assert got.requires_grad == tensor.requires_grad
    if name not in ("gaps", "imaginary part of a conjugate"):
        assert got.stride() == tensor.stride()
        assert (got.is_conj(), got.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    if name != "expanded":
        with torch.no_grad():
            got.add_(1)


class Named(torch.Tensor):
    """A subclass."""


def test_left_to_torch(pickled: Pair) -> None:
    """Subclasses, sparse and quantized tensors, and those with attributes go through torch's own reducer."""
    marked = torch.randn(500)
    marked.mark = "kept"
    got = pickled.through(marked)
    assert torch.equal(got, marked)
    assert got.mark == "kept"
    sparse = torch.eye(50).to_sparse()
    assert torch.equal(pickled.through(sparse).to_dense(), torch.eye(50))
    named = torch.randn(500).as_subclass(Named)
    got = pickled.through(named)
    assert type(got) is Named
    assert torch.equal(got, named)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.randn(500), 0.1, 3, torch.qint8)
        got = pickled.through(quantized)
    assert torch.equal(got.dequantize(), quantized.dequantize())


def test_shared_memory_in_a_message(pickled: Pair) -> None:
    base = torch.zeros(40, 50)
    got = pickled.through({"a": base, "b": base.T, "part": base[1:3], "same": base})
    got["a"][0, 1] = 7
    assert got["b"][1, 0] == 7
    assert got["same"] is got["a"]
    got["a"][1, 0] = 9
    assert got["part"][0, 0] == 0, "only tensors over the same bytes share memory"


def test_structures(pair: Pair) -> None:
    message = {"n": 1, "list": [torch.arange(9), "text", b"bytes"], "array": np.arange(600.0), "none": None}
    got = pair.through(message)
    assert torch.equal(got["list"][0], message["list"][0])  # type: ignore[index]
    assert got["list"][1:] == ["text", b"bytes"]
    assert np.array_equal(got["array"], message["array"])  # type: ignore[arg-type]
    got["array"][0] = 5


@pytest.mark.parametrize("nbytes", [LEASE_BYTES - 8, LEASE_BYTES, LEASE_BYTES + 8, 8 << 20])
def test_received_is_the_readers_own(pair: Pair, nbytes: int) -> None:
    """Copied, leased or over ZMQ: written by the reader, and written again by the writer after publishing."""
    sent = torch.full((nbytes // 8,), 5, dtype=torch.int64)
    got = pair.through(sent)
    sent.fill_(6)
    assert bool((got == 5).all())
    got.fill_(7)
    again = pair.through(sent)
    assert bool((again == 6).all())
    assert bool((got == 7).all())


def test_a_loan_is_not_copied(pair: Pair) -> None:
    """The reader's bytes are those the writer wrote, in their place in the slot."""
    ring = pair.ring
    loan = ring.empty((512, 1024), torch.float32)
    loan.fill_(3)
    other = torch.full((400,), 4.0)
    got = pair.through({"loan": loan[1:], "other": other, "text": "x" * 5000})
    assert torch.equal(got["loan"], torch.full((511, 1024), 3.0))
    assert torch.equal(got["other"], other)
    slot = (
        loan.data_ptr() - ring._memory.address - ring._memory.layout.slots_at
    ) // ring._memory.layout.slot_bytes
    assert slot in ring._lent
    del got
    ring._collect()
    assert slot in ring._lent, "the writer's tensor still lives there"
    del loan
    ring._collect()
    assert slot in ring._free


def test_loans_that_are_not_published(pair: Pair) -> None:
    ring = pair.ring
    first, second = ring.empty((1000,)), ring.empty((1000,))
    first.fill_(1)
    second.fill_(2)
    got = pair.through([first, second, torch.zeros(2)])
    assert (float(got[0].sum()), float(got[1].sum())) == (1000.0, 2000.0)
    del first, second
    assert ring.empty((0, 5)).shape == (0, 5)
    ring._collect()
    assert len(ring._free) == 4
    with pytest.raises(ResourceExhausted, match="larger slot_bytes"):
        ring.empty((1 << 30,))


def test_what_cannot_be_encoded_is_not_sent(pair: Pair) -> None:
    with pytest.raises(EncodeError):
        pair.ring.publish({"function": lambda: 1})
    assert pair.through("next") == "next"


def test_forked_child_is_refused(pair: Pair) -> None:
    pid = pair.ring._pid
    pair.ring._pid = -1
    try:
        with pytest.raises(WrongProcess):
            pair.ring.publish(1)
    finally:
        pair.ring._pid = pid
