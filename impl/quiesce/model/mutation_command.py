"""`quiesce mutate`: the score of the specifications against mutants made by machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiesce.console import FOUND, HOLDS, output
from quiesce.model.mutation import PROTOCOLS, Trial
from quiesce.model.mutation import mutate as run


def mutate(
    protocols: Annotated[
        list[str] | None, typer.Argument(metavar="[PROTOCOL]...", help=f"Of {', '.join(PROTOCOLS)}; all.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="So many guards of each protocol, not all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the sample.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="TLC processes at a time.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the trials as JSON.")] = False,
) -> None:
    """Drop each guard of a specification in turn: TLC must notice, or survivors.toml must say why not.

    Exits with 0 if every mutant is killed or explained, 1 if one survives without a reason, 2 if it could not run. All
    guards of all protocols take a quarter of an hour.
    """
    errors = Console(stderr=True, soft_wrap=True)

    def heard(trial: Trial) -> None:
        errors.print(
            f"{trial.guard.action}: {trial.guard.text} -> {trial.fate} {trial.by}",
            markup=False,
            highlight=False,
        )

    trials = {
        protocol: run(protocol, sample=sample, seed=seed, jobs=jobs, heard=heard)
        for protocol in protocols or PROTOCOLS
    }
    if as_json:
        print(json.dumps({name: [asdict(trial) for trial in found] for name, found in trials.items()}))
    else:
        for name, found in trials.items():
            output().print(_table(name, found))
    good = all(trial.good for found in trials.values() for trial in found)
    raise typer.Exit(HOLDS if good else FOUND)


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
