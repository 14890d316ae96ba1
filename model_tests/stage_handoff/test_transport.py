"""The transport over torch.distributed, with a peer forked for each test: what it sends, refuses and waits for."""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_tests.forking import forked, status

from quiesce import transport
from quiesce.errors import DecodeError, PeerDied, QuiesceError, QuiesceTimeout
from quiesce.transport import METADATA_TAG, TorchHandle, TorchTransport

Peer = Callable[[Callable[[], object]], TorchTransport]


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    """Forks rank 1, which runs what it is given, and makes this process rank 0; the transport of this one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    children: list[int] = []

    def join(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        # Connected on both sides, before either may go.
        dist.barrier()

    def begin(peer: Callable[[], object]) -> TorchTransport:
        children.append(forked(lambda: (join(1), peer()), 30))
        join(0)
        return TorchTransport()

    yield begin
    if dist.is_initialized():
        dist.destroy_process_group()
    for child in children:
        assert status(child) == 0


def test_messages_and_tensors_go_both_ways_and_apart(beside: Peer) -> None:
    """A message is not taken for a tensor, in whatever order they are asked for."""

    def peer() -> None:
        link = TorchTransport()
        assert link.rank == 1
        tensor = torch.arange(6, dtype=torch.int32)
        handles = [link.send(tensor, 0), link.send_message(b"first", 0), link.send_message(b"x", 0)]
        assert link.receive_message(0, 10.0) == bytes(range(256))
        for handle in handles:
            handle.wait(10.0)

    here = beside(peer)
    assert here.rank == 0
    assert here.receive_message(1, 10.0) == b"first"
    assert here.receive_message(1, 10.0) == b"x"
    tensor = torch.zeros(6, dtype=torch.int32)
    received = here.receive(tensor, 1)
    received.wait(10.0)
    assert tensor.tolist() == list(range(6))
    sent = here.send_message(bytes(range(256)), 1)
    assert not sent.received
    sent.wait(10.0)
    assert sent.received


def test_parts_are_gathered_in_the_order_of_the_ranks(beside: Peer) -> None:
    def gather(link: TorchTransport) -> None:
        whole = torch.zeros(6)
        handle = link.gather(whole, torch.full((3,), float(link.rank)))
        assert not handle.received
        handle.wait(10.0)
        assert whole.tolist() == [0.0] * 3 + [1.0] * 3
        assert handle.received

    gather(beside(lambda: gather(TorchTransport())))


def test_metadata_of_a_size_that_no_stage_link_sends_is_refused(
    beside: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE", 8)

    def peer() -> None:
        link = TorchTransport()
        link.send_message(bytes(8), 0).wait(10.0)
        for size in (9, 0, -1):
            header = torch.frombuffer(bytearray(struct.pack("<q", size)), dtype=torch.uint8)
            dist.send(header, 0, tag=METADATA_TAG)

    here = beside(peer)
    assert here.receive_message(1, 10.0) == bytes(8)
    for size in (9, 0, -1):
        with pytest.raises(DecodeError, match=f"rank 1 announced metadata of {size} bytes"):
            here.receive_message(1, 10.0)


def test_a_peer_that_is_gone_is_told_of_by_every_call(beside: Peer) -> None:
    here = beside(lambda: None)
    with pytest.raises(PeerDied, match="metadata from rank 1 to rank 0: the connection is gone"):
        here.receive_message(1, 10.0)
    tensor = torch.zeros(1)
    calls: dict[str, Callable[[], object]] = {
        "metadata from rank 0 to rank 1": lambda: here.send_message(b"x", 1),
        "a tensor from rank 0 to rank 1": lambda: here.send(tensor, 1),
        "a tensor from rank 1 to rank 0": lambda: here.receive(tensor, 1),
    }
    for what, call in calls.items():
        with pytest.raises(PeerDied, match=what):
            call()


def test_a_peer_that_says_nothing_is_waited_for_as_long_as_is_said(beside: Peer) -> None:
    reading, writing = os.pipe()
    here = beside(lambda: (os.close(writing), os.read(reading, 1)))
    with pytest.raises(QuiesceTimeout, match=r"metadata from rank 1 to rank 0: .* within 0\.\d+ s"):
        here.receive_message(1, 0.05)
    os.close(writing)
    os.close(reading)


def test_past_its_time_a_message_is_still_asked_for_a_moment(beside: Peer) -> None:
    reading, writing = os.pipe()
    here = beside(lambda: (os.close(writing), os.read(reading, 1)))
    with pytest.raises(QuiesceTimeout, match=r"within 0\.001 s"):
        here._receive_bytes(4, 1, time.monotonic() - 1.0)
    os.close(writing)
    os.close(reading)


class Work:
    """What torch hands out: notes how long it was waited for, and may fail."""

    def __init__(self, clock: list[float], takes: float = 0.0, error: str = "") -> None:
        self.clock, self.takes, self.error = clock, takes, error
        self.waits: list[Any] = []

    def wait(self, *timeout: timedelta) -> None:
        self.waits += [limit.total_seconds() for limit in timeout] or [None]
        self.clock[0] += self.takes
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("quiesce.transport.time.monotonic", lambda: now[0])
    return now


def test_works_share_the_time_there_is(clock: list[float]) -> None:
    works = [Work(clock, takes) for takes in (2.0, 4.0, 0.0)]
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    handle = TorchHandle(works, [tensor], True, "a tensor")
    del tensor
    assert not handle.received
    assert kept() is not None
    handle.wait(5.0)
    assert handle.received
    assert kept() is None
    handle.wait(5.0)
    # Past its time a work is still asked, for a moment.
    assert [work.waits for work in works] == [[5.0], [3.0], [0.001]]


def test_a_handle_of_a_stream_is_never_known_to_have_been_received(clock: list[float]) -> None:
    work = Work(clock)
    handle = TorchHandle([work], [], False, "a tensor")
    handle.wait(5.0)
    assert work.waits == [None]
    assert not handle.received


@pytest.mark.parametrize(
    ("said", "kind", "told"),
    [
        ("Timed out waiting 500ms", QuiesceTimeout, "a tensor: the peer did not answer within 0.5 s"),
        ("Connection closed\nin a file", PeerDied, "a tensor: the connection is gone (Connection closed)"),
        ("x" * 300, PeerDied, f"a tensor: the connection is gone ({'x' * 200})"),
    ],
)
def test_an_error_is_explained_and_told_again(
    clock: list[float], said: str, kind: type[QuiesceError], told: str
) -> None:
    failing, next_one = Work(clock, error=said), Work(clock)
    handle = TorchHandle([failing, next_one], [], True, "a tensor")
    errors = []
    for _ in range(2):
        with pytest.raises(kind) as caught:
            handle.wait(0.5)
        errors.append(caught.value)
    assert str(errors[0]).startswith(told)
    assert str(errors[0]) == str(errors[1])
    assert errors[0] is not errors[1]
    assert (failing.waits, next_one.waits) == ([0.5], [])
    assert not handle.received


def test_a_handle_that_failed_with_its_last_work_was_not_received(clock: list[float]) -> None:
    handle = TorchHandle([Work(clock, error="Connection closed")], [], True, "a tensor")
    with pytest.raises(PeerDied):
        handle.wait(1.0)
    assert not handle.received


def test_what_torch_distributed_lacks_is_said(beside: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QuiesceError, match="init_process_group"):
        TorchTransport()
    beside(lambda: None)
    device = object()
    # Strings of their own, as those that come from C++ are.
    monkeypatch.setattr(
        dist, "get_backend", lambda group=None: "".join("nccl" if group is device else "gloo")
    )
    assert not TorchTransport(device)._blocks_host
    assert TorchTransport()._blocks_host
    assert (TorchTransport(device).device, TorchTransport().device) == ("cuda", "cpu")
    with pytest.raises(QuiesceError, match="metadata_group"):
        TorchTransport(device, device)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "fake")
    with pytest.raises(QuiesceError, match="metadata_group"):
        TorchTransport()


@pytest.mark.parametrize("timeout", [None, float("inf"), float("nan"), -1.0])
def test_a_handle_is_not_given_up_for_a_bad_time(clock: list[float], timeout: Any) -> None:
    work = Work(clock)
    handle = TorchHandle([work], [], True, "a tensor")
    with pytest.raises(ValueError, match=f"timeout is {timeout!r}"):
        handle.wait(timeout)
    assert work.waits == []
    # More than gloo's clock can count.
    handle.wait(1e300)
    assert work.waits == [1e9]


def test_the_time_that_was_waited_is_told_in_few_digits(clock: list[float]) -> None:
    for timeout, told in ((2.99964, "3"), (0.0501, "0.05"), (1200.0, "1200")):
        handle = TorchHandle([Work(clock, error="Timed out")], [], True, "a tensor")
        with pytest.raises(QuiesceTimeout, match=f"within {told} s"):
            handle.wait(timeout)


@pytest.mark.parametrize("peer", [-1, 0, 2])
def test_a_rank_that_is_no_other_is_refused(beside: Peer, peer: int) -> None:
    """gloo ends the process for one that there is not."""
    transport = beside(lambda: None)
    for call in (
        lambda: transport.send_message(b"message", peer),
        lambda: transport.receive_message(peer, 1.0),
        lambda: transport.send(torch.zeros(4), peer),
        lambda: transport.receive(torch.zeros(4), peer),
    ):
        with pytest.raises(QuiesceError, match=f"with rank {peer}: there are 2"):
            call()
