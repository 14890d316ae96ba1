"""One run of TLC, in a process of its own, bounded in time and memory."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from quiesce.model import paths
from quiesce.model.config import Config
from quiesce.model.errors import ModelError
from quiesce.model.output import CheckResult, Output, Progress

TICK = 0.5
"""Seconds between two calls of the progress callback."""


def run(
    module: Path,
    config: Config,
    *,
    libraries: Iterable[Path] = (),
    workers: int = 1,
    heap: int = 2 << 30,
    timeout: float = 3600.0,
    deadlock: bool = True,
    coverage: bool = True,
    short: bool = False,
    progress: Callable[[Progress], None] | None = None,
    options: Sequence[str] = (),
) -> CheckResult:
    """Check `module` (a .tla file) under `config` and return what TLC found.

    `libraries` are further directories to look for modules in, `heap` is Java's heap in bytes, `timeout` the
    wall clock in seconds, `options` more of TLC's command line. `progress` is called about twice a second and
    may raise: the process group is then killed, as it is on a timeout or Ctrl-C. Nothing is left behind.
    `short` is for runs of seconds: Java then compiles less, and such runs take about half the time.
    """
    if not module.is_file():
        raise ModelError(f"there is no specification {module}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quiesce-tlc-") as scratch:
        file = Path(scratch, "run.cfg")
        file.write_text(config.text(), encoding="utf-8")
        command = _command(module, file, scratch, libraries, workers, heap, short)
        command += [] if deadlock else ["-deadlock"]
        command += ["-coverage", "1"] if coverage else []
        output = Output(config.properties)
        status = _follow([*command, *options, module.name], module.parent, output, began, timeout, progress)
        seconds = time.monotonic() - began
        if status is None:
            at = output.latest
            reached = (
                f"{at.generated:,} states generated, {at.distinct:,} distinct, {at.queue:,} on the queue"
            )
            message = f"no verdict after {timeout:g} s ({reached}). Allow more time, or shrink the model"
            return CheckResult("timeout", "", at.generated, at.distinct, at.depth, seconds, message=message)
        result = output.result(status, seconds)
        if result.verdict == "memory":
            message = f"TLC ran out of its {heap >> 20} MiB of heap. Allow more, or shrink the model"
            return replace(result, message=message)
        return result


def _command(
    module: Path, config: Path, scratch: str, libraries: Iterable[Path], workers: int, heap: int, short: bool
) -> list[str]:
    library = os.pathsep.join(str(path) for path in dict.fromkeys([module.parent, *libraries]))
    return [
        str(paths.java()),
        f"-Xmx{heap >> 20}m",
        "-Xss16m",
        *(("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC") if short else ("-XX:+UseParallelGC",)),
        "-XX:+ExitOnOutOfMemoryError",
        f"-DTLA-Library={library}",
        f"-Djava.io.tmpdir={scratch}",
        "-cp",
        str(paths.jar()),
        "tlc2.TLC",
        # Liveness only at the end: checked now and then, the counterexample found would depend on the machine's load.
        *("-tool", "-fp", "0", "-workers", str(workers), "-lncheck", "final"),
        *("-metadir", str(Path(scratch, "meta")), "-config", str(config)),
    ]


def _follow(
    command: Sequence[str],
    directory: Path,
    output: Output,
    began: float,
    timeout: float,
    progress: Callable[[Progress], None] | None,
) -> int | None:
    """Run the command, feed its lines to `output`; its exit status, or None when the time was up."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            latest, printed = output.latest, 0.0
            while True:
                now = time.monotonic() - began
                if now >= timeout:
                    return None
                if output.latest is not latest:
                    latest, printed = output.latest, now
                if progress:
                    progress(replace(latest, seconds=now, printed=printed))
                if not selector.select(min(TICK, timeout - now)):
                    continue
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    output.feed(line.decode("utf-8", "replace").rstrip("\r"))
        try:
            return process.wait(max(0.1, began + timeout - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
