"""Pages quote what is there: specifications, mutants, rules, tests and code; and the site builds without a network."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from quiesce.events import actions
from quiesce.lifecycle import BufferPool
from quiesce.model import Oracle, manifest, pages
from quiesce.model.errors import ModelError, UnknownName
from quiesce.payload_reuse import PayloadSender
from quiesce.ring_reader import RingReader
from quiesce.ring_writer import RingWriter
from quiesce.stage_handoff import StageLink

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
TESTS = re.compile(r"`([\w/]*test_\w+\.py)::(\w+)`")


@cache
def declared(path: str) -> dict[str, list[str]]:
    """The tests in a file of model_tests, with the text of their decorators."""
    tree = ast.parse((ROOT / "model_tests" / path).read_text("utf-8"))
    return {
        node.name: [ast.unparse(mark) for mark in node.decorator_list]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_quotes_is_up_to_date(page: Path) -> None:
    text = page.read_text("utf-8")
    assert pages.rewritten(text) == text, "run `make pages`"


@pytest.mark.parametrize("page", ["review.md", "limits.md"])
def test_every_test_named_exists(page: str) -> None:
    named = TESTS.findall((ROOT / "docs" / page).read_text("utf-8"))
    assert len(named) > 20
    for path, test in named:
        assert test in declared(path), f"{page} names {path}::{test}"


def test_every_limit_has_a_test_and_the_marked_ones_are_expected_to_fail() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "limits.md").read_text("utf-8").splitlines()
        if line.startswith("| ") and "shown by" not in line
    ]
    marked = set()
    for row in rows:
        (path, test), *_ = TESTS.findall(row)
        fails = any("expected(" in mark or "xfail" in mark for mark in declared(path)[test])
        assert ("†" in row) == fails, row
        if fails:
            marked.add((path, test))
    for path in ("test_limits.py", "memory_order/test_limits.py"):
        for test, marks in declared(path).items():
            if any("expected(" in mark or "xfail" in mark for mark in marks):
                assert (path, test) in marked, f"limits.md does not list {path}::{test}"


ASKED = (
    "payload_reuse",
    "broadcast_ring",
    "stage_handoff",
    "host_staging",
    "buffer_lifecycle",
    "tracker_completion",
)
"""The protocols whose every mutant is a question of a review."""


def test_every_bug_of_a_protocol_is_asked_about() -> None:
    text = (ROOT / "docs" / "review.md").read_text("utf-8")
    asked = set(re.findall(r"^\| `\w+` \| `(\w+)` \|", text, re.MULTILINE))
    mutants = {mutant.name for mutant in manifest.load().mutants.values() if mutant.protocol in ASKED}
    assert mutants - asked == set(), (
        "name them in a `<!-- guards: ... -->` of docs/review.md, and run `make pages`"
    )


def test_every_question_has_a_rule_that_exists_a_guard_and_a_test() -> None:
    known = manifest.load()
    text = (ROOT / "docs" / "review.md").read_text("utf-8")
    sections = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert len(sections) >= 25
    for section in sections:
        title = section.splitlines()[0]
        assert title.endswith("?")
        assert TESTS.search(section), title
        mutants = re.findall(r"^\| `\w+` \| `(\w+)` \|", section, re.MULTILINE)
        modules = {known.model(name).module.removeprefix("MC").removesuffix("Live") for name in mutants}
        modules |= set(re.findall(r"of (HostStaging)", section))
        rules: set[str] = set()
        for module in modules:
            try:
                rules |= set(re.findall(r"^([A-Z]\d+)", pages.excerpt(module, "rules"), re.MULTILINE))
            except ModelError:
                continue
        for listed in re.findall(r"[Rr]ules? ([A-Z]\d+(?:(?:, | and | to )[A-Z]\d+)*)", section):
            for rule in re.findall(r"[A-Z]\d+", listed):
                assert rule in rules, f"{title} cites {rule}"


@pytest.mark.parametrize(
    ("module", "model"),
    [
        ("PayloadReuse", "payload_reuse_stream"),
        ("BroadcastRing", "ring_slots"),
        ("StageHandoff", "stage_handoff_gloo"),
        ("HostStaging", "host_staging"),
    ],
)
def test_the_actions_of_the_glossary_are_those_of_the_specification(module: str, model: str) -> None:
    assert set(pages.actions_of(module)) == set(Oracle.load(model).actions)


OTHERWISE = {"Remember": "lend", "Touch": "_look"}
"""Actions whose method has another name, as CONTRIBUTING.md says."""


@pytest.mark.parametrize(
    ("module", "classes"),
    [
        ("PayloadReuse", (PayloadSender, BufferPool)),
        ("BroadcastRing", (RingWriter, RingReader)),
        ("StageHandoff", (StageLink,)),
    ],
)
def test_methods_bear_the_names_of_actions_and_stand_in_their_order(
    module: str, classes: tuple[type, ...]
) -> None:
    steps = [re.sub(r"^(Begin|End)(?=[A-Z])", "", name) for name in pages.actions_of(module)]
    order = list(dict.fromkeys([*steps, *pages.actions_of(module)]))
    for cls in classes:
        found = {name: method for name, method in actions(cls).items() if name in order}
        assert len(found) > 3
        assert sorted(found, key=order.index) == list(found)
        for name, method in found.items():
            snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
            assert method in (OTHERWISE.get(name, snake), f"_{snake}"), name


def test_a_mark_that_leads_nowhere_is_an_error() -> None:
    for mark in ("spec: Nothing Rule", "spec: PayloadReuse Nothing", "spec: Litmus rules"):
        with pytest.raises(ModelError):
            pages.rewritten(f"<!-- {mark} -->\nold\n<!-- end -->")
    with pytest.raises(UnknownName, match="did you mean 'last_frame_tracker'"):
        pages.rewritten("<!-- guards: last_frame_traker -->\nold\n<!-- end -->")


def test_every_subcommand_is_on_the_page_of_the_command_line() -> None:
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "quiesce.cli", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    found = re.findall(r"^│ (\w+)  ", done.stdout.partition("Commands")[2], re.MULTILINE)
    assert {"check", "explain", "doctor"} <= set(found)
    text = (ROOT / "docs" / "command_line.md").read_text("utf-8")
    assert [name for name in found if f"`quiesce {name}" not in text] == []
    assert "3 undetermined" in done.stdout


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    command += ["-f", str(ROOT / "docs" / "site" / "mkdocs.yml"), "-d", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {page.stem for page in PAGES} <= built
    for path in (tmp_path / "site").glob("*.html"):
        page = path.read_text("utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', page)
        fetched += re.findall(r'<link[^>]* href="([^"]*)"', page)
        assert [address for address in fetched if re.match(r"(?:https?:)?//", address)] == []
    review = (tmp_path / "site" / "review.html").read_text("utf-8")
    assert review.count("<table>") > 20  # the tables between marks are tables
