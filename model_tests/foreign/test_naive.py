"""A sender and a ring as one writes them at first, and what of them keeps step with the specifications."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_tests.foreign import measure
from model_tests.foreign.naive_ring import Ring
from model_tests.foreign.sender import ArrayFirst, HeaderFirst, Sender

from quiesce.model import Oracle, Step, check, judge, manifest
from quiesce.model.adapter import Divergence, Run
from quiesce.model.coverage import Coverage
from quiesce.model.judging import cases
from quiesce.model.judging import judge as judge_case
from quiesce.model.lockstep import lockstep
from quiesce.model.schedule import check as behaviour
from quiesce.model.schedule import find, read, replay
from quiesce.model.tours import drive
from quiesce.model.traces import read as read_trace
from quiesce.model.values import Function
from quiesce.recording import record

# A large array and its header; the buffer is free as soon as they are sent.
ONE_MESSAGE = """
    Take(b = b1)
    BeginEncode
    EndEncode(s = <<[large |-> TRUE, lent |-> FALSE], [large |-> FALSE, lent |-> FALSE]>>)
    SendPart
    SendPart
    Remember
"""


def test_the_models_hold_and_the_mutant_is_caught() -> None:
    known = manifest.load(Path(__file__).with_name("manifest.toml"))
    for name in (*known.models, *known.mutants):
        assert not judge(known.find(name), check(name, manifest=known)).problems, name


def test_with_the_header_first_it_keeps_step() -> None:
    assert lockstep(HeaderFirst, examples=24, steps=40)


def test_with_the_header_first_tours_find_nothing_either() -> None:
    coverage = Coverage.of(HeaderFirst, "two messages")
    drive(HeaderFirst, "two messages", coverage)
    assert not coverage.untaken()[1]


def test_with_the_array_first_a_buffer_is_free_while_it_is_being_read() -> None:
    with pytest.raises(Divergence, match="forbids: Recycle") as caught:
        replay(ArrayFirst, ONE_MESSAGE + "Take(b = b2)")
    divergence = caught.value
    assert divergence.forbidden is not None
    assert divergence.forbidden.action == "Recycle"
    verdict = behaviour(divergence.oracle, divergence.behaviour, divergence.forbidden)
    assert verdict.verdict == "deadlock", "TLC's command line must find that the last step is none"


def test_and_what_the_receiver_holds_is_overwritten() -> None:
    """What it does is what the mutant of the specification does, step for step, until the bytes are wrong."""
    oracle = ArrayFirst.load(fault="foreign_last_frame")
    run = Run(ArrayFirst(oracle))

    def ask(schedule: str) -> set[int]:
        for asked in read(schedule, oracle):
            run.ask(find(run, asked))
        return set(bytes(run.adapter.wire.frames[0]))  # type: ignore[attr-defined]

    try:
        assert ask(ONE_MESSAGE + "PeerTake") == {1}
        assert not oracle.violated(run.states[0])
        assert ask(ONE_MESSAGE.replace("Take", "Recycle")) == {2}, (
            "the first message must show the second's bytes"
        )
        assert oracle.violated(run.states[0]) == ("NoTornRead",)
    finally:
        run.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_real_sockets_carry_the_wrong_bytes(transport: str) -> None:
    assert measure.naive(True, transport, 300) == 0
    assert measure.naive(False, transport, 300) > 0


def _recorded(adapter: type[Sender], oracle: Oracle, folder: Path) -> None:
    """Two messages that nobody receives, sent by the adapter's sender without being stopped."""
    with record(folder):
        run = adapter(oracle)
        try:
            for asked in read(2 * ONE_MESSAGE, ArrayFirst.load()):
                parameters = dict(asked.parameters)
                if "s" in parameters and adapter is HeaderFirst:
                    parameters["s"] = parameters["s"][::-1]
                step = Step(asked.action, Function(parameters), oracle.initial()[0])
                (run.send if asked.action == "Take" else run.go_on)(step)
        finally:
            run.close()


@pytest.mark.parametrize(("adapter", "outcome"), [(ArrayFirst, "rejected"), (HeaderFirst, "accepted")])
def test_a_recording_of_it_is_judged(adapter: type[Sender], outcome: str, tmp_path: Path) -> None:
    _recorded(adapter, adapter.load(), tmp_path)
    (case,) = cases(read_trace(tmp_path))
    verdict = judge_case(case)
    assert verdict.outcome == outcome, verdict.explanation.message
    assert outcome == "accepted" or (verdict.event is not None and verdict.event.action == "Remember")


def test_the_ring_fills_a_slot_that_a_reader_holds() -> None:
    with pytest.raises(Divergence, match="forbids: Take"):
        replay(Ring, "Take(s = s1)\nTake(s = s2)\nOpen(r = r1)\nOverflow")


def test_a_reader_of_the_ring_that_is_slower_than_the_writer_has_other_bytes() -> None:
    assert measure.ring(slots=4, kept=3, count=50) == 0
    assert measure.ring(slots=4, kept=4, count=50) == 50
