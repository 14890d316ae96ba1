"""Counterexamples harm the faulty variants, and not the shipped implementation."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest
from model_tests.conformance.replayed import NOT_REPLAYED, QUICK

from quiesce.errors import QuiesceError
from quiesce.model import ModelError, manifest
from quiesce.model.replay import not_replayed, replay, suite

PROTOCOLS = ("payload_reuse", "broadcast_ring", "stage_handoff")
NAMES = [name for protocol in PROTOCOLS for name in suite(protocol).variants if name not in NOT_REPLAYED]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.nightly) for name in NAMES]
)
def test_the_variant_is_harmed_and_the_shipped_code_is_not(name: str) -> None:
    found = replay(name)
    assert found.damage
    assert not found.shipped_damage


def test_every_mutant_is_replayed_or_has_a_reason() -> None:
    known = {m.name for m in manifest.load().mutants.values() if m.protocol in PROTOCOLS}
    assert known == set(NAMES) | NOT_REPLAYED.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) for name in NOT_REPLAYED])
def test_a_mutant_that_is_listed_shows_nothing(name: str) -> None:
    """Else it need not be listed."""
    with contextlib.suppress(QuiesceError):
        assert not replay(name).shown


@pytest.mark.parametrize(
    "name", ["never_touched", "timeout_ignored", "loan_recycled", "close_lingers", "no_overflow"]
)
def test_the_command_gives_the_reason_of_the_list(name: str) -> None:
    command = [sys.executable, "-m", "quiesce.cli", "replay", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{name} is not replayed: {NOT_REPLAYED[name]}" in done.stderr
    assert not_replayed(name) == NOT_REPLAYED[name]
    assert not_replayed("last_frame_tracker") == not_replayed("ring_views") == ""


def test_the_command() -> None:
    command = [sys.executable, "-m", "quiesce.cli", "replay"]
    done = subprocess.run(
        [*command, "last_frame_tracker", "--json"], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["violated"] == "NoTornRead"
    wrong = subprocess.run([*command, "last_frame_traker"], capture_output=True, timeout=120, check=False)
    assert wrong.returncode == 2
    assert b"did you mean 'last_frame_tracker'" in wrong.stderr.replace(b"\n", b" ")


def test_a_model_and_a_mutant_without_a_variant_are_answered() -> None:
    with pytest.raises(ModelError, match="is a model"):
        replay("ring_views")
    with pytest.raises(ModelError, match="has no faulty variant"):
        replay("sleep_after_check")
