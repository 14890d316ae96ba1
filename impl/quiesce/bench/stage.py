"""Time the stage handoff beside bare torch.distributed: `quiesce bench stage`.

Two processes over gloo: one computes and sends two tensors a step, the other receives and reads them. "bare" sends
the tensors alone, into buffers whose shapes are known before, and "bare, metadata" sends their description in front
of them in every step, as pickled bytes and their number, which is what a pipeline whose shapes change has to do.
"""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from quiesce.bench.measuring import Report, Spread, Times, in_turns, pin, ratio, timed
from quiesce.model.paths import source_tree
from quiesce.simulated import chooser
from quiesce.stage_handoff import StageLink
from quiesce.transport import TorchTransport

TIMEOUT_S = 60.0
CASES = {"64 KiB": (64 << 10, 200), "1 MiB": (1 << 20, 60), "16 MiB": (16 << 20, 6)}
"""Bytes of a step, in two tensors, and steps in a round."""
LINK, BARE, DESCRIBED = "quiesce", "bare", "bare, metadata"


def wait(work: Any) -> None:
    work.wait(timedelta(seconds=TIMEOUT_S))


class Bare:
    """What is written without a library: send, and wait before the next forward pass writes the tensors again."""

    def __init__(self, described: bool) -> None:
        self.described = described
        self.works: list[Any] = []
        self.kept: list[torch.Tensor] = []

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        messages = list(tensors.values())
        if self.described:
            head = bytearray(pickle.dumps([(key, t.shape, t.dtype) for key, t in tensors.items()]))
            size = bytearray(struct.pack("<q", len(head)))
            messages[:0] = [torch.frombuffer(each, dtype=torch.uint8) for each in (size, head)]
        self.kept = messages
        self.works = [dist.isend(message, 1) for message in messages]

    def settle(self) -> None:
        for work in self.works:
            wait(work)
        self.works = []

    def receive(self, into: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.described:
            size = torch.empty(8, dtype=torch.uint8)
            wait(dist.irecv(size, 0))
            head = torch.empty(int(size.view(torch.int64)), dtype=torch.uint8)
            wait(dist.irecv(head, 0))
            described = pickle.loads(head.numpy().tobytes())
            into = {key: torch.empty(shape, dtype=dtype) for key, shape, dtype in described}
        for work in [dist.irecv(tensor, 0) for tensor in into.values()]:
            wait(work)
        return into


def tensors(nbytes: int) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(nbytes // 8) for key in ("hidden", "residual")}


def steps(name: str, rank: int, nbytes: int) -> tuple[Callable[[int], object], Callable[[], object]]:
    """What a rank does in each step, and at the end of a round."""
    mine = tensors(nbytes)
    if name == LINK:
        source, to = (None, 1) if rank == 0 else (0, None)
        link = StageLink(TorchTransport(), source=source, to=to, timeout=TIMEOUT_S)

        def step(number: int) -> None:
            link.before_forward()
            mine["hidden"].fill_(number)
            link.isend_tensor_dict(mine)

        def take(number: int) -> None:
            check(link.irecv_tensor_dict().wait(), number)

        return (step, link.before_forward) if rank == 0 else (take, lambda: None)
    bare = Bare(name == DESCRIBED)

    def bare_step(number: int) -> None:
        bare.settle()
        mine["hidden"].fill_(number)
        bare.send(mine)

    if rank == 0:
        return bare_step, bare.settle
    return lambda number: check(bare.receive(mine), number), lambda: None


def check(received: dict[str, torch.Tensor], number: int) -> None:
    if float(received["hidden"][-1]) != number:
        raise AssertionError(f"step {number} arrived as {float(received['hidden'][-1])}")


def rounds_of(rank: int, store: str, cases: dict[str, tuple[int, int]], rounds: int) -> Any:
    """One rank: all ways in turns; for each case the times of a step, by way and round."""
    pin(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    found = {}
    for case, (nbytes, count) in cases.items():
        calls = {}
        for name in (LINK, BARE, DESCRIBED):
            step, end = steps(name, rank, nbytes)

            def call(
                step: Callable[[int], object] = step, end: Callable[[], object] = end, count: int = count
            ) -> Times:
                dist.barrier()
                begin = time.perf_counter_ns()
                for number in range(count):
                    step(number)
                end()
                return [(time.perf_counter_ns() - begin) / 1e9 / count]

            call()
            calls[name] = call
        found[case] = in_turns(calls, rounds)
    dist.barrier()
    dist.destroy_process_group()
    return found


def run_rank(pipe: Any, rank: int, store: str, cases: dict[str, tuple[int, int]], rounds: int) -> None:
    found = rounds_of(rank, store, cases, rounds)
    if rank == 0:
        pipe.send(found)


def pipeline(cases: dict[str, tuple[int, int]], rounds: int) -> dict[str, dict[str, list[Times]]]:
    """The times of rank 0, from two processes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="quiesce_bench_") as folder:
        store = str(Path(folder, "store"))
        both = [
            context.Process(target=run_rank, args=(theirs, rank, store, cases, rounds)) for rank in (0, 1)
        ]
        for process in both:
            process.start()
        theirs.close()
        try:
            if not ours.poll(10 * TIMEOUT_S):
                raise TimeoutError("the pipeline did not end")
            found: dict[str, dict[str, list[Times]]] = ours.recv()
        finally:
            for process in both:
                process.join(10.0)
                if process.is_alive():
                    process.terminate()
                    process.join(10.0)
    return found


def schedules(count: int) -> Spread | None:
    """Schedules of the simulated pipeline of the tests in a second; None without the source tree."""
    tree = source_tree()
    if tree is None:
        return None
    sys.path.append(str(tree))
    try:
        tests = importlib.import_module("model_tests.stage_handoff.pipeline")
        shape = tests.Shape()

        def one(seed: int) -> None:
            if tests.Pipeline(chooser(seed), shape).run() != tests.meant(shape):
                raise AssertionError(f"the pipeline is wrong under the schedule of seed {seed}")

        numbers = iter(range(count + 1))
        one(next(numbers))
        return Spread.of([1 / each for each in timed(lambda: one(next(numbers)), count)])
    finally:
        with suppress(ValueError):
            sys.path.remove(str(tree))


def main(
    file: Path | None, rounds: int = 15, cases: dict[str, tuple[int, int]] = CASES, seeds: int = 300
) -> dict[str, Any]:
    """Measure, print, write; the data."""
    report = Report("stage", file)
    for case, found in pipeline(cases, rounds).items():
        step = {name: Spread.of([t * 1e6 for times in found[name] for t in times]) for name in found}
        rows = [
            {
                "way": name,
                "step us": step[name],
                "more than bare us": step[name].median - step[BARE].median,
                "step / bare": ratio(found[BARE], found[name]),
                "step / bare, metadata": ratio(found[DESCRIBED], found[name]),
            }
            for name in found
        ]
        report.table(f"a step of {case} in two tensors", rows)
    rate = schedules(seeds)
    if rate is not None:
        report.table("simulated streams", [{"schedule": "two ranks, three steps", "a second": rate}])
    report.write()
    return report.data
