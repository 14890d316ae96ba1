"""Thousands of schedules: the shipped code survives all, each fault shows under some."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from model_tests.stage_handoff import faults, stager
from model_tests.stage_handoff.pipeline import DRAWS, SCHEDULES, SHAPES, Deadlock, Pipeline, Shape, meant

from quiesce.errors import QuiesceTimeout
from quiesce.model import manifest
from quiesce.simulated import Choose, chooser


def drawn(data: st.DataObject) -> Choose:
    """A choice function whose choices Hypothesis draws, and shrinks."""
    return lambda below: data.draw(st.integers(0, below - 1)) if below > 1 else 0


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_schedule_corrupts_the_pipeline(shape: Shape) -> None:
    """Every micro-batch arrives as it was produced, and nothing is accessed out of order."""
    for seed in range(SCHEDULES // len(SHAPES)):
        pipeline = Pipeline(chooser(seed), shape)
        assert pipeline.run() == meant(shape), f"seed {seed}"
        pipeline.world.order.check()
        for _ in range(shape.in_flight):
            pipeline.ranks[0].link.irecv_tensor_dict().wait()
        for rank in pipeline.ranks:
            rank.link.close(0.0)
            assert rank.link.pending == rank.link.unsettled == 0


@pytest.mark.timeout(3600)
def test_no_schedule_corrupts_what_is_staged() -> None:
    """Every tensor reaches the host, and stays there for as long as it is read."""
    for seed in range(SCHEDULES // len(SHAPES)):
        staged = stager.Stager(chooser(seed))
        assert staged.run() == 0, f"seed {seed}"
        staged.world.order.check()


@given(st.data())
def test_no_drawn_schedule_corrupts(data: st.DataObject) -> None:
    """The same under schedules that Hypothesis draws, and would shrink."""
    shape = data.draw(st.sampled_from(SHAPES))
    pipeline = Pipeline(drawn(data), shape)
    assert pipeline.run() == meant(shape)
    pipeline.world.order.check()


@pytest.mark.parametrize("fault", faults.CORRUPTING)
def test_a_fault_corrupts_under_some_schedule(fault: str) -> None:
    """The fault shows as wrong values within a thousand draws, and as a race in every run."""
    shape = faults.CORRUPTING[fault]
    for seed in range(DRAWS):
        pipeline = Pipeline(chooser(seed), shape)
        wrong = pipeline.run() != meant(shape)
        assert pipeline.world.order.races, f"seed {seed}: the checker saw nothing"
        if wrong:
            return
    pytest.fail(f"{fault} survived {DRAWS} schedules")


@pytest.mark.parametrize("fault", stager.CORRUPTING)
def test_a_fault_of_staging_corrupts_under_some_schedule(fault: str) -> None:
    """The same for host staging. A buffer recycled early is no race of streams, and shows in its bytes alone."""
    for seed in range(DRAWS):
        staged = stager.Stager(chooser(seed), stager.CORRUPTING[fault])
        wrong = staged.run()
        assert staged.world.order.races or fault == "pinned_recycled_early", f"seed {seed}"
        if wrong:
            return
    pytest.fail(f"{fault} survived {DRAWS} schedules")


@pytest.mark.parametrize("fault", faults.STOPPING)
def test_a_fault_stops_the_pipeline(fault: str) -> None:
    """The pipeline comes to a halt under every schedule, as the model does."""
    for seed in range(20):
        with pytest.raises((Deadlock, QuiesceTimeout)):
            Pipeline(chooser(seed), faults.STOPPING[fault]).run()


def test_pinned_buffers_that_never_come_back_stop_the_staging() -> None:
    """With a bound on pinned buffers, the third tensor finds none."""
    for seed in range(20):
        with pytest.raises(stager.Stuck):
            stager.Stager(chooser(seed), stager.STOPPING["pinned_never_recycled"]).run()


def test_pending_metadata_is_bounded() -> None:
    """A peer that takes nothing holds the sender at its bound; without the bound, messages pile up."""
    sender = Pipeline(chooser(0), Shape(in_flight=9, max_pending=2, flavour="gloo")).ranks[1]
    for number in range(2):
        sender.link.isend_tensor_dict({"number": number})
        sender.link.before_forward()
    with pytest.raises(QuiesceTimeout, match="has not taken"):
        sender.link.isend_tensor_dict({"number": 2})
    assert sender.link.pending == 2

    shape = Shape(in_flight=9, max_pending=2, flavour="gloo", link=faults.PendingUnbounded)
    faulty = Pipeline(chooser(0), shape).ranks[1]
    for number in range(5):
        faulty.link.isend_tensor_dict({"number": number})
        faulty.link.before_forward()
    assert faulty.link.pending == 5


def test_every_fault_of_the_specification_has_a_faulty_implementation() -> None:
    """The mutants of the manifest and the faulty variants have the same names."""
    mutants = [m for m in manifest.load().mutants.values() if m.protocol in ("stage_handoff", "host_staging")]
    built = {*faults.CORRUPTING, *faults.STOPPING, *faults.ENDING, *stager.CORRUPTING, *stager.STOPPING}
    built.add("pending_unbounded")
    assert {mutant.name for mutant in mutants} == built


def test_a_failing_schedule_shrinks() -> None:
    """Hypothesis finds a schedule that a dropped handle corrupts, and reports one that fails again."""

    @settings(max_examples=100, database=None, print_blob=False, phases=(Phase.generate, Phase.shrink))
    @given(st.data())
    def find(data: st.DataObject) -> None:
        shape = faults.CORRUPTING["handles_dropped"]
        assert Pipeline(drawn(data), shape).run() == meant(shape)

    with pytest.raises(AssertionError):
        find()
