"""What is not supported: each test says what one might expect, and is expected to fail. docs/limits.md lists them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from model_tests.forking import forked, status

from quiesce.broadcast_ring import BroadcastRing
from quiesce.codec import Decoder, Encoder
from quiesce.errors import DecodeError, QuiesceTimeout
from quiesce.model.values import State
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.ring_reader import LEASE_BYTES, RingReader
from quiesce.ring_wire import BODY, new_secret, pack_head, unpack_head
from quiesce.simulated import SimulatedBackend, SimulatedWorld, chooser

LARGE = 100_000
MESSAGES = 60
KEPT, OVERWRITTEN = 10, 11
"""How a forked child ends that has looked at what it must not use; not as any other process ends."""


def expected(reason: str) -> pytest.MarkDecorator:
    """A test of something that is not so; it fails the run if it becomes so."""
    return pytest.mark.xfail(strict=True, reason=reason, raises=(AssertionError, pytest.fail.Exception))


def joined(context: zmq.Context[Any], endpoint: str) -> tuple[PayloadSender, PayloadReceiver[Any]]:
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(endpoint)
    push.connect(pull.getsockopt_string(zmq.LAST_ENDPOINT))
    return PayloadSender(push), PayloadReceiver(pull)


@expected("over inproc the receiver has the sender's own memory; aliases_sender says so")
def test_what_an_inproc_receiver_writes_is_its_own(context: zmq.Context[Any]) -> None:
    sender, receiver = joined(context, "inproc://own")
    with receiver, sender:
        tensor = torch.zeros(LARGE)
        sender.lend(tensor)
        received = receiver.receive()
        received.value.fill_(1)
        intact = not tensor.any()
        del received
    assert intact


@expected("over ipc and tcp a loan is done once the kernel has the bytes, received or not")
def test_a_loan_over_ipc_lasts_until_it_was_received(context: zmq.Context[Any], tmp_path: Path) -> None:
    sender, receiver = joined(context, f"ipc://{tmp_path}/loan")
    with receiver, sender:
        loan = sender.lend(torch.zeros(LARGE))
        with suppress(QuiesceTimeout):
            loan.wait(2.0)
        done = loan.done
        receiver.receive()
    assert not done


@expected(
    "over ipc libzmq drops what the kernel still has when a sender closes while its receiver is at its mark"
)
def test_what_was_sent_before_closing_arrives_over_ipc_at_a_mark(tmp_path: Path) -> None:
    assert _arrive(f"ipc://{tmp_path}/mark", 1) == MESSAGES


@pytest.mark.parametrize(("endpoint", "mark"), [("ipc://{}/mark", 0), ("tcp://127.0.0.1:*", 1)])
def test_what_was_sent_before_closing_arrives(tmp_path: Path, endpoint: str, mark: int) -> None:
    assert _arrive(endpoint.format(tmp_path), mark) == MESSAGES


def _arrive(endpoint: str, mark: int) -> int:
    """How many of `MESSAGES` small messages arrive that are received after their sender has closed."""
    context, theirs = zmq.Context[Any](), zmq.Context[Any]()
    pull, push = context.socket(zmq.PULL), theirs.socket(zmq.PUSH)
    pull.rcvhwm = mark
    pull.bind(endpoint)
    push.connect(pull.getsockopt_string(zmq.LAST_ENDPOINT))
    with PayloadReceiver(pull) as receiver:
        with PayloadSender(push) as sender:
            for _ in range(MESSAGES):
                sender.send(bytes(1000))
        theirs.term()  # returns when the kernel has everything
        arrived = 0
        with suppress(QuiesceTimeout):
            while arrived < MESSAGES:
                receiver.receive(3.0)
                arrived += 1
    context.term()
    return arrived


@expected("the high-water mark counts messages, not bytes: set sndhwm and rcvhwm to what can be afforded")
def test_a_slow_receiver_makes_the_sender_hold_a_bounded_number_of_bytes(context: zmq.Context[Any]) -> None:
    sender, receiver = joined(context, "inproc://bytes")
    with receiver, sender:
        for _ in range(40):
            sender.send(torch.zeros(1 << 20, dtype=torch.uint8), timeout=0.0)
        held = sender.counters().in_flight << 20
        for _ in range(40):
            receiver.receive()
    assert held <= 32 << 20


@expected("numpy has looked at its memory, which torch takes for an export that forbids it")
def test_a_tensor_that_was_sent_can_be_resized(context: zmq.Context[Any]) -> None:
    sender, receiver = joined(context, "inproc://resized")
    tensor = torch.zeros(LARGE)
    with receiver, sender:
        sender.send(tensor)
        receiver.receive()
    try:
        tensor.resize_(2 * LARGE)
    except RuntimeError as error:
        pytest.fail(str(error))


@expected("frames carry no number: a part in the place of another one of the same size is not noticed")
def test_parts_of_two_messages_are_told_apart() -> None:
    first, second = Encoder().encode(torch.zeros(LARGE)), Encoder().encode(torch.ones(LARGE))
    with pytest.raises(DecodeError):
        Decoder().decode([first[0], second[1]])


@expected("only the lengths of large buffers are digested: tensors over TCP can be altered on their way")
def test_altered_bytes_of_a_remote_body_are_refused() -> None:
    class Part:
        def __init__(self, buffer: bytes) -> None:
            self.buffer = buffer

    key, nonce = new_secret(), bytes(16)
    head = pack_head(BODY, key, nonce, 1, [b"pickle", b"tensor"])
    with pytest.raises(DecodeError):
        unpack_head(key, nonce, [Part(head), Part(b"pickle"), Part(b"altered"[:6])])  # type: ignore[list-item]


@expected("pyzmq looks for signals when libzmq has already handed the message over")
def test_an_exception_as_zmq_hands_a_message_over_loses_nothing() -> None:
    with (
        BroadcastRing(readers=1, slots=1, slot_bytes=4096) as ring,
        RingReader(ring.handle, rank=0) as reader,
    ):
        ring.wait_until_ready()
        ring.publish(bytes(2 * LEASE_BYTES))
        receive = reader._socket.recv

        def interrupted(*arguments: Any) -> Any:
            receive(*arguments)
            raise KeyboardInterrupt

        reader._socket.recv = interrupted  # type: ignore[method-assign,assignment]
        with pytest.raises(KeyboardInterrupt):
            reader.receive(0.5)
        reader._socket.recv = receive  # type: ignore[method-assign]
        with suppress(QuiesceTimeout, DecodeError):
            assert reader.receive(0.5) == bytes(2 * LEASE_BYTES)
            return
    pytest.fail("the message came, and is not received")


@expected(
    "a lease is its reader's: a forked child does not hold the slot, and must not use what its parent leased"
)
def test_a_forked_child_may_use_its_parents_leases() -> None:
    with (
        BroadcastRing(readers=1, slots=1, slot_bytes=LEASE_BYTES) as ring,
        RingReader(ring.handle, rank=0) as reader,
    ):
        ring.wait_until_ready()
        ring.publish(torch.full((LEASE_BYTES,), 1, dtype=torch.uint8))
        held = [reader.receive().numpy()]
        told, tell = os.pipe()

        def look() -> None:
            os.close(tell)
            os.read(told, 1)  # also ends when the parent does
            os._exit(KEPT if (held[0] == 1).all() else OVERWRITTEN)

        child = forked(look, 20)
        held.clear()
        ring.publish(torch.full((LEASE_BYTES,), 2, dtype=torch.uint8))
        os.write(tell, b"x")
        ended = status(child)
        os.close(told)
        os.close(tell)
    if ended not in (KEPT, OVERWRITTEN):  # no failure that is expected
        raise ChildProcessError(f"the child ended with {ended}")
    assert ended == KEPT


@expected("the checker knows streams, events and handles, and not what a message from elsewhere implies")
def test_order_that_only_a_message_implies_is_no_race() -> None:
    backend = SimulatedBackend(SimulatedWorld(chooser(0)))
    output = torch.zeros(4)
    backend.launch(lambda memory: memory.fill_(1), writes=[output])
    backend.world.drain()  # somebody else says that it has run
    backend.host_access(output)
    assert backend.world.order.races == []


@expected("Python holds True == 1: a specification in which a variable may be either is not told apart")
def test_true_and_one_are_two_values() -> None:
    assert State({"x": True}) != State({"x": 1})
