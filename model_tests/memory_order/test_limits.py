"""What the memory model does not cover: each test says what a machine beyond it may do, and is expected to fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_tests.memory_order.axiomatic import Instruction, Program
from model_tests.memory_order.test_axioms import MODELS, machine_outcomes

ONE = frozenset({1})


def reachable(program: Program, outcome: tuple[int, ...], directory: Path) -> bool:
    """Whether ARM has the outcome: values of all loads in program order, then the words x, y, z."""
    return outcome in machine_outcomes([program], directory)[MODELS.index("arm") + 1]


def load(word: str, **fields: frozenset[int]) -> Instruction:
    return Instruction("load", word, **fields)


def store(word: str, value: int, **fields: frozenset[int]) -> Instruction:
    return Instruction("store", word, "plain", value, **fields)


FULL = Instruction("fence", order="full")


def test_an_outcome_inside_the_model_is_found(tmp_path: Path) -> None:
    """So that the tests below do not fail for want of a reachable outcome: load buffering without dependencies."""
    program = ((load("x"), store("y", 1)), (load("y"), store("x", 1)))
    assert reachable(program, (1, 1, 1, 1, 0), tmp_path)


@pytest.mark.xfail(strict=True, reason="values are not predicted: no architecture modelled here does")
def test_value_speculation(tmp_path: Path) -> None:
    program = ((load("x"), store("y", 1, data=ONE)), (load("y"), store("x", 1, data=ONE)))
    assert reachable(program, (1, 1, 1, 1, 0), tmp_path)


@pytest.mark.xfail(
    strict=True, reason="multi-copy atomic: on POWER two readers may see two stores in two orders"
)
def test_two_readers_disagree_on_the_order_of_two_stores(tmp_path: Path) -> None:
    program = (
        (store("x", 1),),
        (store("y", 1),),
        (load("x"), load("y", addr=ONE)),
        (load("y"), load("x", addr=ONE)),
    )
    assert reachable(program, (1, 0, 1, 0, 1, 1, 0), tmp_path)


@pytest.mark.xfail(
    strict=True, reason="an access is performed whole: a wide store seen by halves is not modelled"
)
def test_a_wide_store_is_seen_by_halves(tmp_path: Path) -> None:
    """Word x stands for both halves, 11; a reader that sees one half only would read 1 or 10."""
    program = ((store("x", 11),), (load("x"),))
    assert reachable(program, (10, 11, 0, 0), tmp_path)


@pytest.mark.xfail(
    strict=True, reason="ordinary stores: a non-temporal store may pass a later ordinary one on x86"
)
def test_a_non_temporal_store_is_late(tmp_path: Path) -> None:
    program = ((store("x", 1), store("y", 1)), (load("y"), FULL, load("x")))
    outcome = (1, 0, 1, 1, 0)
    assert outcome in machine_outcomes([program], tmp_path)[MODELS.index("tso") + 1]


@pytest.mark.xfail(strict=True, reason="ordinary memory: device memory may drop, merge or repeat accesses")
def test_a_device_word_changes_by_itself(tmp_path: Path) -> None:
    program = ((load("x"), load("x")),)
    assert reachable(program, (0, 1, 0, 0, 0), tmp_path)
