"""The examples run, end, and say what they did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "docs" / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_there_is_an_example_of_each_kind() -> None:
    assert {path.stem for path in EXAMPLES} == {
        "asyncio_client",
        "one_writer_four_readers",
        "push_pull",
        "router_dealer",
        "two_stage_pipeline",
    }
