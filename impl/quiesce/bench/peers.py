"""What the broadcast ring is timed beside: multiprocessing.Queue, vLLM's MessageQueue, iceoryx2.

A way to broadcast has `arguments` (kind, end, rank, spin) for each reader process, which calls `receiver` with them;
the writer calls `ready` once, then `prepare` (not timed) and `send` for each message, and `close`.

vLLM's queue is loaded alone, without its engine and platforms, from the folder that `QUIESCE_BENCH_VLLM` names.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import os
import pickle
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TIMEOUT_S = 120.0
LARGEST = 64 << 20
SLOTS = 8  # as vLLM's arena has; its queue has 10
VLLM_VARIABLE = "QUIESCE_BENCH_VLLM"
VLLM_INSTALL = (
    "pip install --target FOLDER --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 --python-version 3.11 "
    "vllm==0.33.0 psutil regex urllib3 cloudpickle pillow pydantic pydantic-core, "
    f"then set {VLLM_VARIABLE}=FOLDER"
)
ICEORYX_INSTALL = "pip install 'quiesce[bench]'"


class Way:
    """A way to broadcast: one writer, `arguments` for each of its readers."""

    arguments: list[tuple[str, Any, int, float]]

    def ready(self) -> None:
        """Wait until all readers are there."""

    def prepare(self, message: Any) -> Any:
        """What is done before the clock starts."""
        return message

    def send(self, message: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Queues(Way):
    """A multiprocessing.Queue for each reader; torch moves a tensor it has not sent before into shared memory."""

    def __init__(self, readers: int, context: Any) -> None:
        self.queues = [context.Queue() for _ in range(readers)]
        self.arguments = [("queue", each, rank, 0.0) for rank, each in enumerate(self.queues)]

    def prepare(self, message: Any) -> Any:
        return message.clone() if isinstance(message, torch.Tensor) else message

    def send(self, message: Any) -> None:
        for each in self.queues:
            each.put(message)

    def close(self) -> None:
        for each in self.queues:
            each.close()


@functools.cache
def vllm_module() -> Any:
    """Its `shm_broadcast`, with bare packages in place of those whose import needs a whole engine.

    Raises ImportError if the folder is not given or lacks something.
    """
    if VLLM_VARIABLE not in os.environ:
        raise ImportError(f"{VLLM_VARIABLE} is not set")
    folder = Path(os.environ[VLLM_VARIABLE])
    sys.path.append(str(folder))
    for name in ("vllm", "vllm.distributed", "vllm.distributed.device_communicators", "vllm.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    platforms: Any = types.ModuleType("vllm.platforms")
    platforms.__path__ = []
    platforms.current_platform = types.SimpleNamespace(is_cuda_alike=lambda: False)
    interface: Any = types.ModuleType("vllm.platforms.interface")
    interface.in_wsl = lambda: False
    sys.modules |= {each.__name__: each for each in (platforms, interface)}
    return importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")


class Vllm(Way):
    """vLLM's MessageQueue as its executors make it: 10 chunks of 16 MiB; with or without the tensor arena."""

    def __init__(self, readers: int, arena: bool) -> None:
        self.queue = vllm_module().MessageQueue(
            readers, readers, max_chunk_bytes=16 << 20, max_chunks=10, enable_shm_tensor_arena=arena
        )
        self.handle = self.queue.export_handle()
        handle = dataclasses.asdict(self.handle)
        self.arguments = [("vllm", handle, rank, 0.0) for rank in range(readers)]

    def ready(self) -> None:
        self.queue.local_socket.rcvtimeo = int(1000 * TIMEOUT_S)
        self.queue.wait_until_ready()

    def send(self, message: Any) -> None:
        self.queue.enqueue(message, TIMEOUT_S)

    def close(self) -> None:
        del self.queue
        remove_sockets(self.handle)


def remove_sockets(handle: Any) -> None:
    """Remove the files that sockets of vLLM's queue with this handle leave behind."""
    for address in vars(handle).values():
        if isinstance(address, str) and address.startswith("ipc:///"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def vllm_receiver(handle: dict[str, Any], rank: int) -> Callable[[], Any]:
    module = vllm_module()
    queue = module.MessageQueue.create_from_handle(module.Handle(**handle), rank)
    queue.local_socket.rcvtimeo = int(1000 * TIMEOUT_S)
    queue.wait_until_ready()
    return lambda: queue.dequeue(TIMEOUT_S)


HEAD = 64
TENSOR, PICKLE = 1, 2


def bytes_of(sample: Any, count: int) -> Any:
    """The memory of a sample of iceoryx2 as a buffer that keeps the sample."""
    buffer: Any = (ctypes.c_uint8 * count).from_address(sample.payload_ptr)
    buffer.sample = sample
    return buffer


class IceoryxEnds:
    """The service and the event of one benchmark run, in a folder and under a prefix of their own."""

    def __init__(self, folder: str, readers: int) -> None:
        iox = self.iox = importlib.import_module("iceoryx2")
        iox.set_log_level(iox.LogLevel.Error)
        config = iox.config.default()
        config.global_cfg.root_path = iox.Path.new(folder)
        config.global_cfg.prefix = iox.FileName.new(f"{Path(folder).name}_")
        self.node = iox.NodeBuilder.new().config(config).create(iox.ServiceType.Ipc)
        self.service = (
            self.node.service_builder(iox.ServiceName.new("messages"))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .payload_alignment(iox.Alignment.new(64))
            .enable_safe_overflow(False)
            .history_size(0)
            .max_subscribers(readers)
            .subscriber_max_buffer_size(SLOTS)
            .subscriber_max_borrowed_samples(2)
            .open_or_create()
        )
        self.event = self.node.service_builder(iox.ServiceName.new("news")).event().open_or_create()


class Iceoryx(Way):
    """iceoryx2, with readers that spin or sleep on its event.

    It moves bytes, not objects: a lone tensor of bytes is copied behind a head of 64 bytes, anything else is
    pickled there. The writer waits for readers that are `SLOTS` messages behind.
    """

    def __init__(self, readers: int, spin: float) -> None:
        self.folder = tempfile.mkdtemp(prefix="quiesce_bench_")
        self.ends = IceoryxEnds(self.folder, readers)
        iox = self.ends.iox
        self.publisher = (
            self.ends.service.publisher_builder()
            .initial_max_slice_len(HEAD + LARGEST)
            .max_loaned_samples(2)
            .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self.notifier = self.ends.event.notifier_builder().create()
        self.arguments = [("iceoryx2", (self.folder, readers), rank, spin) for rank in range(readers)]

    def fill(self, message: Any) -> Any:
        """The message in a loaned sample."""
        plain = isinstance(message, torch.Tensor)
        body = message if plain else torch.frombuffer(bytearray(pickle.dumps(message, 5)), dtype=torch.uint8)
        loan = self.publisher.loan_slice_uninit(HEAD + len(body))
        buffer = torch.frombuffer(bytes_of(loan, HEAD + len(body)), dtype=torch.uint8)
        buffer[0] = TENSOR if plain else PICKLE
        buffer[HEAD:] = body
        return loan

    def send(self, message: Any) -> None:
        self.post(self.fill(message))

    def post(self, loan: Any) -> None:
        loan.assume_init().send()
        self.notifier.notify()

    def close(self) -> None:
        prefix = f"{Path(self.folder).name}_"
        del self.publisher, self.notifier, self.ends
        shutil.rmtree(self.folder, ignore_errors=True)
        for left in Path("/dev/shm").glob(f"{prefix}*"):
            with contextlib.suppress(FileNotFoundError):
                left.unlink()


class IceoryxLoan(Iceoryx):
    """iceoryx2, with the tensor built in its memory; only its publication is timed."""

    def prepare(self, message: Any) -> Any:
        return self.fill(message)

    def send(self, message: Any) -> None:
        self.post(message)


def iceoryx_receiver(end: tuple[str, int], spin: float) -> Callable[[], Any]:
    ends = IceoryxEnds(*end)
    subscriber = ends.service.subscriber_builder().create()
    listener = ends.event.listener_builder().create()
    pause = ends.iox.Duration.from_millis(100)

    def receive() -> Any:
        begin = time.monotonic()
        while (sample := subscriber.receive()) is None:
            waited = time.monotonic() - begin
            if waited > TIMEOUT_S:
                raise TimeoutError("no message from iceoryx2")
            if waited < spin:
                os.sched_yield()
            else:
                listener.timed_wait(pause)
        buffer = bytes_of(sample, sample.header.number_of_elements)
        if buffer[0] == TENSOR:
            return torch.frombuffer(buffer, dtype=torch.uint8, offset=HEAD)
        return pickle.loads(memoryview(buffer)[HEAD:])

    return receive


def missing() -> dict[str, str]:
    """What cannot be imported here: name -> how to install it."""
    found = {}
    try:
        vllm_module()
    except ImportError as error:
        found["vLLM"] = f"{error}; {VLLM_INSTALL}"
    try:
        importlib.import_module("iceoryx2")
    except ImportError as error:
        found["iceoryx2"] = f"{error}; {ICEORYX_INSTALL}"
    return found
