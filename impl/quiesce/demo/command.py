"""`quiesce demo`: tokens from a small serving engine over all three protocols, held to a run in one process."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table

from quiesce.console import CANNOT, FOUND, HOLDS, complain, output
from quiesce.demo.engine import run
from quiesce.demo.transformer import Config, Output, alone, prompt
from quiesce.model import paths


@dataclass(frozen=True)
class Comparison:
    """The answer to one prompt beside that of a run in one process.

    `wrong_tokens` are indices into the answer; `wrong_rows` counts the rows of log-probabilities, one behind each
    token of prompt and answer, that are missing or differ in any bit.
    """

    request: int
    prompt_tokens: int
    tokens: list[int]
    expected: list[int]
    wrong_tokens: list[int]
    wrong_rows: int
    rows: int

    @property
    def same(self) -> bool:
        """Whether every bit is the same."""
        return not self.wrong_tokens and not self.wrong_rows


def demo(
    prompts: Annotated[
        list[int] | None,
        typer.Option("--prompt", min=1, help="Tokens of a prompt; may be repeated. 8192 and 1500."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    fault: Annotated[
        str | None,
        typer.Option(
            help="A mutant whose faulty variant is swapped in: last_frame_tracker, release_with_a_view or "
            "handles_dropped."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was compared as JSON.")] = False,
) -> None:
    """Serve prompts with a client, an engine core and 2 x 2 workers, and compare with a run in one process.

    Exits with 0 if every token and every log-probability is the same to the bit, 1 if not, 2 if it could not run.
    """
    classes = _classes(fault)
    config, lengths = Config(), prompts or [8192, 1500]
    console = output()

    def say(request: int, token: int) -> None:
        if not as_json:
            console.print(f"request {request}: {token}", style=("cyan", "magenta")[request % 2])

    torch.set_num_threads(1)
    begun = time.monotonic()
    outputs = run(config, lengths, tokens, classes, say)
    served = time.monotonic() - begun
    if not as_json:
        console.print(f"served in {served:.1f} s; the same in one process ...")
    compared = [
        _compare(request, length, found, alone(config, prompt(config, request, length), tokens))
        for request, (length, found) in enumerate(zip(lengths, outputs, strict=True))
    ]
    if as_json:
        result = {"fault": fault, "seconds": served, "requests": [asdict(item) for item in compared]}
        print(json.dumps(result))
    else:
        console.print(_table(compared))
        console.print(_verdict(fault, compared))
    raise typer.Exit(HOLDS if all(item.same for item in compared) else FOUND)


def _classes(fault: str | None) -> dict[str, str]:
    if fault is None:
        return {}
    tree = paths.source_tree()
    if tree is None or not (tree / "model_tests").is_dir():
        complain("faulty variants live in model_tests; run quiesce from a source tree to use --fault")
        raise typer.Exit(CANNOT)
    sys.path.insert(0, str(tree))
    faults: dict[str, tuple[str, str]] = importlib.import_module("model_tests.demo.faults").FAULTS
    if fault not in faults:
        near = difflib.get_close_matches(fault, faults, 1, 0.0)
        complain(f"the demo has no fault {fault!r}; did you mean {near[0]}? It has {', '.join(faults)}")
        raise typer.Exit(CANNOT)
    role, name = faults[fault]
    return {role: name}


def _compare(request: int, length: int, found: Output, expected: Output) -> Comparison:
    rows, meant = torch.cat(found.log_probabilities), torch.cat(expected.log_probabilities)
    common = min(len(rows), len(meant))
    wrong = int((rows[:common] != meant[:common]).any(-1).sum()) + max(len(rows), len(meant)) - common
    differ = [i for i, (a, b) in enumerate(zip(found.tokens, expected.tokens, strict=True)) if a != b]
    return Comparison(request, length, found.tokens, expected.tokens, differ, wrong, len(meant))


def _table(compared: list[Comparison]) -> Table:
    table = Table(box=box.SIMPLE, title="the engine beside a run in one process")
    for heading in (
        "request",
        "prompt",
        "tokens that differ",
        "first",
        "rows of log-probabilities that differ",
    ):
        table.add_column(heading, justify="right")
    for item in compared:
        first = str(item.wrong_tokens[0]) if item.wrong_tokens else "-"
        table.add_row(
            str(item.request),
            f"{item.prompt_tokens:,}",
            f"{len(item.wrong_tokens)} of {len(item.expected)}",
            first,
            f"{item.wrong_rows:,} of {item.rows:,}",
        )
    return table


def _verdict(fault: str | None, compared: list[Comparison]) -> str:
    same = all(item.same for item in compared)
    if fault is None:
        return "every bit is the same" if same else "[red]the engine's answers are wrong[/]"
    if same:
        return f"with {fault} nothing went wrong this time; what it allows did not happen"
    return f"[red]with {fault} the answers are wrong, and nobody was told[/]: no error, no warning"
