"""Writes the table of edge coverage into docs/conformance.md: `python -m model_tests.conformance.table`."""

from __future__ import annotations

import re
from pathlib import Path

from model_tests.conformance.test_tours import LONG, QUICK

from quiesce.model.coverage import Coverage
from quiesce.model.tours import drive

PAGE = Path(__file__).parent.parent.parent / "docs" / "conformance.md"


def main() -> None:
    """Tour every small model and write what was taken, by protocol and action."""
    protocols: dict[str, dict[str, list[int]]] = {}
    lines = [
        "| adapter, small model | states | edges | taken | explained | walks | steps |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for adapter, small in [*QUICK, *LONG]:
        coverage = Coverage.of(adapter, small)
        came = drive(adapter, small, coverage)
        edges, taken = len(coverage.graph.edges), len(coverage.together)
        lines.append(
            f"| {adapter.__name__}, {small} | {len(coverage.graph.states):,} | {edges:,} | {taken:,} | "
            f"{edges - taken - len(coverage.untaken()[1]):,} | {came.walks:,} | {came.steps:,} |"
        )
        for action, row in coverage.rows():
            sums = protocols.setdefault(adapter.__name__, {}).setdefault(action, [0, 0, 0])
            for index, name in enumerate(("edges", "tours", "excused")):
                sums[index] += row[name]
    for name, actions in protocols.items():
        lines += [
            "",
            f"{name}, all its small models together:",
            "",
            "| action | edges | taken | explained |",
            "|---|--:|--:|--:|",
        ]
        lines += [
            f"| {action} | {edges:,} | {taken:,} | {why:,} |"
            for action, (edges, taken, why) in actions.items()
        ]
    text = PAGE.read_text(encoding="utf-8")
    table = "\n".join(lines)
    text = re.sub(
        r"<!-- coverage -->.*<!-- end of coverage -->",
        lambda _: f"<!-- coverage -->\n{table}\n<!-- end of coverage -->",
        text,
        flags=re.DOTALL,
    )
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
