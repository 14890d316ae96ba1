"""Traces of many processes under load, with delays and kills at every step, are behaviours of the specifications."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from model_tests.conftest import PROFILE
from model_tests.traces import runs
from model_tests.traces.runs import Kill

from quiesce.model.judging import cases, judge
from quiesce.model.traces import read

SENDER_STEPS = ("Take", "Encode", "SendPart", "Remember", "Recycle", "Touch", "Close")
WRITER_STEPS = ("Admit", "Take", "Fill", "Publish", "Post", "Return", "HearRelease", "Recycle", "Close")
READER_STEPS = ("Join", "Open", "Copy", "Lease", "Release")
RANK_STEPS = (
    "ReceiveMetadata",
    "PostReceive",
    "AwaitReceive",
    "BeforeForward",
    "SendMetadata",
    "SendTensors",
)
PHASES = ("begin", "end")
TIMES = {"dev": 1, "ci": 5, "nightly": 60}[PROFILE]
"""How often each of the runs below is made, with other sizes, delays and moments."""


def payload_runs(folder: Path, seed: int) -> Iterator[Callable[[], object]]:
    choose = random.Random(seed)
    for number, address in enumerate(["tcp://127.0.0.1:*", f"ipc://{folder}/s"] * 2):
        run = runs.Payload(
            messages=choose.randrange(15, 40),
            address=f"{address}{seed}{number}" if address.startswith("ipc") else address,
            free_limit=choose.randrange(1, 3),
            delay=choose.choice([0.0, 0.003]),
            seed=choose.randrange(1 << 30),
            high_water=choose.choice([1, 4, 100]),
        )
        yield lambda run=run, number=number: runs.payload(folder / f"payload-{seed}-{number}", run)
    for action in SENDER_STEPS:
        for phase in PHASES:
            count = 1 if action == "Close" else choose.randrange(1, 8)
            run = runs.Payload(
                12, delay=0.002, seed=choose.randrange(1 << 30), kill=Kill(action, phase, count)
            )
            yield lambda run=run: runs.payload(
                folder / f"payload-{seed}-{run.kill.action}-{run.kill.phase}", run
            )


def ring_runs(folder: Path, seed: int) -> Iterator[Callable[[], object]]:
    choose = random.Random(seed)
    for number in range(4):
        run = runs.Ring(
            messages=choose.randrange(10, 25),
            readers=choose.randrange(1, 4),
            slots=choose.randrange(1, 4),
            window=choose.choice([2, 4, 4]),
            delay=choose.choice([0.0, 0.004]),
            seed=choose.randrange(1 << 30),
            leave_after=choose.choice([None, None, 5]),
        )
        yield lambda run=run, number=number: runs.ring(folder / f"ring-{seed}-{number}", run)
    for rank, actions in ((-1, WRITER_STEPS), (0, READER_STEPS)):
        for action in actions:
            for phase in PHASES:
                kill = Kill(
                    action, phase, 1 if action in ("Join", "Admit", "Close") else choose.randrange(1, 4)
                )
                run = runs.Ring(10, delay=0.002, seed=choose.randrange(1 << 30), kills=((rank, kill),))
                yield lambda run=run, kill=kill: runs.ring(
                    folder / f"ring-{seed}-{kill.action}-{kill.phase}", run
                )


def stage_runs(folder: Path, seed: int) -> Iterator[Callable[[], object]]:
    choose = random.Random(seed)
    for ranks in (2, 3):
        run = runs.Stage(ranks, 8, choose.randrange(1, 4), choose.choice([0.0, 0.003]), extra=seed % 2 == 1)
        directories = [folder / f"stage-{seed}-{ranks}-{number}" for number in range(5)]
        yield lambda run=run, directories=directories: runs.stage(directories, run)
    for action in RANK_STEPS:
        for phase in PHASES:
            # Only ranks that pass tensors on send them; only those behind receive them.
            rank = 0 if action == "SendTensors" else 1
            kill = Kill(action, phase, choose.randrange(1, 5))
            run = runs.Stage(2 + (action == "SendTensors"), 6, 2, 0.002, kills=((rank, kill),))
            yield lambda run=run, kill=kill: runs.stage(
                [folder / f"stage-{seed}-{kill.action}-{kill.phase}"], run
            )


@pytest.mark.timeout(3600 if PROFILE == "nightly" else 300)
@pytest.mark.parametrize("protocol", ["payload", "ring", "stage"])
def test_every_trace_is_a_behaviour(protocol: str, tmp_path: Path) -> None:
    make = {"payload": payload_runs, "ring": ring_runs, "stage": stage_runs}[protocol]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda run: run(), [run for seed in range(TIMES) for run in make(tmp_path, seed)]))
    traces = [read(directory) for directory in sorted(tmp_path.iterdir()) if directory.is_dir()]
    verdicts = [judge(case) for trace in traces for case in cases(trace)]
    wrong = [verdict.explanation.message for verdict in verdicts if verdict.outcome != "accepted"]
    assert not wrong, f"{len(wrong)} of {len(verdicts)}:\n" + "\n".join(wrong[:10])
    events = sum(len(verdict.case.events) for verdict in verdicts)
    seconds = sum(verdict.seconds for verdict in verdicts)
    print(f"\n{len(traces)} traces, {events:,} events, {seconds:.1f} s to judge")
    least = {"payload": (15, 1_000), "ring": (32, 1_500), "stage": (22, 1_000)}[protocol]
    assert len(verdicts) >= TIMES * least[0]
    assert events >= TIMES * least[1]
