"""Mutants of the protocol modules, made by cosmic-ray, against the tests: `python -m model_tests.mutation.generated`.

The modules are mutated in a temporary copy of the checkout, never in place. A mutant meets the tests that run its line,
the quickest first, up to the first that fails; tests between processes, of which nobody knows the lines, come last.
Needs the extra `quiesce[mutation]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from model_tests.mutation.mutants import ROOT, Mutation, difference, in_turn, mutated, source_of, statement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAYLOAD = (
    "payload_reuse/test_survivors.py", "payload_reuse/test_lifecycle.py", "payload_reuse/test_receiver.py",
    "payload_reuse/test_edges.py", "payload_reuse/test_borrowing.py", "payload_reuse/test_faults.py",
)  # fmt: skip
RING = (
    "broadcast_ring/test_survivors.py", "broadcast_ring/test_objects.py", "broadcast_ring/test_progress.py",
    "broadcast_ring/test_counters.py",
)  # fmt: skip
STAGE = ("stage_handoff/test_survivors.py", "stage_handoff/test_link.py", "stage_handoff/test_schedules.py")
TESTS: dict[str, tuple[str, ...]] = {
    "payload_reuse": PAYLOAD,
    "payload_receiver": PAYLOAD,
    "lifecycle": PAYLOAD,
    "turns": (*PAYLOAD, "broadcast_ring/test_survivors.py", "broadcast_ring/test_progress.py"),
    "broadcast_ring": RING,
    "ring_writer": RING,
    "ring_reader": RING,
    "ring_memory": RING,
    "stage_handoff": STAGE,
    "transport": ("stage_handoff/test_transport.py",),
    "host_staging": ("stage_handoff/test_schedules.py",),
}
"""The protocol modules, and the tests that have to notice when one is mutated."""
LONG: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("payload_reuse", "payload_receiver", "lifecycle"),
        ("payload_reuse/test_lockstep.py::test_the_sender_keeps_step",),
    ),
    **dict.fromkeys(
        ("broadcast_ring", "ring_writer", "ring_reader", "ring_memory"),
        (
            "broadcast_ring/test_lockstep.py",
            "broadcast_ring/test_processes.py::test_late_reader_starts_with_the_next_message",
            "broadcast_ring/test_processes.py::test_every_reader_sees_the_sequence",
        ),
    ),
    "turns": ("faults/test_lifetimes.py::test_an_exception_never_leaves_a_turn_taken",),
    "stage_handoff": ("stage_handoff/test_lockstep.py::test_the_link_keeps_step",),
    "transport": ("stage_handoff/test_gloo.py::test_a_dead_peer_ends_the_link",),
    "host_staging": ("stage_handoff/test_lockstep.py::test_staging_and_specification_agree",),
}
"""Tests that take long, and those whose lines are not known, since they run a module in processes of their own."""
VARIANTS, QUICK_S = 3, 5.0
"""When it is to be quick: so many variants of a test with parameters, and so many seconds of tests."""
LEAST_S, TIMES = 10.0, 20.0
"""What a test may take: so many seconds at least, and so many times what it takes with no mutation."""


@dataclass(frozen=True)
class Trial:
    """What became of a mutant: `by` is the test that failed, `changed` the line as it was and as it became."""

    mutation: Mutation
    fate: Literal["caught", "hung", "survived", "equivalent"]
    changed: str
    by: str
    why: str
    seconds: float


def equivalents() -> dict[tuple[str, str], str]:
    """Why a mutant that survives differs in nothing that is promised, by module and change."""
    path = Path(__file__).parent / "reasons.toml"
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    return {(entry["module"], change): entry["reason"] for entry in entries for change in entry["changes"]}


class Copy:
    """A copy of the checkout in a temporary folder, in which one module at a time is another."""

    def __init__(self, folder: Path, kept: Path | None) -> None:
        self.folder = folder
        self._kept = kept
        for name in ("impl", "spec", "model_tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        self._shipped = {path: path.read_bytes() for path in sorted((folder / "impl").rglob("*.py"))}
        self._known: dict[str, Any] = json.loads(kept.read_text()) if kept and kept.exists() else {}
        # A mutant of the same size within the same second would find the byte code of the one before.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(folder / "impl"), str(folder))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "QUIESCE_PROFILE": "dev",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / ".hypothesis"),
        }
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "model_tests.mutation.warm"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Copy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._warm.terminate()  # it ends the tests that it runs
        try:
            self._warm.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._warm.kill()
            self._warm.communicate()

    def run(
        self, tests: list[str], limits: dict[str, float], seconds: float, cover: str = ""
    ) -> dict[str, Any]:
        """Run tests in the copy as it is: a `warm.Report` as a dict."""
        assert self._warm.stdin
        assert self._warm.stdout
        job = {"tests": tests, "limits": limits, "seconds": seconds, "cover": cover}
        self._warm.stdin.write(json.dumps(job) + "\n")
        self._warm.stdin.flush()
        answer = self._warm.stdout.readline()
        if not answer:
            raise RuntimeError("the process that runs the tests has ended; run it by hand to see why")
        report: dict[str, Any] = json.loads(answer)
        return report

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(b"".join(self._shipped.values())).hexdigest()

    def shipped(self, tests: str) -> dict[str, Any]:
        """What tests do with no mutation: the seconds of each, and which run a line. Kept from one start to the next.

        Raises `RuntimeError` if they fail.
        """
        file = self.folder / "model_tests" / tests.partition("::")[0]
        digest = hashlib.sha256(self._digest.encode() + file.read_bytes()).hexdigest()
        if self._known.get(tests, {}).get("digest") != digest:
            found = self.run([f"model_tests/{tests}"], {}, 250.0, str(self.folder / "impl" / "quiesce"))
            if found["status"] != 0:
                raise RuntimeError(f"the tests do not pass as they are: {found['failed']}: {found['why']}")
            lines = {Path(name).stem: ran for name, ran in found["lines"].items()}
            self._known[tests] = {"digest": digest, "seconds": found["seconds"], "lines": lines}
            if self._kept:
                self._kept.write_text(json.dumps(self._known))
        known: dict[str, Any] = self._known[tests]
        return known

    def chosen(self, mutation: Mutation, quick: bool) -> dict[str, float]:
        """The tests for a mutant, in their order, with the seconds they take."""
        path = source_of(mutation.module, self.folder)
        first, last = statement(self._shipped[path].decode(), mutation.line)
        here: dict[str, float] = {}
        others: dict[str, float] = {}
        for tests in TESTS[mutation.module]:
            known = self.shipped(tests)
            ran = known["lines"].get(mutation.module, {})
            running = set(chain.from_iterable(ran.get(str(line), []) for line in range(first, last + 1)))
            for test, seconds in known["seconds"].items():
                # What runs when the module is imported matters to every test.
                if test in running:
                    here[test] = seconds
                elif "" in running:
                    others[test] = seconds
        by_time = [sorted(some.items(), key=lambda item: item[1]) for some in (here, others)]
        found = dict(chain(*by_time))
        if quick:
            met: Counter[str] = Counter()
            left = QUICK_S
            for test, seconds in tuple(found.items()):
                name = test.partition("[")[0]
                met[name] += 1
                if met[name] > VARIANTS or left < seconds:
                    del found[test]
                else:
                    left -= seconds
        else:
            for tests in LONG[mutation.module]:
                found |= self.shipped(tests)["seconds"]
        return found

    def attempt(self, mutation: Mutation, quick: bool) -> Trial:
        """Run the tests for a mutant up to the first that fails; the long ones too, unless it is to be quick."""
        begun = time.monotonic()
        tests = self.chosen(mutation, quick)
        path = source_of(mutation.module, self.folder)
        source = mutated(mutation, self.folder)
        changed = difference(self._shipped[path].decode(), source)
        path.write_text(source, encoding="utf-8")
        try:
            limits = {test: max(LEAST_S, TIMES * seconds) for test, seconds in tests.items()}
            most = 3 * LEAST_S + TIMES / 2 * sum(tests.values())
            found = (
                self.run(list(tests), limits, most)
                if tests
                else {"status": 0, "failed": "", "why": "no test"}
            )
        finally:
            path.write_bytes(self._shipped[path])
        fate: Literal["caught", "hung", "survived", "equivalent"] = "caught"
        if found["status"] is None or found["why"].startswith("Failed: Timeout"):
            fate = "hung"
        elif found["status"] == 0:
            fate = "equivalent" if (mutation.module, changed) in equivalents() else "survived"
        by = found["failed"].rpartition("/")[2]
        return Trial(mutation, fate, changed, by, found["why"], round(time.monotonic() - begun, 2))


def score(trials: Sequence[Trial]) -> str:
    """How many mutants of each module were tried, and what became of them, as a table."""
    lines = [
        "| module | tried | caught | of which by its time limit | equivalent | survived |",
        "|---|---|---|---|---|---|",
    ]
    for module in [*TESTS, "all"]:
        fates = Counter(t.fate for t in trials if module in (t.mutation.module, "all"))
        if total := fates.total():
            caught = fates["caught"] + fates["hung"]
            lines.append(
                f"| `{module}` | {total} | {caught} | {fates['hung']} | {fates['equivalent']} | {fates['survived']} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Try mutants until there are no more, or no more time; print each trial, and the score. 1 if any survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help="all, if none is named")
    parser.add_argument("--sample", type=int, help="so many mutants, spread over the modules")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no mutant after so many seconds"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="append the trials to this file, one a line; those that it has are not tried again",
    )
    parser.add_argument("--again", action="store_true", help="try those of the file that survived once more")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="leave out tests that take long and most variants of others",
    )
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    had: dict[Mutation, Trial] = {}
    if options.json and options.json.exists():
        for line in options.json.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            mutation = Mutation(**entry.pop("mutation"))
            had[mutation] = Trial(mutation, **entry)
    kept = options.json.with_suffix(".tests.json") if options.json else None
    with (
        tempfile.TemporaryDirectory(prefix="quiesce-mutants-") as directory,
        Copy(Path(directory), kept) as copy,
    ):
        chosen = in_turn(options.modules or list(TESTS), options.seed, copy.folder)[: options.sample]
        trials = {mutation: had[mutation] for mutation in chosen if mutation in had}
        again = {mutation for mutation, trial in trials.items() if options.again and trial.fate == "survived"}
        for mutation in chosen:
            if time.monotonic() > until:
                break
            if mutation in trials and mutation not in again:
                continue
            trial = trials[mutation] = copy.attempt(mutation, options.quick)
            where = f"{mutation.module}.py:{mutation.line}"
            print(
                f"{trial.fate:<10} {trial.seconds:6.1f} s {where} {trial.changed}  [{trial.by}]", flush=True
            )
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(trial)) + "\n")
    print(score(list(trials.values())))
    return int(any(trial.fate == "survived" for trial in trials.values()))


if __name__ == "__main__":
    sys.exit(main())
