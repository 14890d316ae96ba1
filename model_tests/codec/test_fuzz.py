"""Whatever bytes arrive, decoding gives an object or a DecodeError, in bounded memory.

What was built is read to its last byte, so that a tensor reaching outside its frame would show as a crash.
"""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from model_tests.codec.samples import bits, leaves, received, tensor

from quiesce import arrays
from quiesce.codec import Decoder, Encoder
from quiesce.errors import DecodeError

LIMIT = 1 << 20
# Objects that one byte of payload can make: see the limits in docs/codec.md.
PER_BYTE = 100
EXT = 0x51
HEADER = struct.Struct("<4sBBHI")


class Item(msgspec.Struct):
    data: torch.Tensor
    array: np.ndarray | None = None
    name: str = ""


DECODERS = [
    Decoder(limit_bytes=LIMIT),
    Decoder(copy=True, limit_bytes=LIMIT),
    Decoder(list[Item], limit_bytes=LIMIT),
    Decoder(dict[str, torch.Tensor], limit_bytes=LIMIT),
]


def header(frames: int) -> bytes:
    return HEADER.pack(b"\xc1QSC", 1, 0, 0, frames)


def message(obj: Any, parts: list[bytes]) -> list[bytes]:
    return [header(1 + len(parts)) + msgspec.msgpack.encode(obj), *parts]


def attempt(frames: list[Any]) -> int:
    """Decode in every way; returns how many of them accepted."""
    accepted = 0
    for decoder in DECODERS:
        frames = received(frames)
        total = sum(frame.nbytes for frame in frames)
        tracemalloc.start()
        try:
            result = decoder.decode(frames)
            accepted += 1
        except DecodeError:
            result = None
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50_000 + 2 * total + PER_BYTE * (frames[0].nbytes if frames else 0)
        for leaf in leaves(result):
            assert leaf.nbytes <= LIMIT or not leaf.nbytes
            bits(leaf)
    return accepted


def sample(threshold: int) -> list[bytes]:
    value = [
        {"data": tensor(torch.bfloat16, 4, 40), "array": np.arange(90.0), "name": "a"},
        {"data": tensor(torch.bool, 300).view(3, 100).T, "name": "b"},
        {
            "data": tensor(torch.float32, 5, 1).expand(5, 30),
            "array": np.asfortranarray(np.ones((30, 3), "M8[s]")),
        },
        {"data": torch.nn.Parameter(torch.ones(70)), "array": np.array(["x", "yz"])},
        {"data": torch.empty(0, 3)},
    ]
    return [bytes(frame) for frame in Encoder(threshold).encode(value)]


SAMPLES = [sample(0), sample(256), sample(1 << 30)]


def test_the_samples_are_accepted() -> None:
    assert [attempt(frames) for frames in SAMPLES] == [3, 3, 3]


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames(frames: list[bytes]) -> None:
    assert attempt(frames) == 0 or frames[0].startswith(b"\xc1QSC")


@given(st.binary(max_size=200), st.lists(st.binary(min_size=1, max_size=50), max_size=3))
def test_random_msgpack(content: bytes, parts: list[bytes]) -> None:
    attempt([header(1 + len(parts)) + content, *parts])


positions = st.integers(0, 1 << 16)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), positions, positions, st.integers(0, 7)),
        st.tuples(
            st.just("set"), positions, positions, st.sampled_from([0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF])
        ),
        st.tuples(st.just("cut"), positions, positions, st.just(0)),
        st.tuples(st.just("grow"), positions, positions, st.integers(1, 9)),
        st.tuples(st.just("drop frame"), positions, positions, st.just(0)),
        st.tuples(st.just("repeat frame"), positions, positions, st.just(0)),
        st.tuples(st.just("swap frames"), positions, positions, st.just(0)),
    ),
    min_size=1,
    max_size=4,
)


@given(st.sampled_from(SAMPLES), changes, st.booleans(), st.booleans())
def test_mutations(
    frames: list[bytes], changes: list[tuple[str, int, int, int]], fix: bool, payload: bool
) -> None:
    """Flips, cuts and frames moved about, with the header made good again or not."""
    mutated = [bytearray(frame) for frame in frames]
    for kind, where, at, value in changes:
        if not mutated:
            break
        index = 0 if payload else where % len(mutated)
        frame = mutated[index]
        if kind == "drop frame":
            del mutated[index]
        elif kind == "repeat frame":
            mutated.insert(index, bytearray(frame))
        elif kind == "swap frames":
            other = at % len(mutated)
            mutated[index], mutated[other] = mutated[other], mutated[index]
        elif frame and kind == "flip":
            frame[at % len(frame)] ^= 1 << value
        elif frame and kind == "set":
            frame[at % len(frame)] = value
        elif kind == "cut":
            del frame[at % (len(frame) + 1) :]
        elif kind == "grow":
            frame[at % (len(frame) + 1) : 0] = bytes(value)
    if fix and mutated:
        mutated[0][: HEADER.size] = header(len(mutated))
    attempt(mutated)


sizes = st.one_of(
    st.integers(0, 9),
    st.sampled_from([2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 4, 1 << 20, (1 << 20) + 1]),
)
names = st.one_of(
    st.sampled_from(
        [b"<f4", b"|b1", b">i8", b"<M8[s]", b"<U3", b"|S0", b"<U0", b"|V0", b"<f16", b"|O", b"O", b"|V8"]
    ),
    st.sampled_from(
        [b"<U2000000000", b"<U999999999999", b"i4,i4", b"(2,3)f4", b"<M8[0s]", b"<m8[999999999Y/7]", b""]
    ),
    st.binary(max_size=6),
)


@st.composite
def descriptors(draw: st.DrawFn) -> bytes:
    """Descriptors well-formed enough to get past the first checks, and not quite right."""
    kind = draw(st.sampled_from([arrays.TENSOR, arrays.NDARRAY, arrays.SCALAR, 3, 255]))
    shape = draw(st.lists(sizes, max_size=4))
    flags = draw(st.sampled_from([0, 0, 0, 1, 2, 3, 4, 4, 5, 7, 8, 255]))
    frame = draw(st.sampled_from([0, 0, 1, 1, 2, 3, 2**32 - 1]))
    ndim = draw(st.sampled_from([len(shape), len(shape), len(shape), len(shape) + 1, 64, 65, 255]))
    rest = b""
    if flags & arrays.LAYOUT:
        order = draw(st.permutations(range(len(shape))))
        rest = bytes(axis | draw(st.sampled_from([0, 0, 0x80])) for axis in order)
        rest = draw(st.sampled_from([rest, rest, rest[1:], rest[:-1] + b"\xff", bytes(len(rest))]))
    name = draw(names) if kind else b""
    code = draw(st.sampled_from([len(name), len(name), 255])) if kind else draw(st.integers(0, 45))
    data = draw(st.binary(max_size=40))
    return struct.pack(f"<BBBBI{len(shape)}Q", kind, code, flags, ndim, frame, *shape) + rest + name + data


@given(
    st.lists(descriptors(), max_size=3),
    st.lists(st.binary(min_size=1, max_size=100), max_size=3),
    st.sampled_from([EXT, EXT, EXT, 0, -1, 127]),
)
@example([struct.pack("<BBBBIQ", 0, 0, arrays.LAYOUT, 1, 0, 2**62) + b"\x80" + bytes(4)], [], EXT)
@example([struct.pack("<BBBBI2Q", 0, 0, arrays.LAYOUT, 2, 0, 2**62, 0) + b"\x80\x01"], [], EXT)
@example([struct.pack("<BBBBI4Q", 0, 0, 0, 4, 1, 2**32, 2**32, 2, 1)], [b"abcd"], EXT)
def test_descriptors(found: list[bytes], parts: list[bytes], code: int) -> None:
    attempt(message([msgspec.msgpack.Ext(code, data) for data in found], parts))
    attempt(message({"a": msgspec.msgpack.Ext(code, b"".join(found))}, parts))
    for data in found:
        attempt(
            [
                header(1 + len(parts))
                + b"\x81"
                + msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))
                + b"\1"
            ]
        )


def array_ext(kind: int, flags: int, rest: bytes, *shape: int) -> msgspec.msgpack.Ext:
    head = struct.pack(f"<BBBBI{len(shape)}Q", kind, 3, flags, len(shape), 0, *shape)
    return msgspec.msgpack.Ext(EXT, head + rest)


def tensor_ext(
    frame: int, *shape: int, code: int = 4, flags: int = 0, rest: bytes = b""
) -> msgspec.msgpack.Ext:
    head = struct.pack(f"<BBBBI{len(shape)}Q", arrays.TENSOR, code, flags, len(shape), frame, *shape)
    return msgspec.msgpack.Ext(EXT, head + rest)


ARRAY = msgspec.msgpack.Ext(EXT, struct.pack("<BBBBI", arrays.NDARRAY, 3, 0, 0, 0) + b"|u1a")
REFUSED: dict[str, tuple[list[bytes], str]] = {
    "used twice": (message([tensor_ext(1, 4), tensor_ext(1, 4)], [b"abcd"]), "due"),
    "unused": (message([tensor_ext(1, 4)], [b"abcd", b"x"]), "belong to no tensor"),
    "out of range": (message([tensor_ext(2, 4)], [b"abcd"]), "due"),
    "out of order": (message([tensor_ext(2, 4), tensor_ext(1, 4)], [b"abcd", b"abcd"]), "due"),
    "far out of range": (message([tensor_ext(2**32 - 1, 4)], [b"abcd"]), "due"),
    "too short": (message([tensor_ext(1, 5)], [b"abcd"]), "4 bytes"),
    "too long": (message([tensor_ext(1, 3)], [b"abcd"]), "4 bytes"),
    "empty": (message([tensor_ext(1, 0)], [b""]), "gave this message up"),
    "empty inside": (message([tensor_ext(1, 0), tensor_ext(2, 1)], [b"", b"a"]), "frame 1 is empty"),
    "product overflows": (message([tensor_ext(1, 2**32, 2**32, 4)], [b"abcd"]), "4 bytes"),
    "negative size": (message([tensor_ext(1, 2**64 - 4)], [b"abcd"]), "4 bytes"),
    "inline too short": (message([tensor_ext(0, 5, rest=b"abcd")], []), "inline"),
    "inline too long": (message([tensor_ext(0, 3, rest=b"abcd")], []), "inline"),
    "frame and inline": (message([tensor_ext(1, 4, rest=b"abcd")], [b"abcd"]), "stray"),
    "unknown dtype": (message([tensor_ext(1, 4, code=200)], [b"abcd"]), "dtype 200"),
    "gradient of integers": (message([tensor_ext(1, 4, flags=1)], [b"abcd"]), "gradient"),
    "expanded beyond the limit": (
        message([tensor_ext(0, LIMIT + 1, flags=arrays.LAYOUT, rest=b"\x80a")], []),
        "more memory",
    ),
    "expanded bit by bit": (
        message([tensor_ext(0, LIMIT // 4, flags=arrays.LAYOUT, rest=b"\x80a")] * 5, []),
        "more memory",
    ),
    "array expanded beyond the limit": (
        message([array_ext(arrays.NDARRAY, arrays.LAYOUT, b"\x80|u1a", LIMIT + 1)], []),
        "more memory",
    ),
    "array with a gradient": (message([array_ext(arrays.NDARRAY, 1, b"|u1a", 1)], []), "flags 1"),
    "scalar with a shape": (message([array_ext(arrays.SCALAR, 0, b"|u1a", 1)], []), "shape"),
    "object dtype": (message([array_ext(arrays.NDARRAY, 0, b"|O8" + bytes(8), 1)], []), "plain numpy dtype"),
    "no permutation": (
        message([tensor_ext(0, 2, 2, flags=arrays.LAYOUT, rest=b"\0\0abcd")], []),
        "permutation",
    ),
    "axis out of range": (
        message([tensor_ext(0, 2, 2, flags=arrays.LAYOUT, rest=b"\0\2abcd")], []),
        "permutation",
    ),
    "bad bool": (message([tensor_ext(1, 4, code=9)], [b"\0\1\2\0"]), "bool"),
    "truncated descriptor": (message([msgspec.msgpack.Ext(EXT, b"abc")], []), "decode"),
    "unknown extension": (message([msgspec.msgpack.Ext(5, b"abc")], []), "unknown code 5"),
    "deep": ([header(1) + b"\x91" * 100_000], "recursion"),
    "deep maps": ([header(1) + b"\x81\xa0" * 100_000], "recursion"),
    "huge array": ([header(1) + b"\xdd\xff\xff\xff\xff" + b"\x90" * 100], "truncated"),
    "huge map": ([header(1) + b"\xdf\xff\xff\xff\xff"], "truncated"),
    "huge string": ([header(1) + b"\xdb\xff\xff\xff\xff"], "truncated"),
    "huge extension": ([header(1) + b"\xc9\xff\xff\xff\xffQ"], "truncated"),
    "behind the end": ([header(1) + b"\x90\x90"], "trailing"),
    "nothing": ([header(1)], "truncated"),
    "no frames": ([], "at least one"),
    "array as a key": ([header(1) + b"\x81" + msgspec.msgpack.encode(ARRAY) + b"\1"], "hashable"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    frames, reason = REFUSED[name]
    with pytest.raises(DecodeError, match=reason):
        DECODERS[0].decode(received(frames) if frames and frames[-1] else frames)
    assert attempt(frames) == 0


def test_a_deep_unknown_field_is_skipped_without_a_crash() -> None:
    deep = b"\x91" * 1_000_000
    content = b"\x91\x82\xa4data" + msgspec.msgpack.encode(tensor_ext(0, 0)) + b"\xa1z" + deep
    with pytest.raises(DecodeError, match="recursion"):
        DECODERS[2].decode([header(1) + content])


def test_copies_count_against_the_limit() -> None:
    frames = Encoder(threshold=0).encode([torch.ones(LIMIT // 8), torch.ones(LIMIT // 8)])
    assert len(Decoder(copy=True, limit_bytes=LIMIT).decode(frames)) == 2
    assert len(Decoder(limit_bytes=0).decode(received(frames))) == 2
    with pytest.raises(DecodeError, match="more memory"):
        Decoder(copy=True, limit_bytes=LIMIT - 1).decode(frames)
    with pytest.raises(DecodeError, match="more memory"):
        Decoder(limit_bytes=LIMIT - 1).decode(received(frames, shift=1))


def test_memory_for_each_byte_of_payload() -> None:
    """The figure in docs/codec.md: the densest plain structures cost under 100 bytes a byte."""
    for item in (b"\x90", b"\x80", b"\x91\x90", b"\x81\x01\x01", msgspec.msgpack.encode(tensor_ext(0, 0))):
        payload = header(1) + b"\xdd" + struct.pack(">I", 20_000) + item * 20_000
        tracemalloc.start()
        Decoder().decode([payload])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < PER_BYTE * len(payload)


@pytest.mark.nightly
@settings(max_examples=500_000)
@given(st.sampled_from(SAMPLES), st.randoms(use_true_random=False), st.integers(1, 8))
def test_many_flips(frames: list[bytes], random: Any, count: int) -> None:
    mutated = [bytearray(frame) for frame in frames]
    for _ in range(count):
        frame = random.choice(mutated)
        frame[random.randrange(len(frame))] = random.randrange(256)
    attempt(mutated)
