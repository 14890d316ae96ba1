"""`quiesce trace` and `quiesce validate` as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from model_tests.traces import runs

PROGRAM = """
import sys, torch, zmq
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
context = zmq.Context()
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
pull.bind("inproc://x")
push.connect("inproc://x")
with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
    for number in range(5):
        sender.send({"pad": b"x" * 70_000, "tensor": torch.zeros(10)})
        received = receiver.receive()
        del received
sys.exit(7)
"""


def quiesce(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quiesce.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_program_is_recorded_and_judged(tmp_path: Path) -> None:
    """The whole way: record, export, validate with both opinions, tamper, validate again."""
    run, timeline = tmp_path / "run", tmp_path / "run.json"
    traced = quiesce("trace", "-o", run, "--chrome", timeline, "--json", "--", sys.executable, "-c", PROGRAM)
    assert traced.returncode == 7
    told = json.loads(traced.stdout)
    assert told == {"directory": str(run), "files": [str(path) for path in run.glob("*.jsonl")], "status": 7}
    assert "1 process recorded" in traced.stderr
    assert sum(e.get("name") == "SendPart" for e in json.loads(timeline.read_text())["traceEvents"]) == 5
    sound = quiesce("validate", run, "--tlc")
    assert sound.returncode == 0, sound.stderr
    assert "agrees on 1 of 1 cases" in sound.stdout
    (file,) = run.glob("*.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    begin = next(n for n, line in enumerate(lines) if '"a":"Encode"' in line and n > 20)
    file.write_text("".join(lines[:begin] + lines[begin + 2 :]))
    wrong = quiesce("validate", run, "--tlc", "--json")
    assert wrong.returncode == 1, wrong.stderr
    ((case,),) = [trace["cases"] for trace in json.loads(wrong.stdout)]
    assert case["verdict"] == "rejected"
    assert case["event"]["place"] == f"{file}:{begin + 1}"
    assert case["conjunct"] == 'step = "sending"'
    assert case["prefix"][-1] == case["event"]
    assert any("BeginEncode" in action for action in case["enabled"])
    shown = quiesce("validate", run)
    assert shown.returncode == 1
    assert 'SendPart is disabled: step = "sending" is false' in shown.stdout
    assert "the shortest part that is rejected" in shown.stdout


def test_nothing_to_judge_is_undetermined(tmp_path: Path) -> None:
    with runs.recorded(tmp_path / "run"):
        pass
    done = quiesce("validate", tmp_path / "run")
    assert done.returncode == 3
    assert "nothing to judge" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["validate", "missing"], "cannot read the trace missing"),
        (["trace"], "give a command to run after --"),
        (["trace", "-o", "x", "--", "no-such-command"], "cannot run no-such-command"),
    ],
)
def test_what_cannot_run_says_so(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quiesce.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert complaint in done.stderr


def test_a_command_that_never_imports_quiesce_is_said_to_have_recorded_nothing(tmp_path: Path) -> None:
    done = quiesce("trace", "-o", tmp_path / "run", "--", "true")
    assert done.returncode == 0
    assert "nothing was recorded: no process of true imported quiesce" in done.stderr
