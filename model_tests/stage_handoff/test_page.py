"""The page says what the code and the tests say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from quiesce.events import actions
from quiesce.host_staging import HostStaging, Staged
from quiesce.stage_handoff import StageLink

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "stage_handoff.md").read_text(encoding="utf-8")


def test_tests_named_on_the_page_exist() -> None:
    """Each promise is backed by tests that are there."""
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in HERE.glob("test_*.py"))
    defined = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert named <= defined, named - defined


def test_every_promise_names_a_test() -> None:
    """No row of the table is a mere claim."""
    table = PAGE.split("## What the calls promise")[1].split("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| call")]
    assert len(rows) >= 10
    assert all(re.search(r"`test_\w+`", row.split("|")[4]) for row in rows)


def test_every_action_is_on_the_page() -> None:
    """The table of actions has all that the code marks, with the methods that it marks."""
    table = PAGE.split("## The protocol, action by action")[1].split("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")]
    for owner in (StageLink, HostStaging, Staged):
        for name, method in actions(owner).items():
            row = next(row for row in rows if f"`{name}`" in row.split("|")[1])
            assert method in row
