"""The mutation matrix is that of the mutants and variants there are, is shown as it is, and can be had again."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from model_tests.mutation.checkers import ORDINARY, ROOT, TEST_S, ordinary
from model_tests.mutation.variants import SHIPPED, base, fault, variant

from quiesce.model import manifest, matrix
from quiesce.model.errors import UnknownName
from quiesce.model.matrix import CHECKERS, Cell, Row

CHEAPEST, SAMPLE = 12, 2
"""The rows that took least, of which so many are run again."""


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return matrix.read()


def test_every_mutant_has_a_row_with_every_checker(rows: dict[str, Row]) -> None:
    assert list(rows) == [mutant.name for mutant in matrix.mutants()]
    for row in rows.values():
        assert tuple(row.cells) == CHECKERS, row.mutant


def test_every_mutant_is_caught_by_tlc_and_in_the_code(rows: dict[str, Row]) -> None:
    assert {name: row.problems for name, row in rows.items() if row.problems} == {}


def test_rows_are_of_these_specifications_and_variants(rows: dict[str, Row]) -> None:
    known = manifest.load()
    old = [m.name for m in matrix.mutants() if rows[m.name].digest != matrix.digest(m, known)]
    assert not old, f"quiesce matrix --write {' '.join(old)}"


def test_the_page_shows_what_is_kept(rows: dict[str, Row]) -> None:
    page = (ROOT / "docs" / "mutation.md").read_text(encoding="utf-8")
    assert matrix.rewritten(page, list(rows.values())) == page


def test_every_mutant_has_a_variant_of_what_is_shipped() -> None:
    for mutant in matrix.mutants():
        kind = variant(mutant.protocol, fault(mutant))
        assert base(mutant.protocol, kind) in SHIPPED[mutant.protocol]


def test_reasons_are_for_what_is_not_caught(rows: dict[str, Row]) -> None:
    for mutant, checker in matrix.reasons():
        assert rows[mutant].cells[checker].fate == "does not apply", (mutant, checker)


def test_a_sample_of_the_rows_comes_out_the_same(rows: dict[str, Row]) -> None:
    """What is quickly run again; `quiesce matrix` runs all of it."""

    def took(row: Row) -> float:
        return sum(cell.seconds for cell in _caught(row).values())

    for row in random.Random(1).sample(sorted(rows.values(), key=took)[:CHEAPEST], SAMPLE):
        again = matrix.run(matrix.mutants([row.mutant]), checkers=list(_caught(row)), jobs=1)[0]
        assert {name: cell.fate for name, cell in again.cells.items()} == dict.fromkeys(
            _caught(row), "caught"
        )


def _caught(row: Row) -> dict[str, Cell]:
    return {name: cell for name, cell in row.cells.items() if cell.fate == "caught"}


@pytest.mark.nightly
@pytest.mark.timeout(20_000)
def test_every_row_comes_out_the_same(rows: dict[str, Row]) -> None:
    again = {row.mutant: row for row in matrix.run(matrix.mutants())}
    assert {name: row.problems for name, row in again.items() if row.problems} == {}


def test_problems_of_a_row(rows: dict[str, Row]) -> None:
    """A row that TLC misses, or everything else, or with a cell that failed, is no good."""
    row = next(row for row in rows.values() if not row.problems)
    blind = dict.fromkeys(CHECKERS, Cell("survived"))
    assert "TLC" in replace(row, cells={**row.cells, "tlc": Cell("survived")}).problems[0]
    assert "no checker" in replace(row, cells={**blind, "tlc": Cell("caught")}).problems[0]
    assert replace(row, cells={**row.cells, "tours": Cell("failed", "it broke")}).problems == (
        "tours: it broke",
    )


def test_a_reason_for_what_is_caught_fails_the_cell() -> None:
    assert matrix._explained(Cell("caught", "x"), "it cannot").fate == "failed"
    assert matrix._explained(Cell("survived"), "it cannot") == Cell("does not apply", "it cannot")
    assert matrix._explained(Cell("does not apply", "no adapter"), "").fate == "failed"


def test_a_cell_that_takes_too_long_costs_no_other_cell() -> None:
    cells = dict(matrix._cells("no_tracker", ("tests", "tlc"), 0.1, threading.Event()))
    assert {name: cell.fate for name, cell in cells.items()} == dict.fromkeys(
        ("tests", "tlc"), "undetermined"
    )


def test_a_variant_without_a_fault_passes_the_ordinary_tests() -> None:
    """So that it is the fault that the others fail for; the nightly run does it for all protocols."""
    assert not ordinary("host_staging").caught


@pytest.mark.nightly
@pytest.mark.timeout(20 * TEST_S)
@pytest.mark.parametrize("protocol", sorted(ORDINARY))
def test_no_protocol_fails_without_a_fault(protocol: str) -> None:
    found = ordinary(protocol)
    assert not found.caught, found.by


def test_the_command() -> None:
    command = [sys.executable, "-m", "quiesce.cli", "matrix"]
    chosen = ["no_tracker", "--checker", "tlc", "--json"]
    done = subprocess.run([*command, *chosen], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["cells"]["tlc"]["fate"] == "caught"
    wrong = subprocess.run([*command, "no_trackers"], capture_output=True, timeout=120, check=False)
    assert wrong.returncode == 2
    with pytest.raises(UnknownName, match="no_tracker"):
        matrix.mutants(["no_trackers"])
