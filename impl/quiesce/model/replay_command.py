"""`quiesce replay`: a counterexample driven through real code."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from quiesce.console import FOUND, complete_mutants, output
from quiesce.model.errors import ModelError
from quiesce.model.replay import LIST, Replay, not_replayed
from quiesce.model.replay import replay as run


def replay(
    mutant: Annotated[str, typer.Argument(help="A mutant's name.", autocompletion=complete_mutants)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the same as data.")] = False,
) -> None:
    """Drive a mutant's counterexample through its faulty variant, until harm is done, and through the shipped code.

    Needs a checkout, whose `model_tests` have the variants. Exit status 0: the variant is harmed, the shipped code is
    not; 1: it is otherwise; 2: there is nothing to replay.
    """
    reason = not_replayed(mutant)
    if reason:
        raise ModelError(
            f"{mutant} is not replayed: {reason} ({LIST}); quiesce check {mutant} shows its run in TLC"
        )
    found = run(mutant)
    if as_json:
        print(json.dumps({**asdict(found), "shown": found.shown}))
    else:
        _print(found)
    if not found.shown:
        raise typer.Exit(FOUND)


def _print(found: Replay) -> None:
    console = output()
    console.print(f"{found.mutant}: the specification loses {found.violated} after", markup=False)
    for number, step in enumerate(found.schedule, 1):
        note = "" if number > found.taken else "  taken by the shipped implementation too"
        console.print(f"{number:>4}  {step}{note}", markup=False, highlight=False)
    console.print(f"the faulty variant: {found.damage or 'no harm was found'}", markup=False, highlight=False)
    if found.refusal:
        refused = f"the shipped implementation does not take step {found.taken + 1}: {found.refusal}"
        console.print(refused, markup=False, highlight=False)
    console.print(
        f"afterwards: {found.shipped_damage or 'nothing is wrong with it'}", markup=False, highlight=False
    )
