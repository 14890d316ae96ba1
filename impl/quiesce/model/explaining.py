"""A counterexample as a person reads it: who did what, who may read which memory, where it went wrong, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quiesce.model import checking, counterexamples, guard_lines
from quiesce.model.checking import DEFAULT_TIMEOUT
from quiesce.model.errors import ModelError, UnknownName
from quiesce.model.guard_lines import Line
from quiesce.model.lanes import OTHERWISE, VIEWS, Constants, Promise, View, changes
from quiesce.model.manifest import DEADLOCK, Manifest, Model, Mutant, load
from quiesce.model.output import Counterexample, Progress
from quiesce.model.values import State

PROMISED, INTACT, BROKEN = "promised", "intact", "broken"
"""What a bar shows: the bytes are not there yet, they are there, or they are gone while they may be read."""


@dataclass(frozen=True)
class Bar:
    """One memory and one reader of it: what each step (from 0) shows, None where nothing is promised."""

    memory: str
    reader: str
    cells: tuple[tuple[str, Any] | None, ...]


@dataclass(frozen=True)
class Row:
    """One step: the action with its parameters, whose it is, and what it changed."""

    action: str
    label: str
    lane: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """The counterexample of a mutant, laid out.

    `cause` is the bug, `happening` where it shows, `consequence` what is violated, one sentence each. `marked` are
    the steps (from 0) at which memory is overwritten, or something else read, while it may be read. `spec` are the
    lines at which the fault breaks the specification, `code` the line of code that is the guard; where no line is,
    `elsewhere` says why.
    """

    mutant: Mutant
    trace: Counterexample
    rows: tuple[Row, ...]
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    marked: tuple[int, ...]
    cause: str
    happening: str
    consequence: str
    spec: tuple[Line, ...]
    code: Line | None
    elsewhere: str = ""


def explain(
    name: str,
    *,
    manifest: Manifest | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[Progress], None] | None = None,
) -> Explanation:
    """Explain a mutant by its counterexample: the one that is kept, or that TLC finds within `timeout` seconds.

    Raises `UnknownName` for a name that is no mutant's, `ModelError` if there is no counterexample.
    """
    manifest = manifest or load()
    mutant = manifest.mutants.get(name)
    if mutant is None:
        if isinstance(manifest.models.get(name), Model):
            its = ", ".join(m.name for m in manifest.mutants.values() if m.model == name) or "none"
            raise ModelError(f"{name} is a model, and holds; explain one of its mutants: {its}")
        raise UnknownName("mutant", name, manifest.mutants)
    trace = counterexamples.load(mutant, manifest)
    if trace is None:
        result = checking.check(mutant, manifest=manifest, timeout=timeout, progress=progress)
        trace = result.counterexample
        if trace is None or result.violated != mutant.violates:
            said = result.message or f"TLC says {result.verdict} {result.violated}".strip()
            raise ModelError(f"there is no counterexample to explain {name} by: {said}")
    return lay_out(mutant, manifest, trace)


def lay_out(mutant: Mutant, manifest: Manifest, trace: Counterexample) -> Explanation:
    """The picture of a counterexample."""
    view = VIEWS.get(manifest.model(mutant.name).module, OTHERWISE)
    constants: Constants = manifest.config(mutant).constants
    rows = []
    before: State | None = None
    for step in trace.steps:
        lane = "" if before is None else view.lane(step, constants)
        rows.append(
            Row(
                step.action,
                "initially" if before is None else view.label(step, before, lane),
                lane,
                changes(before, step.state),
            )
        )
        before = step.state
    bars, marked = _bars(view, constants, trace)
    code, elsewhere = guard_lines.in_code(mutant, manifest), ""
    if code is None:
        elsewhere = guard_lines.NO_CODE.get(guard_lines.fault_of(mutant), "no line of code is known for it")
    return Explanation(
        mutant,
        trace,
        tuple(rows),
        _ordered({row.lane: None for row in rows if row.lane}, view.order),
        bars,
        marked,
        _sentence(mutant.bug),
        _happening(mutant, trace, rows, bars, marked, view),
        f"{mutant.violates}: {_meaning(mutant, manifest)}",
        guard_lines.in_spec(mutant, manifest),
        code,
        elsewhere,
    )


def _ordered(lanes: Mapping[str, None], order: tuple[str, ...]) -> tuple[str, ...]:
    def rank(lane: str) -> tuple[int, str]:
        return next((i for i, start in enumerate(order) if lane.startswith(start)), len(order)), lane

    return tuple(sorted(lanes, key=rank) if order else lanes)


def _bars(view: View, constants: Constants, trace: Counterexample) -> tuple[tuple[Bar, ...], tuple[int, ...]]:
    columns: dict[tuple[str, str], list[tuple[str, Any] | None]] = {}
    seen: set[tuple[str, str, Any]] = set()  # promises whose bytes have been there
    marked = []
    broken: set[tuple[str, str]] = set()
    for number, step in enumerate(trace.steps):
        content = view.content(step.state)
        now: dict[tuple[str, str], tuple[str, Any]] = {}
        for promise in view.promises(step.state, constants):
            key = promise.memory, promise.reader
            found = _state_of(promise, content.get(promise.memory), seen)
            if key not in now or found == BROKEN:
                now[key] = found, promise.version
        seen = {  # a promise that has ended is forgotten, so that the next one of its version starts anew
            item
            for item in seen
            if any((p.memory, p.reader, p.version) == item for p in view.promises(step.state, constants))
        }
        for key in {*columns, *now}:
            columns.setdefault(key, [None] * number).append(now.get(key))
        gone = {key for key, (state, _) in now.items() if state == BROKEN}
        if gone - broken:
            marked.append(number)
        broken = gone
    return tuple(
        Bar(memory, reader, tuple(cells)) for (memory, reader), cells in sorted(columns.items())
    ), tuple(marked)


def _state_of(promise: Promise, content: Any, seen: set[tuple[str, str, Any]]) -> str:
    key = promise.memory, promise.reader, promise.version
    if promise.wrong:
        return BROKEN
    if content == promise.version:
        seen.add(key)
        return INTACT
    return BROKEN if key in seen else PROMISED


def _happening(
    mutant: Mutant,
    trace: Counterexample,
    rows: list[Row],
    bars: tuple[Bar, ...],
    marked: tuple[int, ...],
    view: View,
) -> str:
    if marked:
        number = marked[-1]
        bar = next(bar for bar in bars if (cell := bar.cells[number]) and cell[0] == BROKEN)
        before = bar.cells[number - 1] if number else None
        who = f"step {number + 1}, {rows[number].label} by {_the(rows[number].lane)},"
        if before and before[0] == INTACT and before[1] is not None and before[1] != -1:
            cell = bar.cells[number]
            assert cell is not None
            return _sentence(
                f"{who} changes {bar.memory} while {_the(bar.reader)} may still read {view.noun} {before[1]} there"
            )
        reads = "reads" if bar.reader == rows[number].lane else f"lets {_the(bar.reader)} read"
        return _sentence(f"{who} {reads} {bar.memory}, which does not hold what it was promised")
    last = len(rows)
    if trace.stutters:
        return f"After step {last} nothing more has to happen, and nothing does, for ever."
    if trace.loop is not None:
        return f"After step {last} it goes back to step {trace.loop + 1}, and so on for ever."
    if mutant.violates == DEADLOCK:
        return f"After step {last} nobody can take a step."
    found = view.finding(trace.steps[-1].state)
    return _sentence(
        f"step {last}, {rows[-1].label} by {_the(rows[-1].lane)}, breaks {mutant.violates}"
        + (f": {found}" if found else "")
    )


def _the(lane: str) -> str:
    return lane if re.search(r"\d|^libzmq|^all ", lane) else f"the {lane}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", ".)")) else ".")


_FALLBACK = {
    DEADLOCK: "somebody can always take a step, until all is done.",
    "RefinesBufferLifecycle": "the protocol is the law of BufferLifecycle: no buffer is written, taken or freed while "
    "somebody was promised its bytes.",
}


def _meaning(mutant: Mutant, manifest: Manifest) -> str:
    """What the violated invariant or property says: the comment above it in the specification, or its definition."""
    if mutant.violates in _FALLBACK:
        return _FALLBACK[mutant.violates]
    definition = ""
    for path in counterexamples.modules(mutant, manifest):
        blocks = path.read_text(encoding="utf-8").split("\n\n")
        for lines in (block.splitlines() for block in blocks):
            start = next(
                (i for i, text in enumerate(lines) if re.match(rf"{mutant.violates}\s*==", text)), None
            )
            if start is None:
                continue
            above: list[str] = []
            for text in reversed(lines[:start]):
                if not text.startswith("\\*"):
                    break
                above.insert(0, text.removeprefix("\\*").strip())
            comment = re.sub(r"^[A-Z]\d+(?:, [A-Z]\d+)*(?:, but for [A-Z]\d+)?[:.]?\s*", "", " ".join(above))
            if comment:
                return _sentence(comment)
            until = next(
                (i for i in range(start + 1, len(lines)) if not lines[i].startswith(" ")), len(lines)
            )
            body = " ".join(" ".join(lines[start:until]).split())
            definition = definition or body.partition("==")[2].strip()
    return definition


def as_data(explanation: Explanation) -> dict[str, Any]:
    """An explanation as plain data, for --json."""

    def line(found: Line | None) -> Any:
        return found and {
            "file": found.path,
            "line": found.number,
            "text": found.text,
            "symbol": found.symbol,
        }

    item = explanation
    return {
        "mutant": item.mutant.name,
        "protocol": item.mutant.protocol,
        "model": item.mutant.model,
        "violates": item.mutant.violates,
        "cause": item.cause,
        "happening": item.happening,
        "consequence": item.consequence,
        "lanes": item.lanes,
        "steps": [
            {"action": row.action, "label": row.label, "lane": row.lane, "changes": row.changes}
            for row in item.rows
        ],
        "bars": [
            {
                "memory": bar.memory,
                "reader": bar.reader,
                "cells": [cell and {"shows": cell[0], "version": repr(cell[1])} for cell in bar.cells],
            }
            for bar in item.bars
        ],
        "marked": item.marked,
        "loop": item.trace.loop,
        "stutters": item.trace.stutters,
        "guards": [line(found) for found in item.spec],
        "code": line(item.code),
        "elsewhere": item.elsewhere,
        "counterexample": counterexamples.as_data(item.trace),
    }
