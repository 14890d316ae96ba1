"""Writes the tables of coverage into docs/conformance.md: `python -m model_tests.conformance.table`, half an hour."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from hypothesis import settings
from model_tests.conformance.test_tours import LONG, QUICK
from model_tests.traces.test_load import payload_runs, ring_runs, stage_runs

from quiesce.model.coverage import Coverage
from quiesce.model.judging import cases, judge
from quiesce.model.lockstep import lockstep
from quiesce.model.tours import drive
from quiesce.model.traces import read

PAGE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"
LARGEST = 3_000
"""States of a small model that is counted; larger ones are toured nightly, and lockstep says little of them."""
EXAMPLES = 100
"""Runs of lockstep in each small model."""
COLUMNS = ("edges", "tours", "lockstep", "together", "excused")


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Markdown; the first column is text, the others are numbers."""
    names = list(head)
    yield from (f"| {' | '.join(names)} |", f"|---|{'--:|' * (len(names) - 1)}")
    for row in rows:
        yield f"| {' | '.join(f'{cell:,}' if isinstance(cell, int) else str(cell) for cell in row)} |"


def edges() -> Iterator[str]:
    """Tour the small models up to `LARGEST`, and run lockstep in them; the edges taken, by model, and by action."""
    protocols: dict[str, dict[str, Counter[str]]] = {}
    models = []
    for adapter, small in [*QUICK, *LONG]:
        coverage = Coverage.of(adapter, small)
        if len(coverage.graph.states) > LARGEST:
            continue
        came = drive(adapter, small, coverage)
        lockstep(
            adapter,
            small=small,
            examples=EXAMPLES,
            on_step=lambda state, step, found=coverage: found.count("lockstep", state, step),
            options=settings(database=None, derandomize=True),
        )
        rows = dict(coverage.rows())
        sums = {name: sum(row[name] for row in rows.values()) for name in COLUMNS}
        models.append(
            [
                f"{adapter.__name__}, {small}",
                len(coverage.graph.states),
                *sums.values(),
                came.walks,
                came.steps,
            ]
        )
        for action, row in rows.items():
            protocols.setdefault(adapter.__name__, {}).setdefault(action, Counter()).update(row)
    columns = ("edges", "tours", "lockstep", "together", "explained")
    yield from table(("adapter, small model", "states", *columns, "walks", "steps"), models)
    for name, actions in protocols.items():
        yield from ("", f"{name}, all these small models together:", "")
        yield from table(
            ("action", *columns), ([action, *(row[c] for c in COLUMNS)] for action, row in actions.items())
        )


def events() -> Iterator[str]:
    """Record the runs of the load test once, and judge them; the events of each action."""
    for name, make in (("payload", payload_runs), ("ring", ring_runs), ("stage", stage_runs)):
        found: Counter[str] = Counter()
        with tempfile.TemporaryDirectory(prefix="quiesce-coverage-") as folder:
            for run in make(Path(folder), 0):
                run()
            traces = [read(directory) for directory in sorted(Path(folder).iterdir()) if directory.is_dir()]
        for trace in traces:
            for case in cases(trace):
                assert judge(case).outcome == "accepted", case.title
                found.update(event.action for event in case.events)
        told = ", ".join(f"{action} {count:,}" for action, count in found.most_common())
        yield f"- {name}, {len(traces)} runs between processes, {found.total():,} events: {told}"


def main() -> None:
    """Write both."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in (("coverage", edges()), ("events", events())):
        told = "\n".join(lines)
        text = re.sub(
            rf"<!-- {name} -->.*<!-- end of {name} -->",
            lambda _, name=name, told=told: f"<!-- {name} -->\n{told}\n<!-- end of {name} -->",
            text,
            flags=re.DOTALL,
        )
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
