"""Guards are found where they stand, dropped one at a time, and what becomes of each mutant is told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from quiesce.model import manifest as manifests
from quiesce.model.errors import ModelError
from quiesce.model.manifest import Manifest
from quiesce.model.mutation import PROTOCOLS, Guard, guards, mutate, reasons
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

GONE_THROUGH = ("stage_handoff",)
"""Protocols whose survivors all have a reason; `quiesce mutate` shows those of the others."""


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


def test_a_sample_is_the_same_for_the_same_seed(table: Manifest) -> None:
    first = [trial.guard for trial in mutate("table", manifest=table, sample=1, seed=3)]
    assert first == [trial.guard for trial in mutate("table", manifest=table, sample=1, seed=3)]
    assert len(first) == 1


def test_a_protocol_without_models_is_an_error(table: Manifest) -> None:
    with pytest.raises(ModelError, match="payload_reuse"):
        mutate("nothing", manifest=table)


def test_reasons_that_cannot_be_read_are_an_error(table: Manifest) -> None:
    (table.directory / "survivors.toml").write_text('[[survivor]]\nmodule = "Table"\n')
    with pytest.raises(ModelError, match=r"survivors\.toml"):
        reasons(table)


def test_every_reason_is_for_a_guard_that_exists() -> None:
    manifest = manifests.load()
    found: set[tuple[str, str, str]] = set()
    for model in manifest.models.values():
        if model.protocol in PROTOCOLS and model.size == "small":
            found |= {
                (g.module, g.action, g.text) for g in guards(Oracle.load(model.name, manifest=manifest))
            }
    assert set(reasons(manifest)) <= found


@pytest.mark.parametrize("protocol", GONE_THROUGH)
def test_sampled_guards_are_missed_or_explained(protocol: str) -> None:
    """`quiesce mutate` tries all of them."""
    for trial in mutate(protocol, sample=2, seed=1):
        assert trial.good, trial


@pytest.mark.nightly
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("protocol", GONE_THROUGH)
def test_every_guard_is_missed_or_explained(protocol: str) -> None:
    bad = [trial for trial in mutate(protocol) if not trial.good]
    assert not bad, bad


def test_a_guard_says_where_it_stands() -> None:
    assert Guard("M", "A", "x", (1, 4), (1, 4)).dropped("a  x b") == "a  TRUE b"
