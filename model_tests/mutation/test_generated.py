"""Generated mutants are other programs, samples of them are even, and the tests that are run tell them apart."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from model_tests.mutation.generated import TESTS, Copy, equivalents
from model_tests.mutation.mutants import in_turn, mutated, mutations, source_of

made = pytest.mark.skipif(
    not (find_spec("cosmic_ray") and find_spec("coverage")), reason="needs the extra `mutation`"
)


@made
def test_mutants_are_other_programs() -> None:
    for module in ("lifecycle", "payload_receiver", "host_staging"):
        found = mutations(module)
        assert len(found) > 50
        source = source_of(module).read_text(encoding="utf-8")
        for mutation in random.Random(module).sample(found, 4):
            changed = mutated(mutation)
            compile(changed, module, "exec")
            assert changed != source


@made
def test_a_sample_is_even_and_the_same_again() -> None:
    modules = ["lifecycle", "payload_receiver"]
    order = in_turn(modules, seed=1)
    assert [mutation.module for mutation in order[:6]] == modules * 3
    assert set(order) == {mutation for module in modules for mutation in mutations(module)}
    assert order == in_turn(modules, seed=1) != in_turn(modules, seed=2)


def test_reasons_are_for_lines_that_there_are() -> None:
    """A line that is another by now may have another mutant."""
    sources = {module: source_of(module).read_text(encoding="utf-8") for module in TESTS}
    for module, change in equivalents():
        assert change.partition("  ->  ")[0] in sources[module], change


@made
def test_a_mutant_meets_the_tests_that_run_its_line(tmp_path: Path) -> None:
    """What is shipped stays as it is, the mutant is caught, and one that changes nothing survives."""
    test = "payload_reuse/test_lifecycle.py"
    shipped = source_of("lifecycle").read_bytes()
    with Copy(tmp_path, None) as copy:
        ran = copy.shipped(test)
        line = next(
            n for n, text in enumerate(shipped.decode().splitlines(), 1) if "if not self._free:" in text
        )
        assert any("test_a_surplus_buffer" in name for name in ran["lines"]["lifecycle"][str(line)])
        job = [f"model_tests/{test}"]
        assert copy.run(job, {}, 60.0)["status"] == 0
        (mutation,) = (m for m in mutations("lifecycle") if m.line == line and m.operator == "core/AddNot")
        source_of("lifecycle", copy.folder).write_text(mutated(mutation), encoding="utf-8")
        found = copy.run(job, {}, 60.0)
        assert found["status"] == 1
        assert found["failed"].startswith(f"model_tests/{test}::")
    assert source_of("lifecycle").read_bytes() == shipped
