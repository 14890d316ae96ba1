"""vLLM's sender loop and ring, two versions of them, held to the specifications; needs `make foreign`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from model_tests.foreign import loading, measure
from model_tests.foreign.vllm_ring import Ring, Ring0260, Ring0330, sending
from model_tests.foreign.vllm_sender import Alone, Alone0260, Alone0330, Vllm0260, Vllm0330

from quiesce.model.adapter import Divergence
from quiesce.model.coverage import Coverage
from quiesce.model.judging import cases, judge
from quiesce.model.lockstep import lockstep
from quiesce.model.schedule import check, replay
from quiesce.model.tours import drive
from quiesce.model.traces import read
from quiesce.recording import record

pytestmark = pytest.mark.skipif(
    list(loading.available()) != list(loading.VERSIONS),
    reason=f"set {loading.VARIABLE} to a folder with vLLM {' and '.join(loading.VERSIONS)}; `make foreign` makes one",
)
RINGS = pytest.mark.parametrize("ring", [Ring0260, Ring0330], ids=["0.26.0", "0.33.0"])
SEARCH: dict[str, Any] = {
    "examples": 40,
    "steps": 50,
    "options": settings(phases=[Phase.generate], database=None),
}


def payload(number: int, tensor: str = "") -> str:
    """A large payload, and perhaps a tensor behind it, sent out of buffer `number`."""
    shape = f"[large |-> TRUE, lent |-> FALSE]{f', [large |-> {tensor}, lent |-> TRUE]' if tensor else ''}"
    parts = "SendPart\nSendPart" if tensor else "SendPart"
    return f"Take(b = b{number})\nBeginEncode\nEndEncode(s = <<{shape}>>)\n{parts}\nRemember\n"


def diverges(adapter: type[Any], schedule: str, where: str) -> Divergence:
    """The divergence that a schedule leads to; TLC's command line must agree about it."""
    with pytest.raises(Divergence, match=where) as caught:
        replay(adapter, schedule)
    found = caught.value
    verdict = check(found.oracle, found.behaviour, found.forbidden).verdict
    assert verdict == ("deadlock" if found.forbidden else "holds")
    return found


OVERWRITTEN = "BeginOverwrite(t = t1)\nEndOverwrite(t = t1)\n"
RECEIVED = "PeerTake\nBeginRead\nEndRead\nPeerDrop\n"
THREE_AT_ONCE = (
    "".join(map(payload, (1, 2, 3)))
    + 3 * RECEIVED
    + "".join(f"TrackerFires(m = {m}, i = 1)\n" for m in (1, 2, 3))
    + "Recycle(b = b1)"
)
PUBLISHED = "Take(s = s1)\nBeginFill(s = s1)\nEndFill(s = s1)\nPublish(s = s1)\nReturn\n"
ANOTHER = PUBLISHED.replace("s1", "s2")
OVERFLOWED = "Overflow\nSendBody(r = r1)\nReturn\n"
LATE_BODY = "Overflow\nOpen(r = r1)\nTimeOut(r = r1)\nSendBody(r = r1)\nReturn\n"


class Unbounded0260(Alone0260):
    """The same held to a specification whose free list has room for all buffers."""

    constants = {**Alone.constants, "FreeLimit": "4"}


def test_the_sender_of_0_33_0_keeps_step() -> None:
    assert lockstep(Vllm0330, **SEARCH)


def test_tours_find_nothing_in_the_sender_of_0_33_0() -> None:
    coverage = Coverage.of(Vllm0330, "a small tensor")
    drive(Vllm0330, "a small tensor", coverage, tries=4)
    assert coverage.together


def test_the_sender_of_0_26_0_frees_a_buffer_behind_a_small_tensor() -> None:
    found = diverges(Vllm0260, OVERWRITTEN + payload(1, "FALSE"), "forbids: Recycle")
    assert len(found.behaviour) == 8


def test_the_sender_of_0_26_0_keeps_step_with_payloads_alone() -> None:
    assert lockstep(Unbounded0260, **SEARCH)


def test_the_free_list_of_0_26_0_grows() -> None:
    diverges(Alone0260, THREE_AT_ONCE, "forbids: Recycle")
    replay(Alone0330, THREE_AT_ONCE)


@pytest.mark.parametrize(("adapter", "outcome"), [(Vllm0260, "rejected"), (Vllm0330, "accepted")])
def test_a_recording_of_the_sender_is_judged(adapter: type[Any], outcome: str, tmp_path: Path) -> None:
    with record(tmp_path), suppress(Divergence):
        replay(adapter, OVERWRITTEN + payload(1, "FALSE"))
    (case,) = cases(read(tmp_path))
    verdict = judge(case)
    assert verdict.outcome == outcome, verdict.explanation.message
    assert outcome == "accepted" or (verdict.event is not None and verdict.event.action == "Remember")


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_the_ring_of_0_33_0_keeps_step(kind: str) -> None:
    assert lockstep(sending(Ring0330, kind), **SEARCH)


def test_the_ring_of_0_26_0_keeps_step_with_tensors() -> None:
    assert lockstep(sending(Ring0260, "tensor"), **SEARCH)


def test_an_array_received_from_the_ring_of_0_26_0_lies_in_a_chunk_that_is_free() -> None:
    schedule = PUBLISHED + ANOTHER + "Open(r = r1)\nLease(r = r1)\nOpen(r = r1)"
    diverges(sending(Ring0260, "array"), schedule, "forbids: Release")


@RINGS
def test_bodies_arrive_if_the_caller_leaves_its_memory_alone(ring: type[Ring]) -> None:
    assert lockstep(sending(ring, "tensor", bodies=True, caller_writes=False), **SEARCH)


@pytest.mark.parametrize(("ring", "kind"), [(Ring0260, "array"), (Ring0330, "array"), (Ring0330, "tensor")])
def test_a_body_on_its_way_is_the_callers_memory(ring: type[Ring], kind: str) -> None:
    diverges(sending(ring, kind, bodies=True), OVERFLOWED, "a body is the caller's memory: True")


def test_a_tensor_sent_as_a_body_by_0_26_0_is_a_copy() -> None:
    replay(sending(Ring0260, "tensor", bodies=True), OVERFLOWED + "Open(r = r1)\nTakeBody(r = r1)")


@RINGS
def test_a_reader_whose_wait_for_a_body_ran_out_does_not_come_back_to_it(ring: type[Ring]) -> None:
    adapter = sending(ring, "tensor", bodies=True, waits_run_out=True, caller_writes=False)
    diverges(adapter, LATE_BODY + "TakeBody(r = r1)", "allows TakeBody")
    diverges(adapter, LATE_BODY + ANOTHER + "TakeBody(r = r1)", "forbids: Open")


def test_what_arrives() -> None:
    for transport in ("ipc", "tcp"):
        assert measure.sender("0.26.0", transport, 300) > 0
        assert measure.sender("0.33.0", transport, 300) == 0
    for version, kind, torn in (("0.26.0", "array", 5), ("0.26.0", "tensor", 0), ("0.33.0", "array", 0)):
        assert measure.kept(version, kind, 5) == torn
    assert measure.kept("0.33.0", "tensor", 5) == measure.arena("0.33.0", 5) == 0
    for version, kind in (("0.26.0", "array"), ("0.33.0", "array"), ("0.33.0", "tensor")):
        assert measure.written_after(version, kind, 2) > 0
    assert measure.written_after("0.26.0", "tensor", 2) == 0
    assert measure.behind("0.26.0", 5) == measure.behind("0.33.0", 5) == 5
