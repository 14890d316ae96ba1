"""A part of a trace that one specification can judge, and what is needed to judge it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from quiesce.model import manifest
from quiesce.model.errors import UnknownName
from quiesce.model.manifest import Manifest
from quiesce.model.oracle import Oracle
from quiesce.model.traces import Event
from quiesce.model.validation import Observation, Span, Walk
from quiesce.model.values import ModelValue, State, Value

Constants = Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """What one sender, ring or pipeline was seen to do, in the words of its specification.

    `spans[i]` is what `events[i]` means. `model` is the entry of the manifest whose constants `worlds` override: each
    is a set of constants, and a behaviour under any of them will do. `counters` are the further constants under which
    the counters need not be moved back, for TLC. `definitions` is TLA+ that constants and conditions refer to; `hidden`
    maps the actions that nobody records to the TLA+ that takes them; of these `canonical` takes the `settled` ones at
    once, and a world in which a constant has the value that `never` names for an action is one in which that action is
    never taken. `urgent` and `canonical` are as for `Walk`.
    `start` are the variables that differ from the initial state, where the recording began later, and `offset` those by
    which counters start where they come out right when they are moved back. `unjudged` says why
    the specification has no word on it, "" if it has. `manifest` is this project's own if None.
    """

    protocol: str
    title: str
    model: str
    events: tuple[Event, ...]
    spans: tuple[Span, ...]
    worlds: tuple[Constants, ...]
    counters: Constants
    definitions: str
    hidden: Mapping[str, str]
    canonical: Callable[[State], State]
    settled: frozenset[str] = frozenset()
    urgent: frozenset[str] = frozenset()
    never: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    start: Mapping[str, Value] = field(default_factory=dict)
    offset: Mapping[str, Value] = field(default_factory=dict)
    unjudged: str = ""
    manifest: Manifest | None = None

    def initial(self, walk: Walk) -> list[State]:
        """The states in which the recording may have begun."""
        return [State({**state, **self.start, **self.offset}) for state in walk.oracle.initial()]

    def walk(self, world: Constants) -> Walk:
        """The behaviours of the specification under these constants; loaded once a process."""
        key = self.model, tuple(sorted(world.items())), self.definitions
        if key not in _walks:
            with tempfile.TemporaryDirectory(prefix="quiesce-trace-") as scratch:
                module, base = Path(scratch, "Traced.tla"), self.manifest or manifest.load()
                if self.model not in base.models:
                    raise UnknownName("model", self.model, base.models)
                model = base.models[self.model]
                module.write_text(
                    f"---- MODULE Traced ----\nEXTENDS {model.module}\n{self.definitions}\n====\n",
                    encoding="utf-8",
                )
                config = base.config(model).override(world).only(None)
                oracle = Oracle(module, config, base.libraries)
            never = {name for name, (constant, value) in self.never.items() if world.get(constant) == value}
            hidden = self.hidden.keys() - self.settled - never
            _walks[key] = Walk(oracle, hidden, self.urgent, self.canonical)
        return _walks[key]


_walks: dict[tuple[object, ...], Walk] = {}


@dataclass
class Told:
    """Events and what they mean, as they are put together.

    An event that has not ended, or has raised, may have happened or not, unless `raising` says that the action always
    raises. The events of a thread follow each other, but for those that happen within another.
    """

    raising: frozenset[str] = frozenset()
    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    _lines: dict[tuple[str, int], list[tuple[int, float]]] = field(default_factory=dict)
    _count: int = 0

    def add(self, event: Event, *steps: Observation, lasting: bool = False) -> None:
        """`event` means these steps; `lasting` if they may be taken after it has returned."""
        certain = event.outcome == "end" or (event.outcome == "error" and event.action in self.raising)
        if not certain:
            steps = tuple(replace(step, optional=True) for step in steps)
        end = math.inf if lasting or event.end is None else float(event.end)
        self.events.append(event)
        line = self._line(event)
        self.spans.append(Span(steps, line, float(event.begin), end, event.boot or event.process))

    def _line(self, event: Event) -> int:
        known = self._lines.setdefault((event.process, event.thread), [])
        end = math.inf if event.end is None else float(event.end)
        for place, (line, over) in enumerate(known):
            if over <= event.begin:
                known[place] = line, end
                return line
        known.append((self._count, end))
        self._count += 1
        return self._count - 1


def plain(
    model: str,
    constants: Constants,
    events: Sequence[Event],
    hidden: Collection[str] = (),
    base: Manifest | None = None,
) -> Case:
    """The case of events that are called as the actions of a model are, and their fields as the actions' parameters.

    A string among the fields is a model value. `hidden` are the actions that nobody records.
    """
    told = Told()
    for event in ordered(events):
        parameters = {
            name: ModelValue(value) if isinstance(value, str) else value
            for name, value in event.fields.items()
        }
        told.add(event, Observation(event.action, parameters))
    return Case(
        model, f"a run of {model}", model, tuple(told.events), tuple(told.spans), ({**constants},), {}, "",
        {name: name for name in hidden}, lambda state: state, manifest=base,
    )  # fmt: skip


def rounded(least: int) -> str:
    """The next of 2, 4, 8, ...: few different constants mean few specifications to load."""
    return str(max(2, 1 << (least - 1).bit_length()))


def named(prefix: str, count: int) -> str:
    """A TLA+ set of model values."""
    return "{" + ", ".join(f"{prefix}{number}" for number in range(1, count + 1)) + "}"


def ordered(events: Sequence[Event]) -> list[Event]:
    """The events by their begins, which in each thread is their order."""
    return sorted(events, key=lambda event: (event.begin, event.process, event.row))
