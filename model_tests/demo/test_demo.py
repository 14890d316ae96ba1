"""The demo says what a run in one process says, to the bit; with a fault it says something else, and no error."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_tests.demo.faults import FAULTS

from quiesce.demo.engine import CLASSES, Job, serve
from quiesce.demo.transformer import Config, alone, prompt
from quiesce.errors import PeerDied
from quiesce.model import manifest

TRIES = 3
"""Runs in which a fault must show; each shows in nearly every one, but none is certain."""


def demo(*arguments: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "quiesce.cli", "demo", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_the_engine_says_what_one_process_says() -> None:
    status, found, errors = demo("--prompt", "2500", "--prompt", "700", "--tokens", "6")
    assert status == 0, errors
    assert [item["wrong_rows"] for item in found["requests"]] == [0, 0]
    assert [len(item["tokens"]) for item in found["requests"]] == [6, 6]
    assert errors == ""


@pytest.mark.nightly
def test_the_engine_says_what_one_process_says_of_a_long_prompt() -> None:
    status, found, errors = demo()
    assert status == 0, errors
    assert found["requests"][0]["prompt_tokens"] == 8192


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_changes_tokens_without_a_word(fault: str) -> None:
    for _ in range(TRIES):
        status, found, errors = demo(
            "--prompt", "4096", "--prompt", "1500", "--tokens", "4", "--fault", fault
        )
        assert errors == ""
        if status == 1:
            break
    assert status == 1
    assert any(item["wrong_tokens"] for item in found["requests"])


def test_the_faults_are_mutants_that_the_help_names() -> None:
    assert FAULTS.keys() <= manifest.load().mutants.keys()
    done = subprocess.run(
        [sys.executable, "-m", "quiesce.cli", "demo", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"},
    )
    assert all(name in done.stdout for name in FAULTS)


def test_an_unknown_fault_is_answered_with_the_nearest() -> None:
    status, _, errors = demo("--fault", "handles_droped")
    assert status == 2
    assert "handles_dropped" in errors


def test_a_token_depends_on_every_chunk_of_its_prompt() -> None:
    """Else a corrupted chunk might go unnoticed."""
    config = Config(chunk=64)
    torch.set_num_threads(1)
    embeddings = prompt(config, 0, 256)
    expected = alone(config, embeddings, 8).tokens
    for start in range(0, 256, config.chunk):
        other = embeddings.clone()
        other[start : start + config.chunk] = 0
        assert alone(config, other, 8).tokens != expected


def test_a_killed_core_ends_the_run_and_the_workers(tmp_path: Path) -> None:
    def kill(request: int, token: int) -> None:
        [core] = multiprocessing.active_children()
        children = Path(f"/proc/{core.pid}/task/{core.pid}/children").read_text().split()
        workers.extend(map(int, children))
        core.kill()

    workers: list[int] = []
    job = Job(Config(chunk=64), (64,), 10_000, CLASSES, str(tmp_path))
    with pytest.raises(PeerDied, match="core"):
        serve(job, kill)
    assert len(workers) == 4
    for pid in workers:
        _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended, _, _ = select.select([handle], [], [], 60)
        assert ended, f"worker {pid} outlives its core"
    finally:
        os.close(handle)
