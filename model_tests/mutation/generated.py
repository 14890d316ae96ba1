"""Mutants of the protocol modules, made by cosmic-ray, against the tests: `python -m model_tests.mutation.generated`.

The modules are mutated in a temporary copy of the checkout, never in place; each mutant is run against the tests of its
protocol, up to the first that fails. Needs the extra `quiesce[mutation]`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal

ROOT = Path(__file__).parent.parent.parent
PAYLOAD = (
    "mutation/test_survivors.py", "payload_reuse/test_lifecycle.py", "payload_reuse/test_receiver.py",
    "payload_reuse/test_edges.py", "payload_reuse/test_borrowing.py", "payload_reuse/test_faults.py",
    "payload_reuse/test_lockstep.py::test_the_sender_keeps_step",
)  # fmt: skip
RING = (
    "broadcast_ring/test_objects.py", "broadcast_ring/test_progress.py", "broadcast_ring/test_counters.py",
    "broadcast_ring/test_lockstep.py", "broadcast_ring/test_processes.py",
)  # fmt: skip
STAGE = (
    "stage_handoff/test_link.py", "stage_handoff/test_schedules.py",
    "stage_handoff/test_lockstep.py::test_the_link_keeps_step",
)  # fmt: skip
STAGING = (
    "stage_handoff/test_schedules.py",
    "stage_handoff/test_lockstep.py::test_staging_and_specification_agree",
)
TESTS: dict[str, tuple[str, ...]] = {
    "payload_reuse": PAYLOAD,
    "payload_receiver": PAYLOAD,
    "lifecycle": PAYLOAD,
    "broadcast_ring": RING,
    "ring_writer": RING,
    "ring_reader": RING,
    "ring_memory": RING,
    "stage_handoff": STAGE,
    "host_staging": STAGING,
}
"""The protocol modules, and the tests that have to notice when one is mutated."""
EXPRESSIONS = ("expr", "xor_expr", "and_expr", "shift_expr", "arith_expr", "term", "power")
"""What a binary operator stands in, as parso calls it."""
TIMEOUT_S = 180.0
"""Seconds that the tests of a mutant may take. Without an answer by then it may hang, or the machine may be busy."""


@dataclass(frozen=True)
class Mutation:
    """One change that cosmic-ray makes: its operator, and which of the operator's places in the module."""

    module: str
    operator: str
    occurrence: int
    line: int
    text: str


@dataclass(frozen=True)
class Trial:
    """What became of a mutant; `by` is the test that failed, `changed` the line as it was and as it became."""

    mutation: Mutation
    fate: Literal["killed", "survived", "no answer"]
    changed: str
    by: str = ""


def mutations(module: str) -> list[Mutation]:
    """All mutants of a module, but for those of annotations, which nothing evaluates."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    source = _source(module).read_text(encoding="utf-8")
    lines = source.splitlines()
    idle = list(_annotations(source))
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name in sorted(operator_names()):
        kind = get_operator(name)
        if kind.arguments():
            continue
        places = [(node, begin) for node in nodes for begin, _ in kind().mutation_positions(node)]
        found += [
            Mutation(module, name, number, begin[0], lines[begin[0] - 1].strip())
            for number, (node, begin) in enumerate(places)
            # A star in a signature or a call is no operator, although cosmic-ray takes it for one.
            if ("BinaryOperator" not in name or node.parent.type in EXPRESSIONS)
            and not any(first <= begin < last for first, last in idle)
        ]
    return found


def _annotations(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(ast.parse(source)):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(annotation, ast.expr):
                assert annotation.end_lineno is not None
                assert annotation.end_col_offset is not None
                yield (
                    (annotation.lineno, annotation.col_offset),
                    (annotation.end_lineno, annotation.end_col_offset),
                )


def _source(module: str, root: Path = ROOT) -> Path:
    return root / "impl" / "quiesce" / f"{module}.py"


def mutated(mutation: Mutation) -> str:
    """The source of the module with the change made."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    source = _source(mutation.module).read_text(encoding="utf-8")
    changed = mutate_code(source, get_operator(mutation.operator)(), mutation.occurrence)
    assert isinstance(changed, str)
    return changed


def _difference(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    for one, other in zip(old, new, strict=False):
        if one != other:
            return f"{one.strip()}  ->  {other.strip()}"
    return "lines at the end differ"


class Copy:
    """A copy of the checkout in a temporary folder, in which one module at a time is another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("impl", "spec", "model_tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)

    def run(self, module: str, source: str | None, timeout: float) -> tuple[int | None, str]:
        """Run the tests with this source of the module: the exit status, None if they hang; what failed."""
        path = _source(module, self.folder)
        original = path.read_text(encoding="utf-8")
        if source is not None:
            path.write_text(source, encoding="utf-8")
        try:
            return self._pytest(TESTS[module], timeout)
        finally:
            path.write_text(original, encoding="utf-8")

    def _pytest(self, tests: tuple[str, ...], timeout: float) -> tuple[int | None, str]:
        # A mutant of the same size within the same second would find the byte code of the one before.
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "impl"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "QUIESCE_PROFILE": "dev",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / ".hypothesis"),
            "COLUMNS": "250",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-rf",
            "-p",
            "no:cacheprovider",
            "--timeout",
            "60",
        ]
        with tempfile.TemporaryFile("w+") as told:
            process = subprocess.Popen(
                [*command, *(f"model_tests/{test}" for test in tests)],
                cwd=self.folder,
                env=environment,
                stdout=told,
                stderr=told,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            told.seek(0)
            lines = told.read().splitlines()
        failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "")
        return status, failed.partition(" - ")[0].rpartition("/")[2]


def run(
    chosen: list[Mutation], jobs: int = 1, timeout: float = TIMEOUT_S, until: float = float("inf")
) -> Iterator[Trial]:
    """Try mutants, `jobs` at a time, none begun after `until` (monotonic seconds).

    Raises `RuntimeError` if the tests of a module fail without any mutation.
    """
    with tempfile.TemporaryDirectory(prefix="quiesce-mutants-") as directory:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(directory, str(number))))

        def sound(tests: tuple[str, ...]) -> None:
            copy = copies.get()
            try:
                status, failed = copy._pytest(tests, timeout)
            finally:
                copies.put(copy)
            if status != 0:
                raise RuntimeError(f"the tests do not pass as they are ({status}): {failed}")

        def tried(mutation: Mutation) -> Trial | None:
            if time.monotonic() > until:
                return None
            copy = copies.get()
            try:
                source = mutated(mutation)
                status, by = copy.run(mutation.module, source, timeout)
            finally:
                copies.put(copy)
            original = _source(mutation.module).read_text(encoding="utf-8")
            fate: Literal["killed", "survived", "no answer"] = "survived" if status == 0 else "killed"
            return Trial(mutation, "no answer" if status is None else fate, _difference(original, source), by)

        with ThreadPoolExecutor(jobs) as pool:
            for _ in pool.map(sound, {TESTS[mutation.module] for mutation in chosen}):
                pass
            yield from filter(None, pool.map(tried, chosen))


def main() -> None:
    """Try a sample, or all; print each trial, and the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="all, if none is named")
    parser.add_argument("--sample", type=int, help="so many mutants, spread over the modules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for the tests of a mutant")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no mutant after so many seconds"
    )
    parser.add_argument("--json", type=Path, help="append the trials to this file, one a line")
    options = parser.parse_args()
    chosen = [mutation for module in options.modules or TESTS for mutation in mutations(module)]
    every = len(chosen)
    if options.sample is not None and options.sample < every:
        chosen = random.Random(options.seed).sample(chosen, options.sample)
    trials = []
    for trial in run(chosen, options.jobs, options.timeout, time.monotonic() + options.seconds):
        trials.append(trial)
        where = f"{trial.mutation.module}.py:{trial.mutation.line}"
        print(f"{trial.fate:<10}{where} {trial.changed}  [{trial.by}]", flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
    counts = Counter(trial.fate for trial in trials)
    print(
        f"{len(trials)} of {every} tried: " + ", ".join(f"{count} {fate}" for fate, count in counts.items())
    )


if __name__ == "__main__":
    main()
