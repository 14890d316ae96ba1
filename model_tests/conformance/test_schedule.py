"""A divergence says how to see it again, as a TLA+ behaviour and as a test, and both show it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from model_tests.payload_reuse.adapter import VARIANTS

from quiesce.model.adapter import Divergence
from quiesce.model.lockstep import lockstep
from quiesce.model.schedule import as_behaviour, check

ROOT = Path(__file__).parent.parent.parent
SMALL = "two messages"


@pytest.fixture(scope="module")
def divergence() -> Divergence:
    searching = settings(derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    with pytest.raises(Divergence) as caught:
        lockstep(VARIANTS["no_tracker"], small=SMALL, examples=400, options=searching)
    return caught.value


def test_tlc_finds_the_forbidden_step(divergence: Divergence) -> None:
    assert divergence.forbidden is not None
    assert check(divergence.oracle, divergence.behaviour).verdict == "holds"
    assert check(divergence.oracle, divergence.behaviour, divergence.forbidden).verdict == "deadlock"


def test_the_module_that_is_printed_is_the_one_that_was_checked(divergence: Divergence) -> None:
    module, config = as_behaviour(divergence.oracle, divergence.behaviour, divergence.forbidden)
    assert module in str(divergence)
    assert config.text() in str(divergence)


def test_the_test_that_is_printed_fails_in_the_same_way(divergence: Divergence, tmp_path: Path) -> None:
    text = str(divergence)
    code = text[text.index("import model_tests.payload_reuse.adapter") :]
    file = tmp_path / "test_schedule.py"
    file.write_text(code, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert re.search(re.escape(divergence.message.split(":")[0]), result.stdout)
