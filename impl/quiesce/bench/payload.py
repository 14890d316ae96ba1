"""Time payload reuse beside others: `quiesce bench payload`.

For each transport and size of an engine's outputs: "trip", from the call of `send` until the receiver, a process of
its own (inproc: the same thread), has the outputs decoded; "sender", until `send` returned; both of paced messages;
and messages a second, unpaced. Then what a sender allocates, and what tracking costs.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zmq

from quiesce.bench.measuring import Report, Spread, Times, heard, in_turns, orders, pin, ratio, timed, unpin
from quiesce.bench.payload_peers import LEND, SEND, TIMEOUT_S, Outputs, Receive, Send, Way, ways
from quiesce.codec import Decoder, Encoder
from quiesce.lifecycle import BufferPool
from quiesce.payload_reuse import PayloadSender

TRANSPORTS = ("inproc", "ipc", "tcp")
_BURST = 128 << 20  # bytes sent without a pause, at most


class Case(NamedTuple):
    """Outputs of `nbytes` bytes in `tensors` tensors, and how many are sent paced in a round."""

    nbytes: int
    tensors: int
    paced: int

    @property
    def name(self) -> str:
        size = f"{self.nbytes >> 20} MiB" if self.nbytes >= 1 << 20 else f"{self.nbytes >> 10} KiB"
        return size if self.tensors == 1 else f"{size} in {self.tensors}"

    @property
    def unpaced(self) -> int:
        return max(4, min(2 * self.paced, _BURST // self.nbytes))

    def make(self) -> Outputs:
        size = self.nbytes // self.tensors // 4
        tensors = [torch.full((size,), float(number)) for number in range(self.tensors)]
        return Outputs(7, [f"request-{number}" for number in range(8)], tensors)


CASES = (
    Case(1 << 10, 1, 200),
    Case(64 << 10, 1, 150),
    Case(1 << 20, 1, 60),
    Case(1 << 20, 16, 60),
    Case(1 << 20, 300, 30),
    Case(16 << 20, 1, 8),
    Case(64 << 20, 1, 3),
    Case(64 << 20, 300, 3),
)


def socket(context: zmq.Context[Any], kind: int, endpoint: str) -> Any:
    found = context.socket(kind)
    found.linger = 0
    found.sndtimeo = found.rcvtimeo = int(TIMEOUT_S * 1000)
    if kind == zmq.PUSH:
        found.bind(endpoint)
    else:
        found.connect(endpoint)
    return found


def receive_all(pipe: Any, only: str, endpoints: dict[str, Any]) -> None:
    """The receiving process: does `(way, what, count)` until told None."""
    pin(1)
    torch.set_num_threads(1)
    known, _ = ways(only)
    with zmq.Context() as context, ExitStack() as stack:
        receivers: dict[str, Receive] = {}
        for name, end in endpoints.items():
            pull = stack.enter_context(socket(context, zmq.PULL, end)) if isinstance(end, str) else end
            receivers[name] = known[name].receiver(pull)
        pipe.send("here")
        for name, paced, count in orders(pipe):
            for _ in range(count):
                outputs = receivers[name]()
                if paced:
                    pipe.send(time.perf_counter_ns())
                del outputs
            if not paced:
                pipe.send(time.perf_counter_ns())


class Turn:
    """One way over one transport: what it does in its turn."""

    def __init__(self, name: str, send: Send, pipe: Any, receive: Receive | None) -> None:
        self.name = name
        self.send = send
        self.pipe = pipe
        self.receive = receive
        self.sent: list[Times] = []
        self.rates: list[float] = []

    def turn(self, outputs: Outputs, case: Case) -> Times:
        """The trips of a round, in seconds; notes the sender's times and the rate."""
        self.rates.append(self._unpaced(outputs, case.unpaced))
        self._paced(outputs, 2)  # so that the memory of all is warm
        trips, sent = self._paced(outputs, case.paced)
        self.sent.append(sent)
        return trips

    def _paced(self, outputs: Outputs, count: int) -> tuple[Times, Times]:
        trips, sent = [], []
        if self.receive is None:
            self.pipe.send((self.name, True, count))
        for _ in range(count):
            if self.receive is None:
                time.sleep(1e-4)  # so that the receiver waits
            begin = time.perf_counter_ns()
            loan = self.send(outputs)
            returned = time.perf_counter_ns()
            if self.receive is None:
                end = heard(self.pipe)
            else:
                got = self.receive()
                end = time.perf_counter_ns()
                del got
            if hasattr(loan, "wait"):
                loan.wait(TIMEOUT_S)
            trips.append((end - begin) / 1e9)
            sent.append((returned - begin) / 1e9)
        return trips, sent

    def _unpaced(self, outputs: Outputs, count: int) -> float:
        begin = time.perf_counter_ns()
        if self.receive is None:
            self.pipe.send((self.name, False, count))
            for _ in range(count):
                self.send(outputs)
            return count * 1e9 / float(heard(self.pipe) - begin)
        for _ in range(count):
            self.send(outputs)
            self.receive()
        return count / (time.perf_counter_ns() - begin) * 1e9


@contextmanager
def turns(transport: str, known: dict[str, Way], only: str) -> Iterator[dict[str, Turn]]:
    """All ways over one transport, with their receiver in a process of its own (inproc: in this thread)."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quiesce_bench_"))
        found: dict[str, Turn] = {}
        endpoints: dict[str, Any] = {}
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        for number, (name, way) in enumerate(known.items()):
            if name == "Connection":
                if transport != "ipc":
                    continue
                push: Any
                endpoints[name], push = multiprocessing.Pipe(duplex=False)
            else:
                address = {"ipc": f"{folder}/{number}", "tcp": "127.0.0.1:*"}.get(transport, str(number))
                push = stack.enter_context(socket(context, zmq.PUSH, f"{transport}://{address}"))
                endpoints[name] = push.get_string(zmq.LAST_ENDPOINT)
            receive = None
            if transport == "inproc":
                pull = stack.enter_context(socket(context, zmq.PULL, endpoints[name]))
                receive = way.receiver(pull)
            found[name] = Turn(name, way.sender(push), ours, receive)
        if transport == "inproc":
            yield found
            return
        process = multiprocessing.get_context("spawn").Process(
            target=receive_all, args=(theirs, only, endpoints), daemon=True
        )
        process.start()
        theirs.close()
        try:
            heard(ours)
            yield found
        finally:
            with suppress(OSError):
                ours.send(None)
            process.join(10.0)
            if process.is_alive():
                process.terminate()
                process.join(10.0)


def main(
    file: Path | None,
    transports: tuple[str, ...] = TRANSPORTS,
    only: str = "",
    message: str = "",
    rounds: int = 5,
    cases: tuple[Case, ...] = CASES,
) -> dict[str, Any]:
    """Measure, print, write; the data."""
    known, missing = ways(only)
    report = Report("payload", file)
    for line in missing:
        report.note(line)
    torch.set_num_threads(1)
    pin(0)
    try:
        for transport in transports:
            with turns(transport, known, only) as found:
                for case in cases:
                    if message in case.name:
                        report.table(f"{transport}, {case.name}", compared(case, found, rounds))
        report.table("allocated for 1 MiB over inproc, bytes", allocations(known))
        report.table("what it costs", costs())
    finally:
        unpin()
    report.write()
    return report.data


def compared(case: Case, found: dict[str, Turn], rounds: int) -> list[dict[str, Any]]:
    """One size, a row for each way."""
    outputs = case.make()
    for each in found.values():
        each.sent.clear()
        each.rates.clear()
        each.turn(outputs, case._replace(paced=2))
        each.sent.clear()
        each.rates.clear()
    trips = in_turns(
        {name: lambda each=each: each.turn(outputs, case) for name, each in found.items()},  # type: ignore[misc]
        rounds,
    )
    rows = []
    for name, each in found.items():
        trip = Spread.of([t * 1e6 for times in trips[name] for t in times])
        rows.append(
            {
                "way": name,
                "trip us": trip,
                "sender us": Spread.of([t * 1e6 for times in each.sent for t in times]),
                "messages/s": statistics.median(each.rates),
                "GB/s": statistics.median(each.rates) * case.nbytes / 1e9,
                "trip / lend": ratio(trips[LEND], trips[name]),
                "trip / send": ratio(trips[SEND], trips[name]),
            }
        )
    return rows


def allocations(known: dict[str, Way]) -> Iterator[dict[str, Any]]:
    """What a sender allocates, over inproc, for outputs of 1 MiB: at its peak in one message; and what stays, later."""
    outputs = Case(1 << 20, 1, 1).make()
    for name, way in known.items():
        if name == "Connection":
            continue
        with zmq.Context() as context:
            push, pull = socket(context, zmq.PUSH, "inproc://it"), socket(context, zmq.PULL, "inproc://it")
            send, receive = way.sender(push), way.receiver(pull)

            def step(count: int, send: Send = send, receive: Receive = receive) -> None:
                for _ in range(count):
                    loan = send(outputs)
                    receive()
                    if hasattr(loan, "wait"):
                        loan.wait(TIMEOUT_S)

            step(50)
            tracemalloc.start()
            step(50)
            begin, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            step(50)
            _, peak = tracemalloc.get_traced_memory()
            step(950)
            sender = getattr(send, "__self__", None)
            if isinstance(sender, PayloadSender):
                _settle(sender)
            end, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            push.close()
            pull.close()
        yield {
            "way": name,
            "at the peak": peak - begin,
            "more after 1,000 messages": end - begin,
        }


def _settle(sender: PayloadSender) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while sender.pool.pending and time.monotonic() < deadline:
        sender.settle()
        time.sleep(1e-3)


def costs() -> Iterator[dict[str, Any]]:
    """What the parts of tracking cost, in nanoseconds."""
    memory = memoryview(bytearray(1 << 16))
    outputs = Case(1 << 20, 1, 1).make()
    pool: BufferPool[bytearray] = BufferPool(bytearray)
    encoder, payload = Encoder(), bytearray()
    frames = [bytearray(frame) for frame in encoder.encode(outputs)]
    decoder = Decoder(Outputs)

    def round_trip() -> None:
        pool.lend(pool.take(), [])
        pool.settle()

    calls: dict[str, Callable[[], object]] = {
        "a frame that is not tracked": lambda: zmq.Frame(memory, copy=False),
        "a frame that is tracked": lambda: zmq.Frame(memory, track=True, copy=False),
        "a buffer taken, lent and settled": round_trip,
        "encoding one tensor of 1 MiB": lambda: encoder.encode_into(outputs, payload),
        "decoding it": lambda: decoder.decode(frames),
    }
    found = in_turns({name: lambda call=call: timed(call, 400) for name, call in calls.items()}, 5)  # type: ignore[misc]
    for name, rounds in found.items():
        yield {"part": name, "ns": Spread.of([t * 1e9 for times in rounds for t in times])}
