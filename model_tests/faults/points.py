"""Crash points: which there are, and what has to hold after each.

A point is a scenario, one of its processes, and a fault at one edge of one action. Actions are those that the classes
of the implementation are marked with; which of them a process takes in a scenario, and how often, a run without faults
tells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import secrets
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from model_tests.faults.crew import Actor, Fault, Report, stage, until

KINDS = ("kill", "stop", "raise")
PHASES = ("begin", "end")
SLACK_S = 20.0
"""Seconds that a call may take beyond all timeouts on a busy machine; a hang is for ever."""
PEER = re.compile(
    r"reader \d|rank \d|the writer|process \d|peer|tcp://|ipc://|inproc://|receiver|another thread"
)
STEP = re.compile(
    r"message|dict \d|slot|metadata|tensor|gather|attach|let reader|buffer|received|read|closing|sent"
)


@dataclass(frozen=True)
class Point:
    scenario: str
    process: str
    fault: Fault

    def __str__(self) -> str:
        return f"{self.scenario}/{self.process}/{self.fault}"


@dataclass
class Outcome:
    """What happened at a point: whether it was struck at all, and everything that was not as it should be."""

    struck: bool = False
    rejoined: bool = False
    wrong: list[str] = field(default_factory=list)
    reports: dict[str, Report] = field(default_factory=dict)
    seconds: float = 0.0


Faults = Mapping[str, Sequence[Fault]]


class Run:
    """One run of a scenario: its processes by name, the faults that strike them, and what was wrong."""

    def __init__(self, actors: list[Actor], faults: Faults, folder: Path) -> None:
        self.actors = actors
        self.faults = faults
        self.folder = folder
        self.names: dict[str, Actor] = {}
        self.outcome = Outcome()

    def start(self, name: str, part: str, **arguments: Any) -> Actor:
        actor = Actor(part, self.faults.get(name, ()), **arguments)
        self.actors.append(actor)
        self.names[name] = actor
        return actor

    def until(self, condition: Callable[[], Any]) -> Any:
        return until(self.actors, condition)

    def all_over(self, *names: str) -> bool:
        return all(self.names[name].over for name in names or self.names)

    def dead(self, *roles: str) -> list[str]:
        """Those with these roles that died and have no heir yet; an heir's name is that of the dead and a plus."""
        return [
            name
            for name, actor in self.names.items()
            if name.rstrip("+") in roles and actor.over and not actor.report and f"{name}+" not in self.names
        ]

    def rejoin(self, name: str, word: str, part: str, **arguments: Any) -> None:
        """Another process takes the part of one that was killed, and does what it says with `word`."""
        heir = self.start(f"{name}+", part, **arguments)
        self.until(lambda: heir.said(word) or heir.over)
        self.outcome.rejoined = heir.said(word) is not None


# ----------------------------------------------------------------------------------------------------- the scenarios


def ring(run: Run, remote: int = 0, idle: bool = False, most: int = 0, nap: float = 0.0) -> None:
    """A writer and two readers. `idle`: the writer rests; the first reader leaves after `most`, or rests for `nap`."""
    writer = run.start("w", "ring_writer", readers=2 - remote, remote=remote, idle=idle)
    run.until(lambda: writer.said("handle") or writer.over)
    handle = writer.said("handle")
    arguments = {
        name: {"handle": handle, "rank": rank, "remote": rank >= 2 - remote}
        for rank, name in enumerate(("r0", "r1"))
    }
    for name in arguments if handle else ():
        first = name == "r0"
        run.start(name, "ring_reader", **arguments[name], most=most * first, nap=nap * first)
    run.until(lambda: writer.over or writer.said("enough") or run.dead("r0", "r1"))
    while not writer.over and (dead := run.dead("r0", "r1")):
        run.rejoin(dead[0], "receives", "ring_reader", **arguments[dead[0].rstrip("+")])
        run.until(lambda: writer.over or writer.said("enough") or run.dead("r0", "r1"))
    writer.tell("stop")
    run.until(run.all_over)


def payload(
    run: Run, transport: str, bind: bool, nap: float = 0.0, interrupts: bool = False, staged: bool = False
) -> None:
    """A sender, that binds or connects, and a receiver, that rests for `nap` between two messages."""
    # An address of the loopback network that nobody else uses: the port that the kernel gives to who binds there is
    # free again for its heir, and is not taken by a connection of another process, or of a peer to itself.
    address = f"ipc://{run.folder}/s" if transport == "ipc" else _loopback()
    to: dict[str, Any] = {"bind": bind, "interrupts": interrupts, "staged": staged}
    starts = [
        partial(run.start, "s", "payload_sender", **to, sender_id=1),
        partial(run.start, "r", "payload_receiver", bind=not bind, nap=nap),
    ]
    binds, connects = starts if bind else starts[::-1]
    first = binds(address=address)
    run.until(lambda: first.said("bound") or first.over)
    address = first.said("bound")
    connects(address=address)
    sender, receiver = run.names["s"], run.names["r"]
    run.until(lambda: sender.over or sender.said("enough") or receiver.over)
    if run.dead("r"):
        run.rejoin("r", "receives", "payload_receiver", address=address, bind=not bind)
        run.until(lambda: sender.over or sender.said("enough"))
    if run.dead("s"):
        run.rejoin("s", "enough", "payload_sender", address=address, **to, sender_id=2)
    for role in "sr":
        there = [name for name in run.names if name.rstrip("+") == role]
        for name in there:
            run.names[name].tell("stop")
        run.until(partial(run.all_over, *there))


def inproc(run: Run, interrupts: bool = False) -> None:
    """Sender and receiver in one process."""
    run.start("both", "payload_both", address="inproc://faults", sender_id=1, interrupts=interrupts)
    run.until(run.all_over)


def pipeline(run: Run, stages: int, parallel: int = 1) -> None:
    """A pipeline over gloo."""
    for rank in range(stages * parallel):
        run.start(
            f"k{rank}", "stage_rank", store=f"{run.folder}/store", rank=rank, stages=stages, parallel=parallel
        )
    run.until(lambda: all(actor.over or actor.said("ready") for actor in run.actors))
    for actor in run.actors:
        actor.tell("go")
    run.until(run.all_over)


_OPENS, _RETURNS = Fault("Open", "end", "kill", 4), Fault("Return", "end", "kill", 5)
SCENARIOS: dict[str, tuple[Callable[..., None], dict[str, Any], Faults]] = {
    "ring": (ring, {}, {}),
    "ring-remote": (ring, {"remote": 1}, {}),
    "ring-idle": (ring, {"idle": True}, {}),
    "ring-leaver": (ring, {"most": 5}, {}),
    "ring-reader-dies": (ring, {}, {"r0": [_OPENS]}),
    "ring-writer-dies": (ring, {}, {"w": [_RETURNS]}),
    "ipc-connect": (payload, {"transport": "ipc", "bind": False}, {}),
    "ipc-bind": (payload, {"transport": "ipc", "bind": True, "interrupts": True}, {}),
    "tcp-connect": (payload, {"transport": "tcp", "bind": False, "staged": True}, {}),
    "tcp-bind": (payload, {"transport": "tcp", "bind": True, "nap": 0.6}, {}),
    "inproc": (inproc, {"interrupts": True}, {}),
    "pipeline-2": (pipeline, {"stages": 2}, {}),
    "pipeline-3": (pipeline, {"stages": 3}, {}),
    "pipeline-2x2": (pipeline, {"stages": 2, "parallel": 2}, {}),
}
# Killed or stopped, the one process of this scenario leaves nobody who could notice.
KINDS_OF = {"inproc": ("raise",)}


def _loopback() -> str:
    return "tcp://127.{}.{}.{}:*".format(*(1 + secrets.randbelow(254) for _ in range(3)))


# ------------------------------------------------------------------------------------------------------- the checks


def play(scenario: str, point: Point | None = None) -> Outcome:
    """Run a scenario, with the fault of a point or none, and check what has to hold afterwards."""
    act, arguments, mischief = SCENARIOS[scenario]
    faults = {name: list(found) for name, found in mischief.items()}
    if point:
        faults.setdefault(point.process, []).append(point.fault)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quiesce-faults-") as folder, stage() as actors:
        run = Run(actors, faults, Path(folder))
        try:
            act(run, **arguments)
        except AssertionError as error:
            run.outcome.wrong.append(str(error))
        run.outcome.reports = {name: actor.report for name, actor in run.names.items() if actor.report}
        run.outcome.struck = bool(
            point and point.process in run.names and str(point.fault) in run.names[point.process].struck
        )
        run.outcome.wrong += _wrong(run, point)
    run.outcome.seconds = time.monotonic() - start
    return run.outcome


def _wrong(run: Run, point: Point | None) -> Iterator[str]:
    killed = {
        name for name, actor in run.names.items() for struck in actor.struck if struck.startswith("kill")
    }
    if not killed & {"w", *(f"{name}+" for name in killed)}:
        for name in killed:
            heir = run.names.get(f"{name}+")
            if heir and not (heir.said("receives") or heir.said("enough")):
                yield f"{name} did not join again: {heir.report}"
    for name, actor in run.names.items():
        report = actor.report
        if report is None:
            if name not in killed:
                yield f"{name} ended with {actor.process.exitcode}"
            continue
        if "Traceback" in report.end:
            yield f"{name}: {report.end}"
        if report.left:
            yield f"{name} left {', '.join(report.left)}"
        if report.longest > SLACK_S:
            yield f"{name} was in a call for {report.longest:.1f} s"
        for kind, text in sorted({(kind, text) for _, kind, text in report.errors}):
            if kind in ("PeerDied", "QuiesceTimeout") and not (PEER.search(text) and STEP.search(text)):
                yield f"{name}: {kind} names no peer or no step: {text}"
        if report.facts.get("held"):
            yield f"{name}: slots stay held by readers {report.facts['held']}"
        if report.facts.get("pending"):
            yield f"{name}: {report.facts['pending']} buffers or loans never ended"
        yield from _out_of_sequence(run, name, report, whole=point is None and not run.faults)
    left = [entry for entry in os.listdir(run.folder) if entry != "store" and entry != "s"]
    if left:
        yield f"files are left: {left}"


def _out_of_sequence(run: Run, name: str, report: Report, whole: bool) -> Iterator[str]:
    """Doubled, or missing without a reason: a loss is excused by an exception of the sender or the receiver.

    Everything has to arrive where nothing struck (`whole`), and at a reader that was told that the ring is closed; and
    the first message at whoever was there from the start.
    """
    if name[0] not in "rkb":
        return
    numbers: dict[Any, list[int]] = {}
    for entry in report.got:
        sender, index = entry if isinstance(entry, tuple) else (0, entry)
        numbers.setdefault(sender, []).append(index)
    unsure = {index for actor in run.actors if actor.report for index in actor.report.unsure}
    unsure |= {words[1] for actor in run.actors for words in actor.words if words[0] == "unsure"}
    own = sum(kind in ("Injected", "Interrupted") for _, kind, _ in report.errors)
    sent = [a.report.facts["sent"] for a in run.actors if a.report and "sent" in a.report.facts]
    ends = bool(sent) and (report.end == "Closed" or (whole and report.end != "left"))
    if whole and not numbers:
        yield f"{name} received nothing"
    for sender, indices in numbers.items():
        if sorted(set(indices)) != indices:
            yield f"{name} received doubled or out of order: {indices}"
        first = indices[0] if own or "+" in name else 0
        missing = set(range(first, sent[0] if ends else indices[-1])) - set(indices) - unsure
        # A ZMQ peer that died took with it what was on its way to it.
        if len(missing) > own and "r+" not in run.names:
            yield f"{name} missed {sorted(missing)} of sender {sender}"


# ------------------------------------------------------------------------------------------------------- the points


def dry(
    scenarios: Sequence[str] = tuple(SCENARIOS), at_once: int = 4
) -> tuple[dict[str, Outcome], list[Point]]:
    """Run the scenarios without a fault; what they did, and the points that follow from it."""
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = dict(zip(scenarios, pool.map(play, scenarios), strict=True))
    points = []
    for scenario, outcome in outcomes.items():
        for process, report in outcome.reports.items():
            for action, count in report.counts.items():
                occurrences = [1, 3] if count >= 6 else [1]
                kinds = KINDS_OF.get(scenario, KINDS)
                for phase, kind, at in itertools.product(PHASES, kinds, occurrences):
                    points.append(Point(scenario, process, Fault(action, phase, kind, at)))
    return outcomes, points


def sample(points: Sequence[Point], share: int, skip: int = 0) -> list[Point]:
    """One of every `share` points, always the same ones; `skip` tells the other shares from this."""
    return [point for point in points if zlib.crc32(str(point).encode()) % share == skip]


def attempt(points: Sequence[Point], seconds: float = 1e9, at_once: int = 8) -> dict[Point, Outcome]:
    """Try them, several at the same time: most of one is waiting. None is begun after so many seconds."""
    end = time.monotonic() + seconds

    def one(point: Point) -> Outcome | None:
        return play(point.scenario, point) if time.monotonic() < end else None

    with ThreadPoolExecutor(at_once) as pool:
        outcomes = zip(points, pool.map(one, points), strict=True)
    return {point: outcome for point, outcome in outcomes if outcome}


def figures(outcomes: Mapping[Point, Outcome]) -> dict[str, Any]:
    """What there is to say of many points. Times in seconds."""
    by_kind = {kind: sum(o.struck for p, o in outcomes.items() if p.fault.kind == kind) for kind in KINDS}
    return {
        "points": len(outcomes),
        "struck": sum(outcome.struck for outcome in outcomes.values()),
        **by_kind,
        "joined again": sum(outcome.rejoined for outcome in outcomes.values()),
        "messages received": sum(
            len(report.got)
            for outcome in outcomes.values()
            for name, report in outcome.reports.items()
            if name[0] in "rbk"
        ),
        "longest call": max(
            (report.longest for outcome in outcomes.values() for report in outcome.reports.values()),
            default=0.0,
        ),
        "wrong": {str(point): outcome.wrong for point, outcome in outcomes.items() if outcome.wrong},
    }


def main() -> int:
    """Try points, and print figures as JSON; the exit status says whether anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int, default=1, help="try one of so many points")
    parser.add_argument("--skip", type=int, default=0, help="which of the shares")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no point after so many")
    parser.add_argument("--only", default="", help="a regular expression that points must match")
    chosen = parser.parse_args()
    outcomes, points = dry()
    bare = {name: outcome.wrong for name, outcome in outcomes.items() if outcome.wrong}
    points = [
        point for point in sample(points, chosen.share, chosen.skip) if re.search(chosen.only, str(point))
    ]
    found = figures(attempt(points, chosen.seconds))
    print(json.dumps({**found, "wrong without a fault": bare}, indent=1))
    return 1 if bare or found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
