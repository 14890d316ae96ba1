"""Every mutant of the specification has a faulty variant here, and the lockstep test tells each from the ring."""

import random

import pytest
from model_tests.broadcast_ring.faults import PROGRESS, READERS, WRITERS
from model_tests.broadcast_ring.lockstep import Lockstep

from quiesce.broadcast_ring import BroadcastRing
from quiesce.model import manifest
from quiesce.ring_reader import RingReader

WALKS, STEPS = 60, 120


def test_every_mutant_has_a_variant() -> None:
    known = manifest.load().mutants.values()
    # `refill_breaks_the_law` is ignore_one_reader again, seen by the law.
    names = {mutant.name for mutant in known if mutant.protocol == "broadcast_ring"} - {
        "refill_breaks_the_law"
    }
    assert names == set(WRITERS) | set(READERS) | PROGRESS


@pytest.mark.parametrize("name", [*WRITERS, *READERS])
def test_variant_is_caught(name: str) -> None:
    for seed in range(WALKS):
        walk = Lockstep(WRITERS.get(name, BroadcastRing), READERS.get(name, RingReader))
        walk.kill_after = STEPS  # a fault needs a writer that goes on
        choose = random.Random(seed)
        try:
            for _ in range(STEPS):
                walk.go_on(choose.randrange(10**6))
        except AssertionError:
            return
        finally:
            walk.teardown()
    pytest.fail(f"{name} was not told from the ring in {WALKS} walks of {STEPS} steps")
