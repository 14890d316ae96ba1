"""`quiesce bench`: time the protocols of this project, and others beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quiesce.console import writable

Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here.", callback=writable)]

bench = typer.Typer(no_args_is_help=True, help="Time what this project does, beside others.")


@bench.command("ring")
def _ring(
    readers: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of readers; 1 and 2.")] = None,
    only: Annotated[str, typer.Option(help="The ways whose name contains this.")] = "",
    message: Annotated[str, typer.Option(help="The messages whose name contains this.")] = "",
    slots: Annotated[
        list[int] | None, typer.Option(min=1, help="The ring alone, with each of these numbers of slots.")
    ] = None,
    json: Json = None,
) -> None:
    """The broadcast ring, vLLM's MessageQueue, iceoryx2 and multiprocessing.Queue: minutes."""
    from quiesce.bench.ring import main

    main(readers or (1, 2), only, message, slots or (), json)


@bench.command("codec")
def _codec(json: Json = None) -> None:
    """The msgpack codec: encoding, decoding, and the trip over ipc."""
    from quiesce.bench.codec import main

    main(json)


@bench.command("payload")
def _payload(
    json: Json = None,
    transport: Annotated[list[str] | None, typer.Option(help="inproc, ipc, tcp; all three.")] = None,
    only: Annotated[str, typer.Option(help="Other ways whose name contains this.")] = "",
    message: Annotated[str, typer.Option(help="The messages whose name contains this.")] = "",
    rounds: Annotated[int, typer.Option(min=2, help="Turns that each way takes.")] = 5,
) -> None:
    """Payload reuse, vLLM's encoder, pickle, msgspec with copies, a Connection and bare libzmq: two minutes."""
    from quiesce.bench.payload import TRANSPORTS, main

    main(json, tuple(transport or TRANSPORTS), only, message, rounds)


@bench.command("stage")
def _stage(
    json: Json = None, rounds: Annotated[int, typer.Option(min=2, help="Turns that each way takes.")] = 15
) -> None:
    """The stage handoff beside bare torch.distributed, over gloo; schedules of the simulated backend."""
    from quiesce.bench.stage import main

    main(json, rounds)


@bench.command("tools")
def _tools(
    json: Json = None,
    models: Annotated[bool, typer.Option("--models", help="All of `make check-model` too: minutes.")] = False,
    rounds: Annotated[int, typer.Option(min=2, help="Turns that each way takes.")] = 5,
) -> None:
    """The model tools beside TLC alone: checking, the oracle, traces, tours."""
    from quiesce.bench.tools import main

    main(json, rounds, check_models=models)


@bench.command("plots")
def _plots(
    files: Annotated[list[Path], typer.Argument(help="What --json wrote.")],
    page: Annotated[Path, typer.Option(help="The page to write the tables into.")] = Path(
        "docs/performance.md"
    ),
) -> None:
    """Tables and pictures of the documentation, from the figures of other commands."""
    from quiesce.bench.plots import main

    main(files, page)
