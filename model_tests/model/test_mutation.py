"""Guards are found where they stand, dropped one at a time, and what becomes of each mutant is told apart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quiesce.model import manifest as manifests
from quiesce.model.errors import ModelError
from quiesce.model.manifest import Manifest
from quiesce.model.mutation import PROTOCOLS, Guard, all_guards, guards, mutate, reasons
from quiesce.model.mutation_score import Score, path, read, rewritten
from quiesce.model.oracle import Oracle

TABLE = """---- MODULE Table ----
EXTENDS Naturals
CONSTANT Fault
VARIABLES seats, guests
vars == <<seats, guests>>
Init == seats = 2 /\\ guests = 0
Sit ==
    /\\ seats > 0
    /\\ guests < 5 /\\ guests >= 0
    /\\ \\E n \\in {1} :
        /\\ \\/ n = 1
           \\/ seats = 9
        /\\ guests' = guests + n
    /\\ seats' = seats - 1
Rise == IF Fault = "none" THEN guests > 0 /\\ guests' = 0 /\\ seats' = 2 ELSE UNCHANGED vars
Wave == guests > 1 /\\ guests' = 9 - guests /\\ UNCHANGED seats
Done == seats = 0 /\\ UNCHANGED vars
Next == Sit \\/ Rise \\/ Wave \\/ Done
Spec == Init /\\ [][Next]_vars
Enough == seats >= 0
====
"""

SAMPLE = 2
"""Mutants of each protocol that are killed again."""


@pytest.fixture
def table(tmp_path: Path) -> Manifest:
    """A model of a table with two seats."""
    (tmp_path / "Table.tla").write_text(TABLE)
    (tmp_path / "MCTable.tla").write_text("---- MODULE MCTable ----\nEXTENDS Table\n====\n")
    (tmp_path / "MCTable.cfg").write_text('CONSTANT Fault = "none"\nSPECIFICATION Spec\nINVARIANT Enough\n')
    (tmp_path / "manifest.toml").write_text(
        '[[model]]\nname = "table"\nprotocol = "table"\nmodule = "MCTable"\nconfig = "MCTable.cfg"\n'
        'proves = "nobody stands"\ndistinct = 4\ndepth = 4\n'
    )
    return manifests.load(tmp_path / "manifest.toml")


def test_guards_are_the_conjuncts_without_primes(table: Manifest) -> None:
    found = guards(Oracle.load("table", manifest=table))
    assert [(guard.action, guard.text) for guard in found] == [
        ("Sit", "seats > 0"),
        ("Sit", "guests < 5"),
        ("Sit", "guests >= 0"),
        ("Sit", r"\/ n = 1 \/ seats = 9"),
        ("Rise", "guests > 0"),
        ("Wave", "guests > 1"),
    ]


def test_what_is_dropped_is_the_guard_alone(table: Manifest) -> None:
    found = {guard.text: guard for guard in guards(Oracle.load("table", manifest=table))}
    lines = TABLE.split("\n")
    dropped = found["guests < 5"].dropped(TABLE).split("\n")
    assert dropped[8] == "    /\\ TRUE       /\\ guests >= 0"
    assert dropped[:8] + dropped[9:] == lines[:8] + lines[9:]
    several = found[r"\/ n = 1 \/ seats = 9"].dropped(TABLE).split("\n")
    assert several[10] == "        /\\ TRUE"
    assert several[:10] + several[11:] == lines[:10] + lines[12:]


def test_fates(table: Manifest) -> None:
    path = table.directory / "survivors.toml"
    path.write_text(
        '[[survivor]]\nmodule = "Table"\naction = "Wave"\nguard = "guests > 1"\nreason = "it only waves"\n'
    )
    heard: list[str] = []
    trials = mutate("table", manifest=table, jobs=1, heard=lambda trial: heard.append(trial.guard.text))
    fates = {trial.guard.text: (trial.fate, trial.by, trial.good) for trial in trials}
    assert fates == {
        "seats > 0": ("killed", "table: Enough", True),
        "guests < 5": ("same", "", False),
        "guests >= 0": ("same", "", False),
        r"\/ n = 1 \/ seats = 9": ("same", "", False),
        "guests > 0": ("same", "", False),
        "guests > 1": ("weaker", "", True),
    }
    assert heard == [trial.guard.text for trial in trials]


def test_no_more_is_tried_when_the_time_is_up(table: Manifest) -> None:
    heard: list[object] = []
    assert mutate("table", manifest=table, seconds=0.0, heard=heard.append) == []
    assert heard == []


def test_a_protocol_without_models_is_an_error(table: Manifest) -> None:
    with pytest.raises(ModelError, match="payload_reuse"):
        mutate("nothing", manifest=table)


def test_reasons_that_cannot_be_read_are_an_error(table: Manifest) -> None:
    (table.directory / "survivors.toml").write_text('[[survivor]]\nmodule = "Table"\n')
    with pytest.raises(ModelError, match=r"survivors\.toml"):
        reasons(table)


@pytest.fixture(scope="module")
def project() -> Manifest:
    return manifests.load()


@pytest.fixture(scope="module")
def found(project: Manifest) -> dict[str, list[Guard]]:
    """The guards of each protocol."""
    return {protocol: all_guards(protocol, project) for protocol in PROTOCOLS}


def test_results_are_of_these_specifications(found: dict[str, list[Guard]], project: Manifest) -> None:
    """`quiesce mutate --write` tries again what is not."""
    score = Score(project)
    old = [row for row in read() if not score.valid(row)]
    assert not old
    known = {(protocol, guard.key) for protocol, those in found.items() for guard in those}
    assert {(row.protocol, row.key) for row in read()} <= known


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_guard_was_tried(protocol: str, found: dict[str, list[Guard]]) -> None:
    kept = {row.key for row in read() if row.protocol == protocol}
    assert {guard.key for guard in found[protocol]} == kept


def test_survivors_and_reasons_belong_together(found: dict[str, list[Guard]], project: Manifest) -> None:
    """Every survivor has a reason; every reason is for a guard there is, and that was not killed."""
    explained = set(reasons(project))
    kept = read()
    assert {row.key for row in kept if row.fate != "killed"} <= explained
    assert explained <= {guard.key for those in found.values() for guard in those}
    assert not explained & {row.key for row in kept if row.fate == "killed"}


def test_the_page_shows_what_is_kept(project: Manifest) -> None:
    page = path().with_name("mutation.md").read_text(encoding="utf-8")
    assert rewritten(page, read(), reasons(project)) == page


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_sample_is_killed_again(protocol: str, found: dict[str, list[Guard]], project: Manifest) -> None:
    killed = {row.key: row.killer for row in read() if row.protocol == protocol and row.fate == "killed"}
    those = [guard for guard in found[protocol] if guard.key in killed]
    trials = mutate(protocol, chosen=random.Random(protocol).sample(those, SAMPLE), hints=killed)
    assert [trial.fate for trial in trials] == ["killed"] * SAMPLE


@pytest.mark.nightly
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_guard_is_missed_or_explained(protocol: str, found: dict[str, list[Guard]]) -> None:
    kept = {row.key: row.killer for row in read() if row.protocol == protocol}
    bad = [t for t in mutate(protocol, chosen=found[protocol], hints=kept) if not t.good]
    assert not bad, bad


def test_a_result_is_of_the_models_it_was_had_with(table: Manifest) -> None:
    """Comments and blanks make no difference; a model that did not kill makes none to a mutant that was killed."""
    file = table.directory / "manifest.toml"
    another = file.read_text().replace('"table"', '"other"', 1).replace("nobody stands", "nobody sits")
    killed, same = mutate("table", manifest=table, chosen=all_guards("table", table)[:2])
    kept = [Score(table).kept("table", trial) for trial in (killed, same)]
    spec = table.directory / "Table.tla"
    spec.write_text(TABLE.replace("Enough ==", "\\* Of seats.\nEnough  =="))
    assert [Score(table).valid(row) for row in kept] == [True, True]
    file.write_text(file.read_text() + another)
    assert [Score(manifests.load(file)).valid(row) for row in kept] == [True, False]
    spec.write_text(TABLE.replace("seats >= 0", "seats >= 0 /\\ guests >= 0"))
    assert [Score(table).valid(row) for row in kept] == [False, False]


def test_a_guard_says_where_it_stands() -> None:
    assert Guard("M", "A", "x", (1, 4), (1, 4)).dropped("a  x b") == "a  TRUE b"
