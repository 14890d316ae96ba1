"""`quiesce validate`, as a library: the cases of a trace, and the verdict on each."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quiesce.model import case_payload, case_ring, case_stage
from quiesce.model.case import Case
from quiesce.model.traces import Event, Trace
from quiesce.model.validation import Explanation, Finding, History, Walk, blame, check_names, search

BOUND = 20_000
"""States that may be possible at a time before a search gives up, unless told otherwise."""


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    `explanation` counts events in the order of their ends. Of a rejected case `event` is the first that no behaviour
    explains, and `prefix` the shortest part of the trace that is rejected, up to it. `seconds` is the time it took.
    """

    case: Case
    explanation: Explanation
    event: Event | None = None
    prefix: tuple[Event, ...] = ()
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """ "accepted", "rejected" or "undetermined"."""
        return self.explanation.outcome


def cases(trace: Trace) -> list[Case]:
    """What in a trace a specification can judge: each sender, the ring, the pipeline."""
    return [case for module in (case_payload, case_ring, case_stage) for case in module.cases(trace.events)]


def judge(case: Case, bound: int = BOUND) -> Verdict:
    """Whether a case is a behaviour of its specification, in any of its worlds.

    First with as few hidden steps as will do, which finds nearly every behaviour there is; then with all of them, so
    that a rejection holds for every interleaving. Undetermined if that is more than `bound` states at a time.
    """
    if case.unjudged:
        return Verdict(case, Explanation("undetermined", 0, message=case.unjudged))
    began = time.monotonic()
    history = History(case.spans)
    for world in case.worlds:
        walk = case.walk(world)
        for span in case.spans:
            for step in span.steps:
                check_names(walk.oracle, step)
        if _look(case, walk, history, False, bound).outcome == "accepted":
            return Verdict(
                case, Explanation("accepted", len(history.order)), seconds=time.monotonic() - began
            )
    found = []
    for world in case.worlds:
        walk = case.walk(world)
        finding = _look(case, walk, history, True, bound)
        if finding.outcome == "accepted":
            return Verdict(
                case, Explanation("accepted", len(history.order)), seconds=time.monotonic() - began
            )
        found.append((finding, walk))
    finding, walk = max(found, key=lambda item: (item[0].outcome == "undetermined", item[0].covered))
    if finding.outcome == "undetermined":
        text = f"more than {bound:,} states are possible after {finding.covered} events; allow more"
        undetermined = Explanation("undetermined", finding.covered, message=text)
        return Verdict(case, undetermined, seconds=time.monotonic() - began)
    return _rejected(case, history, finding, walk, began)


def _look(case: Case, walk: Walk, history: History, complete: bool, bound: int) -> Finding:
    starts = [walk.number(state) for state in case.initial(walk)]
    return search(walk, history, starts, complete=complete, bound=bound)


def _rejected(case: Case, history: History, finding: Finding, walk: Walk, began: float) -> Verdict:
    known = [event for event, span in zip(case.events, case.spans, strict=True) if span.steps]
    ordered = tuple(known[number] for number in history.order[: finding.covered + 1])
    steps = history.spans[history.order[finding.covered]].steps
    states = tuple(walk.states[number] for number in finding.states)
    # Of a pair of steps the first may have been possible.
    item = next((step for step in steps if not any(walk.matches(n, step) for n in finding.states)), steps[-1])
    enabled, reason, why = blame(walk, finding.states, item)
    text = f"{ordered[-1].place}: {ordered[-1]}: {why}"
    explanation = Explanation("rejected", finding.covered, states, enabled, reason, text)
    return Verdict(case, explanation, ordered[-1], ordered, time.monotonic() - began)


def beginning(case: Case, count: int) -> Case:
    """The part of a case in which `count` events have ended; those that had begun by then may have happened."""
    ends = sorted(span.end for span in case.spans if span.steps and span.end < math.inf)
    if count >= len(ends):
        return case
    now = ends[count - 1] if count else -math.inf
    kept: list[tuple[Event, Any]] = []
    for event, span in zip(case.events, case.spans, strict=True):
        if span.end > now:
            if span.begin >= now:
                continue
            steps = tuple(replace(step, optional=True) for step in span.steps)
            span = replace(span, steps=steps, end=math.inf)
        kept.append((event, span))
    return replace(case, events=tuple(e for e, _ in kept), spans=tuple(s for _, s in kept))


def outcome_of(verdicts: Sequence[Verdict]) -> str:
    """The verdict on a whole trace: of one without any case it is undetermined."""
    outcomes = {verdict.outcome for verdict in verdicts}
    if "rejected" in outcomes:
        return "rejected"
    return "accepted" if outcomes == {"accepted"} else "undetermined"
