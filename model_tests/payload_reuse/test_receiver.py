"""What the larger tests of a receiver pass over: interruptions, marks, time limits, and what it says it shares."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest
import zmq
import zmq.asyncio
from model_tests.payload_reuse.watched import LARGE, Signal, full, joined

from quiesce.codec import ABORT, Decoder
from quiesce.errors import Closed, QuiesceTimeout
from quiesce.payload_receiver import AsyncPayloadReceiver, PayloadReceiver
from quiesce.payload_reuse import PayloadSender


@pytest.mark.parametrize(
    ("decoder", "size", "aliases"),
    [(Decoder(), LARGE, True), (Decoder(copy=True), LARGE, False), (Decoder(), 8, False)],
)
def test_a_receiver_says_what_it_shares(
    context: zmq.Context[Any], decoder: Decoder[Any], size: int, aliases: bool
) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull, decoder) as receiver:
        sender.lend([full(size)])
        assert receiver.receive().aliases_sender == aliases


class AsyncWatched(zmq.asyncio.Socket):
    polls: list[Any] = []

    def poll(self, timeout: Any = None, flags: int = zmq.POLLIN) -> Any:
        self.polls.append(timeout)
        return super().poll(timeout, flags)


def test_a_waiting_time_is_what_the_asyncio_socket_is_told() -> None:
    async def run() -> None:
        context = zmq.asyncio.Context()
        pull = context.socket(zmq.PULL, socket_class=AsyncWatched)
        async with AsyncPayloadReceiver(pull) as receiver:
            with pytest.raises(QuiesceTimeout):
                await receiver.receive(0.05)
        context.term()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert 1 < max(AsyncWatched.polls) <= 50


def test_a_receiver_that_is_woken_for_nothing_keeps_to_its_time(context: zmq.Context[Any]) -> None:
    _, pull = joined(context)
    pull.ready = True
    with PayloadReceiver(pull) as receiver, pytest.raises(QuiesceTimeout):
        receiver.receive(0.01)


def test_a_message_behind_an_abort_mark_needs_no_waiting(context: zmq.Context[Any]) -> None:
    dealer, router = joined(context, zmq.DEALER, zmq.ROUTER)
    dealer.send(ABORT)
    with PayloadSender(dealer) as sender, PayloadReceiver(router, prefix=1) as receiver:
        sender.send("behind")
        assert receiver.receive(0).value == "behind"
        assert receiver.aborted == 1


@pytest.mark.parametrize("frame", [1, 2, 4])
def test_an_exception_in_the_middle_of_a_message_leaves_the_receiver_in_step(
    context: zmq.Context[Any], frame: int
) -> None:
    """Before the first frame nothing was taken, and the message is still there; later it is lost as a whole."""
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        sender.send([1, full(LARGE), full(LARGE), full(LARGE)])
        sender.send([2, full(LARGE)])
        pull.fail_at = frame
        with pytest.raises(Signal):
            receiver.receive()
        assert receiver.receive(0).value[0] == (1 if frame == 1 else 2)


def test_bad_arguments_of_a_receiver_are_refused(context: zmq.Context[Any]) -> None:
    _, pull = joined(context)
    with pytest.raises(ValueError, match="prefix is -1"):
        PayloadReceiver(pull, prefix=-1)
    with pytest.raises(ValueError, match="prefix is b'id'"):
        PayloadReceiver(pull, prefix=b"id")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="use PayloadReceiver"):
        AsyncPayloadReceiver(pull)


@pytest.mark.parametrize("transport", ["inproc", "ipc"])
def test_closing_a_receiver_that_a_task_waits_in_is_closed_and_cancelling_it_is_cancelled(
    transport: str,
) -> None:
    async def run() -> None:
        context = zmq.asyncio.Context()
        pull = context.socket(zmq.PULL)
        pull.bind("inproc://waiting" if transport == "inproc" else f"ipc://@{secrets.token_hex(8)}")
        receiver = AsyncPayloadReceiver(pull)
        waiting = asyncio.create_task(receiver.receive(timeout=30))
        cancelled = asyncio.create_task(receiver.receive(timeout=30))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        receiver.close()
        with pytest.raises(Closed, match="the receiver was closed meanwhile"):
            await waiting
        with pytest.raises(Closed):
            await receiver.receive()
        context.term()

    asyncio.run(asyncio.wait_for(run(), 60))
