"""Recordings, read back: what `quiesce.recording` wrote, as events; and as Chrome trace events for a timeline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quiesce.model.errors import ModelError
from quiesce.recording import SCHEMA, Header, Record


@dataclass(frozen=True)
class Event:
    """One action as it was recorded: it began at `begin` and was over at `end`, nanoseconds of CLOCK_MONOTONIC.

    `outcome` is "end", "error" if it raised, or "open" if its process did not live to see its end; `fields` are there
    only for "end". `process` names the file, `subject` the object that acted, and `boot` the run of the machine.
    """

    file: Path
    row: int
    process: str
    thread: int
    cls: str
    subject: int
    action: str
    begin: int
    end: int | None
    outcome: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    boot: str = ""

    @property
    def place(self) -> str:
        """Where the event begins, as file and line."""
        return f"{self.file}:{self.row}"

    def __str__(self) -> str:
        told = ", ".join(f"{name} = {value}" for name, value in self.fields.items())
        return f"{self.action}({told})" if told else self.action


@dataclass(frozen=True)
class Trace:
    """The events of the processes of one run, by their begins; `torn` are files whose last line is cut off."""

    path: Path
    events: tuple[Event, ...]
    headers: Mapping[Path, Header]
    torn: tuple[Path, ...] = ()


def read(path: str | Path) -> Trace:
    """Read the file of one process, or a directory of them.

    A last line without its end is left out: its process was killed while it wrote. ModelError for anything else that
    is no recording, with file and line.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ModelError(f"{path} has no recordings: files that end with .jsonl")
    events: list[Event] = []
    headers: dict[Path, Header] = {}
    torn = []
    for file in files:
        lines, cut = _lines(file)
        if cut:
            torn.append(file)
        if lines:
            headers[file] = header = _header(lines[0], file)
            events += _events(file, header, lines[1:])
    return Trace(path, tuple(sorted(events, key=lambda event: event.begin)), headers, tuple(torn))


def _lines(file: Path) -> tuple[list[bytes], bool]:
    try:
        *lines, rest = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ModelError(f"cannot read the trace {file}: {error.strerror}") from error
    return lines, bool(rest)


def _header(line: bytes, file: Path) -> Header:
    try:
        version = json.loads(line).get("quiesce")
        if version != SCHEMA:
            raise ModelError(f"{file} has format {version}; this version of quiesce reads format {SCHEMA}")
        return msgspec.json.decode(line, type=Header)
    except (ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise ModelError(f"{file} is no recording of quiesce: line 1: {error}") from error


def _events(file: Path, header: Header, lines: list[bytes]) -> Iterable[Event]:
    opened: dict[int, tuple[int, Record]] = {}
    decode = msgspec.json.Decoder(Record).decode
    for row, line in enumerate(lines, 2):
        try:
            record = decode(line)
        except msgspec.MsgspecError as error:
            raise ModelError(f"{file}:{row} is no record: {error}") from error
        if record.ph == "B":
            opened[record.n] = row, record
        elif record.ph in ("E", "X") and record.of in opened:
            began, begin = opened.pop(record.of)
            yield _event(file, header, began, begin, record)
        else:
            raise ModelError(f"{file}:{row} ends what no line before it begins")
    for row, record in opened.values():
        yield _event(file, header, row, record, None)


def _event(file: Path, header: Header, row: int, begin: Record, end: Record | None) -> Event:
    outcome = "open" if end is None else "end" if end.ph == "E" else "error"
    return Event(
        file,
        row,
        file.stem,
        begin.th,
        begin.c,
        begin.o,
        begin.a,
        begin.t,
        end.t if end else None,
        outcome,
        end.f if end else {},
        header.boot,
    )


def chrome(trace: Trace, beside: str | Path | None = None) -> dict[str, Any]:
    """The trace as Chrome trace events, which Perfetto and chrome://tracing show.

    `beside` is what `torch.profiler` exported while the trace was recorded: its events are added to, on one time axis.
    """
    document: dict[str, Any] = {"displayTimeUnit": "ns", "traceEvents": []}
    if beside is not None:
        try:
            document = json.loads(Path(beside).read_text(encoding="utf-8"))
            document["traceEvents"]
        except OSError as error:
            raise ModelError(f"cannot read {beside}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{beside} is not what torch.profiler exports: JSON with `traceEvents`; give what "
                "`export_chrome_trace` wrote"
            ) from error
    base = int(document.get("baseTimeNanoseconds", 0))
    events = document["traceEvents"]
    for header in trace.headers.values():
        events.append(_named("process_name", header.pid, 0, f"quiesce {header.pid}"))
    for event in trace.events:
        header = trace.headers[event.file]
        # The two clocks of one file are read at one moment; torch counts from a time of day of its own.
        start = (event.begin - header.monotonic + header.wall - base) / 1_000
        entry: dict[str, Any] = {
            "name": event.action,
            "cat": "quiesce",
            "ph": "B" if event.end is None else "X",
            "ts": start,
            "pid": header.pid,
            "tid": event.thread,
            "args": {**event.fields, "outcome": event.outcome, "object": f"{event.cls} {event.subject}"},
        }
        if event.end is not None:
            entry["dur"] = (event.end - event.begin) / 1_000
        events.append(entry)
    return document


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
