"""What the subcommands of `quiesce` share: exit statuses, names that can be completed, and where they print."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import typer
from rich.console import Console

HOLDS, FOUND, CANNOT, UNDETERMINED = range(4)
"""Exit statuses of every subcommand."""

EXIT_STATUSES = (
    "Exit statuses: 0 everything holds; 1 something was found (a violation, a rejected trace, a check that fails); "
    "2 it could not run (an unknown name, a broken file, no Java); 3 undetermined (out of time or memory, or more "
    "possibilities than allowed). 130 and 143: interrupted, terminated."
)


def output() -> Console:
    """Standard output; a file or a pipe has no width of its own, and gets one that names fit into."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=150) if wide else Console()


def complain(problem: object) -> None:
    """Say on standard error why nothing could be done."""
    console = Console(stderr=True, soft_wrap=True)
    console.print(f"quiesce: {problem}", style="red", markup=False, highlight=False)


def writable(path: Path | None) -> Path | None:
    """The callback of an option that names a file to write: refuses one that cannot be, before any work is done."""
    if path is not None:
        folder = path.parent
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder; name a file")
        if not folder.is_dir():
            raise typer.BadParameter(f"there is no folder {folder} to write {path.name} into")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written: permission denied")
    return path


def end_on_terminate() -> None:
    """SIGTERM unwinds the stack as Ctrl-C does, so that child processes are ended and files removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def complete_models(incomplete: str) -> list[tuple[str, str]]:
    """Models and mutants for the shell, with what each is about."""
    return [*_entries(incomplete, True), *_entries(incomplete, False)]


def complete_mutants(incomplete: str) -> list[tuple[str, str]]:
    """Mutants for the shell, with the bug each reproduces."""
    return _entries(incomplete, False)


def completing(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes one of `names` for the shell."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def _entries(incomplete: str, models: bool) -> list[tuple[str, str]]:
    from quiesce.model import manifest

    found = manifest.load()
    described = (
        {name: model.proves for name, model in found.models.items()}
        if models
        else {name: mutant.bug for name, mutant in found.mutants.items()}
    )
    return [(name, text) for name, text in described.items() if name.startswith(incomplete)]
