"""Real pipelines: processes over gloo, with buffers written again in every step, against a run in one process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_tests.stage_handoff.worker import Job

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 240.0
"""Seconds that all processes of one pipeline may take together."""


def together(module: str, arguments: list[list[str]]) -> list[dict[str, Any]]:
    """Run a module once in a process of its own for each list of arguments; what each prints, as JSON."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"model_tests.stage_handoff.{module}", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in arguments
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output) for output, _ in outputs]


def pipeline(job: Job) -> list[dict[str, Any]]:
    """What each rank of a pipeline reports."""
    return together(
        "worker", [[replace(job, rank=rank).argument()] for rank in range(job.stages * job.parallel)]
    )


@pytest.mark.parametrize(("stages", "parallel"), [(2, 1), (4, 1), (2, 2)])
def test_outputs_equal_those_of_one_process(stages: int, parallel: int, tmp_path: Path) -> None:
    """200 steps in chunks, tensors up to 16 MiB: every output is bit for bit that of a run in one process."""
    reports = pipeline(Job(0, stages, str(tmp_path / "store"), parallel))
    for report in reports[:parallel]:
        assert report["micro_batches"] >= 200
        assert report["wrong"] == 0
    assert all(report["unsettled"] <= 2 for report in reports)


def test_a_skipped_wait_corrupts(tmp_path: Path) -> None:
    """The same pipeline with the wait for the previous step left out delivers what the next forward wrote."""
    reports = pipeline(Job(0, 2, str(tmp_path / "store"), dropped_wait=True))
    assert reports[0]["wrong"] > 0
    print(f"{reports[0]['wrong']} of {reports[0]['micro_batches']} micro-batches arrived changed")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the sender and the receiver saw."""
    store = str(tmp_path_factory.mktemp("gloo") / "store")
    sender, receiver = together("gloo_facts", [["0", store], ["1", store]])
    return sender, receiver


Facts = tuple[dict[str, Any], dict[str, Any]]


def test_gloo_reads_the_tensor_until_it_was_waited_for(facts: Facts) -> None:
    """A tensor changed between isend and wait arrives changed: isend is not eager."""
    assert facts[1]["arrived_changed"]


def test_gloo_is_completed_says_nothing_before_wait(facts: Facts) -> None:
    """The transfer is over, and is_completed is False until somebody waits."""
    assert facts[0]["completed_before_wait"] is False
    assert facts[0]["completed_after_wait"] is True


def test_gloo_carries_every_dtype(facts: Facts) -> None:
    """All dtypes, empty and strided tensors arrive bit for bit, static buffers are filled, waiting again is fine."""
    assert len(facts[1]["equal"]) == 10
    assert facts[1]["static"]
    assert facts[1]["again"]
    assert facts[1]["no_tensors"]


def test_a_silent_peer_ends_the_link(facts: Facts) -> None:
    """The wait for metadata is bounded, and the link cannot be used any more."""
    assert facts[0]["silence"] == "QuiesceTimeout"
    assert facts[0]["afterwards"] == "Closed"


def test_a_dead_peer_ends_the_link(tmp_path: Path) -> None:
    """A peer whose process is gone is reported by whatever is called next, within its time."""
    store = str(tmp_path / "store")
    survivor, _ = together("gloo_facts", [["0", store, "dies"], ["1", store, "dies"]])
    assert survivor.keys() == {"receive", "send", "close"}
    assert set(survivor.values()) <= {"PeerDied", "QuiesceTimeout"}
    assert survivor["receive"] == "PeerDied"
