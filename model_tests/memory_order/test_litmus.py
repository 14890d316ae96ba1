"""Every row of the litmus table can fail, and the strengths stand in the order they should."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from quiesce.model import manifest, paths, tlc
from quiesce.model.config import Config

MODELS = ("sc", "tso", "arm")
SHAPES = ("MP", "SB", "LB", "S", "R", "_2_2W", "IRIW", "CoRR", "WRC")
STRENGTHS = ("none", "acquire_release", "sc_atomics", "full_fence", "lock", "lock_aarch64", "system_call")


def verdicts(fault: str) -> dict[tuple[str, str, str], bool]:
    """Whether TLC reached the relaxed outcome, for each row, with a fault switched on."""
    models = paths.spec_directory() / "models"
    config = Config.parse((models / "MCLitmus.cfg").read_text()).override({"Fault": f'"{fault}"'}).only(None)
    config = replace(config, names={**config.names, "constraint": ("Report",)})
    result = tlc.run(
        models / "MCLitmus.tla", config, libraries=manifest.load().libraries, timeout=250, coverage=False
    )
    assert result.holds, result.message
    rows = re.findall(
        r'<<\s*"verdict",\s*<<\s*"(\w+)",\s*"(\w+)",\s*"(\w+)"\s*>>,\s*(TRUE|FALSE)\s*>>',
        "\n".join(result.printed),
    )
    return {(model, strength, shape): value == "TRUE" for model, strength, shape, value in rows}


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str, str], bool]:
    return verdicts("none")


def test_every_row_has_a_verdict(table: dict[tuple[str, str, str], bool]) -> None:
    rows = {(m, s, shape) for m in MODELS for s in STRENGTHS for shape in SHAPES}
    assert rows < set(table)
    assert sum(strength == "single" for _, strength, _ in table) == 3 * 37


def test_the_table_of_the_literature(table: dict[tuple[str, str, str], bool]) -> None:
    """The nine shapes once more, written down independently of the specification."""
    store_load = {"SB", "R"}
    expected = {
        "sc": {key: set() for key in ("none", "acquire_release", "sc_atomics", "full_fence")},
        "tso": {"none": store_load, "acquire_release": store_load, "sc_atomics": set(), "full_fence": set()},
        "arm": {
            "none": set(SHAPES) - {"CoRR"},
            "acquire_release": store_load,
            "sc_atomics": set(),
            "full_fence": set(),
        },
    }
    for model, strengths in expected.items():
        for strength, allowed in strengths.items():
            assert {s for s in SHAPES if table[model, strength, s]} == allowed, (model, strength)


def test_every_allowed_row_can_fail(table: dict[tuple[str, str, str], bool]) -> None:
    assert not any(verdicts("all_ordered").values())
    assert any(table.values())


def test_every_forbidden_row_can_fail(table: dict[tuple[str, str, str], bool]) -> None:
    turned = verdicts("none_ordered")
    assert not [row for row, seen in turned.items() if not seen]
    assert not all(table.values())


def test_a_lock_orders_no_more_than_nothing_on_arm(table: dict[tuple[str, str, str], bool]) -> None:
    """A lock round trip lets both sides into the critical section, where they cross."""
    for shape in SHAPES:
        for lock in ("lock", "lock_aarch64", "system_call"):
            assert table["arm", lock, shape] == table["arm", "none", shape]
            assert table["sc", lock, shape] == table["sc", "full_fence", shape]
        assert table["tso", "lock", shape] == table["tso", "full_fence", shape]
