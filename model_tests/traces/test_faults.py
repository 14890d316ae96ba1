"""Faulty variants of the implementations, recorded under load, are rejected; the shipped ones there are not."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_tests.broadcast_ring.faults import READERS, WRITERS
from model_tests.payload_reuse.faulty import FAULTY
from model_tests.stage_handoff.faults import ReceiveReadEarly
from model_tests.stage_handoff.worker import WaitSkipped
from model_tests.traces import runs
from model_tests.traces.runs import Interrupt

from quiesce.broadcast_ring import BroadcastRing
from quiesce.model.judging import Verdict, cases, judge
from quiesce.model.traces import read
from quiesce.payload_reuse import PayloadSender
from quiesce.ring_reader import RingReader
from quiesce.stage_handoff import StageLink
from quiesce.transport import Handle

ATTEMPTS = 3
"""Runs of which one has to show a fault that needs an unlucky moment."""


class HandlesOverwritten(StageLink):
    """Each send replaces the handles of the one before; gloo would lose the message if nobody held them."""

    def isend_tensor_dict(self, values: Any) -> list[Handle]:
        handles = super().isend_tensor_dict(values)
        self.__dict__.setdefault("held", []).extend(self._unsettled)
        self._unsettled = handles[1:]
        return handles


class ReceiveNotPosted(StageLink):
    """The receive is posted unseen: to whoever looks on, the wait is for nothing."""

    def _post_receive(self, received: Any) -> None:
        time.sleep(0.001)
        super()._post_receive.__wrapped__(self, received)  # type: ignore[attr-defined]


SLOW = runs.Payload(messages=20, delay=0.002, seed=5)
CUT = replace(SLOW, kill=Interrupt("SendPart", "end", 4), large=True)
PAYLOAD: dict[str, tuple[runs.Payload, set[str]]] = {
    "last_frame_tracker": (SLOW, {"Remember"}),
    "copied_frame_tracker": (SLOW, {"Remember"}),
    "no_tracker": (SLOW, {"Remember"}),
    "recycled_at_send": (SLOW, {"Remember"}),
    "recycled_at_receive": (SLOW, {"Remember"}),
    "recycled_twice": (SLOW, {"Recycle", "DropSurplus"}),
    "free_list_unbounded": (replace(SLOW, messages=8, free_limit=1, high_water=100), {"Recycle"}),
    "orphan_part": (CUT, {"Remember"}),
}
"""The run, and the actions of which one gives the fault away: whether a buffer is kept depends on how many are free."""

LATE = runs.Ring(messages=12, delay=0.01, seed=5)
RING: dict[str, tuple[runs.Ring, set[str]]] = {
    "ignore_one_reader": (LATE, {"Recycle"}),
    "notify_before_publish": (LATE, {"Post"}),
    "lap_reader": (replace(LATE, window=2, slots=4), {"Take", "Overflow"}),
    "release_before_copy": (LATE, {"Release"}),
    "lease_not_honoured": (LATE, {"Release"}),
}
STAGE: dict[str, tuple[type[StageLink], runs.Stage, set[str]]] = {
    "receive_read_early": (ReceiveReadEarly, runs.Stage(steps=5), {"BeforeForward"}),
    "wait_skipped": (WaitSkipped, runs.Stage(steps=6, delay=0.01), {"BeforeForward"}),
    "handles_overwritten": (
        HandlesOverwritten,
        runs.Stage(steps=6, delay=0.01, extra=True),
        {"BeforeForward"},
    ),
    "receive_not_posted": (ReceiveNotPosted, runs.Stage(steps=5), {"AwaitReceive", "BeforeForward"}),
}


def verdict(folder: Path) -> Verdict:
    (case,) = cases(read(folder))
    return judge(case)


@pytest.mark.parametrize("fault", list(PAYLOAD))
def test_a_faulty_sender_is_rejected(fault: str, tmp_path: Path) -> None:
    run, guilty = PAYLOAD[fault]
    try:
        runs.payload(tmp_path / "faulty", replace(run, sender=FAULTY[fault]))
    except AssertionError:
        # What the fault did may be more than the run survives; the recording is there all the same.
        assert list((tmp_path / "faulty").glob("*.jsonl"))
    found = verdict(tmp_path / "faulty")
    assert found.outcome == "rejected", found
    assert found.event is not None
    assert found.event.action in guilty, found.explanation.message


@pytest.mark.parametrize("run", [SLOW, CUT], ids=["slow", "cut"])
def test_the_shipped_sender_is_accepted_in_the_same_run(run: runs.Payload, tmp_path: Path) -> None:
    runs.payload(tmp_path / "shipped", replace(run, sender=PayloadSender))
    assert verdict(tmp_path / "shipped").outcome == "accepted"


@pytest.mark.parametrize("fault", list(RING))
def test_a_faulty_ring_is_rejected(fault: str, tmp_path: Path) -> None:
    run, guilty = RING[fault]
    for attempt in range(ATTEMPTS):
        folder = tmp_path / str(attempt)
        writer, reader = WRITERS.get(fault, BroadcastRing), READERS.get(fault, RingReader)
        try:
            runs.ring(folder, replace(run, writer=writer, reader=reader, seed=attempt))
        except AssertionError:
            assert list(folder.glob("*.jsonl"))
        found = verdict(folder)
        if found.outcome == "rejected":
            assert found.event is not None
            assert found.event.action in guilty, found.explanation.message
            return
    pytest.fail(f"{fault} was accepted {ATTEMPTS} times")


def test_the_shipped_ring_is_accepted_in_the_same_run(tmp_path: Path) -> None:
    runs.ring(tmp_path / "shipped", LATE)
    assert verdict(tmp_path / "shipped").outcome == "accepted"


@pytest.mark.parametrize("fault", list(STAGE))
def test_a_faulty_link_is_rejected(fault: str, tmp_path: Path) -> None:
    link, run, guilty = STAGE[fault]
    # Runs of one process group are quick; a peer that is quicker than the fault leaves nothing to reject.
    folders = [tmp_path / str(attempt) for attempt in range(4 * ATTEMPTS)]
    runs.stage(folders, replace(run, link=link))
    rejected = [found for found in map(verdict, folders) if found.outcome == "rejected"]
    assert rejected, f"{fault} was accepted {len(folders)} times"
    for found in rejected:
        assert found.event is not None
        assert found.event.action in guilty, found.explanation.message


@pytest.mark.parametrize(
    "run", [runs.Stage(steps=6, delay=0.01, extra=extra) for extra in (False, True)], ids=str
)
def test_the_shipped_link_is_accepted_in_the_same_run(run: runs.Stage, tmp_path: Path) -> None:
    runs.stage([tmp_path / "shipped"], run)
    assert verdict(tmp_path / "shipped").outcome == "accepted"
