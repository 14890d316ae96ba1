"""`quiesce trace` and `quiesce validate`: record what a command does, and hold that against the specifications."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quiesce.console import FOUND, HOLDS, UNDETERMINED, output, writable
from quiesce.model.errors import ModelError
from quiesce.model.judging import BOUND, Verdict, cases, judge, outcome_of
from quiesce.model.second_opinion import accepts
from quiesce.model.traces import Trace, chrome, read
from quiesce.recording import VARIABLE

STATES_SHOWN = 3
"""States of a rejection that are printed; --json has all."""


def trace(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What to run.")] = None,
    directory: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the recording goes.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option("--chrome", callback=writable, help="Also write Chrome trace events, for Perfetto."),
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            "--beside",
            exists=True,
            dir_okay=False,
            help="What torch.profiler exported, to be put on the same time axis.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was recorded as JSON, behind what COMMAND prints.")
    ] = False,
) -> None:
    """Run COMMAND with every process of it that imports quiesce recorded; or only export what -o has.

    Exits as COMMAND does.
    """
    if directory is None and not command:
        raise ModelError("give a command to run after --, or a recording to export with -o")
    directory = directory or Path(f"quiesce-trace-{time.strftime('%Y%m%d-%H%M%S')}")
    status = HOLDS
    if command:
        if list(directory.glob("*.jsonl")):
            raise ModelError(f"{directory} holds a recording already; give another directory")
        try:
            environment = {**os.environ, VARIABLE: str(directory.resolve())}
            status = subprocess.run(command, env=environment, check=False).returncode
        except OSError as error:
            raise ModelError(f"cannot run {command[0]}: {error.strerror}") from error
        files = len(list(directory.glob("*.jsonl")))
        said = f"{files} process{'' if files == 1 else 'es'} recorded in {directory}"
        if not files:
            said = f"nothing was recorded: no process of {command[0]} imported quiesce"
        _say(said)
    if timeline:
        timeline.write_text(json.dumps(chrome(read(directory), beside)), encoding="utf-8")
        _say(f"a timeline is in {timeline}; open it at https://ui.perfetto.dev")
    if as_json:
        found = sorted(str(path) for path in directory.glob("*.jsonl"))
        print(json.dumps({"directory": str(directory), "files": found, "status": status}))
    raise typer.Exit(status if status >= 0 else 128 - status)


def _say(text: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"quiesce: {text}", markup=False, highlight=False)


def validate(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Recordings: directories or files.")
    ],
    tlc: Annotated[bool, typer.Option("--tlc", help="Ask TLC's command line too; it must agree.")] = False,
    bound: Annotated[int, typer.Option(min=1, help="States that may be possible at a time.")] = BOUND,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Hold recordings against the specifications: is what was seen a behaviour, in some order that its clocks allow?

    Exits with 0: all accepted, 1: something was rejected, 2: it could not run, 3: undetermined.
    """
    found = [(item, [judge(case, bound) for case in cases(item)]) for item in map(read, traces)]
    second = _second(found) if tlc else None
    if as_json:
        print(json.dumps([_as_data(item, verdicts) for item, verdicts in found], indent=2))
    else:
        for item, verdicts in found:
            _report(item, verdicts, output())
        if second:
            output().print(second, markup=False, highlight=False)
    outcomes = {outcome_of(verdicts) for _, verdicts in found}
    if "rejected" in outcomes:
        raise typer.Exit(FOUND)
    raise typer.Exit(UNDETERMINED if "undetermined" in outcomes else HOLDS)


def _second(found: list[tuple[Trace, list[Verdict]]]) -> str:
    verdicts = [verdict for _, verdicts in found for verdict in verdicts]
    decided = [verdict for verdict in verdicts if verdict.outcome != "undetermined"]
    answers = accepts([verdict.case for verdict in decided])
    for verdict, answer in zip(decided, answers, strict=True):
        if answer != verdict.explanation.accepted:
            other = "accepted" if answer else "rejected"
            raise ModelError(
                f"TLC's command line says that {verdict.case.title} is {other}, and it was {verdict.outcome} here: one "
                "of the two is wrong; please report it with the trace"
            )
    return f"TLC's command line agrees on {len(decided)} of {len(verdicts)} cases"


def _report(item: Trace, verdicts: list[Verdict], console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    say(
        f"{item.path}: {outcome_of(verdicts)}",
        "bold green" if outcome_of(verdicts) == "accepted" else "bold red",
    )
    if not verdicts:
        say("  nothing in it is an action of a protocol, so that there is nothing to judge")
    open_ = sum(event.outcome == "open" for event in item.events)
    if item.torn or open_:
        say(
            f"  {open_} actions were begun and not ended; {len(item.torn)} files end in the middle of a record"
        )
    for verdict in verdicts:
        say(
            f"  {verdict.case.protocol}, {verdict.case.title}: {verdict.outcome}, {len(verdict.case.events)} events, "
            f"{verdict.seconds:.2f} s"
        )
        for note in verdict.case.notes:
            say(f"    note: {note}")
        if verdict.explanation.message:
            say(f"    {verdict.explanation.message}")
        if verdict.event:
            for state in verdict.explanation.states[:STATES_SHOWN]:
                say("    it could have been in the state\n      " + repr(state).replace("\n", "\n      "))
            say(f"    possible there: {', '.join(verdict.explanation.enabled) or 'nothing'}")
            say("    the shortest part that is rejected, in the order of the ends:")
            for event in verdict.prefix:
                say(f"      {event.place}: {event}")


def _as_data(item: Trace, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "trace": str(item.path),
        "verdict": outcome_of(verdicts),
        "events": len(item.events),
        "open": sum(event.outcome == "open" for event in item.events),
        "torn": [str(file) for file in item.torn],
        "cases": [
            {
                "protocol": verdict.case.protocol,
                "title": verdict.case.title,
                "verdict": verdict.outcome,
                "events": len(verdict.case.events),
                "seconds": round(verdict.seconds, 4),
                "notes": verdict.case.notes,
                "message": verdict.explanation.message,
                "event": verdict.event and {"place": verdict.event.place, "text": str(verdict.event)},
                "states": [repr(state) for state in verdict.explanation.states],
                "enabled": verdict.explanation.enabled,
                "conjunct": verdict.explanation.reason and verdict.explanation.reason.conjunct,
                "prefix": [{"place": event.place, "text": str(event)} for event in verdict.prefix],
            }
            for verdict in verdicts
        ],
    }
