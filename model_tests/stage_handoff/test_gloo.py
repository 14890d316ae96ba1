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


def pipeline(job: Job) -> list[dict[str, Any]]:
    """Run every rank of a pipeline in a process of its own; what each reports."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "model_tests.stage_handoff.worker", replace(job, rank=rank).argument()],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(job.stages * job.parallel)
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
