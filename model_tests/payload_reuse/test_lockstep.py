"""The shipped sender keeps step with the specification, and no faulty one does."""

import pytest
from model_tests.conftest import SEARCHING
from model_tests.payload_reuse.adapter import VARIANTS, PayloadReuse

from quiesce.events import actions
from quiesce.lifecycle import BufferPool
from quiesce.model import manifest
from quiesce.model.adapter import Divergence
from quiesce.model.lockstep import lockstep
from quiesce.payload_reuse import PayloadSender

# Refusals are rare among all that may happen: a smaller model has more of them.
SHOWS_IN = dict.fromkeys(
    ("refused_part_retried", "refusal_not_ended", "refused_parts_kept"), "a peer that dies"
)


def test_the_sender_keeps_step() -> None:
    lockstep(PayloadReuse)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_every_faulty_sender_falls_out_of_step(name: str) -> None:
    with pytest.raises(Divergence):
        lockstep(VARIANTS[name], small=SHOWS_IN.get(name, ""), options=SEARCHING)


def test_every_mutant_of_the_specification_has_a_faulty_sender() -> None:
    mutants = {m.name for m in manifest.load().mutants.values() if m.protocol == "payload_reuse"}
    assert mutants == VARIANTS.keys()


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
        name.replace("BeginEncode", "Encode").replace("EndEncode", "Encode")
        for name in PayloadReuse.load().actions
    }
    assert specified - environment == {*actions(PayloadSender), *actions(BufferPool)}
