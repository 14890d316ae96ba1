"""Lost wake-ups: what a periodic recheck hides, and that the shipped protocol needs none."""

from __future__ import annotations

import pytest

from quiesce.model import manifest, paths, tlc
from quiesce.model.config import Config
from quiesce.model.output import CheckResult


def run(fault: str, checked: str) -> CheckResult:
    models = paths.spec_directory() / "models"
    config = (
        Config.parse((models / "MCWakeUp.cfg").read_text()).override({"Fault": f'"{fault}"'}).only(checked)
    )
    libraries = manifest.load().libraries
    return tlc.run(
        models / "MCWakeUp.tla", config, libraries=libraries, timeout=120, coverage=False, deadlock=False
    )


@pytest.mark.parametrize("checked", ["EveryMessageRead", "NobodySleepsOverAMessage"])
def test_a_lost_wake_up_shows_both_ways(checked: str) -> None:
    assert run("news_not_kept", checked).violated == checked


def test_a_recheck_hides_the_lost_wake_up_from_whoever_waits_long_enough() -> None:
    """Every message is read: liveness alone would pass it."""
    assert run("recheck_masks", "EveryMessageRead").holds
    assert run("recheck_masks", "NobodySleepsOverAMessage").violated == "NobodySleepsOverAMessage"


def test_the_specification_has_no_clock_but_in_the_mutant() -> None:
    """Fairness of the shipped protocol names no recheck that could be taken."""
    result = run("none", "EveryMessageRead")
    assert result.holds
    assert result.distinct == manifest.load().model("wake_up").distinct
