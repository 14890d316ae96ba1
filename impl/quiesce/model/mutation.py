"""Mutants that nobody thought of: each guard of a specification dropped in turn, and what then fails.

A guard that can be dropped without anything failing is redundant, or protects something that no property speaks of.
Either is worth a sentence: `spec/models/survivors.toml` has one for each.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quiesce.model import manifest as manifests
from quiesce.model import tlc
from quiesce.model.actions import (
    ACTION,
    APPLICATION,
    CASE,
    CONJUNCTIONS,
    CONSTANT,
    DISJUNCTIONS,
    EXISTS,
    IF,
    LABEL,
    LET,
)
from quiesce.model.errors import ModelError
from quiesce.model.manifest import SMALL, Manifest, Model
from quiesce.model.oracle import Oracle
from quiesce.model.output import VIOLATIONS, Progress

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Fate = Literal["killed", "same", "weaker", "undetermined"]
TIMEOUT_S = 60.0
"""Seconds that TLC may take on one model of a mutant."""
PROTOCOLS = ("payload_reuse", "broadcast_ring", "stage_handoff")


@dataclass(frozen=True)
class Guard:
    """A conjunct of an action that says when it is possible, and where it stands (lines and columns from 1)."""

    module: str
    action: str
    text: str
    begin: tuple[int, int]
    end: tuple[int, int]

    def dropped(self, source: str) -> str:
        """The module with TRUE in place of the guard; what follows on its line stays in its column."""
        lines = source.split("\n")
        (first, left), (last, right) = self.begin, self.end
        width = right - left + 1 if first == last else 0
        lines[first - 1 : last] = [
            lines[first - 1][: left - 1] + "TRUE".ljust(width) + lines[last - 1][right:]
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Trial:
    """What became of a mutant.

    "killed": `by` names the model and what it violates. "same": every model has the states it had, so that the guard
    is redundant there. "weaker": more is possible, and everything holds. "undetermined": no answer in time.
    """

    guard: Guard
    fate: Fate
    by: str = ""
    reason: str = ""

    @property
    def good(self) -> bool:
        """Killed, or explained."""
        return self.fate == "killed" or bool(self.reason)


def guards(oracle: Oracle) -> list[Guard]:
    """All guards of all actions, each once, in the order of the next-state relation.

    Left out are those of MC modules, those without variables, which switch parts of a model on, and those of `Done`,
    which stutters: without one of these it is another model, not a mutant.
    """
    walker = _Walker(oracle)
    for action, definition in oracle._next.definitions.items():
        for node in definition.nodes if action != "Done" else ():
            walker.walk(node, action)
    return [guard for guard in walker.found.values() if not guard.module.startswith("MC")]


class _Walker:
    def __init__(self, oracle: Oracle) -> None:
        self._next = oracle._next
        self._definition = oracle._classes["tla2sany.semantic.OpDefNode"]
        self._opcodes = oracle._classes["tlc2.tool.BuiltInOPs"]
        self._text = oracle._false._text
        self.found: dict[tuple[str, tuple[int, int]], Guard] = {}

    def walk(self, node: Any, action: str) -> None:
        while node.getKind() in (LET, LABEL):
            node = node.getBody()
        if node.getKind() != APPLICATION or self._next.level(node) < ACTION:
            return
        operator = node.getOperator()
        opcode = int(self._opcodes.getOpCode(operator.getName()))
        arguments = list(node.getArgs())
        if opcode in CONJUNCTIONS:
            for argument in arguments:
                if self._next.level(argument) < ACTION:
                    self._keep(argument, action)
                else:
                    self.walk(argument, action)
        elif opcode in DISJUNCTIONS or opcode == EXISTS:
            for argument in arguments:
                self.walk(argument, action)
        elif opcode == IF:
            for argument in arguments[1:]:
                self.walk(argument, action)
        elif opcode == CASE:
            for pair in arguments:
                self.walk(pair.getArgs()[1], action)
        elif not opcode and isinstance(operator, self._definition):
            self.walk(operator.getBody(), action)

    def _keep(self, node: Any, action: str) -> None:
        if node.getKind() == APPLICATION:
            opcode = int(self._opcodes.getOpCode(node.getOperator().getName()))
            if opcode in CONJUNCTIONS:
                for argument in node.getArgs():
                    self._keep(argument, action)
                return
        if self._next.level(node) == CONSTANT:
            return
        place = node.getLocation()
        module = str(place.source())
        begin = int(place.beginLine()), int(place.beginColumn())
        end = int(place.endLine()), int(place.endColumn())
        text = self._text(node, module, place)
        self.found.setdefault((module, begin), Guard(module, action, text, begin, end))


def reasons(manifest: Manifest) -> dict[tuple[str, str, str], str]:
    """Why guards may survive, by module, action and text, from survivors.toml beside the manifest."""
    path = manifest.directory / "survivors.toml"
    if not path.is_file():
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return {(s["module"], s["action"], s["guard"]): s["reason"] for s in data.get("survivor", [])}
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise ModelError(
            f"{path}: {error}; each [[survivor]] has module, action, guard and reason"
        ) from error


def mutate(
    protocol: str,
    *,
    manifest: Manifest | None = None,
    sample: int | None = None,
    seed: int = 0,
    jobs: int = 2,
    heard: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Drop each guard of a protocol's specification, or `sample` of them, and check its small models.

    `heard` is called with each trial as it ends. Raises `ModelError` for a protocol without small models.
    """
    manifest = manifest or manifests.load()
    models = [m for m in manifest.models.values() if m.protocol == protocol and m.size == SMALL]
    if not models:
        raise ModelError(f"the manifest has no small model of {protocol!r}; choose {', '.join(PROTOCOLS)}")
    models.sort(key=lambda model: model.distinct or 0)
    found: dict[tuple[str, tuple[int, int]], Guard] = {}
    for model in models:
        for guard in guards(Oracle.load(model.name, manifest=manifest)):
            found.setdefault((guard.module, guard.begin), guard)
    chosen = list(found.values())
    if sample is not None and sample < len(chosen):
        chosen = random.Random(seed).sample(chosen, sample)
    explained = reasons(manifest)
    small = [model for model in manifest.models.values() if model.size == SMALL]

    stop = threading.Event()

    def go_on(progress: Progress) -> None:
        if stop.is_set():
            raise KeyboardInterrupt

    def tried(guard: Guard) -> Trial:
        # An environment's guard may matter only in the models of its own.
        own = [model for model in small if model.module == f"MC{guard.module}" and model not in models]
        reason = explained.get((guard.module, guard.action, guard.text), "")
        trial = _try(guard, [*models, *own], manifest, reason, go_on)
        heard(trial)
        return trial

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(tried, guard) for guard in chosen]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            for future in futures:
                future.cancel()
            raise


def _try(
    guard: Guard,
    models: Sequence[Model],
    manifest: Manifest,
    reason: str,
    go_on: Callable[[Progress], None],
) -> Trial:
    fate: Fate = "same"
    with tempfile.TemporaryDirectory(prefix="quiesce-mutant-") as scratch:
        path = next(file for file in _places(guard.module, manifest.libraries) if file.is_file())
        mutated = guard.dropped(path.read_text(encoding="utf-8"))
        Path(scratch, path.name).write_text(mutated, encoding="utf-8")
        for model in models:
            # TLC takes what lies beside the module before what lies elsewhere.
            module = Path(scratch, f"{model.module}.tla")
            module.write_bytes((manifest.directory / module.name).read_bytes())
            result = tlc.run(
                module,
                manifest.config(model),
                libraries=manifest.libraries,
                heap=1 << 30,
                timeout=TIMEOUT_S,
                coverage=False,
                short=True,
                progress=go_on,
            )
            if result.verdict == "parse":
                raise ModelError(f"{guard.module} without {guard.text!r} is no module: {result.message}")
            if result.verdict in VIOLATIONS or result.verdict == "evaluation":
                return Trial(guard, "killed", f"{model.name}: {result.violated or 'TLC cannot evaluate it'}")
            if not result.holds:
                return Trial(guard, "undetermined", f"{model.name}: {result.verdict}", reason)
            if (result.distinct, result.depth) != (model.distinct, model.depth):
                fate = "weaker"
    return Trial(guard, fate, "", reason)


def _places(module: str, libraries: Sequence[Path]) -> Iterator[Path]:
    for directory in libraries:
        yield directory / f"{module}.tla"
