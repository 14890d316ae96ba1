"""Time the broadcast ring beside others: `python -m quiesce.bench.ring`.

For each message and number of readers, medians of paced messages, from the call of `publish` until the slowest
reader has it ("latency") and until it has also read every byte ("used"), in microseconds; then messages a second
unpaced, bytes a second of that, and CPU microseconds a message, of all processes together.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quiesce.broadcast_ring import BroadcastRing
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import RingHandle

SPIN_S = 1.0
TIMEOUT_S = 120.0


class Message(NamedTuple):
    name: str
    make: Callable[[], Any]
    nbytes: int
    paced: int
    unpaced: int


def messages() -> list[Message]:
    """A nested scheduler message, and one tensor of each size."""

    def scheduler() -> dict[str, Any]:
        return {
            "step": 7,
            "requests": [
                {
                    "id": f"request-{i}",
                    "tokens": torch.arange(64),
                    "blocks": list(range(16)),
                    "temperature": 0.7,
                }
                for i in range(32)
            ],
            "positions": torch.arange(2048),
        }

    sizes = {"1 KiB": 1 << 10, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
    runs = {"1 KiB": 2000, "64 KiB": 1000, "1 MiB": 400, "16 MiB": 40, "64 MiB": 20}
    plain = [
        Message(name, lambda n=n: torch.ones(n, dtype=torch.uint8), n, runs[name] // 2, runs[name])  # type: ignore[misc]
        for name, n in sizes.items()
    ]
    return [Message("scheduler", scheduler, 0, 300, 600), *plain]


class Ring:
    """quiesce, with readers that spin or sleep."""

    def __init__(self, readers: int, spin: float) -> None:
        self.ring = BroadcastRing(readers, slots=4, slot_bytes=(64 << 20) + 4096, spin=spin)
        self.arguments = [("ring", self.ring.handle.to_json(), rank, spin) for rank in range(readers)]

    def ready(self) -> None:
        self.ring.wait_until_ready(TIMEOUT_S)

    def send(self, message: Any) -> None:
        self.ring.publish(message, TIMEOUT_S)

    def close(self) -> None:
        self.ring.close()


class LoanRing(Ring):
    """quiesce, with the tensor built in the ring; only its publication is timed."""

    def prepare(self, message: Any) -> Any:
        loan = self.ring.empty(message.shape, message.dtype, TIMEOUT_S)
        return loan.copy_(message)


class Queues:
    """A multiprocessing.Queue for each reader; torch moves a tensor it has not sent before into shared memory."""

    def __init__(self, readers: int, context: Any) -> None:
        self.queues = [context.Queue() for _ in range(readers)]
        self.arguments = [("queue", each, rank, 0.0) for rank, each in enumerate(self.queues)]

    def ready(self) -> None:
        """It is at once."""

    def prepare(self, message: Any) -> Any:
        return message.clone() if isinstance(message, torch.Tensor) else message

    def send(self, message: Any) -> None:
        for each in self.queues:
            each.put(message)

    def close(self) -> None:
        for each in self.queues:
            each.close()


def receiver(kind: str, end: Any, rank: int, spin: float) -> Callable[[], Any]:
    if kind == "ring":
        reader = RingReader(RingHandle.from_json(end), rank, spin=spin)
        return lambda: reader.receive(TIMEOUT_S)
    return lambda: end.get(timeout=TIMEOUT_S)


def touch(message: Any) -> None:
    """Read every byte of a lone tensor."""
    if isinstance(message, torch.Tensor):
        message.view(torch.int64).sum()


def read(pipe: Any, kind: str, end: Any, rank: int, spin: float) -> None:
    """A reader process: does `(what, count)` until told None."""
    torch.set_num_threads(1)
    receive = receiver(kind, end, rank, spin)
    pipe.send("here")
    while (order := pipe.recv()) is not None:
        what, count = order
        if what == "idle":
            before = time.process_time()
            receive()
            pipe.send((time.process_time() - before) / count)
            continue
        before = time.process_time()
        for _ in range(count):
            message = receive()
            if what == "paced":
                got = time.perf_counter_ns()
                touch(message)
                pipe.send((got, time.perf_counter_ns()))
            del message
        if what == "unpaced":
            pipe.send((time.perf_counter_ns(), time.process_time() - before))


@contextmanager
def running(way: Any, context: Any) -> Iterator[list[Any]]:
    pipes, started = [], []
    for arguments in way.arguments:
        ours, theirs = context.Pipe()
        process = context.Process(target=read, args=(theirs, *arguments), daemon=True)
        process.start()
        pipes.append(ours)
        started.append(process)
    way.ready()
    for pipe in pipes:
        pipe.recv()
    try:
        yield pipes
    finally:
        for pipe in pipes:
            pipe.send(None)
        for process in started:
            process.join(TIMEOUT_S)
        way.close()


def measure(way: Any, pipes: list[Any], message: Message) -> tuple[float, float, float, float]:
    """Latency and time until used in us, messages a second, CPU us a message."""
    prepare = getattr(way, "prepare", lambda obj: obj)
    obj, latency, used = message.make(), [], []
    for pipe in pipes:
        pipe.send(("paced", message.paced))
    for _ in range(message.paced):
        prepared = prepare(obj)
        time.sleep(2e-4)  # so that the readers wait
        begin = time.perf_counter_ns()
        way.send(prepared)
        del prepared
        seen = [pipe.recv() for pipe in pipes]
        latency.append(max(got for got, _ in seen) - begin)
        used.append(max(touched for _, touched in seen) - begin)
    for pipe in pipes:
        pipe.send(("unpaced", message.unpaced))
    cpu, begin = time.process_time(), time.perf_counter_ns()
    for _ in range(message.unpaced):
        way.send(prepare(obj))
    ends = [pipe.recv() for pipe in pipes]
    seconds = (max(end for end, _ in ends) - begin) / 1e9
    busy = time.process_time() - cpu + sum(each for _, each in ends)
    return (
        statistics.median(latency) / 1e3,
        statistics.median(used) / 1e3,
        message.unpaced / seconds,
        1e6 * busy / message.unpaced,
    )


def idle(way: Any, pipes: list[Any], seconds: float = 3.0) -> float:
    """CPU that a reader takes while nothing comes, percent."""
    for pipe in pipes:
        pipe.send(("idle", seconds))
    time.sleep(seconds)
    way.send(None)
    return 100.0 * max(float(pipe.recv()) for pipe in pipes)


def copying() -> dict[str, float]:
    """Bytes a second of a plain copy of each size, for comparison."""
    rates = {}
    for message in messages()[1:]:
        source, target = message.make(), message.make()
        times = []
        for _ in range(message.paced):
            begin = time.perf_counter_ns()
            target.copy_(source)
            times.append(time.perf_counter_ns() - begin)
        rates[message.name] = message.nbytes / statistics.median(times)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; plain copy, GB/s:", end=" ")
    print(", ".join(f"{name} {rate:.1f}" for name, rate in copying().items()))
    print(f"{'':28}{'message':>10}{'latency':>10}{'used':>10}{'messages/s':>12}{'GB/s':>8}{'CPU us':>10}")
    for readers in options.readers:
        ways: dict[str, Callable[[], Any]] = {
            "ring, spinning": lambda n=readers: Ring(n, SPIN_S),  # type: ignore[misc]
            "ring, sleeping": lambda n=readers: Ring(n, 0.0),  # type: ignore[misc]
            "ring, loan, sleeping": lambda n=readers: LoanRing(n, 0.0),  # type: ignore[misc]
            "multiprocessing.Queue": lambda n=readers: Queues(n, context),  # type: ignore[misc]
        }
        for name, make in ways.items():
            way = make()
            with running(way, context) as pipes:
                for message in messages():
                    if isinstance(way, LoanRing) and not message.nbytes:
                        continue
                    latency, used, rate, cpu = measure(way, pipes, message)
                    print(
                        f"{f'{name}, {readers} readers':28.28}{message.name:>10}{latency:10.1f}{used:10.1f}"
                        f"{rate:12.0f}{rate * message.nbytes / 1e9:8.2f}{cpu:10.1f}",
                        flush=True,
                    )
                if not isinstance(way, LoanRing):
                    print(
                        f"{name}, {readers} readers: idle {idle(way, pipes):.2f} % of a core a reader",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
