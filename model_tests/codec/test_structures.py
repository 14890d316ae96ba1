"""Tensors anywhere in a structure arrive, with a type and without; what cannot travel is refused by name."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import decimal
import enum
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_tests.codec.samples import LAYOUTS, PLAIN, QUANTIZED, leaves, received, same, tensor
from numpy.typing import NDArray
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import quiesce.arrays
import quiesce.codec
from quiesce.codec import Decoder, Encoder
from quiesce.errors import DecodeError, EncodeError

T = TypeVar("T")
ENCODERS = [Encoder(threshold=0), Encoder(), Encoder(threshold=1 << 30)]


class Kind(enum.Enum):
    A = "a"


class Leaf(msgspec.Struct):
    data: torch.Tensor
    mask: torch.Tensor | None = None
    array: NDArray[np.float32] | None = None
    weight: torch.nn.Parameter | None = None


class Positional(msgspec.Struct, array_like=True, tag=True):
    data: torch.Tensor
    more: list[torch.Tensor]


class Tagged(msgspec.Struct, tag="t", omit_defaults=True, rename="camel"):
    first_data: torch.Tensor
    kind: Kind = Kind.A


class Other(msgspec.Struct, tag="o"):
    data: torch.Tensor


class Box(msgspec.Struct, Generic[T]):
    content: T


@dataclasses.dataclass
class Data:
    leaf: Leaf
    by_name: dict[str, torch.Tensor]
    pair: tuple[torch.Tensor, int]
    many: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: np.ndarray
    y: Data | None = None


def big(seed: int = 0) -> torch.Tensor:
    return tensor(torch.bfloat16, 20, 30, seed=seed)


def typed_examples() -> list[tuple[Any, Any]]:
    leaf = Leaf(
        big(),
        torch.tensor([True, False]),
        np.arange(300, dtype=np.float32),
        torch.nn.Parameter(torch.ones(3)),
    )
    data = Data(leaf, {"a": big(1), "b": torch.tensor(3)}, (big(2), 7), (big(3), big(4)))
    return [
        (torch.Tensor, big()),
        (torch.nn.Parameter, torch.nn.Parameter(torch.ones(99))),
        (np.ndarray, np.arange(5)),
        (NDArray[np.int64], np.arange(500)),
        (np.float32, np.float32("nan")),
        (Leaf, leaf),
        (Leaf, Leaf(torch.empty(0))),
        (Data, data),
        (Frozen, Frozen(np.ones((3, 400)).T, data)),
        (list[Leaf], [leaf, Leaf(big(5))]),
        (Box[torch.Tensor], Box(big())),
        (Box[list[np.ndarray]], Box([np.arange(3), np.arange(300)])),
        (Positional, Positional(big(), [big(1), torch.ones(1)])),
        (Tagged | Other, Other(big())),
        (list[Tagged | Other], [Tagged(big()), Other(big(1))]),
        (dict[int, dict[str, torch.Tensor]], {1: {"x": big()}, -5: {}}),
        (tuple[int, torch.Tensor, np.ndarray, str], (1, big(), np.arange(3), "é")),
        (torch.Tensor | None, None),
        (Any, [None, True, 1, -(2**63), 2**64 - 1, 1.5, "x", b"y", [big()], {"k": np.zeros((2, 0, 3))}]),
    ]


def as_plain(value: Any) -> Any:
    """With the names of classes in place of objects, so that `same` compares these too."""
    if isinstance(value, msgspec.Struct):
        return [type(value).__name__, {f: as_plain(getattr(value, f)) for f in value.__struct_fields__}]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [type(value).__name__, {name: as_plain(getattr(value, name)) for name in names}]
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(as_plain, value)]
    return value


@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda e: f"threshold {e.threshold}")
@pytest.mark.parametrize(("kind", "value"), typed_examples(), ids=lambda x: getattr(x, "__name__", None))
def test_typed(kind: Any, value: Any, encoder: Encoder) -> None:
    frames = encoder.encode(value)
    result = Decoder(kind).decode(received(frames))
    assert same(as_plain(value), as_plain(result))
    untyped = Decoder().decode(received(frames))
    assert same(list(leaves(as_plain(value))), list(leaves(untyped)))


def test_a_wrong_type_is_named_with_its_place() -> None:
    for encoder in ENCODERS:
        for value, kind, place in (
            ({"data": np.ones(300)}, Leaf, r"Expected `Tensor`, got `numpy.ndarray` - at `\$.data`"),
            ({"data": 5}, Leaf, r"\$.data"),
            ([big()], list[np.ndarray], r"\$\[0\]"),
            (big(), torch.nn.Parameter, "Parameter"),
            (big(), int, "int"),
        ):
            with pytest.raises(DecodeError, match=place):
                Decoder(kind).decode(encoder.encode(value))


def test_a_field_that_the_type_does_not_know_is_refused_if_it_holds_a_frame() -> None:
    """Its frame would belong to nobody; a tensor inside the payload is passed over as msgspec does."""
    value = {"data": torch.ones(3), "unknown": big()}
    assert Decoder(Leaf).decode(Encoder(threshold=1 << 30).encode(value)).data.sum() == 3
    with pytest.raises(DecodeError, match="belong to no tensor"):
        Decoder(Leaf).decode(Encoder(threshold=0).encode(value))


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
tensors = st.builds(
    lambda layout, dtype: LAYOUTS[layout][0](dtype), st.sampled_from(list(LAYOUTS)), st.sampled_from(PLAIN)
)
arrays = st.builds(
    lambda char, n, order: np.arange(n).astype(char).reshape(-1, 1, order=order),
    st.sampled_from(["b1", "<i2", ">i4", "f2", "c8", "U7", "M8[s]"]),
    st.integers(0, 300),
    st.sampled_from("CF"),
)
structures = st.recursive(
    scalars | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(-5, 5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(structures, st.sampled_from(ENCODERS), st.integers(0, 9))
def test_round_trip(value: Any, encoder: Encoder, shift: int) -> None:
    parts = encoder.encode_into(value, payload := bytearray())
    frames = [payload, *(part.view for part in parts)]
    expected = Decoder(copy=True).decode(frames)
    assert same(value, expected)
    result, aliased = Decoder().decode_with_report(received(frames, shift))
    assert same(value, result)
    assert set(aliased) <= set(range(1, len(frames)))


def test_values_of_the_standard_library() -> None:
    value = {
        "d": datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc),
        "u": uuid.UUID(int=5),
        "x": decimal.Decimal("1.5"),
        "e": Kind.A,
        "t": big(),
    }
    kinds = [datetime.datetime, uuid.UUID, decimal.Decimal, Kind]
    kind = msgspec.defstruct("Values", [*zip("duxe", kinds, strict=True), ("t", torch.Tensor)])
    result = Decoder(kind).decode(Encoder().encode(value))
    assert [getattr(result, name) for name in "duxe"] == [value[name] for name in "duxe"]


class Opaque:
    pass


class TensorWithMore(torch.Tensor):
    pass


def with_attribute() -> torch.Tensor:
    value = torch.ones(3)
    value.scale = 5  # type: ignore[attr-defined]
    return value


def freed(size: int, columns: int = 1, rows: int = 0) -> torch.Tensor:
    value = torch.ones(100, 10)[rows:, ::columns]
    value.untyped_storage().resize_(size)
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


REFUSED: dict[str, tuple[Any, str]] = {
    "object": (Opaque, "Opaque cannot be sent, and nothing is pickled"),
    "function": (lambda: len, "cannot be sent"),
    "dtype": (lambda: torch.float32, "torch.dtype cannot be sent"),
    "complex": (lambda: 1j, "complex cannot be sent"),
    "big integer": (lambda: 2**64, "int"),
    "surrogate": (lambda: "\ud800", "surrogates"),
    "deep": (lambda: nested(100_000), "recursion"),
    "cyclic": (cyclic, "recursion"),
    "meta": (lambda: torch.ones(3, device="meta"), "no data"),
    "meta, strided": (lambda: torch.ones(3, 9, device="meta")[:, ::2], "no data"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "indices and values"),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "indices and values"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "as a list"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "subclass of Tensor",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "scale and zero point",
    ),
    "mkldnn": (lambda: torch.ones(3, 3).to_mkldnn(), "strided"),
    "subclass": (lambda: torch.ones(3).as_subclass(TensorWithMore), "subclass of Tensor"),
    "uninitialized": (torch.nn.UninitializedParameter, "subclass of Tensor"),
    "attribute": (with_attribute, r"attributes \(scale\)"),
    "module buffer": (lambda: torch.nn.Buffer(torch.ones(3)), "attributes"),
    "zero tensor": (lambda: torch._efficientzerotensor((3,)), "no bytes that can be read"),
    "freed": (lambda: freed(0), "lost its storage"),
    "shrunk": (lambda: freed(3999), "lost its storage"),
    "freed, strided": (lambda: freed(0, columns=2), "lost its storage"),
    "shrunk behind": (lambda: freed(3999, rows=80), "lost its storage"),
    "too many axes": (lambda: torch.ones((1,) * 65), "65 axes"),
    "object array": (lambda: np.array([{}]), "Python objects"),
    "string dtype": (lambda: np.array(["a"], np.dtypes.StringDType()), "Python objects"),
    "structured": (lambda: np.zeros(3, [("a", "f4")]), "fields one by one"),
    "longdouble": (lambda: np.zeros(3, np.longdouble), "longdouble"),
    "clongdouble": (lambda: np.zeros(3, np.clongdouble), "longdouble"),
    "longdouble scalar": (lambda: np.longdouble(1), "longdouble"),
    "structured scalar": (lambda: np.zeros(3, [("a", "f4")])[0], "fields one by one"),
    "dtype metadata": (lambda: np.zeros(3, np.dtype("f4", metadata={"unit": "m"})), "metadata"),
    "masked": (lambda: np.ma.masked_array([1], [True]), "subclass of ndarray"),
    "matrix": (lambda: np.asmatrix([[1]]), "subclass of ndarray"),
    "record": (lambda: np.rec.array([(1,)], dtype=[("a", "i4")]), "subclass of ndarray"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("encoder", ENCODERS, ids=lambda e: f"threshold {e.threshold}")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str, encoder: Encoder) -> None:
    """The same error every time, wherever it stands; nothing is sent and the encoder goes on."""
    make, reason = REFUSED[name]
    value = make()
    for place in (lambda x: x, lambda x: [big(), {"k": x}], lambda x: (x, big())):
        payload = bytearray(b"before")
        with pytest.raises(EncodeError, match=reason):
            encoder.encode_into(place(value), payload)
        assert not payload
    assert same([big()], Decoder().decode(encoder.encode([big()])))


def test_refused_under_transforms() -> None:
    encoder = Encoder()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(300), torch.ones(300))
        with pytest.raises(EncodeError, match="tangent"):
            encoder.encode(dual)
        assert same(torch.ones(300), Decoder().decode(encoder.encode(torch.ones(300))))
    with FakeTensorMode(), pytest.raises(EncodeError, match="subclass of Tensor"):
        encoder.encode(torch.ones(3))

    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(EncodeError, match="no bytes that can be read"):
            encoder.encode(x)
        return x

    torch.func.vmap(inside)(torch.ones(3, 2))
    torch.func.grad(lambda x: inside(x).sum())(torch.ones(3))


def test_every_dtype_of_this_torch_is_known_or_refused() -> None:
    """A dtype that a later torch adds fails here until the codec knows it."""
    assert set(PLAIN) == set(quiesce.arrays._CODES)
    assert not set(QUANTIZED) & set(quiesce.arrays._CODES)
    assert len(set(quiesce.arrays._NAMES)) == len(quiesce.arrays._NAMES)


def test_the_codec_has_no_way_to_run_what_it_reads() -> None:
    for module in (quiesce.codec, quiesce.arrays):
        assert module.__file__
        tree = ast.parse(Path(module.__file__).read_text())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        names |= {
            a.name for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names
        }
        names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert not names & {"pickle", "marshal", "cloudpickle", "eval", "exec", "load", "loads", "__import__"}


AUDITED = """
import pickle, sys
import numpy as np, torch
from quiesce.codec import Decoder, Encoder
from quiesce.errors import DecodeError
class Evil:
    def __reduce__(self):
        return print, ("ran",)
evil = pickle.dumps(Evil())
decoder, encoder = Decoder(), Encoder(threshold=0)
frames = encoder.encode({"x": torch.ones(99).bfloat16(), "y": np.arange(9), "z": evil, "s": np.float32(1)})
variants = [frames, [evil], [frames[0], *[evil] * 2], [bytes(frames[0]).replace(b"<i8", b"O__")] + frames[1:]]
def watch(event, arguments):
    if armed and event.split(".")[0] in ("exec", "compile", "import", "os", "open", "pickle", "subprocess"):
        sys.stderr.write(f"{event} {arguments}\\n")
        sys.exit(3)
armed = False
sys.addaudithook(watch)
for armed in (False, True):
    for variant in variants:
        try:
            decoder.decode(variant)
        except DecodeError:
            pass
armed = False
"""


def test_decoding_runs_nothing() -> None:
    """In a process of its own, because an audit hook cannot be taken off."""
    done = subprocess.run([sys.executable, "-c", AUDITED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
