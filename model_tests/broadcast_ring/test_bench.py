"""The benchmark runs, and says what it could not compare with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def bench(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "QUIESCE_BENCH_VLLM"}
    command = [sys.executable, "-m", "quiesce.cli", "bench", "ring", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_small_messages_are_timed_beside_a_queue(tmp_path: Path) -> None:
    file = tmp_path / "ring.json"
    printed = bench("--readers", "1", "--message", "1 KiB", "--json", str(file))
    assert "without vLLM: QUIESCE_BENCH_VLLM is not set; pip install" in printed
    rows = {
        line[:22].rsplit(",", 1)[0].strip(): line.split() for line in printed.splitlines() if "1 KiB " in line
    }
    for way in ("ring, spinning", "ring, sleeping", "multiprocessing.Queue"):
        latency, used, rate = (float(each) for each in rows[way][-6:-3])
        assert 0 < latency <= used, way
        assert rate > 0, way
    written = {row["way"]: row["message"] for row in json.loads(file.read_text())["rows"]}
    assert written == dict.fromkeys(rows.keys() - {"latency / rate"}, "1 KiB")
    assert "idle, % of a core a reader: ring, spinning" in printed
    assert "multiprocessing.Queue, 1 readers" in printed.split("latency / rate, ring = 1")[1]


def test_scaling() -> None:
    printed = bench("--readers", "1", "--readers", "3", "--slots", "1", "--slots", "2", "--message", "64 KiB")
    for readers in (1, 3):
        for slots in (1, 2):
            for wait in ("spinning", "sleeping"):
                assert f"ring, {wait}, {slots} slots, {readers} readers" in printed
    assert "Queue" not in printed
