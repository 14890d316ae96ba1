"""Time the broadcast ring beside others: `quiesce bench ring`.

For each message and number of readers, from the call of `publish` until the slowest reader has it ("latency") and
until it has also read every byte ("used"), medians in microseconds of paced messages; then messages a second
unpaced, bytes a second of that, also in percent of a plain copy, and CPU microseconds a message, of all processes
together. All ways take turns, so
that what else the machine does hits them alike; readers whose turn it is not wait for their pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quiesce.bench.measuring import Figures, heard, orders
from quiesce.bench.peers import (
    LARGEST,
    SLOTS,
    TIMEOUT_S,
    Iceoryx,
    IceoryxLoan,
    Queues,
    Vllm,
    Way,
    iceoryx_receiver,
    missing,
    vllm_receiver,
)
from quiesce.broadcast_ring import BroadcastRing
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import RingHandle

SPIN_S = 1.0
ROUNDS = 4
COPY = "plain copy"
WARM_UP = 10  # messages: each slot of each way has been used once


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
    runs = {"1 KiB": 300, "64 KiB": 200, "1 MiB": 100, "16 MiB": 12, "64 MiB": 8}
    plain = [
        Message(name, lambda n=n: torch.ones(n, dtype=torch.uint8), n, runs[name] // 2, runs[name])  # type: ignore[misc]
        for name, n in sizes.items()
    ]
    return [Message("scheduler", scheduler, 0, 20, 40), *plain]


class Ring(Way):
    """quiesce, with readers that spin or sleep."""

    def __init__(self, readers: int, spin: float, slots: int = SLOTS) -> None:
        self.ring = BroadcastRing(readers, slots=slots, slot_bytes=LARGEST + 4096, spin=spin)
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


class ColdLoanRing(LoanRing):
    """The same, with nothing left in the caches, whatever the size of the message."""

    def __init__(self, readers: int, spin: float) -> None:
        super().__init__(readers, spin)
        self.source, self.target = (torch.zeros(LARGEST, dtype=torch.uint8) for _ in range(2))

    def prepare(self, message: Any) -> Any:
        loan = super().prepare(message)
        self.target.copy_(self.source)
        return loan


class Case(NamedTuple):
    """A way to broadcast, and the way of quiesce that it is compared with."""

    make: Callable[[int], Way]
    beside: str
    needs: str = ""
    loans: bool = False


def cases(context: Any, slots: Sequence[int]) -> dict[str, Case]:
    """All ways, or the ring alone with each of these numbers of slots."""
    if slots:
        spins = {"spinning": SPIN_S, "sleeping": 0.0}
        return {
            f"ring, {name}, {count} slots": Case(
                lambda n, spin=spin, count=count: Ring(n, spin, count),  # type: ignore[misc]
                f"ring, {name}, {slots[0]} slots",
            )
            for name, spin in spins.items()
            for count in slots
        }
    return {
        "ring, spinning": Case(lambda n: Ring(n, SPIN_S), "ring, spinning"),
        "vLLM": Case(lambda n: Vllm(n, arena=False), "ring, spinning", "vLLM"),
        "vLLM, arena": Case(lambda n: Vllm(n, arena=True), "ring, spinning", "vLLM"),
        "iceoryx2, spinning": Case(lambda n: Iceoryx(n, SPIN_S), "ring, spinning", "iceoryx2"),
        "ring, sleeping": Case(lambda n: Ring(n, 0.0), "ring, sleeping"),
        "iceoryx2, sleeping": Case(lambda n: Iceoryx(n, 0.0), "ring, sleeping", "iceoryx2"),
        "multiprocessing.Queue": Case(lambda n: Queues(n, context), "ring, sleeping"),
        "ring, loan": Case(lambda n: LoanRing(n, 0.0), "ring, loan", loans=True),
        "ring, loan, cold": Case(lambda n: ColdLoanRing(n, 0.0), "ring, loan", loans=True),
        "iceoryx2, loan": Case(lambda n: IceoryxLoan(n, 0.0), "ring, loan", "iceoryx2", loans=True),
    }


def receiver(kind: str, end: Any, rank: int, spin: float) -> Callable[[], Any]:
    if kind == "ring":
        reader = RingReader(RingHandle.from_json(end), rank, spin=spin)
        return lambda: reader.receive(TIMEOUT_S)
    if kind == "vllm":
        return vllm_receiver(end, rank)
    if kind == "iceoryx2":
        return iceoryx_receiver(end, spin)
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
    for what, count in orders(pipe):
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
def running(way: Way, context: Any) -> Iterator[tuple[list[Any], list[int]]]:
    """Pipes to the readers, and their process ids."""
    pipes, started = [], []
    try:
        for arguments in way.arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=read, args=(theirs, *arguments), daemon=True)
            process.start()
            theirs.close()  # so that a reader's end is an EOFError here
            pipes.append(ours)
            started.append(process)
        way.ready()
        for pipe in pipes:
            heard(pipe)
        yield pipes, [process.pid for process in started]
    finally:
        for pipe in pipes:
            with suppress(OSError):
                pipe.send(None)
        for process in started:
            process.join(5.0)
            if process.is_alive():  # it still waits for a message, because something failed here
                process.terminate()
                process.join(5.0)
        way.close()


class Result(NamedTuple):
    """Latency and time until used in us, messages a second, CPU us a message."""

    latency: float
    used: float
    rate: float
    cpu: float


class Measured:
    """What the rounds of one way and one message gave."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.latency: list[int] = []
        self.used: list[int] = []
        self.rates: list[float] = []
        self.cpu: list[float] = []

    def round(self, way: Way, pipes: list[Any]) -> None:
        """Paced messages, after some that are not counted; then the same message without a pause."""
        obj, count = self.message.make(), self.message.unpaced
        warm_up = 2 if self.rates else WARM_UP
        for pipe in pipes:
            pipe.send(("paced", warm_up + self.message.paced))
        for number in range(warm_up + self.message.paced):
            prepared = way.prepare(obj)
            time.sleep(2e-4)  # so that the readers wait
            begin = time.perf_counter_ns()
            way.send(prepared)
            del prepared
            seen = [heard(pipe) for pipe in pipes]
            if number >= warm_up:
                self.latency.append(max(got for got, _ in seen) - begin)
                self.used.append(max(touched for _, touched in seen) - begin)
        for pipe in pipes:
            pipe.send(("unpaced", count))
        cpu, begin = time.process_time(), time.perf_counter_ns()
        for _ in range(count):
            way.send(way.prepare(obj))
        ends = [heard(pipe) for pipe in pipes]
        self.rates.append(count / (max(end for end, _ in ends) - begin) * 1e9)
        self.cpu.append((time.process_time() - cpu + sum(each for _, each in ends)) / count)

    def result(self) -> Result:
        return Result(
            statistics.median(self.latency) / 1e3,
            statistics.median(self.used) / 1e3,
            statistics.median(self.rates),
            statistics.median(self.cpu) * 1e6,
        )


def idle(
    ways: dict[str, Way], ends: dict[str, tuple[list[Any], list[int]]], seconds: float = 3.0
) -> dict[str, float]:
    """CPU of a reader, all its threads together, while nothing comes and its spin is over, percent of a core."""

    def busy(pid: int) -> float:
        tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    for pipe in (pipe for pipes, _ in ends.values() for pipe in pipes):
        pipe.send(("unpaced", 1))
    time.sleep(SPIN_S + 0.5)
    pids = [pid for _, each in ends.values() for pid in each]
    before = {pid: busy(pid) for pid in pids}
    time.sleep(seconds)
    shares = {pid: 100.0 * (busy(pid) - before[pid]) / seconds for pid in pids}
    for name, way in ways.items():
        way.send(way.prepare(torch.zeros(8, dtype=torch.uint8)))
        for pipe in ends[name][0]:
            heard(pipe)
    return {name: max(shares[pid] for pid in each) for name, (_, each) in ends.items()}


class PlainCopy:
    """The time of copying the same bytes in one process, between buffers that stay the same."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.source, self.target = message.make(), message.make()
        self.times: list[int] = []

    def round(self) -> None:
        for _ in range(self.message.paced):
            begin = time.perf_counter_ns()
            self.target.copy_(self.source)
            self.times.append(time.perf_counter_ns() - begin)

    @property
    def median(self) -> float:
        """Microseconds."""
        return statistics.median(self.times) / 1e3

    @property
    def a_second(self) -> float:
        """How often it could be done."""
        return 1e6 / self.median

    def report(self) -> None:
        rate = self.message.nbytes * self.a_second / 1e9
        print(f"{COPY:34}{self.message.name:>10}{self.median:10.1f}{'':22}{rate:8.2f}{100:10}")


def report(name: str, readers: int, message: Message, result: Result, copy: PlainCopy | None) -> None:
    of_copy = f"{100 * result.rate / copy.a_second:10.0f}" if copy else f"{'-':>10}"
    print(
        f"{f'{name}, {readers} readers':34.34}{message.name:>10}{result.latency:10.1f}{result.used:10.1f}"
        f"{result.rate:12.0f}{result.rate * message.nbytes / 1e9:8.2f}{of_copy}{result.cpu:10.1f}",
        flush=True,
    )


def ratios(results: dict[tuple[int, str, str], Result], known: dict[str, Case]) -> None:
    """How many times as long, and how many times as slow, each is as the ring that waits in the same way."""
    names = [message.name for message in messages()]
    print(f"\n{'latency / rate, ring = 1':34}" + "".join(f"{name:>14}" for name in names))
    for readers, way in dict.fromkeys((readers, way) for readers, way, _ in results):
        if known[way].beside == way:
            continue
        cells = []
        for name in names:
            theirs, ours = results.get((readers, way, name)), results.get((readers, known[way].beside, name))
            both = theirs and ours and f"{theirs.latency / ours.latency:.2f} / {ours.rate / theirs.rate:.2f}"
            cells.append(f"{both or '-':>14}")
        print(f"{f'{way}, {readers} readers':34.34}" + "".join(cells))


def load() -> str:
    return "load " + ", ".join(f"{each:.1f}" for each in os.getloadavg())


def main(
    readers: Sequence[int] = (1, 2),
    only: str = "",
    message: str = "",
    slots: Sequence[int] = (),
    json: Path | None = None,
) -> None:
    """Time the ways whose name contains `only`, each number of readers, messages whose name contains `message`.

    With `slots`, the ring alone, with each of these numbers of slots. `json` is a file to write the figures to.
    """
    figures = Figures("ring", json)
    chosen = [each for each in messages() if message in each.name]
    torch.set_num_threads(1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["quiesce.bench.peers", "quiesce.broadcast_ring", "quiesce.ring_reader"])
    known, lacking = cases(context, slots), {} if slots else missing()
    for name, why in lacking.items():
        print(f"without {name}: {why}")
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {load()}")
    print(
        f"{'':34}{'message':>10}{'latency':>10}{'used':>10}{'messages/s':>12}{'GB/s':>8}{'% of copy':>10}{'CPU us':>10}"
    )
    results: dict[tuple[int, str, str], Result] = {}
    taken = {name: case for name, case in known.items() if case.needs not in lacking and only in name}
    for count in readers:
        with ExitStack() as stack:
            ways = {name: case.make(count) for name, case in taken.items()}
            ends = {name: stack.enter_context(running(way, context)) for name, way in ways.items()}
            for each in chosen:
                turns = [name for name in ways if each.nbytes or not taken[name].loans]
                measured = {name: Measured(each) for name in turns}
                copy = PlainCopy(each) if each.nbytes else None
                for _ in range(ROUNDS):
                    if copy:
                        copy.round()
                    for name in turns:
                        measured[name].round(ways[name], ends[name][0])
                about = {"readers": count, "message": each.name, "nbytes": each.nbytes}
                if copy:
                    copy.report()
                    figures.add(
                        {"way": COPY, **about, "beside": COPY, "latency": copy.median, "rate": copy.a_second}
                    )
                for name in turns:
                    result = results[count, name, each.name] = measured[name].result()
                    report(name, count, each, result, copy)
                    figures.add({"way": name, **about, "beside": known[name].beside, **result._asdict()})
            idling = ", ".join(f"{name} {share:.2f}" for name, share in idle(ways, ends).items())
            print(f"idle, % of a core a reader: {idling}; {load()}", flush=True)
    ratios(results, known)
