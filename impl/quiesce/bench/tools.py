"""Time the model tools: `quiesce bench tools`.

States a second beside TLC alone; queries of the oracle, fresh, remembered, and with one call into Java for all
successors of a state; tours, planned and driven through the implementation; validation of recorded traces, by
length, beside a start of TLC for each; with `--models`, what each minute of `make check-model` buys.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import zmq

from quiesce.bench.measuring import Report, Spread, Times, in_turns, ratio, timed
from quiesce.model import manifest, paths, tlc
from quiesce.model.case import Case, _walks
from quiesce.model.checking import check
from quiesce.model.coverage import Coverage
from quiesce.model.errors import ModelError
from quiesce.model.graph import Graph
from quiesce.model.judging import cases, judge
from quiesce.model.oracle import Oracle
from quiesce.model.second_opinion import accepts
from quiesce.model.tours import drive, tours
from quiesce.model.traces import read
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.recording import record

TIMEOUT_S = 600.0
OPINION_S = 60.0


def beside_tlc(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    """`check`, with everything it adds, beside TLC's own command line with the same options, over one model."""
    known = manifest.load()
    model = known.models[name]
    with tempfile.TemporaryDirectory(prefix="quiesce_bench_") as folder:
        config = Path(folder, "run.cfg")
        config.write_text(known.config(model).text(), encoding="utf-8")

        def alone() -> Times:
            with tempfile.TemporaryDirectory(prefix="quiesce_bench_") as scratch:
                command = tlc._command(
                    known.directory / f"{model.module}.tla",
                    config,
                    scratch,
                    known.libraries,
                    1,
                    2 << 30,
                    True,
                )
                begin = time.perf_counter()
                done = subprocess.run(
                    [*command, "-coverage", "1", f"{model.module}.tla"],
                    cwd=known.directory,
                    stdout=subprocess.DEVNULL,
                    timeout=TIMEOUT_S,
                    check=False,
                )
                if done.returncode:
                    raise RuntimeError(f"TLC exits with {done.returncode} on {name}")
                return [time.perf_counter() - begin]

        def ours(named: bool) -> Times:
            begin = time.perf_counter()
            if check(name, named=named).distinct != model.distinct:
                raise RuntimeError(f"{name} is not as pinned")
            return [time.perf_counter() - begin]

        ours(True)  # loads the oracle, once a process
        ways = {"TLC alone": alone, "check": lambda: ours(False), "check, actions named": lambda: ours(True)}
        found = in_turns(ways, rounds)
        for way, times in found.items():
            seconds = Spread.of([t for each in times for t in each])
            yield {
                "way": way,
                "model": name,
                "seconds": seconds,
                "distinct states/s": (model.distinct or 0) / seconds.median,
                "time / TLC alone": ratio(found["TLC alone"], times),
            }


def queries(name: str, count: int) -> Iterator[dict[str, Any]]:
    """Successors of the first states of a model, breadth first."""
    oracle = Oracle.load(name)
    states = list(oracle.initial())
    seen = set(states)
    for state in states:
        for step in oracle.successors(state):
            if step.state not in seen and len(states) < count:
                seen.add(step.state)
                states.append(step.state)
    bridge, tool = oracle._bridge, oracle._tool
    whole = tool.getNextStateSpec()
    java = [bridge.java_state(state) for state in states]

    def fresh() -> Times:
        oracle._successors.clear()
        return [sum(timed(lambda: [oracle.successors(state) for state in states], 1)) / len(states)]

    def remembered() -> Times:
        return [sum(timed(lambda: [oracle.successors(state) for state in states], 1)) / len(states)]

    def in_one_call() -> Times:
        def all_states() -> None:
            for state in java:
                found = tool.getNextStates(whole, state)
                for index in range(found.size()):
                    bridge.state(found.elementAt(index))

        return [sum(timed(all_states, 1)) / len(states)]

    ways = {"fresh": fresh, "one call, actions not named": in_one_call, "remembered": remembered}
    found = in_turns(ways, 5)
    for way, times in found.items():
        each = Spread.of([t * 1e6 for rounds in times for t in rounds])
        yield {
            "way": way,
            "model": name,
            "us a state": each,
            "states/s": 1e6 / each.median,
            "fresh / this": ratio(times, found["fresh"]),
        }


def touring(name: str) -> Iterator[dict[str, Any]]:
    """Tours of a small model: planned only, and driven through the implementation by the adapter of the tests."""
    graph = Graph.explore(Oracle.load(name))
    begin = time.perf_counter()
    walks = list(tours(graph))
    seconds = time.perf_counter() - begin
    steps = sum(map(len, walks))
    yield {
        "what": f"tours of {name}, planned",
        "edges": len(graph.edges),
        "steps": steps,
        "steps/s": steps / seconds,
    }
    tree = paths.source_tree()
    if tree is None:
        return
    sys.path.append(str(tree))
    adapter = importlib.import_module("model_tests.payload_reuse.adapter").PayloadReuse
    for small in ("two messages", "lent"):
        coverage = Coverage.of(adapter, small)
        begin = time.perf_counter()
        driven = drive(adapter, small, coverage)
        seconds = time.perf_counter() - begin
        yield {
            "tour": f"the real sender, {small}",
            "edges": len(coverage.graph.edges),
            "steps": driven.steps,
            "steps/s": driven.steps / seconds,
        }


def recorded(folder: Path, messages: int) -> Case:
    """What a real sender did, for a real receiver, over inproc."""
    with zmq.Context() as context, record(folder):
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        push.bind("inproc://bench")
        pull.connect("inproc://bench")
        with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
            for number in range(messages):
                sender.send([number, torch.full((20_000,), float(number))])
                del receiver.receive().value[1]
    (case,) = cases(read(folder))
    return case


def validating(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Validation of recorded senders, by length; and a start of TLC for the same trace.

    "first": of a specification just loaded, which has seen no trace; "again": of one that knows the `states` already.
    """
    for messages in lengths:
        with tempfile.TemporaryDirectory(prefix="quiesce_bench_") as folder:
            case = recorded(Path(folder), messages)
        first: list[float] = []
        again: list[float] = []
        for _ in range(3):
            _walks.clear()
            walk = case.walk(case.worlds[0])
            for times in (first, again):
                begin = time.perf_counter()
                outcome = judge(case).outcome
                times.append(time.perf_counter() - begin)
                if outcome != "accepted":
                    raise RuntimeError(f"the recording of {messages} messages is {outcome}")
        begin = time.perf_counter()
        try:
            accepted = accepts([case], timeout=OPINION_S)
        except ModelError:  # no answer within the time
            accepted = []
        alone = time.perf_counter() - begin
        if accepted == [False]:
            raise RuntimeError(f"TLC does not accept the recording of {messages} messages")
        events, seconds = len(case.events), Spread.of(first)
        yield {
            "messages": messages,
            "events": events,
            "states": len(walk.states),
            "first, s": seconds,
            "events/s": events / seconds.median,
            "again, events/s": events / Spread.of(again).median,
            "a start of TLC, s": alone if accepted else f"over {OPINION_S:.0f}",
            "TLC / first": alone / seconds.median,
        }


def models(jobs: int) -> Iterator[dict[str, Any]]:
    """What `make check-model` spends its time on, by protocol; TLC's seconds, of which `jobs` pass at a time."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "quiesce.cli", "check", "--json", "--jobs", str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=True)
    wall = time.perf_counter() - begin
    results = json.loads(done.stdout)
    for protocol in dict.fromkeys(each["protocol"] for each in results):
        own = [each for each in results if each["protocol"] == protocol]
        slowest = max(own, key=lambda each: each["seconds"])
        yield {
            "protocol": protocol,
            "models": sum(each["kind"] == "model" for each in own),
            "mutants": sum(each["kind"] == "mutant" for each in own),
            "states": sum(each["distinct"] for each in own),
            "TLC, s": sum(each["seconds"] for each in own),
            "slowest": f"{slowest['name']}, {slowest['seconds']:.1f} s",
        }
    yield {
        "protocol": "all, and the time that passed",
        "models": sum(each["kind"] == "model" for each in results),
        "mutants": sum(each["kind"] == "mutant" for each in results),
        "states": sum(each["distinct"] for each in results),
        "TLC, s": wall,
        "slowest": "",
    }


def main(
    file: Path | None,
    rounds: int = 5,
    model: str = "ring_slots",
    count: int = 2_000,
    lengths: Sequence[int] = (10, 20, 40, 80, 160),
    check_models: bool = False,
) -> dict[str, Any]:
    """Measure, print, write; the data."""
    report = Report("tools", file)
    report.table("beside TLC alone", beside_tlc(model, rounds))
    report.table(
        "the oracle", [row for name in ("ring_views", "payload_reuse_stream") for row in queries(name, count)]
    )
    report.table("traces of a real sender", validating(lengths))
    if check_models:
        report.table("make check-model", models(2))
    report.table("tours", touring("tracker_completion_stream"))
    report.write()
    return report.data
