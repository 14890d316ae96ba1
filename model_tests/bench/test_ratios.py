"""The benchmarks run, small; they fail only if a ratio to a peer in the same run is twice as bad as recorded.

Both sides of a ratio run in turns, so that a loaded machine slows both; and the best of several turns counts, because
load only ever makes a turn worse. A change that costs twice as much in every turn still shows. What is recorded in
`recorded.json` is the worst of such runs on two cores that had four times as much to do as they can; for gloo that is
far from the middle, since a step waits for the scheduler several times.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import statistics
from pathlib import Path

import pytest

from quiesce.bench import payload, stage
from quiesce.bench.measuring import in_turns
from quiesce.bench.payload import Case, turns
from quiesce.bench.payload_peers import BARE, LEND, SEND, Bare, ways
from quiesce.lifecycle import FREE_BYTES

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text(encoding="utf-8"))
WORSE = 2.0
CASES = (Case(1 << 10, 1, 40), Case(1 << 20, 1, 15), Case(1 << 20, 300, 8))


def held(found: dict[str, float]) -> None:
    """Every ratio against what is recorded; QUIESCE_RECORD prints what to record."""
    if "QUIESCE_RECORD" in os.environ:
        print(json.dumps({name: round(value, 2) for name, value in found.items()}))
    worse = {
        name: f"{value:.2f}, recorded {RECORDED[name]}"
        for name, value in found.items()
        if value > WORSE * RECORDED[name]
    }
    assert not worse, f"more than {WORSE:g} times as slow beside the peer as recorded: {worse}"


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_payloads_cost_no_more_beside_bare_libzmq_and_pickle(transport: str) -> None:
    known, _ = ways("pickle")
    del known["pickle, out of band"]
    found = {}
    with turns(transport, known, "pickle") as each:
        for case in CASES:
            calls = {name: functools.partial(turn.turn, case.make(), case) for name, turn in each.items()}
            times = in_turns(calls, 6)
            best = {name: min(map(statistics.median, rounds)) for name, rounds in times.items()}
            # Pickling many tensors over sockets takes now once, now four times as long.
            for ours, peer in ((LEND, BARE), (SEND, "pickle"))[: 1 if case.tensors > 1 else 2]:
                found[f"{transport}, {case.name}, {ours} / {peer}"] = best[ours] / best[peer]
    held(found)


def test_a_step_costs_no_more_beside_bare_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = {}
    for case, times in stage.pipeline({"64 KiB": (64 << 10, 10), "1 MiB": (1 << 20, 6)}, 20).items():
        best = {name: min(map(statistics.median, rounds)) for name, rounds in times.items()}
        found[f"{case}, {stage.LINK} / {stage.DESCRIBED}"] = best[stage.LINK] / best[stage.DESCRIBED]
    held(found)


def test_a_sender_keeps_nothing_of_the_messages_it_sent() -> None:
    """A thousand messages of 1 MiB; what stays is what the free list may hold."""
    known, _ = ways("none of them")
    rows = {row["way"]: row for row in payload.allocations(known)}
    assert rows[LEND]["at the peak"] < 1 << 18
    assert rows[LEND]["more after 1,000 messages"] < 1 << 18
    assert rows[SEND]["more after 1,000 messages"] < FREE_BYTES + (1 << 20)


def test_the_bare_way_sends_what_it_is_given() -> None:
    """Messages die at once, so that the next one may be where the last one was."""
    sent = []

    class Push:
        def send_multipart(self, frames: list[bytes], copy: bool) -> None:
            sent.append(len(frames))

    send = Bare().sender(Push())  # type: ignore[arg-type]
    one, four = (Case(1 << 20, count, 1).make() for count in (1, 4))
    for _ in range(20):
        send(copy.copy(one))
        send(copy.copy(four))
    assert sent == sent[:2] * 20
    assert sent[0] < sent[1]
