"""`quiesce check`: every model and every mutant of the manifest, as a reviewer wants to read them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quiesce.console import CANNOT, FOUND, HOLDS, UNDETERMINED, complete_models, output
from quiesce.model import checking
from quiesce.model import manifest as manifests
from quiesce.model.checking import DEFAULT_TIMEOUT, Judgement, judge
from quiesce.model.errors import ModelError
from quiesce.model.manifest import LARGE, Manifest, Model, Mutant
from quiesce.model.output import CheckResult, Progress

REPORT_EVERY = 60.0
"""Seconds between two lines about a run when standard error is no terminal."""


def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...", help="Models, mutants or protocols.", autocompletion=complete_models
        ),
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
    """Check models and their mutants with TLC: all small ones, or those named.

    Exits with 0 if everything is as pinned, 1 if something else was found, 2 if an entry could not be run, and 3 if
    time or memory ran out before there was an answer.
    """
    manifest = manifests.load(manifest_path)
    entries = select(manifest, names or [], large)
    judgements = run(manifest, entries, jobs=jobs, timeout=timeout, heap=heap << 20, show=not as_json)
    if pin:
        manifests.pin(manifest, {item.entry.name: item.result for item in judgements if item.answered})
        Console(stderr=True, soft_wrap=True).print(
            f"pinned in {manifest.path}; check again to hold the models to it"
        )
    if as_json:
        print(json.dumps([as_data(judgement) for judgement in judgements], indent=2))
    else:
        report(judgements, output())
    raise typer.Exit(status(judgements))


def status(judgements: Sequence[Judgement]) -> int:
    """The exit status of a run: what could not be run counts before what was found, and that before no verdict."""
    unanswered = [judgement for judgement in judgements if not judgement.answered]
    if any(judgement.result.verdict not in ("timeout", "memory") for judgement in unanswered):
        return CANNOT
    if any(judgement.answered and not judgement.good for judgement in judgements):
        return FOUND
    return UNDETERMINED if unanswered else HOLDS


def select(manifest: Manifest, names: Sequence[str], large: bool) -> list[Model | Mutant]:
    """The entries a command line asks for.

    A model's name means it and its mutants, a protocol's all its models of that size, unless a model is called so.
    """
    models = {name: model for name, model in manifest.models.items() if (model.size == LARGE) == large}
    if names:
        chosen: dict[str, Model | Mutant] = {}
        for name in names:
            of: dict[str, Model | Mutant] = {k: m for k, m in models.items() if m.protocol == name}
            if name in manifest.models or name in manifest.mutants or not of:
                of = {name: manifest.find(name)}
            chosen |= of
            chosen |= {mutant.name: mutant for mutant in manifest.mutants.values() if mutant.model in of}
        return list(chosen.values())
    mutants = [mutant for mutant in manifest.mutants.values() if mutant.model in models]
    if not models:
        raise ModelError(f"{manifest.path} has no {'large' if large else 'small'} model")
    return [*models.values(), *mutants]


@dataclass
class _Running:
    """A run under way: what TLC said last, and what it had said before that."""

    entry: Model | Mutant
    latest: Progress
    earlier: Progress
    shown: float = 0.0

    def tell(self, progress: Progress) -> None:
        if progress.printed != self.latest.printed:
            self.earlier = self.latest
        self.latest = progress

    def __str__(self) -> str:
        now, before = self.latest, self.earlier
        line = f"{self.entry.name}: {_span(now.seconds)}"
        if not now.generated:
            return f"{line}, TLC has not counted yet (it does after some seconds, then once a minute)"
        elapsed = max(now.printed - before.printed, 0.001)
        rate = (now.generated - before.generated) / elapsed
        line += f", {now.distinct:,} distinct states, {rate:,.0f} generated/s, {now.queue:,} on the queue"
        found = (now.distinct - before.distinct) / elapsed
        expected = self.entry.distinct if isinstance(self.entry, Model) else None
        if expected and found > 0 and expected > now.distinct:
            left = (expected - now.distinct) / found - (now.seconds - now.printed)
            line += f", about {_span(max(left, 1.0))} left"
        return line


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def run(
    manifest: Manifest, entries: Sequence[Model | Mutant], *, jobs: int, timeout: float, heap: int, show: bool
) -> list[Judgement]:
    """Check all entries, `jobs` at a time, and show on stderr how far they are."""
    stop = threading.Event()
    running: dict[str, _Running] = {}

    def one(entry: Model | Mutant) -> Judgement:
        def tell(progress: Progress) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            running.setdefault(entry.name, _Running(entry, progress, Progress())).tell(progress)

        if stop.is_set():
            raise KeyboardInterrupt
        try:
            result = checking.check(entry, manifest=manifest, timeout=timeout, heap=heap, progress=tell)
            return judge(entry, result)
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
    futures: Sequence[Future[Judgement]], running: dict[str, _Running], console: Console, show: bool
) -> None:
    live = Live(console=console, transient=True, auto_refresh=False) if show and console.is_terminal else None
    began = time.monotonic()
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
            under_way = list(running.values())
            if live:
                finished = len(futures) - len(pending)
                head = f"{finished} of {len(futures)} done"
                if finished and pending:
                    left = (time.monotonic() - began) / finished * len(pending)
                    head += f", about {_span(left)} left"
                live.update(Text("\n  ".join([head, *map(str, under_way)])), refresh=True)
            for item in under_way if show and not live else ():
                if item.latest.seconds - item.shown >= REPORT_EVERY:
                    item.shown = item.latest.seconds
                    console.print(str(item), markup=False, highlight=False, soft_wrap=True)
    finally:
        if live:
            live.stop()


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
    console.print(summary(judgements), markup=False, highlight=False)


def summary(judgements: Sequence[Judgement]) -> str:
    """A run in one line."""
    told = []
    for kind, name, verdict in ((Model, "models", "hold"), (Mutant, "mutants", "are caught")):
        good = [judgement.good for judgement in judgements if isinstance(judgement.entry, kind)]
        if good:
            told.append(f"{name}: {sum(good)} of {len(good)} {verdict}")
    return "; ".join(told)


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
