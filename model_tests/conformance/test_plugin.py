"""`pytest --quiesce-adapter` runs lockstep and tours, and says readably what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ADAPTER = """
from model_tests.stage_handoff.adapter import VARIANTS, Stage as Shipped


class Stage(Shipped):
    constants = Shipped.small["one step, gathered"]
    small = {"one step, gathered": constants}


class Faulty(VARIANTS["second_wait_blocks"]):
    small = {"gloo": Shipped.small["gloo"]}
"""


def run(tmp_path: Path, name: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(ADAPTER, encoding="utf-8")
    (tmp_path / "test_other.py").write_text("def test_other() -> None:\n    assert False\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        f"--quiesce-adapter={name}",
    ]
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    return subprocess.run(
        command, cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=250, check=False
    )


def test_what_conforms_passes(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Stage")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 passed" in result.stdout


def test_what_does_not_fails_readably(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Faulty")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "2 failed" in result.stdout
    assert "AwaitReceive(r = 2) failed: QuiesceTimeout: a second wait never ends" in result.stdout
    assert "Traceback" not in result.stdout


def test_a_wrong_name_is_said(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Nothing")
    assert result.returncode == 4
    assert "give module:Class" in result.stderr
