"""`quiesce mutate`: the score of the specifications against mutants made by machine."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiesce.console import FOUND, HOLDS, UNDETERMINED, completing, output
from quiesce.model.manifest import load
from quiesce.model.mutation import PROTOCOLS, TIMEOUT_S, Guard, Trial, all_guards, reasons
from quiesce.model.mutation import mutate as run
from quiesce.model.mutation_score import Score, read, write

_WRITING = threading.Lock()


def mutate(
    protocols: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROTOCOL]...",
            help=f"Of {', '.join(PROTOCOLS)}; all.",
            autocompletion=completing(PROTOCOLS),
        ),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="So many guards of each protocol, not all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the sample.")] = 0,
    keep: Annotated[
        bool,
        typer.Option(
            "--write", help="Keep each result, and write docs/mutation.md; try only what is not kept."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for TLC on one model.")] = TIMEOUT_S,
    seconds: Annotated[float, typer.Option(min=1, help="Try no more after so many seconds.")] = 86_400.0,
    jobs: Annotated[int, typer.Option(min=1, help="TLC processes at a time.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the trials as JSON.")] = False,
) -> None:
    """Drop each guard of a specification in turn: TLC must notice, or survivors.toml must say why not.

    Exits with 0 if every mutant is killed or explained, 1 if one survives without a reason, 2 if it could not run, 3 if
    time ran out before all were tried. All
    guards of all protocols take half an hour; what is kept of a run that was broken off is not tried again.
    """
    errors = Console(stderr=True, soft_wrap=True)
    manifest, end = load(), time.monotonic() + seconds
    explained, score = reasons(manifest), Score(manifest)
    trials, left = {}, 0
    for protocol in protocols or PROTOCOLS:
        chosen = guards = all_guards(protocol, manifest)
        known = {kept.key: kept for kept in read() if kept.protocol == protocol} if keep else {}
        if keep:
            chosen = [g for g in guards if g.key not in known or not score.valid(known[g.key])]
        if sample is not None and sample < len(chosen):
            chosen = random.Random(seed).sample(chosen, sample)

        def heard(trial: Trial, protocol: str = protocol, guards: list[Guard] = guards) -> None:
            line = f"{trial.guard.action}: {trial.guard.text} -> {trial.fate} {trial.by}"
            errors.print(line, markup=False, highlight=False)
            if keep:
                with _WRITING:
                    write(protocol, [g.key for g in guards], [score.kept(protocol, trial)], explained)

        trials[protocol] = run(
            protocol,
            manifest=manifest,
            chosen=chosen,
            hints={key: kept.killer for key, kept in known.items()},
            jobs=jobs,
            timeout=timeout,
            seconds=max(0.0, end - time.monotonic()),
            heard=heard,
        )
        left += len(chosen) - len(trials[protocol])
    if left:
        errors.print(f"{left} guards were not tried in {seconds:g} s", highlight=False)
    if as_json:
        print(json.dumps({name: [asdict(trial) for trial in found] for name, found in trials.items()}))
    else:
        for name, found in trials.items():
            output().print(_table(name, found))
    if not all(trial.good for found in trials.values() for trial in found):
        raise typer.Exit(FOUND)
    raise typer.Exit(UNDETERMINED if left else HOLDS)


def _table(protocol: str, trials: list[Trial]) -> Table:
    killed = sum(trial.fate == "killed" for trial in trials)
    explained = sum(trial.fate != "killed" and trial.good for trial in trials)
    title = f"{protocol}: {killed} of {len(trials)} killed, {explained} survive with a reason"
    table = Table(box=box.SIMPLE, title=title)
    for heading in ("action", "without", "fate", "by, or why"):
        table.add_column(heading)
    for trial in trials:
        fate = Text(trial.fate, style="" if trial.good else "red")
        table.add_row(trial.guard.action, Text(trial.guard.text), fate, Text(trial.by or trial.reason))
    return table
