"""Exceptions from outside in the middle of the ring's calls, and what is left of the message, the slot and the rank."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_tests.broadcast_ring.processes import START_S

from quiesce import events
from quiesce.broadcast_ring import BroadcastRing
from quiesce.errors import Closed, PeerDied, ResourceExhausted
from quiesce.ring_reader import LEASE_BYTES, RemoteReader, RingReader


class Outside(BaseException):
    """What a signal handler raises."""


def once(action: str, phase: str) -> Callable[[events.Event], None]:
    """Raises at the first such edge."""
    edges = [(action, phase)]

    def observer(event: events.Event) -> None:
        if edges == [(event.action, event.phase)]:
            edges.clear()
            raise Outside

    return observer


def far_ring(**options: Any) -> BroadcastRing:
    """A ring with one remote reader, and as many local ones as are asked for."""
    return BroadcastRing(
        options.pop("readers", 0), slots=2, slot_bytes=LEASE_BYTES, remote=1,
        bind=f"ipc://@{secrets.token_hex(8)}", **options,
    )  # fmt: skip


def test_a_remote_reader_goes_on_with_the_message_it_was_about_to_take() -> None:
    with far_ring() as ring, RemoteReader(ring.handle, 0) as reader:
        ring.wait_until_ready(START_S)
        ring.publish("first")
        ring.publish("second")
        with events.observe(once("TakeBody", "begin")), pytest.raises(Outside):
            reader.receive(START_S)
        assert [reader.receive(START_S), reader.receive(START_S)] == ["first", "second"]


@pytest.mark.parametrize("calls", range(1, 9))
def test_a_body_that_was_cut_between_two_parts_is_sent_again(calls: int) -> None:
    """To a local reader beside the slots, and to a remote one; each has it once, and what follows."""
    body = {"numbers": torch.arange(2 * LEASE_BYTES, dtype=torch.uint8), "small": torch.arange(5)}
    with (
        far_ring(readers=1) as ring,
        RingReader(ring.handle, 0) as near,
        RemoteReader(ring.handle, 1) as far,
    ):
        ring.wait_until_ready(START_S)
        sent = 0
        send = ring._socket.send

        def cut(*arguments: Any, **options: Any) -> Any:
            nonlocal sent
            sent += 1
            if sent == calls:
                raise Outside
            return send(*arguments, **options)

        ring._socket.send = cut  # type: ignore[method-assign]
        with contextlib.suppress(Outside):
            ring.publish(body)
        assert ring.publish("after it") == 2
        for reader in (near, far):
            got = reader.receive(START_S)
            assert torch.equal(got["numbers"], body["numbers"])
            assert torch.equal(got["small"], body["small"])
            assert reader.receive(START_S) == "after it"


@pytest.mark.parametrize("reader_class", [RingReader, RemoteReader])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_greeting_whose_answer_was_cut_short_is_answered(reader_class: type[RingReader], when: str) -> None:
    remote = reader_class is RemoteReader
    with far_ring() if remote else BroadcastRing(1, slots=2, slot_bytes=4096) as ring:
        say, raised = ring._say, []

        def interrupted(*arguments: Any, **options: Any) -> bool:
            if when == "after":
                say(*arguments, **options)
            if not raised:
                raised.append(True)
                raise Outside
            return say(*arguments, **options)

        ring._say = interrupted  # type: ignore[method-assign]
        with reader_class(ring.handle, 0) as reader:
            with pytest.raises(Outside):
                ring.wait_until_ready(START_S)
            ring.wait_until_ready(START_S)
            ring.publish("here")
            ring.publish("there")
            assert [reader.receive(START_S), reader.receive(START_S)] == ["here", "there"]


def test_a_reader_that_closes_with_an_opened_message_lets_its_slot_go() -> None:
    with BroadcastRing(1, slots=1, slot_bytes=LEASE_BYTES) as ring:
        with RingReader(ring.handle, 0) as reader:
            ring.wait_until_ready(START_S)
            ring.publish(torch.zeros(100))
            with events.observe(once("Copy", "begin")), pytest.raises(Outside):
                reader.receive(START_S)
        assert ring.empty((1,), timeout=START_S).shape == (1,)
        with RingReader(ring.handle, 0):
            ring.wait_until_ready(START_S)


@pytest.mark.parametrize("action", ["Take", "Fill", "Publish", "Overflow", "Post", "Return"])
@pytest.mark.parametrize("phase", ["begin", "end"])
def test_a_publication_reaches_all_readers_or_none(action: str, phase: str) -> None:
    size = 2 * LEASE_BYTES if action == "Overflow" else 8
    with (
        BroadcastRing(2, slots=1, slot_bytes=LEASE_BYTES) as ring,
        RingReader(ring.handle, 0) as first,
        RingReader(ring.handle, 1) as second,
    ):
        ring.wait_until_ready(START_S)
        with events.observe(once(action, phase)), pytest.raises(Outside):
            ring.publish(bytes(size))
        ring.publish("after it")
        got = []
        for reader in (first, second):
            value = reader.receive(START_S)
            got.append(value)
            if value != "after it":
                assert reader.receive(START_S) == "after it"
        assert got[0] == got[1]


def test_a_slot_that_an_exception_left_on_no_list_is_found() -> None:
    with BroadcastRing(1, slots=2, slot_bytes=4096) as ring, RingReader(ring.handle, 0) as reader:
        ring.wait_until_ready(START_S)
        ring._free.clear()
        for number in range(4):
            ring.publish(number, START_S)
            assert reader.receive(START_S) == number
        assert ring.counters().fallbacks == 0


def test_no_descriptor_to_lease_with_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with BroadcastRing(1, slots=2, slot_bytes=LEASE_BYTES) as ring, RingReader(ring.handle, 0) as reader:
        ring.wait_until_ready(START_S)
        ring.publish(torch.ones(LEASE_BYTES, dtype=torch.uint8))
        with monkeypatch.context() as limited:
            limited.setattr("quiesce.ring_reader.mmap.mmap", exhausted)
            with pytest.raises(ResourceExhausted, match="nothing is lost"):
                reader.receive(START_S)
        assert bool(reader.receive(START_S).all())


def test_a_ring_whose_making_is_interrupted_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise Outside

    monkeypatch.setattr("quiesce.ring_memory.fcntl.fcntl", interrupted)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Outside):
        BroadcastRing(1, slots=2, slot_bytes=4096)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_remote_reader_receives_what_had_come_when_the_connection_broke() -> None:
    """Also if it looked nowhere meanwhile."""
    with far_ring() as ring, RemoteReader(ring.handle, 0) as reader:
        ring.wait_until_ready(START_S)
        for number in range(5):
            ring.publish(number)
        ring._context.destroy(linger=int(1e3 * START_S))
        ring._memory.close()
        assert reader._monitor.poll(int(1e3 * START_S)), "the connection still stands"
        assert [reader.receive(START_S) for _ in range(5)] == list(range(5))
        with pytest.raises(PeerDied, match="received everything up to message 5"):
            reader.receive(START_S)


def test_a_reader_that_greeted_is_told_that_the_ring_closes() -> None:
    with BroadcastRing(1, slots=1, slot_bytes=4096) as ring, RingReader(ring.handle, 0) as reader:
        assert ring._socket.poll(1e3 * START_S)
        ring.close()
        with pytest.raises(Closed):
            reader.receive(START_S)


def test_a_body_that_the_end_of_the_ring_cut_off_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with BroadcastRing(1, slots=1, slot_bytes=4096) as ring, RingReader(ring.handle, 0) as reader:
        ring.wait_until_ready(START_S)
        monkeypatch.setattr(ring, "_say", lambda *arguments, **options: True)
        ring.publish(bytes(2 * LEASE_BYTES))
        ring.close()
        with pytest.raises(PeerDied, match="closed the ring while a message was on its way"):
            reader.receive(START_S)


def test_nobody_attaches_to_a_ring_that_was_closed() -> None:
    with BroadcastRing(2, slots=1, slot_bytes=4096) as ring, RingReader(ring.handle, 0) as reader:
        assert ring._socket.poll(1e3 * START_S)
        ring.publish("here")
        ring.close()
        with pytest.raises(PeerDied, match="closed the ring"):
            RingReader(ring.handle, 1)
        assert reader.receive(START_S) == "here"
        with pytest.raises(Closed):
            reader.receive(START_S)
