"""What all benchmarks share: turns, medians with their spread, ratios within one run, the machine, JSON and tables.

Competitors take turns in every round, and a ratio is the median of the ratios of single rounds: what else the machine
does hits all of them, and most of it drops out. pyperf and pytest-benchmark time one competitor after the other.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

Times = Sequence[float]
_SILENCE_S, _IDLE_S = 120.0, 3600.0


def heard(pipe: Any) -> Any:
    """What a process of the benchmark says next; TimeoutError after two minutes of silence."""
    if not pipe.poll(_SILENCE_S):
        raise TimeoutError(f"a process of the benchmark has said nothing for {_SILENCE_S:.0f} s")
    return pipe.recv()


def orders(pipe: Any) -> Iterator[Any]:
    """What such a process is told to do, until None comes, an hour passes without a word, or the benchmark is gone."""
    with suppress(EOFError):
        while pipe.poll(_IDLE_S) and (order := pipe.recv()) is not None:
            yield order


class Spread(NamedTuple):
    """The median of some numbers, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Times) -> Spread:
        """Of at least one number."""
        if len(numbers) < 2:
            return cls(numbers[0], numbers[0], numbers[0])
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high)


def in_turns(calls: Mapping[str, Callable[[], Times]], rounds: int) -> dict[str, list[Times]]:
    """Call each once a round, each round from another one on; what they returned, by round."""
    names = list(calls)
    found: dict[str, list[Times]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(calls[name]())
    return found


def ratio(ours: Sequence[Times], theirs: Sequence[Times]) -> Spread:
    """How many times as long theirs take as ours, round by round."""
    return Spread.of([statistics.median(b) / statistics.median(a) for a, b in zip(ours, theirs, strict=True)])


def timed(call: Callable[[], object], runs: int) -> list[float]:
    """The time of each of some calls, in seconds."""
    times = []
    for _ in range(runs):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e9)
    return times


def pin(core: int) -> None:
    """Keep this thread, and those it starts, on one core, if the machine has it and lets us."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def unpin() -> None:
    """Let this thread, and those it starts, run anywhere again."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("torch", "pyzmq", "msgspec", "numpy")},
        "load": [round(each, 1) for each in os.getloadavg()],
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model} {platform.machine()}".strip()


def _command(file: Path | None) -> str:
    """How this was called, but for where the figures went."""
    arguments = [each for each in sys.argv[1:] if each not in ("--json", str(file))]
    return shlex.join([Path(sys.argv[0]).name, *arguments])


class Figures:
    """The rows of one benchmark, written as JSON after each: a run that is ended early leaves what it has."""

    def __init__(self, benchmark: str, file: Path | None) -> None:
        self.data: dict[str, Any] = {
            "benchmark": benchmark,
            "command": _command(file),
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "notes": [],
            "rows": [],
        }
        self._file = file

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Add rows, and write all of them if a file was asked for."""
        self.data["rows"] += rows
        self.write()

    def write(self) -> None:
        """Write the JSON, if a file was asked for."""
        if self._file is not None:
            self._file.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")


class Report(Figures):
    """Figures that are also printed as tables while they come."""

    def __init__(self, benchmark: str, file: Path | None) -> None:
        super().__init__(benchmark, file)
        self._console = Console(width=None if sys.stdout.isatty() else 150)

    def note(self, text: str) -> None:
        """Say something beside the figures, such as what could not be measured."""
        self.data["notes"].append(text)
        self._console.print(text, markup=False, highlight=False)

    def table(self, what: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows about one thing, and print them; all have the same columns, the first says whose row it is."""
        rows = list(rows)
        self.add(*({"what": what, **row} for row in rows))
        table = Table(title=what, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for number, column in enumerate(rows[0]):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*(shown(value) for value in row.values()))
        self._console.print(table)


def shown(value: Any) -> str:
    """A cell: a number with three digits that matter, a spread as its median and quartiles."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return f"{shown(value[0])} ({shown(value[1])}-{shown(value[2])})"
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
