"""The project's own manifest: everything pinned, every claim broken by some mutant, every fault in a specification."""

from __future__ import annotations

import re

import pytest

from quiesce.model import Oracle, manifest
from quiesce.model.graph import Graph
from quiesce.model.manifest import DEADLOCK, Manifest, Model, Mutant
from quiesce.model.paths import spec_directory

PROJECT: Manifest = manifest.load()
TYPES = re.compile(r"TypeOK$|TypeInv$")


def claims(model: Model) -> set[str]:
    config = PROJECT.config(model)
    return {name for name in config.invariants + config.properties if not TYPES.search(name)}


@pytest.mark.parametrize("model", PROJECT.models.values(), ids=lambda model: model.name)
def test_every_model_is_complete(model: Model) -> None:
    assert (PROJECT.directory / f"{model.module}.tla").is_file()
    assert claims(model), "a model that claims nothing proves nothing"
    assert model.distinct, "distinct is not pinned"
    assert model.depth, "depth is not pinned"
    assert "Fault" in PROJECT.config(model).constants


@pytest.mark.parametrize("mutant", PROJECT.mutants.values(), ids=lambda mutant: mutant.name)
def test_every_mutant_is_complete(mutant: Mutant) -> None:
    assert mutant.depth, "depth is not pinned"
    assert mutant.violates == DEADLOCK or mutant.violates in claims(PROJECT.models[mutant.model])
    assert mutant.protocol == PROJECT.models[mutant.model].protocol


def test_every_claim_is_broken_by_some_mutant() -> None:
    broken = {(mutant.protocol, mutant.violates) for mutant in PROJECT.mutants.values()}
    unbroken = {
        f"{model.name}: {claim}"
        for model in PROJECT.models.values()
        for claim in claims(model)
        if (model.protocol, claim) not in broken
    }
    assert not unbroken


def test_every_fault_stands_in_a_specification() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in spec_directory().rglob("*.tla"))
    faults = {mutant.overrides["Fault"].strip('"') for mutant in PROJECT.mutants.values()}
    assert not {fault for fault in faults if not any(_stands(part, text) for part in _splits(fault))}


def _splits(fault: str) -> list[tuple[str, ...]]:
    """The fault's name whole, and put together of two strings, as "without_" \\o position."""
    ends = [index + 1 for index, character in enumerate(fault) if character == "_"]
    return [(fault,), *((fault[:end], fault[end:]) for end in ends)]


def _stands(parts: tuple[str, ...], text: str) -> bool:
    return all(f'"{part}"' in text for part in parts)


def test_every_configuration_is_in_the_manifest() -> None:
    # The fence table asks its own questions, and has a digest and tests of its own.
    listed = {model.config for model in PROJECT.models.values()} | {"MCFenceTable.cfg"}
    unlisted = {path.name for path in PROJECT.directory.glob("*.cfg")} - listed
    assert not unlisted


SMALL_ENOUGH = 1_500
BY_SIZE = sorted(PROJECT.models.values(), key=lambda model: -(model.distinct or 0))
SMALLEST = {model.protocol: model for model in BY_SIZE if model.distinct}
TINY = [model for model in SMALLEST.values() if (model.distinct or 0) <= SMALL_ENOUGH]


@pytest.mark.parametrize("model", TINY, ids=lambda model: model.name)
def test_the_oracle_finds_the_pinned_number_of_states(model: Model) -> None:
    assert len(Graph.explore(Oracle.load(model.name)).states) == model.distinct
