"""Each protocol at full load for a stated time, with peers that come and go, and then crash points.

    python -m model_tests.faults.soak --seconds 1800 --json soak.json

A fifth of the time each goes to the ring, the payloads and the pipeline, and two fifths to crash points. At the end
a shorter run of each protocol is recorded and held to its specification. The exit status says whether anything was
wrong: a message changed, lost, doubled or out of order, memory that grows, a crash point, or a trace.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from model_tests.faults import points
from model_tests.faults.crew import Actor, stage, until

from quiesce.model.judging import cases, judge
from quiesce.model.traces import read

STAY_S = 3.0
"""Seconds that a peer stays which comes and goes."""
WARM_UP = 0.3
"""The part of a run that memory is given to reach its level."""
STRETCHES = 20
"""Into how many the rest is divided."""
GROWTH = 256 << 10
"""Bytes a second by which memory may seem to grow: what it means is that it fits a day. Noise is above this in a run
of seconds, so that the slope must also be three times its error."""


def slope(samples: np.ndarray) -> tuple[float, float]:
    """By how much a second the second column grows after the warm-up, and the standard error of that.

    Taken over means of stretches: neighbouring samples of memory are alike, and would make the error seem small.
    """
    start, end = samples[0, 0], samples[-1, 0]
    kept = samples[samples[:, 0] >= start + WARM_UP * (end - start)]
    if len(kept) < 4:
        return 0.0, float("inf")
    means = np.array([part.mean(axis=0) for part in np.array_split(kept, min(STRETCHES, len(kept)))])
    t, y = means[:, 0] - means[:, 0].mean(), means[:, 1] - means[:, 1].mean()
    rate = float((t @ y) / (t @ t))
    return rate, float(np.sqrt(((y - rate * t) ** 2).sum() / (len(t) - 2) / (t @ t)))


def summary(
    staying: dict[str, Actor], guests: list[Actor], seconds: float, lost: Callable[[int, int], int]
) -> dict[str, Any]:
    """Of what all of them measured. Latencies in microseconds, from before the message is sent to after it came.

    `lost` says how many messages are missing, of those sent and those that came to the one that stays.
    """
    facts = {name: actor.report.facts if actor.report else {} for name, actor in staying.items()}
    visits = [actor.report.facts for actor in guests if actor.report]
    received = [f for name, f in facts.items() if not name.startswith("sends")] + visits
    latencies = np.concatenate(
        [np.zeros(0), *(f["latencies"] for f in (*facts.values(), *visits) if len(f.get("latencies", [])))]
    )
    memory = {name: np.array(f["memory"], float) for name, f in facts.items() if f}
    sent = sum(f.get("messages", 0) for name, f in facts.items() if name.startswith("sends"))
    came = sum(f.get("messages", 0) for name, f in facts.items() if not name.startswith("sends"))
    everybody = {**staying, **{f"guest {number}": guest for number, guest in enumerate(guests)}}
    return {
        "seconds": round(seconds, 1),
        "sent": sent,
        "received": sum(f.get("messages", 0) for f in received),
        "gigabytes": round(sum(f.get("bytes", 0) for f in received) / 1e9, 2),
        "corrupted": sum(f.get("wrong", 0) for f in (*facts.values(), *visits)),
        "out of order": sum(f.get("out of order", 0) for f in (*facts.values(), *visits)),
        "lost": lost(sent, came),
        "came and went": len(guests),
        "latency us": {
            str(q): round(float(np.percentile(latencies, q)) * 1e6)
            for q in (50, 99, 99.9, 100)
            if len(latencies)
        },
        "memory growth kB/s": {n: [round(x / 1e3, 2) for x in slope(m[:, :2])] for n, m in memory.items()},
        "allocated growth kB/s": {
            n: [round(x / 1e3, 2) for x in slope(m[:, ::2])] for n, m in memory.items()
        },
        "Python blocks growth 1/s": {n: [round(x, 2) for x in slope(m[:, ::3])] for n, m in memory.items()},
        # Resident, allocated, and millions of Python's blocks, at eleven moments from the first to the last.
        "memory MB": {
            n: [[round(x / 1e6, 3) for x in m[at, 1:]] for at in np.linspace(0, len(m) - 1, 11).astype(int)]
            for n, m in memory.items()
        },
        "facts": {
            n: {k: v for k, v in f.items() if k.startswith(("buffers", "pending"))} for n, f in facts.items()
        },
        "left": sorted({what for a in everybody.values() if a.report for what in a.report.left}),
        "failed": [a.report.end for a in everybody.values() if a.report and "Traceback" in a.report.end],
        "silent": [name for name, actor in everybody.items() if not actor.report and not actor.killed],
    }


def miscounted(found: dict[str, Any]) -> list[str]:
    """What of a summary is not as it should be, but for memory, which needs a longer run."""
    keys = ("corrupted", "out of order", "lost", "left", "failed", "silent")
    return [f"{key}: {found[key]}" for key in keys if found[key]]


def wrong(found: dict[str, Any]) -> list[str]:
    """What of a summary is not as it should be."""
    grew = {n: (r, e) for n, (r, e) in found["memory growth kB/s"].items() if r * 1e3 > GROWTH and r > 3 * e}
    return miscounted(found) + [
        f"memory of {name} grows by {rate} kB/s (error {error})" for name, (rate, error) in grew.items()
    ]


def _for(actors: list[Actor], seconds: float) -> None:
    end = time.monotonic() + seconds
    until(actors, lambda: time.monotonic() >= end or all(actor.over for actor in actors))


def _visits(actors: list[Actor], seconds: float, come: Callable[[], Actor]) -> Iterator[Actor]:
    """Guests, one after the other, at least one; every second one is killed, the others leave when told."""
    number, end = 0, time.monotonic() + seconds
    while not number or time.monotonic() < end:
        guest = come()
        actors.append(guest)
        _for(actors, max(0.5, min(STAY_S, end - time.monotonic())))
        if number % 2:
            guest.kill()
        number += 1
        yield guest


def ring(seconds: float, folder: str, most: int = -1, **options: Any) -> dict[str, Any]:
    with stage() as actors:
        start = time.monotonic()
        writer = Actor("load:ring_writer", readers=2, most=most, **options)
        actors.append(writer)
        handle = until(actors, lambda: writer.said("handle"))
        stays = Actor("load:ring_reader", handle=handle, rank=0, **options)
        actors.append(stays)
        if most >= 0:
            guests = [Actor("load:ring_reader", handle=handle, rank=1, **options)]
            actors += guests
        else:
            guests = []
            come = lambda: Actor("load:ring_reader", handle=handle, rank=1)  # noqa: E731
            for guest in _visits(actors, seconds, come):
                guest.tell("leave")
                until(actors, lambda guest=guest: guest.over)  # its rank is taken until then
                guests.append(guest)
        writer.tell("stop") if most < 0 else None
        until(actors, lambda: all(actor.over for actor in actors))
        return summary(
            {"sends": writer, "receives": stays},
            guests,
            time.monotonic() - start,
            lost=lambda sent, came: sent - came,
        )


def payload(seconds: float, folder: str, most: int = -1, **options: Any) -> dict[str, Any]:
    with stage() as actors:
        start = time.monotonic()
        address = f"ipc://{folder}/payload{most}"
        sender = Actor("load:payload_sender", address=address, most=most, **options)
        stays = Actor("load:payload_receiver", address=address, **options)
        actors += [sender, stays]
        guests = []
        if most < 0:
            come = lambda: Actor("load:payload_receiver", address=address)  # noqa: E731
            for guest in _visits(actors, seconds, come):
                guest.tell("leave")
                guests.append(guest)
            sender.tell("stop")
        # Over ipc what the kernel still has for a receiver at its mark is lost when the sender closes.
        until(actors, lambda: sender.over or sender.said("sent"))
        for receiver in (stays, *guests):
            receiver.tell("stop")
        until(actors, lambda: all(actor.over for actor in (stays, *guests)))
        sender.tell("close")
        until(actors, lambda: sender.over)
        # What was on its way to a guest goes with it.
        return summary(
            {"sends": sender, "receives": stays},
            guests,
            time.monotonic() - start,
            lost=lambda sent, came: 0 if guests else sent - came,
        )


def pipeline(seconds: float, folder: str, most: int = -1, **options: Any) -> dict[str, Any]:
    """The second stage is killed and replaced; the first goes on with the new one."""
    with stage() as actors:
        start = time.monotonic()
        first = Actor("load:stage_rank", folder=folder, rank=0, life=most, most=most, **options)
        actors.append(first)
        guests: list[Actor] = []
        while True:
            life = most + len(guests)
            guest = Actor("load:stage_rank", folder=folder, rank=1, life=life, **options)
            guests.append(guest)
            actors.append(guest)
            until(actors, lambda life=life: first.over or ("life", life) in first.words)
            left = start + seconds - time.monotonic()
            if most >= 0 or left < 2 * STAY_S:
                break
            _for(actors, STAY_S)
            guest.kill()
            until(actors, lambda guest=guest: guest.over)
        _for(actors, max(0.0, start + seconds - time.monotonic()) if most < 0 else 0.0)
        first.tell("stop") if most < 0 else None
        until(actors, lambda: all(actor.over for actor in actors))
        # Both ends count: the first its answers, the second what it was sent.
        # What was on its way to a stage that was killed went with it.
        return summary(
            {"sends and is answered": first},
            guests,
            time.monotonic() - start,
            lost=lambda sent, came: most + 1 - sent if most >= 0 else 0,
        )


LOADS = {"broadcast ring": ring, "payload reuse": payload, "stage handoff": pipeline}


def traces(folder: Path, messages: int = 60) -> dict[str, Any]:
    """A run of each protocol recorded: the verdicts (accepted, rejected or undetermined), and what was miscounted."""
    found: dict[str, Any] = {}
    for name, load in LOADS.items():
        # In a folder of its own: a store that an earlier group met through leads to addresses that are gone.
        directory = folder / f"recorded-{name.replace(' ', '-')}"
        directory.mkdir()
        counted = load(0.0, str(directory), messages, record=str(directory / "recording"))
        verdicts = [judge(case).outcome for case in cases(read(directory / "recording"))]
        found[name] = [*sorted(verdicts), *miscounted(counted)]
    return found


def soak(seconds: float) -> dict[str, Any]:
    """Everything, for about so many seconds."""
    found: dict[str, Any] = {"machine": f"{platform.machine()}, Python {platform.python_version()}"}
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="quiesce-soak-") as folder:
        for name, load in LOADS.items():
            found[name] = load(seconds / 5, folder)
            bad += [f"{name}: {what}" for what in wrong(found[name])]
        found["traces"] = traces(Path(folder))
        bad += [f"trace of {n}: {v}" for n, v in found["traces"].items() if set(v) != {"accepted"}]
    _, candidates = points.dry()
    # In an order that goes through all scenarios, however few fit.
    candidates.sort(key=lambda point: zlib.crc32(str(point).encode()))
    found["crash points"] = points.figures(points.attempt(candidates, 2 * seconds / 5))
    bad += [f"{point}: {what}" for point, what in found["crash points"]["wrong"].items()]
    return {**found, "wrong": bad}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800.0, help="how long it may take, about")
    parser.add_argument("--json", type=Path, help="where the figures go besides stdout")
    chosen = parser.parse_args()
    found = json.dumps(soak(chosen.seconds), indent=1)
    print(found)
    if chosen.json:
        chosen.json.write_text(found + "\n")
    return 1 if json.loads(found)["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
