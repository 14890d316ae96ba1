"""The examples run, end, say what they did, and did what the specifications allow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quiesce.model import judging
from quiesce.model.traces import read
from quiesce.recording import VARIABLE

EXAMPLES = sorted((Path(__file__).parent.parent / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    environment = {**os.environ, VARIABLE: str(tmp_path)}
    command = [sys.executable, str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
    verdicts = [judging.judge(case) for case in judging.cases(read(tmp_path))]
    assert judging.outcome_of(verdicts) == "accepted", [item.explanation.message for item in verdicts]


def test_there_is_an_example_of_each_kind() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "asyncio_client",
        "one_writer_four_readers",
        "push_pull",
        "router_dealer",
        "two_stage_pipeline",
    }
