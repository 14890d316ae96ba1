"""What the divergences come to in bytes: the same code over real sockets and rings, unstopped, and counted.

Each function returns how many of `count` messages did not arrive, or did not stay, as they were sent.
`python -m model_tests.foreign.measure` prints them all.
"""

from __future__ import annotations

import queue
import random
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import zmq
from model_tests.foreign import loading
from model_tests.foreign.naive import NaiveRing, NaiveSender, receive
from model_tests.foreign.sender import ArrayFirst, HeaderFirst
from model_tests.foreign.vllm_ring import NAME, Ring0260, Ring0330, sending
from model_tests.foreign.vllm_sender import Alone0260, Vllm0260, Vllm0330
from model_tests.foreign.wire import version as version_of
from model_tests.stepper import PATIENCE

from quiesce.bench.peers import remove_sockets
from quiesce.model.adapter import Adapter, Divergence, Run

PAYLOAD = 200_000
RUNS, RING_RUNS = 50, 20


@contextmanager
def _receiver(transport: str) -> Iterator[tuple[zmq.Socket[Any], str]]:
    with tempfile.TemporaryDirectory(prefix="quiesce-foreign-") as folder, zmq.Context() as context:
        socket = context.socket(zmq.PULL)
        socket.rcvhwm, socket.linger, socket.rcvtimeo = 0, 0, int(1000 * PATIENCE)
        socket.bind("tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{folder}/socket")
        try:
            yield socket, socket.last_endpoint.decode()
        finally:
            socket.close()


def _arrive(socket: zmq.Socket[Any], count: int, number: Callable[[list[bytes]], int]) -> int:
    """How many messages are not the one that is due."""
    return sum(number(socket.recv_multipart()) != n % 100 + 1 for n in range(count))


def naive(header_first: bool, transport: str, count: int) -> int:
    """`NaiveSender`, as fast as it can."""

    def send(endpoint: str) -> None:
        with zmq.Context() as context:
            socket = context.socket(zmq.PUSH)
            socket.sndhwm = 0
            socket.connect(endpoint)
            sender = NaiveSender(socket, PAYLOAD, header_first)
            for n in range(count):
                sender.send(np.full(PAYLOAD, n % 100 + 1, np.uint8))
            for tracker, _ in sender.pending:
                tracker.wait(PATIENCE)
            arrived.wait(PATIENCE)
            socket.close()
        sender.close()

    arrived = threading.Event()
    with _receiver(transport) as (socket, endpoint):
        thread = threading.Thread(target=send, args=(endpoint,))
        thread.start()
        try:
            return _arrive(socket, count, lambda frames: version_of(receive(frames).tobytes()))
        finally:
            arrived.set()
            thread.join(PATIENCE)


def ring(slots: int, kept: int, count: int) -> int:
    """`NaiveRing`: a reader looks at each message again when `kept` more were published."""
    with _receiver("ipc") as (end, endpoint), zmq.Context() as context:
        start = context.socket(zmq.PUSH)
        start.sndhwm, start.linger = 0, 0
        start.connect(endpoint)
        naive_ring = NaiveRing([start], slots, PAYLOAD)
        held: deque[Any] = deque()
        changed = 0
        for n in range(count + kept):
            naive_ring.publish(np.full(PAYLOAD, n % 100 + 1, np.uint8))
            held.append(naive_ring.receive(end))
            if len(held) > kept:
                changed += not bool((held.popleft() == (n - kept) % 100 + 1).all())
        held.clear()
        start.close()
        naive_ring.close()
    return changed


def sender(version: str, transport: str, count: int) -> int:
    """vLLM's sender loop with all its own parts: outputs of 200,000 bytes, each with a tensor of 1,024 bytes."""
    core = loading.module(version, "vllm.v1.engine.core")
    structs = loading.module(version, "vllm.v1.engine")
    outputs: queue.Queue[Any] = queue.Queue()
    process = core.EngineCoreProc.__new__(core.EngineCoreProc)
    process.output_queue = outputs
    for n in range(count):
        one = structs.EngineCoreOutput(request_id=chr(n % 100 + 1) * PAYLOAD, new_token_ids=[])
        one.pooling_output = torch.zeros(256)
        outputs.put((0, structs.EngineCoreOutputs(outputs=[one])))
    outputs.put(process.ENGINE_CORE_DEAD)
    with _receiver(transport) as (socket, endpoint):
        thread = threading.Thread(target=process.process_output_sockets, args=([endpoint], None, 0))
        thread.start()
        try:
            return _arrive(socket, count, lambda frames: version_of(frames[0]))
        finally:
            thread.join(PATIENCE)


@contextmanager
def _ring(version: str, chunks: int, chunk_bytes: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A writer and one reader."""
    shm: Any = loading.module(version, NAME)
    writer = shm.MessageQueue(1, 1, max_chunk_bytes=chunk_bytes, max_chunks=chunks, **options)
    handle = writer.export_handle()
    reader = shm.MessageQueue.create_from_handle(handle, 0)
    for end in (writer, reader):
        end.local_socket.rcvtimeo = int(1000 * PATIENCE)
        end.wait_until_ready()
    try:
        yield writer, reader
    finally:
        for end in (reader, writer):
            spin = end._spin_condition
            for socket in (spin.local_notify_socket, spin.read_cancel_socket, spin.write_cancel_socket):
                if socket is not None:
                    socket.close(linger=0)
            end.local_socket.close(linger=0)
            end.local_socket.context.term()
        remove_sockets(handle)


def _message(kind: str, count: int, number: int) -> Any:
    array = np.full(count, number, np.uint8)
    return torch.from_numpy(array) if kind == "tensor" else array


def kept(version: str, kind: str, count: int) -> int:
    """A reader keeps what it received, of 1 MiB, while the writer goes once round its two chunks."""
    changed = 0
    with _ring(version, 2, 5 << 18) as (writer, reader):
        for n in range(count):
            writer.enqueue(_message(kind, 1 << 20, n % 100 + 1), PATIENCE)
            value = reader.dequeue(PATIENCE)
            for _ in range(2):
                writer.enqueue(_message(kind, 1 << 20, 0xEE), PATIENCE)
                reader.dequeue(PATIENCE)
            changed += not bool((np.asarray(value) == n % 100 + 1).all())
            del value
    return changed


def written_after(version: str, kind: str, count: int) -> int:
    """The caller writes a message of 64 MiB, too long for a chunk, again when `enqueue` has returned."""
    changed = 0
    with _ring(version, 2, 1 << 20) as (writer, reader):
        for n in range(count):
            message = _message(kind, 64 << 20, n % 100 + 1)
            writer.enqueue(message, PATIENCE)
            np.asarray(message)[:] = 0xEE
            changed += not bool((np.asarray(reader.dequeue(PATIENCE)) == n % 100 + 1).all())
    return changed


def behind(version: str, count: int) -> int:
    """A wait runs out between a chunk that announces a body and the body; `count` bodies follow, received in turn."""
    wrong = 0
    with _ring(version, 4, 1 << 10) as (writer, reader):
        send = writer.local_socket.send_multipart
        late: list[Any] = []
        writer.local_socket.send_multipart = lambda buffers, **_: late.append(list(buffers))
        writer.enqueue(bytes([1]) * 2_000, PATIENCE)
        with suppress(TimeoutError):
            reader.dequeue(0.0)
        writer.local_socket.send_multipart = send
        send(late[0], copy=False)
        for n in range(2, count + 2):
            writer.enqueue(bytes([n % 100]) * 2_000, PATIENCE)
            wrong += reader.dequeue(PATIENCE)[0] != n % 100
    return wrong


def arena(version: str, count: int) -> int:
    """A reader keeps a tensor of 8 MiB that lies in the arena, which has two places, while four more are sent."""
    changed = 0
    module = loading.module(version, NAME.replace("shm_broadcast", "shm_tensor_arena"))
    init = module.ShmTensorArena.__init__
    usual, init.__defaults__ = init.__defaults__, (16 << 20, 2, None, -1)
    try:
        with _ring(version, 4, 16 << 20, enable_shm_tensor_arena=True) as (writer, reader):
            for n in range(count):
                writer.enqueue(_message("tensor", 8 << 20, n % 100 + 1), PATIENCE)
                value = reader.dequeue(PATIENCE)
                memory = np.frombuffer(reader.tensor_arena.shared_memory.buf, np.uint8)
                assert np.shares_memory(value.numpy(), memory), "the tensor does not lie in the arena"
                del memory
                for _ in range(4):
                    writer.enqueue(_message("tensor", 8 << 20, 0xEE), PATIENCE)
                    reader.dequeue(PATIENCE)
                changed += not bool((value == n % 100 + 1).all())
                del value
    finally:
        init.__defaults__ = usual
    return changed


def diverging(adapter: type[Adapter], runs: int, steps: int = 60) -> str:
    """Of `runs` random runs of at most `steps` steps, how many came apart from the specification, and at what."""
    found: Counter[str] = Counter()
    oracle = adapter.load()
    for seed in range(runs):
        choose = random.Random(seed)
        run = Run(adapter(oracle))
        try:
            for _ in range(steps):
                offers = [step for step in run.offers() if step.action != "Done"]
                if not offers:
                    break
                action = choose.choice(sorted({step.action for step in offers}))
                run.ask(choose.choice([step for step in offers if step.action == action]))
        except Divergence as divergence:
            what = f"forbidden {divergence.forbidden.action}" if divergence.forbidden else divergence.message
            found[what.splitlines()[-1].strip()] += 1
        finally:
            run.close()
    return f"{sum(found.values())} of {runs} runs diverge {dict(found) if found else ''}"


def main() -> None:
    """Print every figure."""
    for transport in ("ipc", "tcp"):
        for header_first in (False, True):
            name = "header first" if header_first else "array first"
            print(f"naive, {name}, {transport}: {naive(header_first, transport, 2000)} of 2000", flush=True)
    for kept_for in (7, 8):
        print(f"naive ring of 8 slots, {kept_for} more: {ring(8, kept_for, 2000)} of 2000", flush=True)
    for version in loading.available():
        for transport in ("ipc", "tcp"):
            print(f"{version} sender, {transport}: {sender(version, transport, 2000)} of 2000", flush=True)
        for kind in ("tensor", "array"):
            print(f"{version} kept {kind}: {kept(version, kind, 20)} of 20", flush=True)
            print(f"{version} written after, {kind}: {written_after(version, kind, 20)} of 20", flush=True)
        print(f"{version} behind: {behind(version, 20)} of 20", flush=True)
    if "0.33.0" in loading.available():
        print(f"0.33.0 arena: {arena('0.33.0', 20)} of 20", flush=True)
    adapters = {"naive, array first": ArrayFirst, "naive, header first": HeaderFirst}
    if list(loading.available()) == list(loading.VERSIONS):
        adapters |= {
            "0.26.0 sender": Vllm0260,
            "0.33.0 sender": Vllm0330,
            "0.26.0 sender, no tensors": Alone0260,
        }
        for each in (Ring0260, Ring0330):
            for kind in ("tensor", "array"):
                adapters[f"{each.version} ring, {kind}"] = sending(each, kind)
                adapters[f"{each.version} ring, {kind}, bodies"] = sending(each, kind, bodies=True)
            waiting = sending(each, "tensor", bodies=True, waits_run_out=True, caller_writes=False)
            adapters[f"{each.version} ring, bodies, waits run out"] = waiting
    for name, adapter in adapters.items():
        print(f"{name}: {diverging(adapter, RING_RUNS if 'ring' in name else RUNS)}", flush=True)


if __name__ == "__main__":
    main()
