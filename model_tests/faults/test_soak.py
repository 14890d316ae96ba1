"""A short form of `make soak`: each protocol at full load for seconds, and a recorded run; nightly, the long one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_tests.conftest import PROFILE
from model_tests.faults import soak
from model_tests.faults.crew import Report

SECONDS = {"dev": 3.0, "ci": 7.0, "nightly": 30.0}[PROFILE]


@pytest.mark.parametrize("name", soak.LOADS)
def test_full_load_with_peers_that_come_and_go(name: str, tmp_path: Path) -> None:
    """Nothing is changed, lost in between, doubled or left; memory is looked at in longer runs."""
    found = soak.LOADS[name](SECONDS, str(tmp_path))
    assert [what for what in soak.wrong(found) if not what.startswith("memory")] == []
    assert found["received"] > 50
    assert found["came and went"] >= 1


def test_recorded_runs_are_behaviours_of_the_specifications(tmp_path: Path) -> None:
    for name, verdicts in soak.traces(tmp_path).items():
        assert set(verdicts) == {"accepted"}, name


def test_a_wrong_message_is_seen() -> None:
    """What the figures rest on."""
    from model_tests.faults import load

    message = load.content(7)
    assert not load.is_wrong(message)
    for at in (0, 5, -1):
        message = load.content(7)
        message["numbers"][at] += 1
        assert load.is_wrong(message)
    assert load.is_wrong({**load.content(7), "number": 8})


@pytest.mark.parametrize("name", ["sends and is answered", "receives", "guest"])
@pytest.mark.parametrize("what", ["wrong", "out of order"])
def test_whatever_any_of_them_found_counts(name: str, what: str) -> None:
    def actor(own: str) -> Any:
        facts = {"messages": 9, "memory": [(0, 0, 0, 0)], what: 3 * (own == name)}
        return SimpleNamespace(report=Report(facts=facts), killed=False)

    staying = {own: actor(own) for own in ("sends and is answered", "receives")}
    guests = [actor("guest"), SimpleNamespace(report=None, killed=True)]
    found = soak.summary(staying, guests, 1.0, lost=lambda sent, came: sent - came)
    assert soak.miscounted(found) == [f"{'corrupted' if what == 'wrong' else what}: 3"]


def test_who_is_lost_or_silent_counts() -> None:
    there = SimpleNamespace(report=Report(facts={"messages": 9, "memory": [(0, 0, 0, 0)]}), killed=False)
    gone = SimpleNamespace(report=None, killed=False)
    found = soak.summary({"sends": there, "receives": gone}, [gone], 1.0, lost=lambda sent, came: sent - came)
    assert soak.miscounted(found) == ["lost: 9", "silent: ['receives', 'guest 0']"]


@pytest.mark.nightly
@pytest.mark.timeout(4000)
def test_soak() -> None:
    """Half an hour of everything."""
    assert soak.soak(1800.0)["wrong"] == []
