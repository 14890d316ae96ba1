"""Real sockets: what the original fix was tested by, and long runs between processes."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from model_tests.payload_reuse.faulty import FAULTY

from quiesce.codec import Decoder
from quiesce.errors import DecodeError
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import COPY_THRESHOLD, PayloadSender

MESSAGES = 10_000
SIZES = [0, 1, 300, 5_000, COPY_THRESHOLD - 1, COPY_THRESHOLD, COPY_THRESHOLD + 1, 200_000]


def endpoint(transport: str, folder: Path) -> str:
    return {"inproc": "inproc://test", "ipc": f"ipc://{folder}/s", "tcp": "tcp://127.0.0.1:0"}[transport]


def pair(context: zmq.Context[Any], address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.sndhwm = pull.rcvhwm = 0
    pull.bind(address)
    push.connect(pull.LAST_ENDPOINT.decode())
    return push, pull


def body(number: int, generator: np.random.Generator) -> dict[str, Any]:
    """A message of mixed sizes that carries the checksums of its parts."""
    sizes = generator.choice(SIZES, size=int(generator.integers(0, 4)))
    tensors = [torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8)) for size in sizes]
    text = bytes(generator.integers(0, 256, int(generator.choice([10, 1_000, 70_000])), dtype=np.uint8))
    sums = [zlib.crc32(tensor.numpy()) for tensor in tensors]
    return {"number": number, "tensors": tensors, "sums": sums, "text": text, "sum": zlib.crc32(text)}


def is_intact(message: dict[str, Any]) -> bool:
    sums = [zlib.crc32(tensor.numpy()) for tensor in message["tensors"]]
    return sums == message["sums"] and zlib.crc32(message["text"]) == message["sum"]


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
def test_a_large_payload_with_many_small_frames_survives_reuse(
    transport: str, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    """100 messages in flight, each a payload over 64 KiB with 40 small tensor frames."""
    push, pull = pair(context, endpoint(transport, tmp_path))
    with PayloadSender(push) as sender, PayloadReceiver(pull, Decoder(copy=True)) as receiver:
        for number in range(100):
            tensors = [torch.full((100,), number + i, dtype=torch.float32) for i in range(40)]
            sender.send({"pad": bytes([number]) * (COPY_THRESHOLD + 1_000), "tensors": tensors})
        for number in range(100):
            value = receiver.receive().value
            assert value["pad"] == bytes([number]) * (COPY_THRESHOLD + 1_000)
            for i, tensor in enumerate(value["tensors"]):
                assert torch.equal(tensor, torch.full((100,), number + i, dtype=torch.float32))
            del value, tensor


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
def test_lent_tensors_need_no_reference_held_by_the_caller(
    transport: str, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    push, pull = pair(context, endpoint(transport, tmp_path))
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        for number in range(20):
            sender.lend([torch.full((50_000,), number)])
        gc.collect()
        for number in range(20):
            received = receiver.receive()
            assert torch.equal(received.value[0], torch.full((50_000,), number))
            assert received.aliases_sender == (transport == "inproc")
            del received


def _send_many(address: str, seed: int, counts: Any) -> None:
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(address)
    generator = np.random.default_rng(seed)
    with PayloadSender(push) as sender:
        for number in range(MESSAGES):
            if number % 2:
                sender.send(body(number, generator), timeout=60)
            else:
                sender.lend(body(number, generator), timeout=60)
        sender.settle()
        counts.put((sender.pool.free, sender.pool.free_limit))
    context.term()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_ten_thousand_messages_between_processes(transport: str, tmp_path: Path) -> None:
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.bind(endpoint(transport, tmp_path))
    spawn = multiprocessing.get_context("spawn")
    counts = spawn.Queue()
    process = spawn.Process(target=_send_many, args=(pull.LAST_ENDPOINT.decode(), 1, counts))
    process.start()
    try:
        with PayloadReceiver(pull) as receiver:
            for number in range(MESSAGES):
                value = receiver.receive(60).value
                assert value["number"] == number
                assert is_intact(value), f"message {number} is corrupt"
        free, limit = counts.get(timeout=60)
        assert free <= limit
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join(60)
        context.term()
        assert not process.is_alive()


def corrupted(cls: type[PayloadSender], address: str, context: zmq.Context[Any], messages: int = 300) -> int:
    """How many messages arrive changed when the sender never waits and the receiver is a little behind."""
    push, pull = pair(context, address)
    wrong = 0

    def receive() -> None:
        nonlocal wrong
        with PayloadReceiver(pull) as receiver:
            for number in range(messages):
                try:
                    value = receiver.receive(30).value
                except DecodeError:
                    # So torn that it is no message any more.
                    wrong += 1
                    continue
                if value["pad"] != bytes([number % 251]) * 500_000:
                    wrong += 1
                del value

    thread = threading.Thread(target=receive)
    thread.start()
    with cls(push) as sender:
        for number in range(messages):
            sender.send({"pad": bytes([number % 251]) * 500_000, "tensor": torch.zeros(100)})
        thread.join(60)
        assert not thread.is_alive()
    return wrong


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
def test_no_message_is_corrupted_by_the_shipped_sender(
    transport: str, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    assert corrupted(PayloadSender, endpoint(transport, tmp_path), context) == 0


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
def test_the_last_frames_tracker_corrupts_messages(
    transport: str, tmp_path: Path, context: zmq.Context[Any]
) -> None:
    """The historical bug, for real: the same run with the tracker of the last frame asked."""
    assert corrupted(FAULTY["last_frame_tracker"], endpoint(transport, tmp_path), context) > 0
