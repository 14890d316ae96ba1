"""`quiesce explain`: the counterexample of a mutant, as a person reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from quiesce.console import complete_mutants, output, writable
from quiesce.model import manifest as manifests
from quiesce.model.checking import DEFAULT_TIMEOUT
from quiesce.model.explaining import as_data
from quiesce.model.explaining import explain as explained
from quiesce.model.output import Progress
from quiesce.model.picture import html, in_terminal


def explain(
    mutant: Annotated[str, typer.Argument(help="A mutant of the manifest.", autocompletion=complete_mutants)],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    page: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page with the figure to this file.", callback=writable),
    ] = None,
    changes: Annotated[bool, typer.Option("--changes", help="Show what each step changed.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that TLC may look for it.")] = DEFAULT_TIMEOUT,
    manifest_path: Annotated[Path | None, typer.Option("--manifest", help="Another manifest.toml.")] = None,
) -> None:
    """Show how a bug plays out: who did what, who may read which memory, where it goes wrong, which guard stops it.

    The counterexample is the one that `quiesce check` found, or is looked for now. Exits with 0, or with 2 if there is
    none.
    """
    console = Console(stderr=True)
    with Status(f"looking for the counterexample of {mutant}", console=console) as status:

        def tell(progress: Progress) -> None:
            status.update(f"TLC looks for the counterexample of {mutant}: {progress.seconds:.0f} s")

        found = explained(mutant, manifest=manifests.load(manifest_path), timeout=timeout, progress=tell)
    if page is not None:
        page.write_text(html(found), encoding="utf-8")
        console.print(f"written to {page}", markup=False, highlight=False)
    if as_json:
        print(json.dumps(as_data(found), indent=2, ensure_ascii=False))
    elif page is None:
        screen = output()
        screen.print(in_terminal(found, changes, screen.width))
