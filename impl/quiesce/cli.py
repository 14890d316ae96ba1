"""The `quiesce` command. Each subcommand lives in a module of its own and is registered here by a line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the exit statuses are those of `quiesce.console`."""
    try:
        import typer

        from quiesce.bench.command import bench
        from quiesce.console import CANNOT, EXIT_STATUSES, complain, end_on_terminate
        from quiesce.demo.command import demo
        from quiesce.doctor import doctor
        from quiesce.model.command import check
        from quiesce.model.explain_command import explain
        from quiesce.model.matrix_command import matrix
        from quiesce.model.mutation_command import mutate
        from quiesce.model.replay_command import replay
        from quiesce.model.report import report
        from quiesce.model.trace_command import trace, validate
    except ModuleNotFoundError as error:
        print(
            f"quiesce: {error.name} is missing; install the tools with: pip install 'quiesce[model]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    from quiesce import __version__
    from quiesce.errors import QuiesceError

    app = typer.Typer(
        name="quiesce",
        help="Zero-copy tensor transport, formally modelled: check the models, and look at what they say.",
        epilog=EXIT_STATUSES,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )

    def say_version(wanted: bool) -> None:
        if wanted:
            print(f"quiesce {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", callback=say_version, is_eager=True, help="Say which this is."
        ),
    ) -> None:
        pass

    app.command("check")(check)
    app.command("explain")(explain)
    app.command("matrix")(matrix)
    app.command("mutate")(mutate)
    app.command("replay")(replay)
    app.command("report")(report)
    app.command("trace")(trace)
    app.command("validate")(validate)
    app.command("demo")(demo)
    app.command("doctor")(doctor)
    app.add_typer(bench, name="bench")
    end_on_terminate()
    try:
        app()
    except QuiesceError as problem:
        complain(problem)
        raise SystemExit(CANNOT) from None
    except OSError as problem:
        if problem.filename is None:
            raise
        complain(f"{problem.filename}: {problem.strerror}")
        raise SystemExit(CANNOT) from None


if __name__ == "__main__":
    main()
