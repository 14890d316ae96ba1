"""Mutants that nobody thought of: each guard of a specification dropped in turn, and what then fails.

A guard that can be dropped without anything failing is redundant, or protects something that no property speaks of.
Either is worth a sentence: `spec/models/survivors.toml` has one for each.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from quiesce.model.output import VIOLATIONS, CheckResult, Progress
from quiesce.model.pool import each

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Fate = Literal["killed", "same", "weaker", "undetermined"]
Key = tuple[str, str, str]
"""The module, action and text of a guard."""
TIMEOUT_S = 60.0
"""Seconds that TLC may take on one model of a mutant unless told otherwise."""
PROTOCOLS = ("payload_reuse", "broadcast_ring", "stage_handoff")


@dataclass(frozen=True)
class Guard:
    """A conjunct of an action that says when it is possible, and where it stands (lines and columns from 1)."""

    module: str
    action: str
    text: str
    begin: tuple[int, int]
    end: tuple[int, int]

    @property
    def key(self) -> Key:
        """What tells it from other guards, also after lines have moved."""
        return self.module, self.action, self.text

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


def models(protocol: str, manifest: Manifest) -> list[Model]:
    """The small models of a protocol, those first that see most in least time.

    Raises `ModelError` if there are none.
    """
    found = [m for m in manifest.models.values() if m.protocol == protocol and m.size == SMALL]
    if not found:
        raise ModelError(f"the manifest has no small model of {protocol!r}; choose {', '.join(PROTOCOLS)}")
    # Invariants bound what a mutant can do; without any, its states may have no end.
    return sorted(found, key=lambda model: (not manifest.config(model).invariants, model.distinct or 0))


def held_against(guard: Key, protocol: str, manifest: Manifest) -> list[Model]:
    """The models that a mutant is tried in: those of the protocol, and those of its environment alone."""
    found = models(protocol, manifest)
    own = [m for m in manifest.models.values() if m.size == SMALL and m.module == f"MC{guard[0]}"]
    return found + [model for model in own if model not in found]


def all_guards(protocol: str, manifest: Manifest) -> list[Guard]:
    """The guards in the small models of a protocol, each once. Raises `ModelError` if there are no models."""
    found: dict[Key, Guard] = {}
    for model in models(protocol, manifest):
        for guard in guards(Oracle.load(model.name, manifest=manifest)):
            found.setdefault(guard.key, guard)
    return list(found.values())


def mutate(
    protocol: str,
    *,
    manifest: Manifest | None = None,
    chosen: Sequence[Guard] | None = None,
    hints: Mapping[Key, str] | None = None,
    jobs: int = 2,
    timeout: float = TIMEOUT_S,
    seconds: float = float("inf"),
    heard: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """Drop each guard of a protocol's specification, or each of `chosen`, and check its small models.

    `hints` names models that may kill a mutant, which are tried first. TLC may take `timeout` seconds on a model.
    `heard` is called with each trial as it ends. After `seconds` no more are tried, and those under way are given up.
    Raises `ModelError` for a protocol without small models.
    """
    manifest = manifest or manifests.load()
    explained = reasons(manifest)
    end = time.monotonic() + seconds
    if chosen is None:
        chosen = all_guards(protocol, manifest)

    plain = _Plain(manifest, timeout)

    def tried(guard: Guard, stop: threading.Event) -> Trial | None:
        def go_on(progress: Progress | None = None) -> None:
            if stop.is_set() or time.monotonic() > end:
                raise TimeoutError

        hint = (hints or {}).get(guard.key)
        order = held_against(guard.key, protocol, manifest)
        order.sort(key=lambda model: (model.name != hint, guard.action in model.untaken))
        try:
            go_on()
            fate, by = _fate(guard, order, plain, go_on)
        except TimeoutError:
            return None
        trial = Trial(guard, fate, by, "" if fate == "killed" else explained.get(guard.key, ""))
        heard(trial)
        return trial

    return [trial for trial in each(tried, chosen, jobs) if trial]


class _Plain:
    """Runs of TLC on models, of a mutant or as they are."""

    def __init__(self, manifest: Manifest, timeout: float) -> None:
        self.manifest = manifest
        self._timeout = timeout
        self._sizes: dict[str, Size] = {}
        self._lock = threading.Lock()

    def run(
        self, model: Model, where: Path, properties: bool, go_on: Callable[[Progress], None]
    ) -> CheckResult:
        """The model, with modules in `where` in place of its own; invariants alone, or its properties too."""
        config = self.manifest.config(model)
        # Without an invariant, the states of a mutant may have no end.
        names = {**config.names, "invariant": config.invariants or ("TypeOK",)}
        if not properties:
            names["property"] = ()
        # TLC takes what lies beside the module before what lies elsewhere.
        module = Path(where, f"{model.module}.tla")
        module.write_bytes((self.manifest.directory / module.name).read_bytes())
        return tlc.run(
            module,
            replace(config, names=names),
            libraries=self.manifest.libraries,
            heap=1 << 30,
            timeout=self._timeout,
            coverage=False,
            short=True,
            progress=go_on,
        )

    def size(self, model: Model, go_on: Callable[[Progress], None]) -> Size:
        """That of the model as it is."""
        with self._lock, tempfile.TemporaryDirectory(prefix="quiesce-mutant-") as scratch:
            if model.name not in self._sizes:
                self._sizes[model.name] = _size(self.run(model, Path(scratch), False, go_on))
            return self._sizes[model.name]


Size = tuple[int, int, int]
"""Distinct states, depth, and steps between states: without a guard there is no less of either."""


def _size(result: CheckResult) -> Size:
    return result.distinct, result.depth, result.generated


def _fate(
    guard: Guard, order: Sequence[Model], plain: _Plain, go_on: Callable[[Progress], None]
) -> tuple[Fate, str]:
    """What becomes of a mutant, and by which model and what it violates there."""
    fate: Fate = "same"
    late = ""
    with tempfile.TemporaryDirectory(prefix="quiesce-mutant-") as name:
        scratch = Path(name)
        path = next(p for d in plain.manifest.libraries if (p := d / f"{guard.module}.tla").is_file())
        scratch.joinpath(path.name).write_text(guard.dropped(path.read_text(encoding="utf-8")), "utf-8")
        # The invariants of all models come before the properties of most, which cost several times as much.
        for models in (order[:1], order[1:]):
            todo = [(model, False) for model in models]
            while todo:
                model, properties = todo.pop(0)
                result = plain.run(model, scratch, properties, go_on)
                if result.verdict == "parse":
                    raise ModelError(f"{guard.module} without {guard.text!r} is no module: {result.message}")
                if result.verdict in VIOLATIONS or result.verdict == "evaluation":
                    return "killed", f"{model.name}: {result.violated or 'TLC cannot evaluate it'}"
                if not result.holds:
                    late = f"{model.name}: {result.verdict}"
                elif not properties and _size(result) != plain.size(model, go_on):
                    # Where there is no other step, every property holds as it did.
                    todo += [(model, True)] if plain.manifest.config(model).properties else []
                    if (result.distinct, result.depth) != (model.distinct, model.depth):
                        fate = "weaker"
    return ("undetermined", late) if late else (fate, "")
