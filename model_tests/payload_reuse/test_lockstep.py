"""The shipped sender keeps step with the specification, and no faulty one does."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from model_tests.payload_reuse.faulty import FAULTY
from model_tests.payload_reuse.lockstep import Lockstep, oracle

from quiesce.events import actions
from quiesce.lifecycle import BufferPool
from quiesce.model import manifest
from quiesce.payload_reuse import PayloadSender

TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(settings.default, stateful_step_count=60)

# Over inproc no frame outlives the closing of its socket because of a linger period: test_faults.py has this one.
BY_OTHER_TESTS = {"close_lingers"}


@pytest.mark.parametrize("name", sorted(FAULTY.keys() - BY_OTHER_TESTS))
def test_every_faulty_sender_falls_out_of_step(name: str) -> None:
    machine = type(f"Lockstep_{name}", (Lockstep,), {"sender_class": FAULTY[name]})
    searching = settings(
        max_examples=400,
        stateful_step_count=60,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=searching)


def test_every_mutant_of_the_specification_has_a_faulty_sender() -> None:
    mutants = {m.name for m in manifest.load().mutants.values() if m.protocol == "payload_reuse"}
    assert mutants == FAULTY.keys()


def test_every_action_of_the_sender_has_a_method() -> None:
    environment = {
        "BeginOverwrite",  # the caller's
        "EndOverwrite",
        "Interrupt",
        "Done",
        "PeerTake",
        "BeginRead",
        "EndRead",
        "PeerDrop",
        "TrackerFires",
        "Notice",
        "PeerDies",
        "PeerReturns",
        "Reap",
    }
    specified = {
        name.replace("BeginEncode", "Encode").replace("EndEncode", "Encode") for name in oracle().actions
    }
    assert specified - environment == {*actions(PayloadSender), *actions(BufferPool)}
