"""Mutants made by machine that the other tests did not notice, and what is now asked so that they are."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio
from model_tests.payload_reuse.watched import LARGE, Watched, full, joined

from quiesce.errors import Closed, QuiesceTimeout, WrongProcess
from quiesce.lifecycle import BufferPool, Loan
from quiesce.payload_receiver import AsyncPayloadReceiver, PayloadReceiver
from quiesce.payload_reuse import PayloadBuffer, PayloadSender
from quiesce.turns import Turns, _abandon_all


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; how long was slept."""
    slept: list[float] = []
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    monkeypatch.setattr("time.sleep", slept.append)
    return slept


def test_a_buffer_counts_the_bytes_of_payload_and_body() -> None:
    """Bits that both sizes have in common are counted twice: the sum, not what another operator makes of it."""
    buffer = PayloadBuffer()
    buffer.payload = bytearray(96)
    buffer.body = bytearray(96)
    assert len(buffer) == 192


def test_limits_of_a_free_list_may_be_met_and_may_be_nothing() -> None:
    pool = BufferPool(bytearray, free_bytes=10, size=len)
    for size, free in ((5, 1), (5, 2), (1, 2), (0, 3)):
        pool.give_back(bytearray(size))
        assert pool.free == free
    none = BufferPool(bytearray, 0, 0)
    none.give_back(none.take())
    assert none.free == 0


def test_no_time_to_wait_is_no_waiting(context: zmq.Context[Any], stopped: list[float]) -> None:
    """A deadline that is now has passed."""
    push = context.socket(zmq.PUSH, socket_class=Watched)
    push.bind("inproc://nobody")
    _, pull = joined(context)
    sender, receiver = PayloadSender(push), PayloadReceiver(pull)
    with pytest.raises(QuiesceTimeout):
        sender.send(1, timeout=0)
    with pytest.raises(QuiesceTimeout):
        receiver.receive(0)
    assert push.polls == pull.polls == []
    loan = Loan("memory")
    loan.add(type("Never", (), {"done": False})(), None)
    with pytest.raises(QuiesceTimeout):
        loan.wait(0)
    assert stopped == []
    receiver.close()
    push.close(linger=0)


@pytest.mark.parametrize("distance", [-1, 1])
def test_another_process_is_one_of_whatever_number(monkeypatch: pytest.MonkeyPatch, distance: int) -> None:
    turns = Turns("this sender")
    assert turns.take(0.0, lambda: "mine") == "mine"
    other = os.getpid() + distance
    monkeypatch.setattr("os.getpid", lambda: other)
    with pytest.raises(WrongProcess, match="this sender was made in process"):
        turns.take(0.0, lambda: "mine")


def elsewhere(call: Callable[[], object]) -> str:
    """What a call of another thread comes to: the name of its error, or nothing."""
    said: list[str] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    return "".join(said)


def test_a_turn_is_ended_by_its_own_thread_alone() -> None:
    turns = Turns("this sender")

    def another() -> None:
        turns.take(0.0, lambda: None)

    def begun() -> str:
        assert turns.mine
        assert elsewhere(another) == "QuiesceTimeout"
        assert turns.mine
        return "begun"

    assert turns.take(0.0, begun) == "begun"
    assert not turns.mine
    assert elsewhere(another) == ""


def test_a_turn_whose_beginning_fails_is_over() -> None:
    turns = Turns("this sender")
    with pytest.raises(KeyError):
        turns.take(0.0, lambda: {}["nothing"])
    assert not turns.mine
    assert elsewhere(lambda: turns.take(0.0, lambda: None)) == ""


def test_a_sender_that_is_left_at_exit_does_not_linger(context: zmq.Context[Any]) -> None:
    push, _ = joined(context)
    sender = PayloadSender(push)
    _abandon_all()
    assert push.lingers == [0]
    with pytest.raises(Closed):
        sender.send(1)


EXITS = """
import atexit
atexit.register(lambda: print(sender._closed))  # first, hence run last
import zmq
from quiesce.payload_reuse import PayloadSender
sender = PayloadSender(zmq.Context().socket(zmq.PUSH))
"""


def test_an_interpreter_that_exits_closes_its_senders() -> None:
    found = subprocess.run(
        [sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "True\n"


def test_loans_are_waited_for_a_second_longer_than_the_socket_lingers(
    context: zmq.Context[Any], stopped: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    push, pull = joined(context)
    waits: list[float] = []

    def wait(loan: Loan, timeout: float) -> None:
        waits.append(timeout)
        if timeout < 2:
            raise QuiesceTimeout

    monkeypatch.setattr(Loan, "wait", wait)
    with PayloadReceiver(pull) as receiver:
        sender = PayloadSender(push)
        sender.lend([full(LARGE)])
        held = receiver.receive()
        sender.close(1.5)
        assert waits == [1.495, 2.5]
        del held


class Awake(zmq.asyncio.Socket):
    """Says at once that there is something to receive."""

    polled = 0

    def poll(self, timeout: Any = None, flags: int = zmq.POLLIN) -> Any:
        type(self).polled += 1
        assert self.polled < 100_000, "its time has long passed"
        answer: asyncio.Future[int] = asyncio.Future()
        answer.set_result(flags)
        return answer


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_an_asyncio_receiver_that_is_woken_for_nothing_keeps_to_its_time(timeout: float) -> None:
    async def run() -> None:
        context = zmq.asyncio.Context()
        async with AsyncPayloadReceiver(context.socket(zmq.PULL, socket_class=Awake)) as receiver:
            with pytest.raises(QuiesceTimeout):
                await receiver.receive(timeout)
        context.term()

    Awake.polled = 0
    asyncio.run(asyncio.wait_for(run(), 30))
    assert bool(Awake.polled) == bool(timeout)
