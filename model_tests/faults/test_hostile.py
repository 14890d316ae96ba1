"""Bytes from somebody who means harm, or is broken: typed errors, bounded memory, no code, and the honest are served.

The codec's own decoders are fuzzed in `model_tests/codec/test_fuzz.py`; here are the sockets, the segment, the handle
and the metadata of a stage link, and the 1.4 million inputs that all decoders get every night.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pickle
import random
import resource
import socket as sockets
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from model_tests.codec.samples import bits, leaves
from model_tests.codec.test_fuzz import DECODERS, SAMPLES
from model_tests.conftest import PROFILE
from model_tests.forking import outcome

from quiesce.broadcast_ring import BroadcastRing
from quiesce.codec import ABORT, Decoder
from quiesce.errors import DecodeError, PeerDied, QuiesceError, QuiesceTimeout
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.ring_memory import _HEADER, HEADER_BYTES, Layout, RingMemory
from quiesce.ring_reader import RemoteReader, RingReader
from quiesce.ring_wire import BODY, HELLO, WELCOME, Hello, RingHandle, new_secret, pack_head, unpack_head
from quiesce.simulated import SimulatedBackend, SimulatedWorld, chooser
from quiesce.simulated_transport import SimulatedPeers, SimulatedTransport
from quiesce.stage_handoff import Metadata, StageLink

BATCH = 100
"""Inputs that one example of Hypothesis makes of its seed."""
LIMIT = 1 << 20
KEY, NONCE = bytes(range(32)), bytes(range(16))
METADATA = msgspec.msgpack.encode(
    Metadata(0, {"n": [1, "s", None]}, (("x", (2, 3), "float32", False), ("y", (0,), "bool", False)), ("n", "x", "y"))  # type: ignore[arg-type]
)  # fmt: skip
HANDLE = RingHandle(os.getpid(), 3, 1, 1, "ipc://@a", "tcp://127.0.0.1:1", "pickle", KEY.hex()).to_json()


def mutated(original: bytes, chance: random.Random) -> bytes:
    """Some bytes flipped, replaced by telling ones, cut, doubled, or all of them random."""
    found = bytearray(original)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(found) + 1)
        match chance.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << chance.randrange(8)
            case 1 if found:
                found[at % len(found)] = chance.choice([0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF])
            case 2:
                del found[at:]
            case 3:
                found[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 4:
                found[at : at + 8] = struct.pack("<q", chance.choice([-1, 2**31, 2**62, 2**63 - 1, 1 << 20]))
            case 5:
                found = bytearray(chance.randbytes(chance.randrange(64)))
    return bytes(found)


class Part:
    """As `zmq.Frame`, as far as the ring's decoders look."""

    def __init__(self, buffer: bytes) -> None:
        self.buffer = buffer


def link(message: bytes) -> None:
    """What a stage link makes of a metadata message."""
    peers = SimulatedPeers()
    backend = SimulatedBackend(SimulatedWorld(chooser(0)), "2", eager=False)
    SimulatedTransport(peers, backend, 1, "nccl").send_message(message, 2)
    receiver = StageLink(
        SimulatedTransport(peers, backend, 2, "nccl"), source=1, backend=backend, limit_bytes=LIMIT
    )
    receiver.irecv_tensor_dict()


HELLO_PARTS = Hello(0, 1, 2, NONCE).pack(KEY)
HEAD_PARTS = [pack_head(BODY, KEY, NONCE, 5, [b"pickle", b"data"]), b"pickle", b"data"]


def _try_codec(chance: random.Random) -> None:
    frames = [mutated(f, chance) if chance.random() < 0.6 else f for f in chance.choice(SAMPLES)]
    for leaf in leaves(chance.choice(DECODERS).decode([bytearray(frame) for frame in frames])):
        assert leaf.nbytes <= LIMIT or not leaf.nbytes
        bits(leaf)


def _try_hello(chance: random.Random) -> None:
    parts = [mutated(part, chance) for part in HELLO_PARTS]
    assert Hello.unpack(KEY, parts) is None or parts[1:] == HELLO_PARTS[1:]


def _try_head(chance: random.Random) -> None:
    parts = [mutated(part, chance) for part in HEAD_PARTS[:2]] + HEAD_PARTS[2:]
    unpack_head(KEY, NONCE, [Part(part) for part in parts])  # type: ignore[misc]
    assert parts == HEAD_PARTS, "a message that the writer did not make was taken for its"


@functools.cache
def _wire() -> tuple[zmq.Socket[bytes], PayloadReceiver[Any]]:
    """A socket that says anything, and the receiver at its other end; they live as long as the process."""
    context = zmq.Context.instance()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://hostile")
    push.connect("inproc://hostile")
    push.linger = 0
    return push, PayloadReceiver(pull, Decoder(limit_bytes=LIMIT))


def _try_receiver(chance: random.Random) -> None:
    push, receiver = _wire()
    sample = chance.choice(SAMPLES)
    frames = [mutated(f, chance) if chance.random() < 0.6 else f for f in sample]
    if chance.random() < 0.2:
        frames.insert(chance.randrange(len(frames) + 1), chance.choice([b"", ABORT, chance.randbytes(9)]))
    push.send_multipart(frames)
    push.send_multipart(sample)
    # Whatever was said before it, the message behind it comes, whole.
    values = []
    for _ in range(2):
        with contextlib.suppress(DecodeError, QuiesceTimeout):
            values.append(receiver.receive(0.0).value)
    found, sent = ([bits(leaf) for leaf in leaves(value)] for value in (values[-1], Decoder().decode(sample)))
    assert found == sent


def _try_segment(chance: random.Random) -> None:
    damaged = mutated(SEGMENT, chance)
    fd = os.memfd_create("hostile")
    try:
        os.write(fd, damaged)
        os.truncate(fd, chance.choice([len(damaged), HEADER_BYTES, 1 << 20]))
        with contextlib.suppress(PeerDied):
            RingMemory.attach(os.getpid(), fd, KEY)
            # What was cut off and is beyond the end of the bytes written reads as zeros.
            assert damaged.ljust(len(SEGMENT), b"\0").startswith(SEGMENT), "another header was taken for it"
    finally:
        os.close(fd)


def _segment() -> bytes:
    memory = RingMemory.create(Layout(1, 2, 8, 4096), KEY)
    return bytes(memory.view[: _HEADER.size])


SEGMENT = _segment()
TRIES: dict[str, Callable[[random.Random], None]] = {
    "codec": _try_codec,
    "metadata": lambda chance: link(mutated(METADATA, chance)),
    "hello": _try_hello,
    "head": _try_head,
    "handle": lambda chance: (
        RingHandle.from_json(mutated(HANDLE.encode(), chance).decode("latin-1")) and None
    ),
    "receiver": _try_receiver,
    "segment": _try_segment,
}


def _batch(name: str, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(BATCH):
        with contextlib.suppress(DecodeError):
            TRIES[name](chance)


@pytest.mark.parametrize("name", TRIES)
@settings(max_examples={"dev": 5, "ci": 20}.get(PROFILE, 2_000))
@given(seed=st.integers(0, 2**64 - 1))
def test_mutated_inputs(name: str, seed: int) -> None:
    """Every night 7 times 2,000 batches of 100: 1.4 million inputs. Nothing but DecodeError comes of them."""
    _batch(name, seed)


def test_mutated_inputs_need_no_memory() -> None:
    """However they ask for it."""
    for name in TRIES:
        _batch(name, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(10):
        for name in TRIES:
            _batch(name, seed)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


HOSTILE_METADATA: dict[str, Any] = {
    "huge shape": [0, {}, [["x", [2**40, 2**20], "float32", False]], ["x"]],
    "overflow": [0, {}, [["x", [2**62, 4], "float32", False]], ["x"]],
    "overflow around an empty axis": [0, {}, [["x", [0, 2**63 - 1], "float32", False]], ["x"]],
    "many axes": [0, {}, [["x", [1] * 1_000, "float32", False]], ["x"]],
    "negative": [0, {}, [["x", [-1], "float32", False]], ["x"]],
    "many small": [0, {}, [[str(i), [LIMIT // 8], "uint8", False] for i in range(9)], [str(i) for i in range(9)]],
    "quantized": [0, {}, [["x", [2], "quint8", False]], ["x"]],
    "a key of nothing": [0, {}, [], ["x"]],
    "a key too few": [0, {"x": 1}, [], []],
    "a key twice": [0, {"x": 1}, [["x", [1], "uint8", False]], ["x", "x"]],
    "no dict": [],
    "out of turn": [7, {}, [], []],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_METADATA)
def test_hostile_metadata(name: str) -> None:
    with pytest.raises(DecodeError):
        link(msgspec.msgpack.encode(HOSTILE_METADATA[name]))


def test_deep_metadata() -> None:
    for deep in (b"\x91" * 1_000_000, b"\x94\x00\x81\xa1x" + b"\x91" * 1_000_000):
        with pytest.raises(DecodeError):
            link(deep)


# --------------------------------------------------------------------------------------------------------- the sockets


@contextlib.contextmanager
def stranger(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 200
        socket.connect(endpoint)
        yield socket


def raw(endpoint: str, chance: random.Random) -> None:
    """Bytes that are no ZMTP, or break off."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
    for start in (b"", greeting[:12], greeting, b"GET / HTTP/1.1\r\n\r\n"):
        with (
            sockets.create_connection((host, int(port)), timeout=5) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(start + chance.randbytes(chance.randrange(200)))


def test_strangers_at_the_ring_are_ignored() -> None:
    """Greetings forged and garbled, parts without number, frames without end: the readers miss nothing."""
    chance = random.Random(7)
    with BroadcastRing(1, slots=2, slot_bytes=1 << 16, remote=1, bind="tcp://127.0.0.1:*") as ring:
        forged = Hello(0, os.getpid(), 1, NONCE).pack(new_secret())
        garbled = [mutated(part, chance) for part in Hello(0, os.getpid(), 1, NONCE).pack(ring.handle.key)]
        with RingReader(ring.handle, 0) as local, RemoteReader(ring.handle, 1) as remote:
            ring.wait_until_ready(20)
            for endpoint in (ring.handle.endpoint, ring.handle.remote_endpoint):
                with stranger(zmq.DEALER, endpoint) as dealer:
                    for parts in (forged, garbled, [HELLO], [b""], [b""] * 500, [b"A", bytes(8)], [b"B"]):
                        dealer.send_multipart(parts)
                    for _ in range(200):
                        count = chance.randrange(1, 5)
                        dealer.send_multipart([chance.randbytes(chance.randrange(60)) for _ in range(count)])
                    time.sleep(0.1)
                    for number in range(3):
                        ring.publish({"number": number}, 20)
                        assert local.receive(20) == remote.receive(20) == {"number": number}
            raw(ring.handle.remote_endpoint, chance)
            ring.publish("still here", 20)
            assert local.receive(20) == remote.receive(20) == "still here"
            assert sorted(ring._peers) == [0, 1]


def test_a_frame_without_end_is_not_taken() -> None:
    """Nobody makes the writer hold more than a greeting needs."""
    with (
        BroadcastRing(1, slots=2, slot_bytes=1 << 16, remote=1, bind="tcp://127.0.0.1:*") as ring,
        stranger(zmq.DEALER, ring.handle.remote_endpoint) as dealer,
    ):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        block = bytes(64 << 20)
        for _ in range(4):
            dealer.send(block)
        with pytest.raises(QuiesceTimeout):
            ring.wait_until_ready(1.0)
        # The stranger's own copies are in this process too: two of them, and what the kernel holds.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < (5 * 64 + 64) << 10


class Bomb:
    """A pickle that, loaded, leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("secret", ["none", "wrong", "another reader's"])
def test_no_pickle_is_loaded_that_the_writer_did_not_send(tmp_path: Path, secret: str) -> None:
    """Somebody sits at the writer's endpoint who has not its secret, or whose message was for another reader."""
    body = pickle.dumps(Bomb(tmp_path / "mark"))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        handle = RingHandle(1, 1, 0, 1, "", f"tcp://127.0.0.1:{port}", "pickle", KEY.hex())
        with RemoteReader(handle, 0) as reader:
            assert router.poll(5_000)
            identity, kind, greeting = router.recv_multipart()
            hello = Hello.unpack(KEY, [kind, greeting])
            assert hello is not None
            router.send_multipart([identity, pack_head(WELCOME, KEY, hello.nonce, 0)])
            reader.wait_until_ready(5)
            key, nonce = {"none": (bytes(32), NONCE), "wrong": (new_secret(), hello.nonce)}.get(
                secret, (KEY, NONCE)
            )
            router.send_multipart([identity, pack_head(BODY, key, nonce, 1, [body]), body])
            with pytest.raises(DecodeError, match="not made by the writer"):
                reader.receive(5)
            # The same head, and another pickle behind it.
            router.send_multipart([identity, pack_head(BODY, KEY, hello.nonce, 1, [b"pickle"]), body])
            with pytest.raises(DecodeError, match="not made by the writer"):
                reader.receive(5)
    assert not (tmp_path / "mark").exists()


def test_msgpack_runs_no_code(tmp_path: Path) -> None:
    """On the msgpack path a pickle is nothing but bytes."""
    with (
        BroadcastRing(1, slots=2, slot_bytes=1 << 16, serializer="msgpack") as ring,
        RingReader(ring.handle, 0) as reader,
    ):
        ring.wait_until_ready(20)
        ring.publish({"bytes": pickle.dumps(Bomb(tmp_path / "mark"))}, 20)
        assert set(reader.receive(20)) == {"bytes"}
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_strangers_at_a_receiver_are_refused_one_by_one(tmp_path: Path, transport: str) -> None:
    """What is no message is a DecodeError, and the next one comes; a frame that is too long ends its connection."""
    chance = random.Random(3)
    address = f"ipc://{tmp_path}/s" if transport == "ipc" else "tcp://127.0.0.1:*"
    with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
        push.linger = 0
        pull.maxmsgsize = 1 << 20
        pull.bind(address)
        endpoint = pull.LAST_ENDPOINT.decode()
        push.connect(endpoint)
        with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
            for number in range(20):
                with stranger(zmq.PUSH, endpoint) as other:
                    for _ in range(10):
                        frames = [mutated(frame, chance) for frame in chance.choice(SAMPLES)]
                        other.send_multipart(frames + [b""] * chance.randrange(2))
                    other.send(bytes(2 << 20))
                if transport == "tcp":
                    raw(endpoint, chance)
                sender.send(number, timeout=20)
                give_up_at = time.monotonic() + 20
                while time.monotonic() < give_up_at:
                    with contextlib.suppress(DecodeError):
                        if receiver.receive(20).value == number:
                            break
                else:
                    pytest.fail("the honest message did not come")


# --------------------------------------------------------------------------------------------- the segment, the handle


@pytest.fixture
def ring() -> Iterator[BroadcastRing]:
    with BroadcastRing(1, slots=2, slot_bytes=1 << 16) as ring:
        yield ring


@pytest.mark.parametrize("at", range(0, 60, 4))
def test_a_segment_with_another_header_is_refused(ring: BroadcastRing, at: int) -> None:
    """Another version, another size, another writer: each word of the header is vouched for."""
    word = slice(at, at + 4)
    ring._memory.view[word] = bytes(b ^ 0x55 for b in ring._memory.view[word])
    with pytest.raises((DecodeError, PeerDied)):
        RingReader(ring.handle, 0)


def test_a_short_segment_is_refused() -> None:
    for size in (0, 10, HEADER_BYTES):
        fd = os.memfd_create("short")
        try:
            os.truncate(fd, size)
            with pytest.raises(DecodeError):
                RingMemory.attach(os.getpid(), fd, KEY)
        finally:
            os.close(fd)


def test_a_handle_of_another_user_is_refused(ring: BroadcastRing) -> None:
    """The kernel keeps others from the segment; what they are told says so."""
    if os.getuid():
        pytest.skip("only root can become somebody else")

    def attach() -> str:
        ctypes.CDLL(None).setresuid(65534, 65534, 65534)
        RingReader(ring.handle, 0)
        return "attached"

    said = outcome(attach, 20)
    assert said.startswith("QuiesceError: "), said
    assert "as the same user" in said


def test_a_handle_of_another_host_is_refused(ring: BroadcastRing) -> None:
    """There no process has the number, or another has it: it is no ring, or not this one."""
    fields = json.loads(ring.handle.to_json())
    for pid, fd in ((1 << 22, 3), (os.getpid(), 1 << 20), (os.getpid(), 0), (-1, -1)):
        other = RingHandle.from_json(json.dumps({**fields, "pid": pid, "fd": fd}))
        with pytest.raises((PeerDied, QuiesceError)):
            RingReader(other, 0)


def test_a_corrupted_entry_is_an_error_and_nothing_is_read_outside_the_slot(ring: BroadcastRing) -> None:
    for word, value in ((1, 9), (2, 1 << 40), (3, 1 << 40)):
        with BroadcastRing(1, slots=2, slot_bytes=1 << 16) as broken, RingReader(broken.handle, 0) as reader:
            broken.wait_until_ready(20)
            sequence = broken.publish(torch.ones(100), 20)
            broken._memory.entries[sequence % broken._memory.layout.window][word] = value
            with pytest.raises(QuiesceError, match="broken"):
                reader.receive(5)
