"""The memory model as a machine has the outcomes of the memory model as axioms, on random small programs."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import pytest
from model_tests.memory_order.axiomatic import Instruction, Program, outcomes

from quiesce.model import paths, tlc
from quiesce.model.config import Config

WORDS = "xyz"
NUMBER = {"dev": 40, "ci": 80, "nightly": 2000}[os.environ.get("QUIESCE_PROFILE", "dev")]
MODELS = ("sc", "tso", "arm")
CONFIG = """
SPECIFICATION Spec
CONSTANT Fault = "{fault}"
CONSTANT Cases <- TheCases
CONSTANT Ordered <- TheOrders
CONSTRAINT Report
"""


def random_program(rng: random.Random) -> Program:
    """Two or three threads, five or six accesses, with whatever may stand between or on them."""
    lengths = rng.choice([(2, 2), (2, 3), (3, 3), (1, 2, 2), (1, 1, 3), (2, 2, 2)])
    value = iter(range(1, 10))
    words = WORDS[: rng.choice([2, 2, 3])]
    return tuple(tuple(random_thread(rng, length, words, value)) for length in lengths)


def random_thread(rng: random.Random, accesses: int, words: str, value) -> list[Instruction]:
    thread: list[Instruction] = []
    for number in range(accesses):
        loads = [n for n, ins in enumerate(thread) if ins.op == "load"]
        if number and rng.random() < 0.3:
            thread.append(Instruction("fence", order=rng.choice(["full", "load", "store", "context"])))
        if loads and rng.random() < 0.25:
            thread.append(Instruction("branch", ctrl=frozenset({len(thread) - rng.choice(loads)})))
            if rng.random() < 0.4:
                thread.append(Instruction("fence", order="context"))
        depends = (
            frozenset({len(thread) - rng.choice(loads)}) if loads and rng.random() < 0.5 else frozenset()
        )
        op, word = rng.choice(["load", "store"]), rng.choice(words)
        kind = rng.choice(["addr", "data"]) if op == "store" else "addr"
        order = rng.choice(["plain", "plain", *{"load": ["acquire", "acquire_pc"], "store": ["release"]}[op]])
        thread.append(Instruction(op, word, order, next(value) if op == "store" else 0, **{kind: depends}))
    return thread


def tla(ins: Instruction) -> str:
    def distances(found: frozenset[int]) -> str:
        return "{" + ", ".join(map(str, sorted(found))) + "}"

    if ins.op == "fence":
        return f'Fence("{ins.order}")'
    if ins.op == "branch":
        return f"Branch({distances(ins.ctrl)})"
    base = f'Load("{ins.word}")' if ins.op == "load" else f'Store("{ins.word}", {ins.value})'
    return (
        f'[{base} EXCEPT !.order = "{ins.order}", '
        f"!.addr = {distances(ins.addr)}, !.data = {distances(ins.data)}]"
    )


def machine_outcomes(
    programs: list[Program], directory: Path, fault: str = "none"
) -> dict[int, set[tuple[int, ...]]]:
    """TLC's outcomes of each program under each model; case numbers count models within programs, from 1."""
    cases = []
    for program in programs:
        text = ", ".join("<< " + ", ".join(map(tla, thread)) + " >>" for thread in program)
        cases += [f'[model |-> "{model}", programs |-> << {text} >>]' for model in MODELS]
    (directory / "Random.tla").write_text(
        "---- MODULE Random ----\nEXTENDS Outcomes\n"
        f"AllCases == << {', '.join(cases)} >>\nTheCases == AllCases\n"
        "AllOrders == [c \\in DOMAIN AllCases |-> [t \\in DOMAIN AllCases[c].programs |->\n"
        "                Before(AllCases[c].model, AllCases[c].programs[t])]]\nTheOrders == AllOrders\n====\n"
    )
    result = tlc.run(
        directory / "Random.tla",
        Config.parse(CONFIG.replace("{fault}", fault)),
        libraries=[paths.spec_directory(), Path(__file__).parent],
        timeout=600,
        deadlock=False,
        coverage=False,
    )
    assert result.holds, result.message
    found: dict[int, set[tuple[int, ...]]] = {n: set() for n in range(1, len(cases) + 1)}
    for case, values in re.findall(r'<<"outcome", (\d+), <<([\d, ]+)>>>>', "\n".join(result.printed)):
        found[int(case)].add(tuple(int(value) for value in values.split(",")))
    return found


def telling_programs(rng: random.Random) -> list[tuple[Program, dict[str, set[tuple[int, ...]]]]]:
    """Programs with their outcomes by the axioms; on three of four, the models differ."""
    found = []
    while len(found) < NUMBER:
        program = random_program(rng)
        expected = {model: outcomes(model, program, WORDS) for model in MODELS}
        if len(found) % 4 == 3 or len({frozenset(seen) for seen in expected.values()}) > 1:
            found.append((program, expected))
    return found


def disagreements(directory: Path, fault: str = "none") -> list[object]:
    programs = telling_programs(random.Random(20_180_108))
    seen = machine_outcomes([program for program, _ in programs], directory, fault)
    return [
        (model, program, seen[number * len(MODELS) + offset + 1] ^ expected[model])
        for number, (program, expected) in enumerate(programs)
        for offset, model in enumerate(MODELS)
        if seen[number * len(MODELS) + offset + 1] != expected[model]
    ]


def test_machine_and_axioms_agree(tmp_path: Path) -> None:
    assert not disagreements(tmp_path)


@pytest.mark.parametrize("fault", ["dependencies_ignored", "no_forwarding", "acquire_always_sc"])
def test_a_wrong_machine_disagrees(fault: str, tmp_path: Path) -> None:
    """Programs on which no fault shows would compare nothing."""
    assert disagreements(tmp_path, fault)
