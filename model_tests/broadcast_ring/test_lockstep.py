"""The shipped ring keeps step with the specification."""

from hypothesis import settings
from model_tests.broadcast_ring.lockstep import Lockstep

TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(settings.default, stateful_step_count=80)
