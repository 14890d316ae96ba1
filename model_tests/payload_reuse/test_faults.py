"""Bad input, dead peers, exceptions, threads, forks and closing: what a caller sees, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
import zmq.asyncio
from model_tests.forking import outcome
from model_tests.payload_reuse.faulty import FAULTY

from quiesce import events
from quiesce.codec import ABORT
from quiesce.errors import (
    Closed,
    DecodeError,
    EncodeError,
    NotQuiescent,
    PeerDied,
    QuiesceTimeout,
)
from quiesce.payload_receiver import AsyncPayloadReceiver, PayloadReceiver
from quiesce.payload_reuse import PayloadSender

LARGE = 100_000
NOBODY = "tcp://127.0.0.1:9"


def joined(context: zmq.Context[Any], kind: int = zmq.PUSH, peer: int = zmq.PULL) -> Any:
    front, back = context.socket(kind), context.socket(peer)
    front.bind("inproc://faults")
    back.connect("inproc://faults")
    return front, back


def large(value: int) -> torch.Tensor:
    return torch.full((LARGE,), value, dtype=torch.uint8)


def test_an_object_that_cannot_be_encoded_costs_nothing(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        with pytest.raises(EncodeError):
            sender.send({"tensor": large(1), "thread": threading.Lock()})
        assert (sender.pool.free, sender.pool.pending) == (1, 0)
        sender.send(2)
        assert receiver.receive().value == 2


def test_nobody_there_is_a_timeout_and_nothing_is_sent(context: zmq.Context[Any]) -> None:
    push = context.socket(zmq.PUSH)
    push.bind("inproc://alone")
    with PayloadSender(push) as sender:
        tensor = large(1)
        for _ in range(3):
            with pytest.raises(QuiesceTimeout, match="send it again"):
                sender.lend(tensor, timeout=0.01)
        assert sender.loans == ()
        assert sender.pool.pending == 0
        pull = context.socket(zmq.PULL)
        pull.connect("inproc://alone")
        sender.send("first")
        assert PayloadReceiver(pull).receive().value == "first"


def test_a_full_queue_is_a_timeout(context: zmq.Context[Any]) -> None:
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    push.sndhwm = pull.rcvhwm = 1
    push.bind("inproc://full")
    pull.connect("inproc://full")
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        sender.send(0)
        sender.send(1)
        with pytest.raises(QuiesceTimeout):
            sender.send(2, timeout=0.01)
        assert [receiver.receive().value for _ in range(2)] == [0, 1]
        sender.send(3)
        assert receiver.receive().value == 3


class Signal(Exception):
    pass


def interrupting(part: int) -> Any:
    def observer(event: events.Event) -> None:
        if event.action == "SendPart" and event.phase == "end" and event.fields["part"] == part:
            raise Signal

    return observer


@pytest.mark.parametrize("part", [1, 2, 3])
def test_an_exception_after_any_part_leaves_the_stream_in_step(context: zmq.Context[Any], part: int) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:
        with events.observe(interrupting(part)), pytest.raises(Signal):
            sender.lend([large(1), large(2)])
        assert len(sender.loans) == (1 if part > 1 else 0)
        sender.send([large(3)])
        values = [receiver.receive().value for _ in range(2 if part == 3 else 1)]
        assert torch.equal(values[-1][0], large(3))
        del values
        with pytest.raises(QuiesceTimeout):
            receiver.receive(0.01)
        assert receiver.aborted == 1
        for loan in sender.loans:
            loan.wait(5)


def test_without_the_abort_mark_the_part_is_glued_to_the_next_message(context: zmq.Context[Any]) -> None:
    """The receiver notices, and goes on with the message after that one: two are lost."""
    push, pull = joined(context)
    with FAULTY["orphan_part"](push) as sender, PayloadReceiver(pull) as receiver:
        with events.observe(interrupting(1)), pytest.raises(Signal):
            sender.send([large(1), large(2)])
        sender.send([large(3)])
        sender.send([large(4)])
        with pytest.raises(DecodeError, match="glued"):
            receiver.receive()
        assert torch.equal(receiver.receive().value[0], large(4))


def test_a_peer_that_dies_between_two_parts(context: zmq.Context[Any]) -> None:
    """libzmq refuses the rest of the message or swallows it; either way the next message is not affected."""
    push, pull = joined(context)

    def observer(event: events.Event) -> None:
        if event.action == "SendPart" and event.phase == "end" and event.fields["part"] == 1:
            pull.close(linger=0)
            time.sleep(0.005)

    with PayloadSender(push) as sender:
        with events.observe(observer), contextlib.suppress(PeerDied):
            sender.lend([large(1), large(2), large(3)])
        again = context.socket(zmq.PULL)
        again.connect("inproc://faults")
        with PayloadReceiver(again) as receiver:
            sender.send("next")
            assert receiver.receive().value == "next"
        for loan in sender.loans:
            loan.wait(5)


@pytest.mark.parametrize("faulty", [False, True])
def test_closing_towards_a_dead_peer_is_bounded(context: zmq.Context[Any], faulty: bool) -> None:
    """The mutant `close_lingers`: with the default linger its trackers never fire."""
    push = context.socket(zmq.PUSH)
    push.connect(NOBODY)
    sender = FAULTY["close_lingers"](push) if faulty else PayloadSender(push)
    loan = sender.lend([large(1)])
    if faulty:
        with pytest.raises(NotQuiescent, match="message 1"):
            sender.close(timeout=0.2)
        assert not loan.done
        # The socket is gone, so nothing but the end of the process can end this; let the fixture not wait for it.
        context.destroy = lambda linger=None: None  # type: ignore[method-assign]
    else:
        sender.close(timeout=0.2)
        assert loan.done


def test_closing_while_a_receiver_holds_frames_is_reported(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    sender = PayloadSender(push)
    receiver = PayloadReceiver(pull)
    sender.lend([large(1)])
    received = receiver.receive()
    with pytest.raises(
        NotQuiescent, match=r"still being read after closing: 1 loan\(s\), the first of message 1"
    ):
        sender.close(timeout=0)
    assert torch.equal(received.value[0], large(1))
    with pytest.raises(NotQuiescent):
        sender.close(timeout=0)
    del received
    sender.close()
    with pytest.raises(Closed):
        sender.send(1)
    receiver.close()


def test_a_bound_sender_settles_after_its_peer_died(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender:
        loan = sender.lend([large(1)])
        pull.close(linger=0)
        loan.wait(5)
        deadline = time.monotonic() + 5
        while sender.pool.pending and time.monotonic() < deadline:
            sender.settle()
        assert sender.pool.pending == 0


def test_dropped_messages_are_done_and_not_delivered(context: zmq.Context[Any]) -> None:
    pub, sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
    pub.sndhwm = sub.rcvhwm = 1
    sub.subscribe(b"")
    pub.bind("inproc://dropped")
    sub.connect("inproc://dropped")
    with PayloadSender(pub) as sender, PayloadReceiver(sub) as receiver:
        deadline = time.monotonic() + 20
        while not sub.poll(10):
            assert time.monotonic() < deadline, "the subscription does not arrive"
            sender.send("subscribed")
        while sub.poll(100):
            receiver.receive()
        loans = [sender.lend([number, large(number)]) for number in range(9)]
        # Some were dropped while the first, over inproc, still waits in the sender's own memory.
        deadline = time.monotonic() + 20
        while not any(loan.done for loan in loans):
            assert time.monotonic() < deadline, "none is done"
        assert not loans[0].done
        arrived = []
        with contextlib.suppress(QuiesceTimeout):
            while True:
                arrived.append(receiver.receive(0.1).value[0])
        # Not always the first ones: libzmq learns late that what came before has made room.
        assert arrived == sorted(set(arrived))
        assert 0 < len(arrived) < len(loans)
        for loan in loans:
            loan.wait(5)


def test_router_and_dealer(context: zmq.Context[Any]) -> None:
    router, dealer = joined(context, zmq.ROUTER, zmq.DEALER)
    dealer_sender = PayloadSender(dealer)
    dealer_sender.send("hello")
    from_dealer = PayloadReceiver(router, prefix=1).receive()
    assert from_dealer.value == "hello"
    reply = PayloadSender(router)
    reply.send([large(5)], prefix=from_dealer.prefix)
    assert torch.equal(PayloadReceiver(dealer).receive().value[0], large(5))
    router.router_mandatory = True
    with pytest.raises(PeerDied, match="routing id"):
        reply.send([large(6)], prefix=[b"nobody"])
    reply.send("still in step", prefix=from_dealer.prefix)
    assert PayloadReceiver(dealer).receive().value == "still in step"
    reply.close()
    dealer_sender.close()


def test_foreign_messages_are_refused_one_by_one(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadReceiver(pull) as receiver:
        sender = PayloadSender(push)
        push.send(b"hello")
        push.send_multipart([b"a", b"b"])
        push.send(ABORT)
        sender.send("mine")
        for _ in range(2):
            with pytest.raises(DecodeError):
                receiver.receive()
        assert receiver.receive().value == "mine"
        assert receiver.aborted == 1
        sender.close()


def test_threads_share_a_sender(context: zmq.Context[Any]) -> None:
    push, pull = joined(context)
    with PayloadSender(push) as sender, PayloadReceiver(pull) as receiver:

        def send(base: int) -> None:
            for index in range(50):
                sender.send([base + index, large((base + index) % 251)])

        threads = [threading.Thread(target=send, args=(1_000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        numbers = []
        for _ in range(200):
            number, tensor = receiver.receive().value
            assert torch.equal(tensor, large(number % 251))
            numbers.append(number)
            del tensor
        for thread in threads:
            thread.join(10)
        assert sorted(numbers) == [1_000 * i + j for i in range(4) for j in range(50)]


def test_use_after_fork_is_refused(context: zmq.Context[Any]) -> None:
    push, _ = joined(context)
    with PayloadSender(push) as sender:
        assert outcome(lambda: sender.send(1), 10).startswith("WrongProcess: ")


def test_asyncio_sockets_are_refused_where_they_do_not_belong() -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUSH)
    with pytest.raises(TypeError, match="shadow"):
        PayloadSender(socket)
    with pytest.raises(TypeError, match="AsyncPayloadReceiver"):
        PayloadReceiver(socket)
    socket.close()
    context.term()


def test_asyncio_receiver_and_cancellation(tmp_path: Path, context: zmq.Context[Any]) -> None:
    async def run() -> None:
        push = context.socket(zmq.PUSH)
        asynchronous = zmq.asyncio.Context()
        pull = asynchronous.socket(zmq.PULL)
        pull.bind(f"ipc://{tmp_path}/s")
        push.connect(f"ipc://{tmp_path}/s")
        with PayloadSender(push) as sender:
            async with AsyncPayloadReceiver(pull) as receiver:
                for number in range(20):
                    waiting = asyncio.create_task(receiver.receive())
                    await asyncio.sleep(0)
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                    sender.send([number, large(number)])
                    value = (await receiver.receive()).value
                    assert value[0] == number
                    assert torch.equal(value[1], large(number))
                with pytest.raises(QuiesceTimeout):
                    await receiver.receive(0.01)
        asynchronous.term()

    asyncio.run(asyncio.wait_for(run(), 60))
