"""`pytest --quiesce-adapter` runs lockstep, tours and traces, and says readably what failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ADAPTER = """
from model_tests.payload_reuse.adapter import VARIANTS as SENDERS
from model_tests.stage_handoff.adapter import VARIANTS, Stage as Shipped
from quiesce.events import action
from quiesce.model.adapter import Adapter, does
from quiesce.recording import record


class Stage(Shipped):
    constants = Shipped.small["one step, gathered"]
    small = {"one step, gathered": constants}


class Faulty(VARIANTS["second_wait_blocks"]):
    small = {"gloo": Shipped.small["gloo"]}

    @classmethod
    def record(cls, directory):
        raise NotImplementedError


Sender = SENDERS["last_frame_tracker"]


class Pool:
    keep = True

    @action("Take", lambda self, *_: {"b": "b1", "h": "h1"})
    def take(self):
        self.readers = False

    @action("BeginWrite", lambda self, *_: {"b": "b1"})
    def begin_write(self):
        pass

    @action("EndWrite", lambda self, *_: {"b": "b1", "v": 1})
    def end_write(self):
        pass

    @action("Recycle", lambda self, *_: {"b": "b1"})
    def recycle(self):
        pass


class Careless(Pool):
    def end_write(self):
        self.recycle()


class Plain(Adapter):
    model = "buffer_lifecycle"
    constants = {"Buffers": "{b1}", "Holders": "{h1}", "Readers": "{r1}", "Versions": "{1}"}
    pool = Pool

    @does("EndLoans")
    def end_loans(self):
        pass

    def view(self):
        return {}

    def facts(self, state):
        return {}

    @classmethod
    def record(cls, directory):
        with record(directory):
            pool = cls.pool()
            pool.take()
            pool.begin_write()
            pool.end_write()


class CarelessPlain(Plain):
    pool = Careless


class Misnamed(Plain):
    small = {"one": Plain.constants}

    @does("Tak")
    def take(self):
        pass


class Unknown(Plain):
    model = "buffer_lifecicle"


class Constant(Plain):
    constants = {"Bufers": "{b1}"}


class Blind(Adapter):
    model = "buffer_lifecycle"
"""


def run(tmp_path: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(ADAPTER, encoding="utf-8")
    (tmp_path / "test_other.py").write_text("def test_other() -> None:\n    assert False\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        f"--quiesce-adapter={name}",
        *options,
    ]
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    return subprocess.run(
        command, cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=250, check=False
    )


def test_what_conforms_passes(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Stage")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout


def test_what_does_not_fails_readably(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Faulty")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "2 failed, 1 skipped" in result.stdout
    assert "AwaitReceive(r = 2) failed: QuiesceTimeout: a second wait never ends" in result.stdout
    assert "Traceback" not in result.stdout


def test_recorded_traces_of_a_model_of_ones_own_are_judged(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Plain", "-k", "traces")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    result = run(tmp_path, "mine:CarelessPlain", "-k", "traces")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Recycle(b = b1)" in result.stdout
    assert "rejected" in result.stdout


def test_a_recorded_sender_that_is_faulty_is_rejected(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Sender", "-k", "traces")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "rejected" in result.stdout


def test_a_guard_that_was_not_tested_is_said(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Plain", "-k", "lockstep")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Plain: no forbidden step was asked for: guards were not tested (see `attempts`" in result.stdout
    result = run(tmp_path, "mine:Plain", "-k", "traces")
    assert "forbidden" not in result.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Misnamed", "no action is called 'Tak'; did you mean 'Take'?"),
        ("Unknown", "no model or mutant is called 'buffer_lifecicle'; did you mean 'buffer_lifecycle'?"),
        ("Constant", "no constant of the configuration is called 'Bufers'; did you mean 'Buffers'"),
        ("Blind", "Blind has no method `view`; it must return what the implementation shows"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said_without_a_traceback(
    name: str, message: str, tmp_path: Path
) -> None:
    result = run(tmp_path, f"mine:{name}")
    assert result.returncode == 1, result.stdout + result.stderr
    assert message in result.stdout
    assert "Traceback" not in result.stdout
    assert len(result.stdout.splitlines()) < 20, result.stdout


def test_the_module_is_looked_for_in_the_current_directory(tmp_path: Path) -> None:
    """Also by `pytest`, which unlike `python -m pytest` does not put that on the path."""
    (tmp_path / "here.py").write_text(ADAPTER, encoding="utf-8")
    command = [
        str(Path(sys.executable).with_name("pytest")),
        "-q",
        "--quiesce-adapter=here:Plain",
        "-k",
        "lockstep",
    ]
    paths = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    result = subprocess.run(
        command, cwd=tmp_path, env=paths, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_wrong_name_is_said(tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Nothing")
    assert result.returncode == 4
    assert "give module:Class" in result.stderr


@pytest.mark.parametrize(("limit", "ends"), [("-otimeout=0.05", False), ("--timeout=0.05", True)])
def test_a_long_tour_is_ended_only_by_the_command_line(limit: str, ends: bool, tmp_path: Path) -> None:
    result = run(tmp_path, "mine:Stage", "-k", "tour", limit)
    assert ("Timeout" in result.stdout) == ends, result.stdout + result.stderr
    assert result.returncode == ends
