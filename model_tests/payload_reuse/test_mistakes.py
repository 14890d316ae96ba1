"""What users do wrong: arguments that cannot work are refused at once, and what is lost at closing is told of."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import zmq
import zmq.asyncio
from model_tests.payload_reuse.watched import LARGE, full, joined

from quiesce.errors import DecodeError, PeerDied, QuiesceTimeout
from quiesce.payload_receiver import AsyncPayloadReceiver, PayloadReceiver
from quiesce.payload_reuse import PayloadSender

NOBODY = "tcp://127.0.0.1:9"
LOST = "lost as far as is known: "


@pytest.mark.parametrize("kind", [PayloadSender, PayloadReceiver, AsyncPayloadReceiver])
@pytest.mark.parametrize("thing", ["tcp://127.0.0.1:5555", None, zmq.Context])
def test_what_is_no_socket_is_refused(kind: Any, thing: Any) -> None:
    name = type(thing).__name__
    with pytest.raises(TypeError, match=f"needs a zmq.Socket, not a {name}"):
        kind(thing)


@pytest.mark.parametrize("kind", ["PULL", "SUB"])
def test_a_socket_that_cannot_send_has_no_sender(context: zmq.Context[Any], kind: str) -> None:
    socket = context.socket(zmq.SocketType[kind])
    with pytest.raises(ValueError, match=f"a {kind} socket cannot send"):
        PayloadSender(socket)
    PayloadReceiver(socket).close()


@pytest.mark.parametrize("kind", ["PUSH", "PUB"])
def test_a_socket_that_cannot_receive_has_no_receiver(context: zmq.Context[Any], kind: str) -> None:
    socket = context.socket(zmq.SocketType[kind])
    with pytest.raises(ValueError, match=f"a {kind} socket cannot receive"):
        PayloadReceiver(socket)
    asynchronous = zmq.asyncio.Socket.shadow(socket)
    with pytest.raises(ValueError, match=f"a {kind} socket cannot receive"):
        AsyncPayloadReceiver(asynchronous)
    PayloadSender(socket).close()


@pytest.mark.parametrize("kind", [zmq.PAIR, zmq.DEALER, zmq.ROUTER, zmq.XPUB, zmq.XSUB])
def test_other_sockets_have_both(context: zmq.Context[Any], kind: int) -> None:
    socket = context.socket(kind)
    PayloadReceiver(socket)
    PayloadSender(socket).close()


@pytest.mark.parametrize("prefix", [b"id", bytearray(b"id"), "id"])
def test_a_prefix_is_a_list_of_frames(context: zmq.Context[Any], prefix: Any) -> None:
    router, _ = joined(context, zmq.ROUTER, zmq.DEALER)
    with PayloadSender(router) as sender:
        for call in (sender.send, sender.lend):
            with pytest.raises(TypeError, match="give a list of frames"):
                call("hello", prefix=prefix)
        assert sender.counters().messages == 0


def test_a_receiver_on_a_router_is_told_of_the_prefix_it_lacks(context: zmq.Context[Any]) -> None:
    router, dealer = joined(context, zmq.ROUTER, zmq.DEALER)
    with PayloadSender(dealer) as sender, PayloadReceiver(router) as receiver:
        sender.send("hello")
        with pytest.raises(DecodeError, match="pass prefix=1"):
            receiver.receive()
    with PayloadReceiver(context.socket(zmq.PULL)) as receiver:
        receiver._plain.bind("inproc://foreign")
        push = context.socket(zmq.PUSH)
        push.connect("inproc://foreign")
        push.send(b"hello")
        with pytest.raises(DecodeError) as caught:
            receiver.receive()
        assert "prefix" not in str(caught.value)


@pytest.mark.parametrize("way", ["send", "lend"])
def test_what_was_queued_for_nobody_is_lost_at_closing_and_told_of(
    context: zmq.Context[Any], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    push = context.socket(zmq.PUSH)
    push.connect(NOBODY)
    sender = PayloadSender(push)
    for _ in range(3):
        getattr(sender, way)([full(LARGE)])
    sender.close(timeout=0.1)
    what = "3 buffer(s)" if way == "send" else "3 loan(s), the first of message 1"
    [record] = caplog.records
    assert (record.name, record.levelname) == ("quiesce.payload_reuse", "WARNING")
    assert record.getMessage().startswith(f"{LOST}{what}. The sender for {NOBODY} was closed")
    sender.close(timeout=0)
    assert len(caplog.records) == 1


def test_what_was_sent_is_not_told_of(context: zmq.Context[Any], caplog: pytest.LogCaptureFixture) -> None:
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    pull.bind("tcp://127.0.0.1:0")
    push.connect(pull.getsockopt_string(zmq.LAST_ENDPOINT))
    with PayloadReceiver(pull) as receiver:
        with PayloadSender(push) as sender:
            sender.send([full(LARGE)])
            sender.lend([full(LARGE)])
        assert [receiver.receive().value[0].numel() for _ in range(2)] == [LARGE] * 2
    assert not caplog.records


def test_what_a_receiver_in_this_process_has_is_not_lost(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    push, pull = joined(context)
    sender, receiver = PayloadSender(push), PayloadReceiver(pull)
    sender.lend([full(LARGE)])
    held = [receiver.receive()]
    letting_go = threading.Timer(0.1, held.clear)
    letting_go.start()
    sender.close(timeout=0)
    letting_go.join(10)
    assert not caplog.records


EXITS = f"""
import torch, zmq
from quiesce.payload_reuse import PayloadSender
push = zmq.Context().socket(zmq.PUSH)
push.connect("{NOBODY}")
sender = PayloadSender(push)
sender.send(torch.zeros({LARGE}))
"""


def test_an_interpreter_that_exits_tells_of_what_it_drops() -> None:
    found = subprocess.run(
        [sys.executable, "-c", EXITS], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"{LOST}1 buffer(s). The sender for {NOBODY}" in found.stderr


def test_small_messages_for_nobody_are_lost_without_a_word(
    context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq has a copy of them, and tells nobody when it drops that."""
    push = context.socket(zmq.PUSH)
    push.connect(NOBODY)
    with PayloadSender(push) as sender:
        sender.send("small")
    assert not caplog.records


def test_with_immediate_a_message_for_nobody_is_not_sent(context: zmq.Context[Any]) -> None:
    push = context.socket(zmq.PUSH)
    push.immediate = True
    push.connect(NOBODY)
    with PayloadSender(push) as sender, pytest.raises(QuiesceTimeout, match="nothing was lost"):
        sender.send("small", timeout=0.05)


@pytest.mark.parametrize("mandatory", [False, True])
def test_a_router_drops_what_is_for_an_unknown_id_unless_it_is_mandatory(
    context: zmq.Context[Any], mandatory: bool
) -> None:
    router, dealer = joined(context, zmq.ROUTER, zmq.DEALER)
    router.router_mandatory = mandatory
    with PayloadSender(router) as sender, PayloadReceiver(dealer) as receiver:
        if mandatory:
            with pytest.raises(PeerDied, match="routing id"):
                sender.send("lost", prefix=[b"nobody"])
        else:
            sender.send("lost", prefix=[b"nobody"])
        with pytest.raises(QuiesceTimeout):
            receiver.receive(0.05)


def test_a_prefix_may_be_written_when_the_call_returns(context: zmq.Context[Any]) -> None:
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://prefixed")
    push.connect("inproc://prefixed")
    prefix = bytearray(b"a" * 100_000)
    with PayloadSender(push) as sender, PayloadReceiver(pull, prefix=1) as receiver:
        sender.send([1], prefix=[prefix])  # type: ignore[list-item]
        prefix[:] = b"b" * len(prefix)
        assert bytes(receiver.receive(5.0).prefix[0]) == b"a" * len(prefix)


def test_a_very_long_timeout_closes_as_well(context: zmq.Context[Any]) -> None:
    push = context.socket(zmq.PUSH)
    PayloadSender(push).close(3e6)
    assert push.closed
