"""The shipped ring keeps step with the specification."""

from model_tests.broadcast_ring.adapter import Ring

from quiesce.model.lockstep import lockstep


def test_the_ring_keeps_step() -> None:
    lockstep(Ring, steps=80)
