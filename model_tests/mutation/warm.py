"""Runs tests again and again, each time in a fork of a process that holds what they import, but nothing of quiesce.

Importing torch takes longer than most tests of a mutant. Jobs come on the standard input, one a line, and each is
answered with a line: `python -m model_tests.mutation.warm`, in the folder whose tests are run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest

REPORT, OUTPUT = Path("report.json"), Path("output.txt")


@dataclass(frozen=True)
class Job:
    """Tests to run, in this order, up to the first that fails; within so many seconds each, and all together.

    `cover` is a folder: which lines of the code there each test runs is noted.
    """

    tests: list[str]
    limits: dict[str, float]
    seconds: float
    cover: str = ""


@dataclass
class Report:
    """What became of a job: `status` as pytest's, None if there was no end to it; which test failed, and why.

    `seconds` each test took; `lines` which tests ran a line, by file and line ("" stands for what is run by importing).
    """

    status: int | None = None
    failed: str = ""
    why: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)


class _Watch:
    """Puts the tests in order, gives each its limit, and notes what becomes of them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.report = Report()
        self.traced = coverage.Coverage(data_file=None, source=[job.cover]) if job.cover else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = {test: place for place, test in enumerate(self.job.tests)}
        items.sort(key=lambda item: order.get(item.nodeid, 0))
        for item in items:
            if item.nodeid in self.job.limits:
                item.add_marker(pytest.mark.timeout(self.job.limits[item.nodeid]))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.traced:
            self.traced.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        took = self.report.seconds
        took[report.nodeid] = took.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed(report)

    def failed(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not self.report.failed:
            self.report.failed = report.nodeid
            crash = getattr(report.longrepr, "reprcrash", None)
            self.report.why = (
                (crash.message if crash else str(report.longrepr)).strip().splitlines()[-1][:200]
            )

    def run(self) -> None:
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-seed=0",
            f"--basetemp={Path.cwd() / 'temp'}",
        ]
        if self.traced:
            self.traced.start()
        self.report.status = int(pytest.main([*options, *self.job.tests], plugins=[self]))
        if self.traced:
            self.traced.stop()
            data = self.traced.get_data()
            self.report.lines = {file: data.contexts_by_lineno(file) for file in data.measured_files()}


def run(job: Job) -> Report:
    """Run a job in a fork, and end all that it leaves behind."""
    REPORT.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.stdin.close()
            with OUTPUT.open("w") as output:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            session = os.getpid()
            watch = _Watch(job)
            watch.run()
            if os.getpid() == session:  # not a fork that a test has lost control of
                REPORT.write_text(json.dumps(asdict(watch.report)))
        finally:
            os._exit(1)
    deadline = time.monotonic() + job.seconds
    ended = 0
    try:
        while not ended and time.monotonic() < deadline:
            ended, _ = os.waitpid(child, os.WNOHANG)
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if not ended:
            os.waitpid(child, 0)
    if not ended:
        return Report(why=f"no end within {job.seconds:g} s")
    if not REPORT.exists():
        return Report(status=-1, why="the tests' process died")
    return Report(**json.loads(REPORT.read_text()))


def main() -> None:
    """Answer jobs until there are no more."""
    for name in ("hypothesis", "msgspec", "numpy", "torch", "torch.distributed", "zmq.asyncio"):
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    # Children that the tests start would import this module in the place of theirs.
    main = sys.modules["__main__"]
    main.__spec__ = None
    del main.__file__
    for line in sys.stdin:
        told: dict[str, Any] = json.loads(line)
        print(json.dumps(asdict(run(Job(**told)))), flush=True)


if __name__ == "__main__":
    main()
