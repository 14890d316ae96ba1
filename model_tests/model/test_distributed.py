"""The recipe for TLC's distributed mode in docs/performance.md, run as it stands there on a smaller model."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from quiesce.model import manifest

ROOT = Path(__file__).parent.parent.parent
LARGE, SMALL = "ring_slots_large", "ring_deaths"
LIMIT = 240.0
"""Seconds for a server and two workers on a busy machine."""


def test_the_recipe_finds_as_many_states_as_one_process_does(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.partition("### Models that outgrow one machine")[2].partition("\n## ")[0]
    recipe = "\n".join(re.findall(r"^ {4}(.*)$", section, re.MULTILINE))
    assert "tlc2.tool.distributed.TLCServer" in recipe
    assert LARGE in recipe
    (tmp_path / "spec").symlink_to(ROOT / "spec")
    process = subprocess.Popen(
        ["bash", "-euc", recipe.replace(LARGE, SMALL)], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = re.findall(r"([\d,]+) distinct states found, 0 states left on queue", said)
    pinned = manifest.load().models[SMALL].distinct
    assert found, said
    assert int(found[-1].replace(",", "")) == pinned, said
