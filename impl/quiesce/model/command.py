"""`quiesce check`: every model and every mutant of the manifest, as a reviewer wants to read them."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quiesce.model import manifest as manifests
from quiesce.model.checking import DEFAULT_TIMEOUT, Judgement, check, judge
from quiesce.model.errors import ModelError
from quiesce.model.manifest import LARGE, Manifest, Model, Mutant
from quiesce.model.output import CheckResult, Progress

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
HOLDS, FOUND, CANNOT = 0, 1, 2


@app.callback()
def _quiesce() -> None:
    """Zero-copy tensor transport, formally modelled: check the models."""


@app.command("check")
def _check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Models or mutants.")
    ] = None,
    large: Annotated[
        bool, typer.Option("--large", help="The large models instead of the small ones.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="TLC processes at a time.")] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds a run may take.")] = DEFAULT_TIMEOUT,
    heap: Annotated[int, typer.Option(min=64, help="Java heap of one run, in MiB.")] = 2048,
    manifest_path: Annotated[Path | None, typer.Option("--manifest", help="Another manifest.toml.")] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Write the numbers seen into the manifest.")] = False,
) -> None:
    """Check models and mutants with TLC. Exits with 0: all as pinned, 1: something found, 2: no answer."""
    error = Console(stderr=True, soft_wrap=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        manifest = manifests.load(manifest_path)
        entries = select(manifest, names or [], large)
        show = not as_json
        judgements = run(manifest, entries, jobs=jobs, timeout=timeout, heap=heap << 20, show=show)
        if pin:
            manifests.pin(manifest, {item.entry.name: item.result for item in judgements if item.answered})
            error.print(f"pinned in {manifest.path}; check again to hold the models to it")
    except ModelError as problem:
        error.print(f"quiesce check: {problem}", style="red", markup=False, highlight=False)
        raise typer.Exit(CANNOT) from None
    if as_json:
        print(json.dumps([as_data(judgement) for judgement in judgements], indent=2))
    else:
        report(judgements, _output())
    if not all(judgement.answered for judgement in judgements):
        raise typer.Exit(CANNOT)
    raise typer.Exit(HOLDS if all(judgement.good for judgement in judgements) else FOUND)


def _output() -> Console:
    """Standard output; a file or a pipe has no width of its own, and gets one that names fit into."""
    wide = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=150) if wide else Console()


def select(manifest: Manifest, names: Sequence[str], large: bool) -> list[Model | Mutant]:
    """The entries a command line asks for: a model's name means it and its mutants."""
    if names:
        chosen: dict[str, Model | Mutant] = {}
        for name in names:
            chosen[name] = manifest.find(name)
            chosen |= {mutant.name: mutant for mutant in manifest.mutants.values() if mutant.model == name}
        return list(chosen.values())
    models = {name: model for name, model in manifest.models.items() if (model.size == LARGE) == large}
    mutants = [mutant for mutant in manifest.mutants.values() if mutant.model in models]
    if not models:
        raise ModelError(f"{manifest.path} has no {'large' if large else 'small'} model")
    return [*models.values(), *mutants]


def run(
    manifest: Manifest, entries: Sequence[Model | Mutant], *, jobs: int, timeout: float, heap: int, show: bool
) -> list[Judgement]:
    """Check all entries, `jobs` at a time, and show on stderr how far they are."""
    stop = threading.Event()
    running: dict[str, Progress] = {}

    def one(entry: Model | Mutant) -> Judgement:
        def tell(progress: Progress) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            running[entry.name] = progress

        if stop.is_set():
            raise KeyboardInterrupt
        try:
            return judge(entry, check(entry, manifest=manifest, timeout=timeout, heap=heap, progress=tell))
        except ModelError as problem:
            return Judgement(entry, CheckResult("config"), (str(problem),), answered=False)
        finally:
            running.pop(entry.name, None)

    console = Console(stderr=True)
    with ThreadPoolExecutor(jobs, thread_name_prefix="tlc") as pool:
        futures = [pool.submit(one, entry) for entry in entries]
        try:
            _watch(futures, running, console, show)
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise
    return [future.result() for future in futures]


def _watch(
    futures: Sequence[Future[Judgement]], running: dict[str, Progress], console: Console, show: bool
) -> None:
    live = Live(console=console, transient=True, auto_refresh=False) if show and console.is_terminal else None
    if live:
        live.start()
    try:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                judgement = future.result()
                if show and not live:
                    word = _verdict(judgement).plain
                    console.print(
                        f"{judgement.entry.name}: {word}, {judgement.result.seconds:.1f} s", markup=False
                    )
            if live:
                lines = [f"{len(futures) - len(pending)} of {len(futures)} done"]
                lines += [_line(name, progress) for name, progress in list(running.items())]
                live.update(Text("\n".join(lines)), refresh=True)
    finally:
        if live:
            live.stop()


def _line(name: str, progress: Progress) -> str:
    line = f"  {name}: {progress.seconds:.0f} s"
    if progress.generated:
        rate = progress.generated / max(progress.printed, 0.001)
        line += f", {progress.distinct:,} distinct, {rate:,.0f} generated/s, {progress.queue:,} on the queue"
    return line


def _verdict(judgement: Judgement) -> Text:
    if not judgement.answered:
        return Text(judgement.result.verdict, "bold red")
    if not judgement.good:
        return Text(
            "not as pinned" if judgement.result.holds == isinstance(judgement.entry, Model) else "FAILED",
            "bold red",
        )
    return Text("holds" if isinstance(judgement.entry, Model) else "caught", "green")


def report(judgements: Sequence[Judgement], console: Console) -> None:
    """Print the tables and, below them, what is wrong."""
    models = _table("Models", "model", "what it proves")
    for heading in ("states", "depth", "seconds"):
        models.add_column(heading, justify="right")
    models.add_column("verdict", no_wrap=True)
    mutants = _table("Mutants", "mutant", "the bug it reproduces")
    mutants.add_column("violates", no_wrap=True)
    for heading in ("steps", "seconds"):
        mutants.add_column(heading, justify="right")
    mutants.add_column("verdict", no_wrap=True)
    for judgement in judgements:
        entry, result = judgement.entry, judgement.result
        seconds = f"{result.seconds:.1f}"
        if isinstance(entry, Model):
            models.add_row(
                entry.name,
                entry.proves,
                f"{result.distinct:,}",
                str(result.depth),
                seconds,
                _verdict(judgement),
            )
        else:
            steps = str(len(result.counterexample.steps)) if result.counterexample else ""
            mutants.add_row(entry.name, entry.bug, entry.violates, steps, seconds, _verdict(judgement))
    for table in (models, mutants):
        if table.row_count:
            console.print(table)
    for judgement in judgements:
        for problem in judgement.problems:
            console.print(f"{judgement.entry.name}: {problem}", style="red", markup=False, highlight=False)
        if isinstance(judgement.entry, Model) and judgement.result.counterexample:
            console.print(str(judgement.result.counterexample), markup=False, highlight=False)


def _table(title: str, name: str, text: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, no_wrap=True)
    table.add_column(text, min_width=20)
    return table


def as_data(judgement: Judgement) -> dict[str, Any]:
    """A judgement as plain data, for --json."""
    entry, result = judgement.entry, judgement.result
    trace = result.counterexample
    return {
        "name": entry.name,
        "kind": "model" if isinstance(entry, Model) else "mutant",
        "protocol": entry.protocol,
        "verdict": result.verdict,
        "violated": result.violated,
        "generated": result.generated,
        "distinct": result.distinct,
        "depth": result.depth,
        "seconds": round(result.seconds, 3),
        "coverage": dict(result.coverage),
        "counterexample": trace
        and {
            "steps": [{"action": step.action, "state": repr(step.state)} for step in trace.steps],
            "loop": trace.loop,
            "stutters": trace.stutters,
        },
        "problems": judgement.problems,
        "good": judgement.good,
    }
