"""Every mutant of the specification has a faulty variant here, and lockstep tells each from the ring."""

import pytest
from model_tests.broadcast_ring.adapter import VARIANTS
from model_tests.broadcast_ring.faults import PROGRESS
from model_tests.conftest import SEARCHING

from quiesce.model import manifest
from quiesce.model.adapter import Divergence
from quiesce.model.lockstep import lockstep


def test_every_mutant_has_a_variant() -> None:
    known = manifest.load().mutants.values()
    # `refill_breaks_the_law` is ignore_one_reader again, seen by the law.
    names = {mutant.name for mutant in known if mutant.protocol == "broadcast_ring"} - {
        "refill_breaks_the_law"
    }
    assert names == VARIANTS.keys() | PROGRESS


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"stale_notices"}))
def test_variant_is_caught(name: str) -> None:
    """`stale_notices` needs a death at a rare moment, which `test_progress` brings about."""
    with pytest.raises(Divergence):
        lockstep(VARIANTS[name], options=SEARCHING, steps=100)
