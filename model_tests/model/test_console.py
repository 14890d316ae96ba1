"""What the subcommands share: exit statuses, how far a run is, and names that the shell completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quiesce import __version__
from quiesce.console import CANNOT, FOUND, HOLDS, UNDETERMINED, complete_models, complete_mutants
from quiesce.model import manifest
from quiesce.model.checking import Judgement
from quiesce.model.command import _Running, status
from quiesce.model.errors import UnknownName
from quiesce.model.output import CheckResult, Progress
from quiesce.recording import record

MANIFEST = manifest.load()
MODEL = MANIFEST.models["payload_reuse_stream"]


def judged(verdict: str, *problems: str, answered: bool = True) -> Judgement:
    return Judgement(MODEL, CheckResult(verdict), problems, answered)


GOOD, WRONG = judged("holds"), judged("invariant", "violated")
BROKEN, LATE = (judged(verdict, "no answer", answered=False) for verdict in ("parse", "timeout"))
FULL = judged("memory", "no answer", answered=False)


@pytest.mark.parametrize(
    ("judgements", "expected"),
    [
        ([GOOD, GOOD], HOLDS),
        ([GOOD, WRONG], FOUND),
        ([GOOD, LATE], UNDETERMINED),
        ([FULL], UNDETERMINED),
        ([LATE, WRONG], FOUND),
        ([LATE, WRONG, BROKEN], CANNOT),
    ],
)
def test_the_exit_status_of_a_run(judgements: list[Judgement], expected: int) -> None:
    assert status(judgements) == expected
    assert (HOLDS, FOUND, CANNOT, UNDETERMINED) == (0, 1, 2, 3)


def test_a_run_says_how_far_it_is_and_how_long_it_still_takes() -> None:
    assert MODEL.distinct is not None
    running = _Running(MODEL, Progress(seconds=1.0), Progress())
    assert str(running).startswith("payload_reuse_stream: 1 s, TLC has not counted yet")
    running.tell(Progress(4.0, generated=2_000, distinct=1_000, queue=300, printed=4.0))
    running.tell(Progress(70.0, generated=62_000, distinct=4_000, queue=500, printed=64.0))
    running.tell(Progress(72.0, generated=62_000, distinct=4_000, queue=500, printed=64.0))
    # 60,000 generated and 3,000 distinct in the minute between the two reports; of 9,073 pinned 5,073 are left.
    left = (MODEL.distinct - 4_000) / 50 - 8
    assert str(running) == (
        "payload_reuse_stream: 72 s, 4,000 distinct states, 1,000 generated/s, 500 on the queue, "
        f"about {left:.0f} s left"
    )


def test_nothing_is_foretold_of_what_is_not_pinned() -> None:
    running = _Running(MANIFEST.mutants["last_frame_tracker"], Progress(), Progress())
    running.tell(Progress(4.0, generated=2_000, distinct=1_000, queue=300, printed=4.0))
    assert str(running).endswith("300 on the queue")


def test_the_version_is_said() -> None:
    command = [sys.executable, "-m", "quiesce.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (HOLDS, f"quiesce {__version__}\n")


def test_the_timeline_that_was_written_is_named(tmp_path: Path) -> None:
    with record(tmp_path / "run"):
        pass
    timeline, profile = tmp_path / "run.json", tmp_path / "profile.json"
    profile.write_text("{}", encoding="utf-8")
    command = [sys.executable, "-m", "quiesce.cli", "trace", "-o", str(tmp_path / "run")]
    command += ["--chrome", str(timeline)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == HOLDS, done.stderr
    assert f"a timeline is in {timeline}" in done.stderr
    command += ["--beside", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == CANNOT
    assert f"{profile} is not what torch.profiler exports: JSON with `traceEvents`" in done.stderr


def test_names_are_completed_with_what_they_are_about() -> None:
    assert complete_mutants("last_f") == [("last_frame_tracker", MANIFEST.mutants["last_frame_tracker"].bug)]
    names = [name for name, _ in complete_models("payload_reuse_")]
    assert "payload_reuse_stream" in names
    assert complete_models("no such") == []


def test_only_what_is_close_is_offered() -> None:
    known = ["Buffers", "Readers", "Holders"]
    assert str(UnknownName("constant", "Bufers", known)).endswith("did you mean 'Buffers'?")
    assert "there are: Buffers, Holders, Readers" in str(UnknownName("constant", "Rust", known))


def test_a_name_unlike_any_is_answered_with_some_and_how_many_more() -> None:
    known = [f"model_{number:02}" for number in range(20)]
    assert str(UnknownName("model", "zzz", known)).endswith("model_10, model_11 and 8 more")
    assert str(UnknownName("model", "zzz", known[:2])).endswith("there are: model_00, model_01")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("quiesce explain last_f", "last_frame_tracker"),
        ("quiesce mutate pay", "payload_reuse"),
        ("quiesce matrix --checker lock", "lockstep"),
    ],
)
def test_the_shell_completes_names(words: str, found: str) -> None:
    environment = {
        **os.environ,
        "_QUIESCE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['quiesce']; from quiesce.cli import main; main()",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout.split() == [found]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["report", "-o", "{folder}/none/report.html"], "there is no folder"),
        (["report", "-o", "{folder}"], "is a folder; name a file"),
        (["report", "--results", "{folder}/none"], "does not exist"),
        (["explain", "last_frame_tracker", "--html", "{folder}/none/page.html"], "there is no folder"),
        (["bench", "codec", "--json", "{folder}/none/figures.json"], "there is no folder"),
        (["bench", "plots", "{folder}/none.json"], "none.json: No such file or directory"),
        (["trace", "--chrome", "{folder}/none/run.json", "--", "true"], "there is no folder"),
        (["trace", "--chrome", "{folder}/a", "--beside", "{folder}/none", "--", "true"], "does not exist"),
    ],
)
def test_a_file_that_cannot_be_read_or_written_is_named_before_any_work(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    """Nothing is checked first: a check of all models would outlast the limit."""
    command = [sys.executable, "-m", "quiesce.cli", *(item.format(folder=tmp_path) for item in arguments)]
    environment = {**os.environ, "COLUMNS": "300", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == CANNOT
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
