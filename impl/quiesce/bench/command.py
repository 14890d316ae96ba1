"""`quiesce bench`: time the protocols of this project, and others beside them."""

from __future__ import annotations

from typing import Annotated

import typer

bench = typer.Typer(no_args_is_help=True, help="Time what this project does, beside others.")


@bench.command("ring")
def _ring(
    readers: Annotated[list[int] | None, typer.Option(min=1, help="Numbers of readers; 1 and 2.")] = None,
    only: Annotated[str, typer.Option(help="The ways whose name contains this.")] = "",
    message: Annotated[str, typer.Option(help="The messages whose name contains this.")] = "",
    slots: Annotated[
        list[int] | None, typer.Option(min=1, help="The ring alone, with each of these numbers of slots.")
    ] = None,
) -> None:
    """The broadcast ring, vLLM's MessageQueue, iceoryx2 and multiprocessing.Queue: minutes."""
    from quiesce.bench.ring import main

    main(readers or (1, 2), only, message, slots or ())


@bench.command("codec")
def _codec() -> None:
    """The msgpack codec: encoding, decoding, and the trip over ipc."""
    from quiesce.bench.codec import main

    main()
