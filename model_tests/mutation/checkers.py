"""The checkers of the mutation matrix, each held against one mutant: `python -m model_tests.mutation.checkers`.

A checker answers whether it told the mutant from what was shipped, and by what. `Unfit`: there is nothing for it to
run; the reason is in reasons.toml.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from model_tests.conftest import SEARCHING
from model_tests.mutation.swap import NONE
from model_tests.mutation.variants import base, fault, variant

from quiesce.errors import QuiesceError
from quiesce.model import checking
from quiesce.model.adapter import Divergence
from quiesce.model.coverage import Coverage
from quiesce.model.errors import ModelError
from quiesce.model.lockstep import lockstep
from quiesce.model.manifest import Mutant, load
from quiesce.model.replay import Suite, replay, suite
from quiesce.model.tours import drive

ROOT = Path(__file__).parent.parent.parent
STEPS = {"payload_reuse": 60, "broadcast_ring": 100, "stage_handoff": 60}
ATTEMPTS = 3
"""Recorded runs of each kind: a fault may need an unlucky moment."""
ORDINARY = {
    "payload_reuse": (
        "test_lifecycle", "test_edges", "test_faults", "test_borrowing", "test_receiver", "test_ends", "test_sockets",
    ),
    "broadcast_ring": ("test_objects", "test_progress", "test_counters", "test_processes"),
    "stage_handoff": ("test_schedules", "test_link"),
    "host_staging": ("test_schedules",),
}  # fmt: skip
"""The test files of each protocol that know nothing of the specification."""
NAMED = {
    "sleep_after_check": "broadcast_ring/test_progress.py::test_a_post_before_sleep_is_not_slept_through"
}
"""Tests that put a variant in an unlucky moment themselves, and pass if it shows."""
TEST_S = 30
"""Seconds after which an ordinary test that hangs has failed."""


class Unfit(Exception):
    """The checker cannot be held against this mutant."""


class Found(NamedTuple):
    """Whether the mutant was caught, and by what."""

    caught: bool
    by: str = ""


def tlc(mutant: Mutant) -> Found:
    result = checking.check(mutant, named=False)
    judgement = checking.judge(mutant, result)
    if not judgement.answered:
        raise TimeoutError(judgement.problems[0])
    return Found(
        not judgement.problems, "; ".join(judgement.problems) or f"{mutant.violates}, {mutant.depth} states"
    )


def in_lockstep(mutant: Mutant) -> Found:
    known, name = _driven(mutant)
    try:
        lockstep(known.variants[name], steps=STEPS[mutant.protocol], options=SEARCHING)
    except Divergence as divergence:
        return Found(True, _told(divergence))
    return Found(False)


def on_tours(mutant: Mutant) -> Found:
    known, name = _driven(mutant)
    kind = known.variants[name]
    first = known.shows_in.get(name)
    for small in dict.fromkeys([*([first] if first else []), *kind.small]):
        try:
            drive(kind, small, Coverage.of(kind, small))
        except Divergence as divergence:
            return Found(True, f"{small}: {_told(divergence)}")
    return Found(False)


def replayed(mutant: Mutant) -> Found:
    _, name = _driven(mutant)
    try:
        found = replay(name)
    except QuiesceError as error:  # no counterexample that can be replayed, or the variant cannot go on
        raise Unfit(str(error)) from None
    return Found(found.shown, found.damage or "no damage")


def _driven(mutant: Mutant) -> tuple[Suite, str]:
    name = fault(mutant)
    try:
        known = suite(mutant.protocol)
    except ModelError as error:
        raise Unfit(str(error)) from None
    if name not in known.variants:
        raise Unfit("no adapter drives it")
    return known, name


def _told(divergence: Divergence) -> str:
    text = " ".join(divergence.message.split())
    forbidden = re.search(r"forbids: (\w+)", text)
    refused = re.search(r"allows (\w+).*, but the implementation did not", text)
    shown = re.search(r"specification has(?: \(.*?\))?: (.*)", text)
    failed = re.search(r"(\w+)(?:\(.*\))? failed: (\w+)", text)
    if forbidden:
        return f"{forbidden[1]} where it is forbidden"
    if refused:
        return f"{refused[1]} is not taken"
    if shown:
        return f"it shows another {shown[1].split(':')[0]}"
    return f"{failed[2]} in {failed[1]}" if failed else text[:60]


def in_traces(mutant: Mutant) -> Found:
    from model_tests.traces import runs

    from quiesce.model.judging import cases, judge
    from quiesce.model.traces import read

    with tempfile.TemporaryDirectory(prefix="quiesce-matrix-") as directory:
        for number, (make, run) in enumerate(_recorded(mutant, runs)):
            folder = Path(directory, str(number))
            try:
                make(folder, run)
            except AssertionError:  # what the fault did may be more than the run survives
                if not list(folder.glob("*.jsonl")):
                    raise
            for case in cases(read(folder)):
                verdict = judge(case)
                if verdict.outcome == "rejected" and verdict.event:
                    return Found(True, f"rejected at {verdict.event.action}")
    return Found(False)


def _recorded(mutant: Mutant, runs: Any) -> Iterator[tuple[Callable[..., None], Any]]:
    """The runs of a faulty variant that are recorded: those of the tests of traces, and some for all."""
    from model_tests.traces import test_faults as known

    name, protocol = fault(mutant), mutant.protocol
    if protocol == "host_staging":
        raise Unfit("no recorded run stages")
    kind = variant(protocol, name)
    where = base(protocol, kind).rpartition(".")[2]
    if protocol == "payload_reuse":
        chosen = [known.PAYLOAD[name][0]] if name in known.PAYLOAD else [known.SLOW, known.CUT]
        for attempt in range(ATTEMPTS):
            for run in chosen:
                yield runs.payload, replace(run, sender=kind, seed=run.seed + attempt)
    elif protocol == "broadcast_ring":
        field = {"BroadcastRing": "writer", "RingReader": "reader"}[where]
        chosen = (
            [known.RING[name][0]] if name in known.RING else [known.LATE, replace(known.LATE, leave_after=4)]
        )
        for attempt in range(ATTEMPTS):
            for run in chosen:
                yield runs.ring, replace(run, **{field: kind}, seed=attempt)
    elif where != "StageLink":
        raise Unfit("recorded runs use gloo, not the simulated device that this is a fault of")
    else:
        if name in known.STAGE:
            kind, run, _ = known.STAGE[name]
        else:
            run = runs.Stage(steps=6, delay=0.01)

        def stage(folder: Path, run: Any) -> None:
            runs.stage([folder], run)

        for _ in range(ATTEMPTS):
            yield stage, replace(run, link=kind)


def in_tests(mutant: Mutant) -> Found:
    if test := NAMED.get(fault(mutant)):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"model_tests/{test}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        return Found(done.returncode == 0, test.partition("/")[2])
    return ordinary(mutant.protocol, fault(mutant))


def ordinary(protocol: str, name: str = NONE) -> Found:
    """Run the ordinary tests with the variant in place of the shipped class, up to the first that fails."""
    folder = {"host_staging": "stage_handoff"}.get(protocol, protocol)
    files = [f"model_tests/{folder}/{file}.py" for file in ORDINARY[protocol]]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-rf", "-p", "model_tests.mutation.swap"),
            *("-p", "no:cacheprovider", "--timeout", str(TEST_S), *files),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "QUIESCE_VARIANT": f"{protocol}/{name}",
            "QUIESCE_PROFILE": "dev",
            "COLUMNS": "250",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    failed = re.search(r"^(?:FAILED|ERROR) \S+/(\S+?\.py::\w+)", run.stdout, re.MULTILINE)
    if run.returncode == 1 and failed:
        return Found(True, failed[1])
    if run.returncode == 0:
        return Found(False)
    raise RuntimeError(f"pytest ended with {run.returncode}: {(run.stdout + run.stderr)[-2000:]}")


CHECKERS: dict[str, Callable[[Mutant], Found]] = {
    "tlc": tlc,
    "lockstep": in_lockstep,
    "tours": on_tours,
    "traces": in_traces,
    "replay": replayed,
    "tests": in_tests,
}


def main(name: str, checkers: list[str]) -> None:
    """Print a line of JSON for each checker as soon as it is through."""
    mutant = load().find(name)
    assert isinstance(mutant, Mutant)
    for checker in checkers:
        began = time.monotonic()
        try:
            found = CHECKERS[checker](mutant)
            answer = {
                "fate": "caught" if found.caught else "survived",
                "by": found.by if found.caught else "",
            }
        except Unfit as why:
            answer = {"fate": "unfit", "by": str(why)}
        except Exception as error:
            answer = {"fate": "failed", "by": f"{type(error).__name__}: {error}"}
        print(
            "\n" + json.dumps({"checker": checker, **answer, "seconds": time.monotonic() - began}), flush=True
        )
    sys.stdout.flush()
    os._exit(0)  # threads of a faulty variant may be left that never end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
