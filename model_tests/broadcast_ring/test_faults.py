"""Every mutant of the specification has a faulty variant here, and lockstep tells each from the ring."""

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from model_tests.broadcast_ring.adapter import VARIANTS
from model_tests.broadcast_ring.faults import PROGRESS, WRITERS

from quiesce.broadcast_ring import BroadcastRing
from quiesce.model import manifest
from quiesce.model.adapter import Divergence
from quiesce.model.lockstep import lockstep
from quiesce.ring_reader import RingReader
from quiesce.ring_wire import RingHandle

PATIENCE, MESSAGE = 30.0, 1 << 18  # seconds, elements of four bytes
SEARCHING = settings(
    max_examples=400,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def test_every_mutant_has_a_variant() -> None:
    known = manifest.load().mutants.values()
    # `refill_breaks_the_law` is ignore_one_reader again, seen by the law.
    names = {mutant.name for mutant in known if mutant.protocol == "broadcast_ring"} - {
        "refill_breaks_the_law"
    }
    assert names == VARIANTS.keys() | PROGRESS


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"stale_notices"}))
def test_variant_is_caught(name: str) -> None:
    with pytest.raises(Divergence):
        lockstep(VARIANTS[name], options=SEARCHING, steps=100)


def _take_and_let_go(handle: RingHandle, told: Connection) -> None:
    with RingReader(handle, 0) as reader:
        value = reader.receive(PATIENCE)
        del value
        told.send("let go")
        told.poll(PATIENCE)


def _keeps_its_lease(ring_class: type[BroadcastRing]) -> bool:
    """Whether a lease lasts though the reader before was killed with word of its release on the way."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with ring_class(1, slots=1, slot_bytes=2 << 20) as ring:
        first = spawn.Process(target=_take_and_let_go, args=(ring.handle, theirs))
        first.start()
        try:
            ring.wait_until_ready(PATIENCE)
            ring.publish(torch.zeros(MESSAGE), PATIENCE)
            assert ours.poll(PATIENCE)
        finally:
            first.kill()
            first.join(PATIENCE)
        with RingReader(ring.handle, 0) as reader:
            assert ring._socket.poll(int(1e3 * PATIENCE)), "no greeting came"
            ring.publish(torch.full((MESSAGE,), 2.0), PATIENCE)
            kept = reader.receive(PATIENCE)
            ring.publish(torch.full((MESSAGE,), 3.0), PATIENCE)
            return bool((kept == 2.0).all())


def test_what_a_dead_reader_told_is_not_its_successors() -> None:
    """Lockstep rarely lets a reader die at this moment and another come to the one slot."""
    assert _keeps_its_lease(BroadcastRing)
    assert not _keeps_its_lease(WRITERS["stale_notices"])
