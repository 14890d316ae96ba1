"""The same races on a real device, with a kernel slow enough to make each visible. They need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quiesce.host_staging import HostStaging
from quiesce.streams import CudaBackend

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine"),
]
CYCLES = 50_000_000
"""Clock cycles that a slow kernel spins: some tens of milliseconds."""
ELEMENTS = 1 << 20


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    """The current device, idle before and after."""
    torch.cuda.synchronize()
    yield CudaBackend()
    torch.cuda.synchronize()


def slowly(backend: CudaBackend) -> None:
    """Keep the current stream busy."""
    backend.launch(lambda: torch.cuda._sleep(CYCLES))


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_is_ordered_behind_another_by_an_event_alone(backend: CudaBackend, waits: bool) -> None:
    """Without the wait the reader finds what was there before; with it, what was produced."""
    side = backend.stream("side")
    source, target = torch.zeros(ELEMENTS, device="cuda"), torch.zeros(ELEMENTS, device="cuda")
    torch.cuda.synchronize()
    slowly(backend)
    backend.launch(lambda memory: memory.fill_(1), writes=[source])
    produced = backend.record()
    with backend.using(side):
        if waits:
            backend.wait(produced)
        backend.copy(target, source)
    torch.cuda.synchronize()
    assert bool((target == 1).all()) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_static_buffer_is_overwritten_under_a_slow_reader(backend: CudaBackend, waits: bool) -> None:
    """Two streams hand a buffer on, as stages do: the next forward must be ordered behind the last read of it."""
    side = backend.stream("send")
    output, sent = torch.zeros(ELEMENTS, device="cuda"), torch.zeros(ELEMENTS, device="cuda")
    backend.launch(lambda memory: memory.fill_(1), writes=[output])
    produced = backend.record()
    with backend.using(side):
        backend.wait(produced)
        slowly(backend)
        backend.copy(sent, output)
        handle = backend.record()
    if waits:
        backend.wait(handle)
    backend.launch(lambda memory: memory.fill_(2), writes=[output])
    torch.cuda.synchronize()
    assert bool((sent == 1).all()) == waits


def test_recording_again_does_not_move_a_wait(backend: CudaBackend) -> None:
    """The wait captured the point; what is recorded later holds nothing back, nor does an event never recorded."""
    side = backend.stream("side")
    event = backend.record()
    with backend.using(side):
        backend.wait(event)
        backend.wait(torch.cuda.Event())
        passed = backend.record()
    slowly(backend)
    backend.record(event)
    backend.synchronize(passed, 10.0)
    assert not backend.query(event)


def test_a_pinned_copy_has_not_happened_when_it_returns(backend: CudaBackend) -> None:
    """The host finds the old bytes until the event behind the copy is reached."""
    pinned = backend.pinned(ELEMENTS)
    pinned.zero_()
    source = torch.ones(ELEMENTS, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    slowly(backend)
    backend.copy(pinned, source)
    copied = backend.record()
    early = bool((pinned == 0).all())
    backend.synchronize(copied, 10.0)
    assert early
    assert bool((pinned == 1).all())


def test_pageable_memory_may_be_written_at_once(backend: CudaBackend) -> None:
    """A copy from pageable memory has read it when the call returns, however busy the stream is."""
    source = torch.ones(ELEMENTS, dtype=torch.uint8)
    target = torch.zeros(ELEMENTS, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    slowly(backend)
    backend.copy(target, source)
    source.fill_(9)
    torch.cuda.synchronize()
    assert bool((target == 1).all())


@pytest.mark.parametrize("recorded", [True, False])
def test_the_allocator_hands_memory_out_again(backend: CudaBackend, recorded: bool) -> None:
    """Without record_stream, memory that another stream still reads is handed out, and overwritten."""
    side = backend.stream("side")
    target = torch.zeros(ELEMENTS, device="cuda")
    source = torch.ones(ELEMENTS, device="cuda")
    torch.cuda.synchronize()
    with backend.using(side):
        slowly(backend)
        backend.copy(target, source)
        if recorded:
            backend.record_stream(source)
    address = source.data_ptr()
    del source
    again = torch.full((ELEMENTS,), 5.0, device="cuda")
    reused = again.data_ptr() == address
    torch.cuda.synchronize()
    assert reused == (not recorded)
    assert bool((target == 1).all()) == recorded


def test_staging_delivers_every_output(backend: CudaBackend) -> None:
    """Outputs dropped at once reach the host unharmed, while the copies lag behind."""
    staging = HostStaging(backend, ELEMENTS * 4, limit=3)
    for number in range(20):
        output = torch.full((ELEMENTS,), number, dtype=torch.int32, device="cuda")
        with backend.using(staging.stream):
            slowly(backend)
        staged = staging.stage(output)
        del output
        overwriting = torch.full((ELEMENTS,), -1, dtype=torch.int32, device="cuda")
        assert bool((staged.settle(10.0) == number).all())
        staged.lend([])
        del overwriting
    staging.close(10.0)


def test_a_graph_replay_overwrites_its_static_output(backend: CudaBackend) -> None:
    """Forward alone is captured; its output is settled before the next replay. Staging under capture is refused."""
    number = torch.zeros(ELEMENTS, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert backend.capturing()
        output = number + 1
    staging = HostStaging(backend, ELEMENTS * 4)
    for step in range(5):
        number.fill_(step)
        graph.replay()
        staged = staging.stage(output)
        # The next replay writes the source of this copy.
        backend.wait(staged._event)
        assert bool((staged.settle(10.0) == step + 1).all())
        staged.lend([])
    staging.close(10.0)
