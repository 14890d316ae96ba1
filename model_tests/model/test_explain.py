"""`quiesce explain`: every mutant of the manifest is laid out, and the lines it names exist."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from quiesce.model import counterexamples, guard_lines, manifest, paths
from quiesce.model.errors import ModelError, UnknownName
from quiesce.model.explaining import BROKEN, INTACT, Explanation, as_data, explain, lay_out
from quiesce.model.lanes import VIEWS, changes
from quiesce.model.output import CheckResult
from quiesce.model.picture import html, in_terminal, svg
from quiesce.model.values import State

MANIFEST = manifest.load()
WAITS_FOR_TLC = os.environ.get("QUIESCE_PROFILE", "dev") != "dev"
LAW = ("NoTornRead",)


def explained(name: str) -> Explanation:
    """The explanation of a mutant; without TLC unless the profile allows it seconds."""
    if not WAITS_FOR_TLC and counterexamples.load(MANIFEST.mutants[name], MANIFEST) is None:
        pytest.skip("run `quiesce check` first, or set QUIESCE_PROFILE=ci: its counterexample is not kept")
    return explain(name, manifest=MANIFEST)


@pytest.mark.parametrize("name", MANIFEST.mutants)
def test_every_mutant_can_be_explained(name: str) -> None:
    found = explained(name)
    mutant = MANIFEST.mutants[name]
    assert MANIFEST.models[mutant.model].module in VIEWS
    assert len(found.rows) == len(found.trace.steps) == mutant.depth
    assert found.rows[0].lane == ""
    assert {row.lane for row in found.rows[1:]} == set(found.lanes)
    assert all(row.changes for row in found.rows[1:])
    assert all(len(bar.cells) == len(found.rows) and any(bar.cells) for bar in found.bars)
    for text in (found.cause, found.happening, found.consequence.partition(": ")[2]):
        assert len(text) > 8
    assert found.spec
    assert guard_lines.fault_of(mutant) in found.spec[0].text or "without_" in guard_lines.fault_of(mutant)
    assert found.code is not None or guard_lines.fault_of(mutant) in guard_lines.NO_CODE
    if mutant.violates in LAW:
        # The law is broken by the last step, and the picture has to show it there.
        last = len(found.rows) - 1
        assert last in found.marked
        assert any(bar.cells[last] and bar.cells[last][0] == BROKEN for bar in found.bars)  # type: ignore[index]
    figure = ElementTree.fromstring(svg(found))
    texts = " ".join(figure.itertext())
    assert all(lane in texts for lane in found.lanes)
    page = html(found)
    assert "<script" not in page
    assert "src=" not in page
    assert page.count("http") == page.count("http://www.w3.org/2000/svg")
    assert json.loads(json.dumps(as_data(found)))["mutant"] == name


def test_the_first_bug_is_drawn_as_it_happened() -> None:
    found = explained("last_frame_tracker")
    assert found.lanes == ("sender",)
    (bar,) = found.bars
    assert (bar.memory, bar.reader) == ("b1", "I/O thread")
    assert bar.cells[:4] == (None,) * 4
    assert bar.cells[4:9] == ((INTACT, 1),) * 5
    assert bar.cells[9] == (BROKEN, 1)
    assert found.happening == (
        "Step 10, BeginEncode by the sender, changes b1 while the I/O thread may still read message 1 there."
    )
    assert found.code is not None
    assert found.code.symbol == "PayloadSender._asked"


def test_a_promise_that_is_kept_marks_nothing() -> None:
    found = explained("no_overflow")
    assert found.bars
    assert found.marked == ()
    assert found.trace.stutters
    assert not any(cell and cell[0] == BROKEN for bar in found.bars for cell in bar.cells)


@pytest.mark.parametrize("fault", guard_lines.CODE)
def test_every_entry_for_the_code_is_valid_and_used(fault: str) -> None:
    assert fault in {guard_lines.fault_of(mutant) for mutant in MANIFEST.mutants.values()}
    assert guard_lines.resolve(guard_lines.CODE[fault]).number > 0


def test_an_entry_that_no_longer_fits_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"has no BufferPool\.settel"):
        guard_lines.resolve("lifecycle BufferPool.settel: x")
    with pytest.raises(LookupError, match=r"on 0 lines of BufferPool\.settle"):
        guard_lines.resolve("lifecycle BufferPool.settle: nothing like this")


def test_the_reasons_for_no_code_name_files_that_exist() -> None:
    tree = paths.source_tree()
    assert tree is not None
    for fault, reason in guard_lines.NO_CODE.items():
        assert fault in {guard_lines.fault_of(mutant) for mutant in MANIFEST.mutants.values()}
        named = [word.strip("();,") for word in reason.split() if "/" in word and "." in word]
        assert named
        assert all((tree / path).is_file() for path in named)


def test_a_counterexample_is_kept_until_its_specification_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = explained("write_while_lent").trace
    mutant = MANIFEST.mutants["write_while_lent"]
    monkeypatch.setattr(paths, "cache_directory", lambda: tmp_path)
    assert counterexamples.load(mutant, MANIFEST) is None
    counterexamples.keep(mutant, MANIFEST, CheckResult("invariant", "NoTornRead", counterexample=trace))
    assert counterexamples.load(mutant, MANIFEST) == trace
    assert counterexamples.load(replace(mutant, set={"FreeLimit": "2"}), MANIFEST) is None
    (kept,) = (tmp_path / "counterexamples").iterdir()
    kept.write_text("{}")
    assert counterexamples.load(mutant, MANIFEST) is None


def test_a_modules_family_is_found() -> None:
    names = {path.stem for path in counterexamples.modules(MANIFEST.mutants["last_frame_tracker"], MANIFEST)}
    assert names == {"MCPayloadReuse", "PayloadReuse", "TrackerCompletion", "BufferLifecycle"}


def test_what_a_step_changed() -> None:
    before = State({"s": frozenset({1}), "q": (1, 2), "f": {"a": 1, "b": 2}, "same": 0})
    after = State({"s": frozenset({2}), "q": (2,), "f": {"a": 1, "b": 3}, "same": 0})
    assert changes(before, after) == ("s: + 2, - 1", "q: - 1", "f: [a |-> 1, b |-> 2] → [a |-> 1, b |-> 3]")
    assert changes(None, after) == ()


def test_names_that_are_no_mutants() -> None:
    with pytest.raises(UnknownName, match="did you mean 'last_frame_tracker'"):
        explain("last_frame_traker", manifest=MANIFEST)
    with pytest.raises(
        ModelError, match="is a model, and holds; explain one of its mutants: last_frame_tracker"
    ):
        explain("payload_reuse_stream", manifest=MANIFEST)


def test_a_specification_without_lanes_of_its_own_is_drawn_by_actions(
    own_manifest: manifest.Manifest,
) -> None:
    found = explain("lose", manifest=own_manifest)
    assert found.lanes == ("Send", "Deliver", "Read")
    assert found.bars == ()
    assert "Step 4" in found.happening
    assert lay_out(found.mutant, own_manifest, found.trace) == found


def test_what_does_not_fit_is_told_in_a_column_and_brackets_are_kept() -> None:
    found = explained("handles_dropped")

    def shown(width: int) -> str:
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(in_terminal(found, changes=True, width=width))
        return console.export_text()

    wide, narrow = shown(220), shown(100)
    assert "who" not in wide.splitlines()[2:6]
    assert re.search(r"14 +│ +BeginWork +│", wide)
    assert re.search(r"14 +stream 1 compute +BeginWork", narrow)
    for text in (wide, narrow):
        assert "memory[1 out]: 1 → 0" in text


def test_the_command(tmp_path: Path) -> None:
    explained("last_frame_tracker")
    page = tmp_path / "page.html"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "quiesce.cli", "explain", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    done = run("last_frame_tracker")
    assert done.returncode == 0
    for text in ("BeginEncode", "✗ 1", "spec/PayloadReuse.tla:", "impl/quiesce/payload_reuse.py:"):
        assert text in done.stdout
    assert "┃ there, and may be read; ✗ overwritten" in done.stdout
    assert "┊" not in done.stdout
    done = run("last_frame_tracker", "--json", "--html", str(page))
    assert done.returncode == 0
    assert json.loads(done.stdout)["marked"] == [9]
    assert "<svg" in page.read_text("utf-8")
    done = run("last_frame_traker")
    assert done.returncode == 2
    assert "did you mean 'last_frame_tracker'" in done.stderr
