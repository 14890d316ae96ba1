"""`quiesce matrix`: who catches which mutant."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiesce.console import FOUND, HOLDS, complete_mutants, completing, output
from quiesce.model.errors import UnknownName
from quiesce.model.matrix import CHECKERS, TIMEOUT_S, Cell, Row, mutants, run, write

_STYLES = {"caught": "green", "failed": "red", "survived": "yellow", "undetermined": "yellow"}


def matrix(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MUTANT]...", help="All, if none is named.", autocompletion=complete_mutants),
    ] = None,
    checkers: Annotated[
        list[str] | None,
        typer.Option(
            "--checker",
            help=f"Only this one of {', '.join(CHECKERS)}; repeatable.",
            autocompletion=completing(CHECKERS),
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--write", help="Keep the results, and write docs/mutation.md.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for each cell.")] = TIMEOUT_S,
    jobs: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Hold every mutant of the protocols, in the specification and in the code, against every checker.

    Exits with 0 if TLC and a checker of the implementation catch each, 1 if not, 2 if it could not run. All of it takes
    about an hour. It needs a checkout: the faulty variants of the implementation are among the tests.
    """
    for checker in checkers or ():
        if checker not in CHECKERS:
            raise UnknownName("checker", checker, CHECKERS)
    errors = Console(stderr=True, soft_wrap=True)

    def heard(mutant: str, checker: str, cell: Cell) -> None:
        line = f"{mutant}: {checker} {cell.fate} {cell.by} ({cell.seconds:.1f} s)"
        errors.print(line, markup=False, highlight=False)

    rows = run(mutants(names or ()), checkers=checkers or CHECKERS, timeout=timeout, jobs=jobs, heard=heard)
    if keep:
        write(rows)
    if as_json:
        print(json.dumps([{**asdict(row), "problems": row.problems} for row in rows]))
    else:
        output().print(_table(rows, checkers or CHECKERS))
        for row in rows:
            for problem in row.problems:
                errors.print(f"{row.mutant}: {problem}", style="red", markup=False, highlight=False)
    raise typer.Exit(FOUND if any(row.problems for row in rows) else HOLDS)


def _table(rows: list[Row], checkers: list[str] | tuple[str, ...]) -> Table:
    found = Table(
        box=box.SIMPLE, title=f"{sum(not row.problems for row in rows)} of {len(rows)} mutants caught"
    )
    for heading in ("mutant", *checkers):
        found.add_column(heading)
    for row in rows:
        cells = [row.cells.get(checker, Cell("undetermined")) for checker in checkers]
        texts = [Text(cell.fate, style=_STYLES.get(cell.fate, "dim")) for cell in cells]
        found.add_row(Text(row.mutant, style="red" if row.problems else ""), *texts)
    return found
