"""The `quiesce` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exits with 0, 1 (something was found) or 2 (it could not run)."""
    try:
        from quiesce.bench.command import bench
        from quiesce.model.command import app
    except ModuleNotFoundError as error:
        print(
            f"quiesce: {error.name} is missing; install the tools with: pip install 'quiesce[model]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app.add_typer(bench, name="bench")
    app()


if __name__ == "__main__":
    main()
