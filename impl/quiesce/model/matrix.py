"""The mutation matrix: every mutant of the protocols against every checker, and the table that says who catches what.

The checkers, and the faulty variants of the implementation, live in `model_tests`; each row is run in a process of its
own, so that a variant that hangs or crashes costs one cell. Results are kept in docs/mutation_matrix.json, and
docs/mutation.md shows them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quiesce.model import manifest as manifests
from quiesce.model.counterexamples import meaning
from quiesce.model.errors import ModelError, UnknownName
from quiesce.model.manifest import Manifest, Mutant
from quiesce.model.paths import source_tree
from quiesce.model.pool import each

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROTOCOLS = ("payload_reuse", "broadcast_ring", "stage_handoff", "host_staging")
CHECKERS = ("tlc", "lockstep", "tours", "traces", "replay", "tests")
TIMEOUT_S = 150.0
"""Seconds that a cell may take unless told otherwise."""
_VARIANTS = {
    "payload_reuse": "payload_reuse/faulty.py",
    "broadcast_ring": "broadcast_ring/faults.py",
    "stage_handoff": "stage_handoff/faults.py",
    "host_staging": "stage_handoff/stager.py",
}
_MARKED = re.compile(r"<!-- matrix -->\n.*?<!-- end -->", re.DOTALL)

Fate = Literal["caught", "survived", "does not apply", "undetermined", "failed"]


@dataclass(frozen=True)
class Cell:
    """What a checker said of a mutant: `by` is what gave it away, or the reason why it does not apply."""

    fate: Fate
    by: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Row:
    """A mutant, what each checker said of it, and a digest of the specification and the variants it was held with."""

    mutant: str
    protocol: str
    digest: str
    cells: Mapping[str, Cell]

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the row is no good: TLC misses the mutant, or all that run the code do, or a cell has failed."""
        found = []
        tlc = self.cells.get("tlc")
        if tlc and tlc.fate != "caught":
            found.append(f"TLC does not catch it as pinned ({tlc.fate}): {tlc.by}")
        rest = {name: cell for name, cell in self.cells.items() if name != "tlc"}
        if len(self.cells) == len(CHECKERS) and all(cell.fate != "caught" for cell in rest.values()):
            found.append("no checker of the implementation catches it")
        found += [f"{name}: {cell.by}" for name, cell in rest.items() if cell.fate == "failed"]
        return tuple(found)


def root() -> Path:
    """The checkout, whose tests hold the faulty variants. Raises `ModelError` outside one."""
    tree = source_tree()
    if tree is None or not (tree / "model_tests" / "mutation").is_dir():
        raise ModelError("the faulty variants are in model_tests: run this in a checkout of quiesce")
    return tree


def mutants(names: Sequence[str] = (), manifest: Manifest | None = None) -> list[Mutant]:
    """The mutants of the protocols, or those named. Raises `UnknownName`."""
    known = {m.name: m for m in (manifest or manifests.load()).mutants.values() if m.protocol in PROTOCOLS}
    for name in names:
        if name not in known:
            raise UnknownName("mutant", name, known)
    return [known[name] for name in names] if names else list(known.values())


def reasons() -> dict[tuple[str, str], str]:
    """Why a checker does not see a mutant, by mutant and checker."""
    path = root() / "model_tests" / "mutation" / "reasons.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return {
            (mutant, entry["checker"]): entry["reason"]
            for entry in data.get("unseen", [])
            for mutant in entry["mutants"]
        }
    except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
        raise ModelError(f"{path}: {error}; each [[unseen]] has checker, mutants and reason") from error


def digest(mutant: Mutant, manifest: Manifest) -> str:
    """Of what the specification says, its configuration, and the file with the faulty variants of the protocol."""
    found = f"{mutant.violates} {mutant.depth}\n{manifest.config(mutant).text()}\n{meaning(mutant, manifest)}"
    variants = root() / "model_tests" / _VARIANTS[mutant.protocol]
    return hashlib.sha256(found.encode() + variants.read_bytes()).hexdigest()[:16]


def run(
    chosen: Iterable[Mutant],
    *,
    checkers: Sequence[str] = CHECKERS,
    timeout: float = TIMEOUT_S,
    jobs: int = 2,
    heard: Callable[[str, str, Cell], None] = lambda mutant, checker, cell: None,
) -> list[Row]:
    """Hold mutants against checkers, `jobs` rows at a time, each cell for `timeout` seconds at most.

    `heard` is called with the mutant, the checker and the cell as each is through.
    """
    manifest = manifests.load()
    explained = reasons()

    def row(mutant: Mutant, stop: threading.Event) -> Row:
        cells: dict[str, Cell] = {}
        for checker, cell in _cells(mutant.name, checkers, timeout, stop):
            cells[checker] = _explained(cell, explained.get((mutant.name, checker), ""))
            heard(mutant.name, checker, cells[checker])
        return Row(mutant.name, mutant.protocol, digest(mutant, manifest), cells)

    return each(row, chosen, jobs)


def _explained(cell: Cell, reason: str) -> Cell:
    if cell.fate == "caught":
        text = f"reasons.toml says that it does not apply, but it catches it by {cell.by}"
        return Cell("failed", text, cell.seconds) if reason else cell
    if cell.fate == "does not apply" and not reason:
        return Cell("failed", f"it cannot be run, and reasons.toml does not say why: {cell.by}", cell.seconds)
    return Cell("does not apply", reason, cell.seconds) if reason and cell.fate != "failed" else cell


def _cells(
    mutant: str, checkers: Sequence[str], timeout: float, stop: threading.Event
) -> Iterable[tuple[str, Cell]]:
    left = list(checkers)
    while left and not stop.is_set():
        with _process([mutant, *left]) as heard:
            while left:
                line = heard(timeout, stop)
                if stop.is_set():
                    return
                if not line:
                    cell = Cell("undetermined", f"no answer within {timeout:g} s", timeout)
                    if line is None:
                        cell = Cell("failed", "its process ended without an answer")
                    yield left.pop(0), cell
                    break
                answer = json.loads(line)
                fate: Fate = "does not apply" if answer["fate"] == "unfit" else answer["fate"]
                yield left.pop(0), Cell(fate, answer["by"], round(answer["seconds"], 1))


class _process:
    """A process of `model_tests.mutation.checkers`, from which lines are heard; ended with all that it started."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "model_tests.mutation.checkers", *arguments],
            cwd=root(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith('{"checker"'):
                self._lines.put(line)
        self._lines.put(None)

    def __enter__(self) -> Callable[[float, threading.Event], str | None]:
        return self._heard

    def _heard(self, timeout: float, stop: threading.Event) -> str | None:
        """A line; "" if none came in time; None if the process ended."""
        for _ in range(max(1, int(timeout / 0.2))):
            try:
                return self._lines.get(timeout=0.2)
            except queue.Empty:
                if stop.is_set():
                    break
        return ""

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._thread.join(5.0)
        assert self._process.stdout
        self._process.stdout.close()


def kept() -> Path:
    """The file that results are kept in."""
    return root() / "docs" / "mutation_matrix.json"


def read() -> dict[str, Row]:
    """The rows that are kept, by mutant; none if there is no file."""
    if not kept().is_file():
        return {}
    rows = json.loads(kept().read_text(encoding="utf-8"))
    return {
        row["mutant"]: Row(**{**row, "cells": {name: Cell(**cell) for name, cell in row["cells"].items()}})
        for row in rows
    }


def write(rows: Iterable[Row]) -> None:
    """Keep rows, beside those of other mutants and the cells of other checkers, and bring the page up to date."""
    known = read()
    for row in rows:
        old = known.get(row.mutant)
        cells = {**old.cells, **row.cells} if old else dict(row.cells)
        known[row.mutant] = replace(row, cells={name: cells[name] for name in CHECKERS if name in cells})
    order = [mutant.name for mutant in mutants()]
    found = [known[name] for name in order if name in known]
    kept().write_text(
        "[\n" + ",\n".join(json.dumps(asdict(row)) for row in found) + "\n]\n", encoding="utf-8"
    )
    page = root() / "docs" / "mutation.md"
    page.write_text(rewritten(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def rewritten(page: str, rows: Sequence[Row]) -> str:
    """The page with the table of these rows between its marks."""
    return _MARKED.sub(lambda _: f"<!-- matrix -->\n\n{table(rows)}\n\n<!-- end -->", page)


_SHORT = {"caught": "**caught**", "survived": "survives", "undetermined": "no answer", "failed": "FAILED"}


def table(rows: Sequence[Row]) -> str:
    """The matrix as Markdown, with what does not apply explained below it."""
    notes: dict[str, int] = {}
    lines = []
    for protocol in PROTOCOLS:
        those = [row for row in rows if row.protocol == protocol]
        if not those:
            continue
        lines += [
            f"### {protocol}",
            "",
            f"| mutant | {' | '.join(CHECKERS)} |",
            "|---" * (len(CHECKERS) + 1) + "|",
        ]
        for row in those:
            shown = [_shown(row.cells.get(checker), notes) for checker in CHECKERS]
            lines.append(f"| `{row.mutant}` | {' | '.join(shown)} |")
        lines.append("")
    lines += [f"{number}. {note[0].upper()}{note[1:]}." for note, number in notes.items()]
    return "\n".join([*summary(rows), "", *lines]).rstrip()


def summary(rows: Sequence[Row]) -> list[str]:
    """How many mutants each checker catches, as a table."""
    lines = ["| checker | caught | survive | does not apply | no answer |", "|---|--:|--:|--:|--:|"]
    for checker in CHECKERS:
        fates: list[Any] = [row.cells[checker].fate for row in rows if checker in row.cells]
        counts = [fates.count(fate) for fate in ("caught", "survived", "does not apply", "undetermined")]
        lines.append(f"| {checker} | {' | '.join(map(str, counts))} |")
    return lines


def _shown(cell: Cell | None, notes: dict[str, int]) -> str:
    if cell is None:
        return "not run"
    if cell.fate == "does not apply":
        return f"- ({notes.setdefault(cell.by, len(notes) + 1)})"
    by = textwrap.shorten(cell.by, 80, placeholder=" ...").replace("|", "\\|")
    return _SHORT[cell.fate] + (f": {by}" if by and cell.fate == "caught" else "")
