"""Which synchronisation does the ring need, where, on which CPU: every subset, answered by TLC, as a table.

`python -m quiesce.model.fences` (`make fence-table`) writes the tables of docs/memory_order.md. Answers are kept
under .quiesce/fences by the hash of everything they depend on, so that a second run asks TLC nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quiesce.model import paths, tlc
from quiesce.model.config import Config
from quiesce.model.errors import ModelError

Set = frozenset[str]

POSITIONS = {
    "flags": (
        *("before_look", "before_unmark", "before_fill", "before_reset", "before_mark", "after_mark"),
        *("before_flag", "before_check", "before_copy", "before_done", "after_done"),
    ),
    "semaphores": (
        *("room_wait", "hear_wait", "announce_post"),
        *("open_wait", "pass_post", "release_post"),
    ),
    "doorbell": ("doorbell_wait", "doorbell_post"),
}
"""Where each ring may synchronise, in the order of the program; the specification's `Candidates`."""

FIELD_FOUR = frozenset({"before_look", "after_mark", "before_flag", "after_done"})
FIELD_FIVE = FIELD_FOUR | {"before_mark"}
"""The fences of the ring of flags in the field: vllm 29819, and with the one of vllm-ascend 3988."""

MODELS = {"sc": "SC", "tso": "x86-TSO", "arm": "ARMv8"}
MECHANISMS = {
    "full_fence": "full fence (`DMB ISH`, `MFENCE`)",
    "load_fence": "load fence (`DMB ISHLD`)",
    "store_fence": "store fence (`DMB ISHST`)",
    "lock_aarch64": "`threading.Lock` round trip, as compiled for AArch64 (`LDAXR`, `STLR`)",
    "lock": "`threading.Lock` round trip, as C11 promises it (acquire, release)",
    "system_call": "system call: `sched_yield`, `futex`, `eventfd` (context synchronisation only)",
}
STRENGTHS = {
    "none": "none",
    "acquire_release": "acquire, release",
    "sc_atomics": "`LDAR`, `STLR`",
    "full_fence": "full fence",
    "lock": "lock (C11)",
    "lock_aarch64": "lock (AArch64)",
    "system_call": "system call",
}
MODULES = ("MemoryModel.tla", "RingMemory.tla", "Litmus.tla")
DRIVERS = ("MCRingMemory.tla", "MCFenceTable.tla", "MCFenceTable.cfg", "MCLitmus.tla", "MCLitmus.cfg")


@dataclass(frozen=True)
class Question:
    """One run of TLC: a ring of some size under a memory model, and the sets of positions to try."""

    ring: str
    model: str
    mechanism: str
    control: bool
    readers: int
    slots: int
    window: int
    held: int
    rounds: int
    sets: tuple[tuple[str, ...], ...] | None = None
    """None asks for every subset of the positions."""

    def tried(self) -> set[Set]:
        """The sets of positions that the run gives a verdict on."""
        if self.sets is not None:
            return {frozenset(names) for names in self.sets}
        names = POSITIONS[self.ring]
        return {frozenset(c) for n in range(len(names) + 1) for c in itertools.combinations(names, n)}

    def constants(self) -> dict[str, str]:
        """The question as constants of the configuration."""
        sets = "<- EverySet"
        if self.sets is not None:
            sets = (
                "{" + ", ".join("{" + ", ".join(f'"{x}"' for x in names) + "}" for names in self.sets) + "}"
            )
        return {
            "Ring": f'"{self.ring}"',
            "Model": f'"{self.model}"',
            "Mechanism": f'"{self.mechanism}"',
            "Control": str(self.control).upper(),
            "Readers": str(self.readers),
            "Slots": str(self.slots),
            "Window": str(self.window),
            "Held": str(self.held),
            "Rounds": str(self.rounds),
            "PositionSets": sets,
        }


@dataclass(frozen=True)
class Answer:
    """`safe` are the sets under which every execution ends and nobody misreads; all others tried are violated."""

    safe: frozenset[Set]
    violated: frozenset[Set]
    distinct: int

    def least(self) -> list[Set]:
        """The safe sets of which no proper subset is safe."""
        return ordered(s for s in self.safe if not any(other < s for other in self.safe))

    def largest(self) -> list[Set]:
        """The violated sets of which no proper superset is violated."""
        return ordered(s for s in self.violated if not any(s < other for other in self.violated))


class Archive:
    """Answers of TLC, kept in `directory` as long as nothing that they depend on changes."""

    def __init__(self, directory: Path | None, timeout: float = 600.0) -> None:
        self.directory = directory
        self.timeout = timeout
        self.sources = digest()
        self.runs = 0

    def ask(self, question: Question) -> Answer:
        """The verdict on every set tried; `ModelError` if TLC gives none within `timeout` seconds."""
        lines, distinct = self.lines("MCFenceTable", asdict(question), question.constants())
        return read_verdicts(lines, question.tried(), distinct)

    def lines(
        self, module: str, about: dict[str, object], constants: dict[str, str]
    ) -> tuple[list[str], int]:
        """What the module prints, and the distinct states of the run."""
        key = hashlib.sha256(json.dumps([self.sources, module, about], sort_keys=True).encode()).hexdigest()
        kept = self.directory / f"{key}.json" if self.directory else None
        if kept and kept.is_file():
            found = json.loads(kept.read_text(encoding="utf-8"))
            return found["printed"], found["distinct"]
        models = paths.spec_directory() / "models"
        config = Config.parse((models / f"{module}.cfg").read_text(encoding="utf-8"), f"{module}.cfg")
        config = config.override(constants)
        if module == "MCLitmus":
            config = replace(config, names={**config.names, "constraint": ("Report",)})
        for _ in range(2):  # what the specification prints may fall into TLC's own message that it is done
            self.runs += 1
            result = tlc.run(
                models / f"{module}.tla",
                config,
                libraries=[paths.spec_directory()],
                timeout=self.timeout,
                deadlock=False,
                coverage=False,
            )
            if result.verdict != "crashed":
                break
        if not result.holds:
            raise ModelError(f"{module} gave no table ({result.verdict} {result.violated}): {result.message}")
        printed = [line for line in result.printed if line.strip()]
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps({"printed": printed, "distinct": result.distinct}), encoding="utf-8")
        return printed, result.distinct


def digest() -> str:
    """Of everything the tables depend on: specifications, configurations, this file."""
    spec = paths.spec_directory()
    files = (
        [spec / name for name in MODULES] + [spec / "models" / name for name in DRIVERS] + [Path(__file__)]
    )
    whole = hashlib.sha256()
    for file in files:
        whole.update(hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def read_verdicts(lines: Iterable[str], tried: set[Set], distinct: int = 0) -> Answer:
    """The verdicts that MCFenceTable printed.

    A set is violated if it, or a larger one, was found out; it is safe only if it was seen to complete and
    neither happened. A set with neither verdict is an error, not a pass.
    """
    found: dict[str, set[Set]] = {"violated": set(), "completes": set()}
    for verdict, names in re.findall(r'<<\s*"(\w+)",\s*\{([^}]*)\}\s*>>', "\n".join(lines)):
        found[verdict].add(frozenset(re.findall(r'"(\w+)"', names)))
    bad = {s for s in tried if any(s <= seen for seen in found["violated"])}
    silent = tried - bad - found["completes"]
    if silent:
        raise ModelError(
            f"no verdict on {len(silent)} sets of positions, such as {sorted(next(iter(silent)))}"
        )
    return Answer(frozenset(tried - bad), frozenset(bad), distinct)


def ordered(sets: Iterable[Set]) -> list[Set]:
    """Small sets first, then by name."""
    return sorted(sets, key=lambda s: (len(s), sorted(s)))


def every(ring: str, model: str, mechanism: str, control: bool, slots: int = 1) -> Question:
    """Every subset, on a ring with one reader that wraps twice; with two slots, the reader holds a message."""
    return Question(ring, model, mechanism, control, 1, slots, 1, slots - 1, 2 + slots)


def on(question: Question, sets: Iterable[Set], **size: int) -> Question:
    """The same question about a few sets, perhaps on a ring of another size."""
    names = POSITIONS[question.ring]
    tuples = tuple(tuple(x for x in names if x in s) for s in ordered(sets))
    return replace(question, sets=tuples, **size)  # type: ignore[arg-type]


def settle(archive: Archive, question: Question) -> Answer:
    """Every subset, without asking about each where no synchronisation at all is enough, or all of it is not.

    More synchronisation permits no execution that less does not: the order of the memory model only grows.
    """
    everything = frozenset(POSITIONS[question.ring])
    tried = question.tried()
    ends = archive.ask(on(question, {frozenset(), everything}))
    if frozenset() in ends.safe:
        return Answer(frozenset(tried), frozenset(), ends.distinct)
    if everything in ends.violated:
        return Answer(frozenset(), frozenset(tried), ends.distinct)
    return archive.ask(question)


LARGER = {
    "two readers": {"readers": 2, "slots": 1, "rounds": 3},
    "two slots": {"readers": 1, "slots": 2, "rounds": 5},
}
"""Sizes on which what suffices for the ring of flags is tried again."""


def questions() -> dict[str, Question]:
    """What the tables ask, by name."""
    asked = {}
    for model, mechanism in itertools.product(MODELS, MECHANISMS):
        asked[f"flags {model} {mechanism}"] = every("flags", model, mechanism, True)
    for model in MODELS:
        asked[f"doorbell {model}"] = every("doorbell", model, "full_fence", True)
    asked["flags arm full_fence uncontrolled"] = every("flags", "arm", "full_fence", False)
    for model, control in itertools.product(MODELS, (True, False)):
        asked[f"semaphores {model} {control}"] = every("semaphores", model, "full_fence", control)
        asked[f"semaphores {model} {control} 2"] = every("semaphores", model, "full_fence", control, slots=2)
    return asked


def gather(archive: Archive, tell: Callable[[str], None] = lambda _: None) -> dict[str, Answer]:
    """All answers, two runs of TLC at a time."""
    asked = questions()
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(settle, archive, question) for name, question in asked.items()}
        found = {}
        for name, future in running.items():
            found[name] = future.result()
            tell(f"{name}: {len(found[name].safe)} safe, {len(found[name].violated)} violated")
        larger = {}
        for name, size in itertools.product(asked, LARGER):
            if name.startswith("flags arm") and found[name].safe:
                again = on(asked[name], found[name].least(), **LARGER[size])
                larger[f"{name}, {size}"] = pool.submit(archive.ask, again)
        for name, future in larger.items():
            found[name] = future.result()
            tell(f"{name}: {len(found[name].safe)} safe, {len(found[name].violated)} violated")
    return found


def litmus(archive: Archive) -> dict[tuple[str, str, str], bool]:
    """For each model, strength and shape whether the relaxed outcome is reachable, as TLC saw it."""
    lines, _ = archive.lines("MCLitmus", {}, {})
    seen = re.findall(
        r'<<\s*"verdict",\s*<<\s*"(\w+)",\s*"(\w+)",\s*"(\w+)"\s*>>,\s*(TRUE|FALSE)\s*>>', "\n".join(lines)
    )
    return {(model, strength, shape): value == "TRUE" for model, strength, shape, value in seen}


def tables(found: dict[str, Answer], verdicts: dict[tuple[str, str, str], bool]) -> str:
    """The generated part of docs/memory_order.md."""
    parts = [
        "### Litmus shapes: where the relaxed outcome is reachable",
        litmus_table(verdicts),
        "### The ring of flags: which fences are enough",
        flags_table(found),
        "### The ring of semaphores: which calls must order",
        semaphores_table(found),
        "### The doorbell: which calls must order, so that no notice is slept over",
        doorbell_table(found),
    ]
    return "\n\n".join(parts)


def litmus_table(verdicts: dict[tuple[str, str, str], bool]) -> str:
    """A row a shape and strength; SC forbids everything and is left out when it does."""
    rows = []
    for strength, name in STRENGTHS.items():
        for shape in ("MP", "SB", "LB", "S", "R", "_2_2W", "IRIW", "CoRR", "WRC"):
            cells = ["allowed" if verdicts[m, strength, shape] else "forbidden" for m in MODELS]
            rows.append([shape.strip("_").replace("2_2W", "2+2W"), name, *cells])
    for shape in sorted({shape for _, strength, shape in verdicts if strength == "single"}):
        cells = ["allowed" if verdicts[m, "single", shape] else "forbidden" for m in MODELS]
        rows.append([shape.replace("_", "+"), "as named", *cells])
    return table(["shape", "strengthened by", *MODELS.values()], rows)


def flags_table(found: dict[str, Answer]) -> str:
    """A row a mechanism and memory model."""
    rows = []
    for mechanism, what in MECHANISMS.items():
        for model, name in MODELS.items():
            rows.append([what, name, *cells_of(found[f"flags {model} {mechanism}"], "flags")])
    loose = found["flags arm full_fence uncontrolled"]
    rows.append([MECHANISMS["full_fence"], "ARMv8, branches order nothing", *cells_of(loose, "flags")])
    head = ["made of", "on", "subsets safe", "field's four", "field's five", "minimal sufficient sets"]
    again = {name: answer for name, answer in found.items() if name.endswith(tuple(LARGER))}
    lost = [f"{name}: {sorted(s)}" for name, answer in again.items() for s in ordered(answer.violated)]
    sizes = " and ".join(f"{name} ({size['rounds']} rounds)" for name, size in LARGER.items())
    verdict = f"not enough there: {'; '.join(lost)}" if lost else "all are enough there too"
    return f"{table(head, rows)}\n\nThe minimal sets for ARMv8, tried again on {sizes}: {verdict}."


def semaphores_table(found: dict[str, Answer]) -> str:
    """A row a memory model, with and without trust in control dependencies."""
    rows = []
    for model, control, more in itertools.product(MODELS, (True, False), ("", " 2")):
        answer = found[f"semaphores {model} {control}{more}"]
        branches = "order later stores" if control else "order nothing"
        size = "two slots, one entry, leases" if more else "one slot, one entry, copies"
        rows.append([MODELS[model], branches, size, *cells_of(answer, "semaphores")])
    return table(["on", "branches", "ring", "subsets safe", "minimal sufficient sets"], rows)


def doorbell_table(found: dict[str, Answer]) -> str:
    """A row a memory model."""
    rows = [[name, *cells_of(found[f"doorbell {model}"], "doorbell")] for model, name in MODELS.items()]
    return table(["on", "subsets safe", "minimal sufficient sets"], rows)


def cells_of(answer: Answer, ring: str) -> list[str]:
    """How many subsets are safe, what becomes of the field's choices, and the least sets."""
    total = len(answer.safe) + len(answer.violated)
    least = answer.least()
    if not least:
        sets = "no set is enough"
    elif least == [frozenset()]:
        sets = "none needed"
    else:
        sets = "; ".join(" + ".join(f"`{x}`" for x in POSITIONS[ring] if x in s) for s in least)
    field = []
    if ring == "flags":
        field = ["safe" if s in answer.safe else "violated" for s in (FIELD_FOUR, FIELD_FIVE)]
    return [f"{len(answer.safe)} of {total}", *field, sets]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


BEGIN, END = "<!-- fence-table: begin", "<!-- fence-table: end -->"


def written(page: str, body: str, sources: str) -> str:
    """The page with its generated part replaced, and marked with the digest of what it was made from."""
    pattern = re.compile(re.escape(BEGIN) + r".*?-->.*?" + re.escape(END), re.DOTALL)
    if not pattern.search(page):
        raise ModelError(f"the page has no part between {BEGIN!r} and {END!r} to write the tables into")
    made = f"{BEGIN} {sources} -->\n\n{body}\n\n{END}"
    return pattern.sub(lambda _: made, page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables; with --check say instead whether they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m quiesce.model.fences", description=__doc__)
    parser.add_argument("page", type=Path, help="the page to write the tables into")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the tables are stale")
    parser.add_argument("--cache", type=Path, default=Path(".quiesce/fences"), help="where answers are kept")
    options = parser.parse_args(arguments)
    page = options.page.read_text(encoding="utf-8")
    if options.check:
        fresh = f"{BEGIN} {digest()} -->" in page
        print("up to date" if fresh else f"{options.page} is stale: run `make fence-table`")
        return 0 if fresh else 1
    archive = Archive(options.cache)
    found = gather(archive, lambda line: print(line, file=sys.stderr, flush=True))
    options.page.write_text(written(page, tables(found, litmus(archive)), archive.sources), encoding="utf-8")
    print(f"{options.page}: {archive.runs} runs of TLC, the rest was known", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
