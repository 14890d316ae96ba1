"""TLC in a process of its own: every verdict, every way to be stopped, nothing left behind."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quiesce.model import tlc
from quiesce.model.config import Config
from quiesce.model.errors import ModelError
from quiesce.model.output import CheckResult, Progress


def failing(specs: Path, fault: str, only: str | None = "") -> CheckResult:
    config = Config.parse((specs / "MCFailing.cfg").read_text()).override({"Fault": f'"{fault}"'})
    return tlc.run(
        specs / "MCFailing.tla", config if only == "" else config.only(only), timeout=100, short=True
    )


def states(result: CheckResult) -> list[dict[str, object]]:
    assert result.counterexample is not None
    return [dict(step.state) for step in result.counterexample.steps]


def actions(result: CheckResult) -> list[str]:
    assert result.counterexample is not None
    return [step.action for step in result.counterexample.steps]


def java_processes() -> set[str]:
    """Java processes with a configuration of ours on their command line, by process id."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"tlc2.TLC" in command and os.fsencode(tempfile.gettempdir()) in command:
                found.add(entry.name)
    return found


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory for temporary files, which must be empty again afterwards, with no process using it."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield scratch
    assert list(scratch.iterdir()) == []
    assert java_processes() == set()


def test_a_model_that_holds_gives_its_numbers(specs: Path, nothing_left: Path) -> None:
    result = failing(specs, "none")
    assert result.holds
    assert (result.generated, result.distinct, result.depth, result.exit_status) == (5, 4, 4, 0)
    assert result.coverage == {"Count": 3, "Wrap": 1, "Rest": 0, "Skip": 0, "Never": 0, "Idle": 0}
    assert result.counterexample is None
    assert result.message == ""


def test_an_invariant_is_violated_with_typed_states(specs: Path) -> None:
    result = failing(specs, "invariant")
    assert (result.verdict, result.violated, result.exit_status) == ("invariant", "Small", 12)
    assert states(result) == [{"mode": "run", "n": n} for n in range(5)]
    assert actions(result) == ["Init", "Count", "Count", "Count", "Wrap"]


def test_an_invariant_is_violated_by_an_initial_state(specs: Path) -> None:
    config = Config.parse('INIT Init\nNEXT Next\nCONSTANT Fault = "none"\nINVARIANT Wrong')
    result = tlc.run(specs / "Failing.tla", config)
    assert (result.verdict, result.violated) == ("invariant", "Wrong")
    assert states(result) == [{"mode": "run", "n": 0}]


def test_a_deadlock_is_found_unless_it_is_not_looked_for(specs: Path) -> None:
    result = failing(specs, "deadlock", only=None)
    assert (result.verdict, result.violated) == ("deadlock", "Deadlock")
    assert len(states(result)) == 4
    config = (
        Config.parse((specs / "MCFailing.cfg").read_text()).override({"Fault": '"deadlock"'}).only("Small")
    )
    assert tlc.run(specs / "MCFailing.tla", config, deadlock=False).holds


def test_a_liveness_counterexample_loops(specs: Path) -> None:
    result = failing(specs, "lasso", only="Returns")
    assert (result.verdict, result.violated) == ("property", "Returns")
    assert result.counterexample is not None
    assert (result.counterexample.loop, result.counterexample.stutters) == (1, False)
    assert [state["n"] for state in states(result)] == [0, 1, 2]
    assert "then back to state 2" in str(result.counterexample)


def test_a_liveness_counterexample_stutters(specs: Path) -> None:
    result = failing(specs, "stutter", only="Returns")
    assert result.counterexample is not None
    assert (result.counterexample.loop, result.counterexample.stutters) == (None, True)
    assert "then nothing, for ever" in str(result.counterexample)


def test_an_action_property_is_named(specs: Path) -> None:
    result = failing(specs, "lasso")
    assert (result.verdict, result.violated) == ("property", "Climbs")


def test_a_false_assumption_is_a_verdict_of_its_own(specs: Path) -> None:
    result = failing(specs, "assumption")
    assert result.verdict == "assumption"
    assert "line 8" in result.message


def test_an_evaluation_error_says_what_and_where(specs: Path) -> None:
    result = failing(specs, "evaluation")
    assert result.verdict == "evaluation"
    assert result.message.startswith("Attempted to apply Head to the empty sequence.")
    assert "Line 15, column 59" in result.message


def test_a_parse_error_says_where(specs: Path) -> None:
    result = tlc.run(specs / "Broken.tla", Config.parse("INIT Init\nNEXT Next"))
    assert result.verdict == "parse"
    assert "at line 5, column 1" in result.message


def test_an_unknown_operator_says_where(specs: Path) -> None:
    result = tlc.run(specs / "Undeclared.tla", Config.parse("INIT Init\nNEXT Next"))
    assert result.verdict == "parse"
    assert "line 3, col 18" in result.message
    assert "Unknown operator: `y'" in result.message


def test_a_wrong_configuration_says_what_is_wrong(specs: Path) -> None:
    result = tlc.run(specs / "MCPost.tla", Config.parse("SPECIFICATION Spec\nCONSTANT Limit = 1"))
    assert result.verdict == "config"
    assert "is not assigned a value" in result.message


def test_a_missing_specification_is_an_error(specs: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no specification .*Nowhere\.tla"):
        tlc.run(specs / "Nowhere.tla", Config.parse("INIT Init\nNEXT Next"))


def test_time_runs_out_and_nothing_is_left(specs: Path, nothing_left: Path) -> None:
    result = tlc.run(specs / "Endless.tla", ENDLESS, timeout=4)
    assert result.verdict == "timeout"
    assert "no verdict after 4 s" in result.message


def test_memory_runs_out_and_nothing_is_left(specs: Path, nothing_left: Path) -> None:
    config = Config.parse('INIT Init\nNEXT Double\nCONSTANT Fault = "none"')
    result = tlc.run(specs / "Endless.tla", config, heap=32 << 20, timeout=120)
    assert result.verdict == "memory"
    assert "32 MiB" in result.message


def test_progress_is_told_and_may_stop_the_run(specs: Path, nothing_left: Path) -> None:
    told: list[Progress] = []

    def stop(progress: Progress) -> None:
        told.append(progress)
        if progress.seconds > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tlc.run(specs / "Endless.tla", ENDLESS, progress=stop, timeout=100, short=True)
    assert told == sorted(told, key=lambda progress: progress.seconds)


def test_runs_at_the_same_time_do_not_disturb_each_other(specs: Path, nothing_left: Path) -> None:
    barrier = threading.Barrier(3)

    def run(fault: str) -> str:
        barrier.wait(30)
        return failing(specs, fault).verdict

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, ["none", "invariant", "none"])) == ["holds", "invariant", "holds"]


ENDLESS = Config.parse('INIT Init\nNEXT Next\nCONSTANT Fault = "none"')
