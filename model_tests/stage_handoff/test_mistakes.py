"""What users do wrong: it is refused before anything is sent or waited for, and the link can be used on."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from model_tests.stage_handoff.test_link import pair

from quiesce.errors import Closed, DecodeError, EncodeError, QuiesceTimeout
from quiesce.host_staging import HostStaging
from quiesce.simulated_transport import SimulatedTransport
from quiesce.stage_handoff import StageLink
from quiesce.streams import CpuBackend

BAD_TIMES = [float("inf"), float("nan"), -1.0]


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "on device 'meta'": lambda: torch.zeros(4, device="meta"),
    "torch.sparse_coo": lambda: torch.eye(2).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "torch._mkldnn": lambda: torch.eye(2).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
}


def recursive() -> list[Any]:
    values: list[Any] = []
    values.append(values)
    return values


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({1: torch.zeros(4)}, "key 1 is of type int; the keys of a dict must be strings"),
        ({None: 1}, "key None is of type NoneType"),
        ({("a", 1): 1}, r"key \('a', 1\) is of type tuple"),
        (torch.zeros(4), "a link sends dicts, not a Tensor"),
        ([("x", torch.zeros(4))], "a link sends dicts, not a list"),
        ({"a": 1, "b": np.ones(3)}, r"value of 'b' .* numpy.ndarray .* through torch.from_numpy"),
        ({"a": {"b": torch.ones(3)}, "c": 1}, r"value of 'a' .* Tensor .* values of the dict itself"),
        ({"a": [object()], "b": object()}, "value of 'a', 'b' cannot be sent"),
        ({"a": recursive()}, "value of 'a' cannot be sent"),
        ({"\ud800": 1}, "value of a key cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_named_and_nothing_is_sent(values: Any, told: str) -> None:
    link, peer, _ = pair()
    with pytest.raises(EncodeError, match=told):
        link.isend_tensor_dict(values)
    assert (link.pending, link.unsettled) == (0, 0)
    link.isend_tensor_dict({"fine": True})
    assert peer.irecv_tensor_dict().wait() == {"fine": True}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_tensor_without_plain_bytes_is_refused_on_both_sides(kind: str) -> None:
    link, peer, _ = pair()
    tensor = KINDS[kind]()
    with pytest.raises(EncodeError, match=f"tensor 'x' is {kind}"):
        link.isend_tensor_dict({"x": tensor})
    assert (link.pending, link.unsettled) == (0, 0)
    link.isend_tensor_dict({"x": torch.zeros(4)})
    with pytest.raises(DecodeError, match=f"the buffer for 'x' is {kind}"):
        peer.irecv_tensor_dict(into={"x": tensor})


def test_a_tensor_elsewhere_than_the_transport_sends_from_is_refused() -> None:
    link, _, _ = pair()
    link.transport.device = "cuda"  # type: ignore[attr-defined]
    with pytest.raises(EncodeError, match=r"'x' is on device 'cpu'; .* must lie on a cuda device"):
        link.isend_tensor_dict({"x": torch.zeros(4)})
    link.transport.device = "cpu"  # type: ignore[attr-defined]
    link.isend_tensor_dict({"x": torch.zeros(4)})


def test_a_buffer_for_which_nothing_arrived_is_refused() -> None:
    """Else it keeps what it held, and is taken for what was received."""
    for sent in ({"hidden": torch.zeros(4), "n": 1}, {"hidden": torch.zeros(4)}):
        link, peer, _ = pair()
        link.isend_tensor_dict(sent)
        with pytest.raises(
            DecodeError, match=r"for the buffers \['hiden'\]; those from rank 1 are \['hidden'\]"
        ):
            peer.irecv_tensor_dict(into={"hiden": torch.zeros(4)})
        with pytest.raises(Closed, match="failed before"):
            peer.irecv_tensor_dict()


def test_a_buffer_for_what_came_as_no_tensor_is_refused() -> None:
    link, peer, _ = pair()
    link.isend_tensor_dict({"n": 1})
    with pytest.raises(DecodeError, match=r"no tensor arrived for the buffers \['n'\]"):
        peer.irecv_tensor_dict(into={"n": torch.zeros(1)})


@pytest.mark.parametrize(
    ("buffer", "told"),
    [
        (torch.zeros(8)[::2], r"is \(4,\) of torch.float32, not contiguous \(strides \(2,\)\); it must be"),
        (torch.zeros(5), r"is \(5,\) of torch.float32; it must be contiguous, \(4,\)"),
    ],
)
def test_a_buffer_is_told_what_is_wrong_with_it(buffer: torch.Tensor, told: str) -> None:
    link, peer, _ = pair()
    link.isend_tensor_dict({"x": torch.zeros(4)})
    with pytest.raises(DecodeError, match=f"the buffer for 'x' {told}"):
        peer.irecv_tensor_dict(into={"x": buffer})


@pytest.mark.parametrize("into", [torch.zeros(4), [torch.zeros(4)], {"x": np.zeros(4)}, {"x": None}])
def test_buffers_are_a_dict_of_tensors(into: Any) -> None:
    link, peer, world = pair()
    link.isend_tensor_dict({"x": torch.ones(4)})
    with pytest.raises(TypeError, match="`into` must be a dict"):
        peer.irecv_tensor_dict(into=into)
    values = peer.irecv_tensor_dict(into={}).wait()
    world.drain()
    assert values["x"].tolist() == [1.0] * 4


@pytest.mark.parametrize("timeout", [*BAD_TIMES, "1"])
def test_a_bad_timeout_is_refused_and_the_link_goes_on(timeout: Any) -> None:
    link, peer, world = pair()
    link.isend_tensor_dict({"x": torch.ones(4)})
    told = f"timeout is {timeout!r}"
    calls: list[Callable[[Any], object]] = [link.before_forward, link.close]
    calls += [lambda timeout: peer.irecv_tensor_dict(timeout=timeout), peer.close]
    for call in calls:
        with pytest.raises(ValueError, match=told):
            call(timeout)
    received = peer.irecv_tensor_dict()
    for _ in range(2):
        with pytest.raises(ValueError, match=told):
            received.wait(timeout)
        values = received.wait()
    world.drain()
    assert values["x"].tolist() == [1.0] * 4
    link.before_forward()


@pytest.mark.parametrize("timeout", [*BAD_TIMES, None])
def test_a_link_is_not_made_with_a_bad_timeout(timeout: Any) -> None:
    with pytest.raises(ValueError, match=f"timeout is {timeout!r}"):
        pair(timeout=timeout)


@pytest.mark.parametrize("timeout", [*BAD_TIMES, None])
def test_a_bad_timeout_of_staging_is_refused(timeout: Any) -> None:
    staging = HostStaging(CpuBackend(), 64, limit=1)
    told = f"timeout is {timeout!r}"
    with pytest.raises(ValueError, match=told):
        staging.stage(torch.ones(4), timeout)
    staged = staging.stage(torch.ones(4))
    with pytest.raises(ValueError, match=told):
        staged.settle(timeout)
    with pytest.raises(ValueError, match=told):
        staging.close(timeout)
    assert staged.settle().tolist() == [1.0] * 4
    staged.lend([])
    staging.stage(torch.ones(4)).discard()
    staging.close()


def test_two_links_between_a_pair_of_ranks_take_each_others_dicts() -> None:
    """Messages bear the ranks and a tag, and no link."""
    link, peer, _ = pair()
    assert isinstance(link.transport, SimulatedTransport)
    second, its_peer = (
        StageLink(one.transport, source=one.source, to=one.to, backend=one.backend) for one in (link, peer)
    )
    link.isend_tensor_dict({"from": "the first"})
    second.isend_tensor_dict({"from": "the second"})
    assert its_peer.irecv_tensor_dict().wait() == {"from": "the first"}
    assert peer.irecv_tensor_dict().wait() == {"from": "the second"}


@pytest.mark.parametrize("nbytes", [0, 400])
def test_a_tensor_whose_storage_shrank_is_not_sent(nbytes: int) -> None:
    link, peer, _ = pair("gloo")
    shrunk = torch.ones(1000)
    shrunk.untyped_storage().resize_(nbytes)
    with pytest.raises(EncodeError, match="'x' has lost its storage"):
        link.isend_tensor_dict({"x": shrunk})
    link.isend_tensor_dict({"x": torch.ones(3)})
    assert torch.equal(peer.irecv_tensor_dict().wait()["x"], torch.ones(3))


def test_a_dict_that_nobody_waits_for_is_kept_while_it_is_written() -> None:
    link, peer, _ = pair("gloo")
    link.isend_tensor_dict({"x": torch.ones(3)})
    link.isend_tensor_dict({"x": torch.full((3,), 2.0)})
    dropped = weakref.ref(peer.irecv_tensor_dict().parts["x"])
    gc.collect()
    assert dropped() is not None
    assert torch.equal(peer.irecv_tensor_dict().wait()["x"], torch.full((3,), 2.0))
    link.close()
    peer.close()
    gc.collect()
    assert dropped() is None


def test_a_dict_that_was_sent_late_has_the_next_number() -> None:
    """Another thread's dict goes between the look at this one and its turn."""
    link, peer, _ = pair()
    in_step = link._in_step

    def overtaken(call: Callable[[], Any]) -> Any:
        link._in_step = in_step  # type: ignore[method-assign]
        link.isend_tensor_dict({"x": 1})
        return in_step(call)

    link._in_step = overtaken  # type: ignore[method-assign,assignment]
    link.isend_tensor_dict({"x": 2})
    assert [peer.irecv_tensor_dict().wait()["x"] for _ in range(2)] == [1, 2]


def test_a_link_is_not_closed_in_the_middle_of_a_call_of_another_thread() -> None:
    link, _, _ = pair()
    link.isend_tensor_dict({"x": 1})
    closed: list[object] = []

    def close() -> None:
        try:
            link.close(0.0)
        except QuiesceTimeout as error:
            closed.append(error)

    other = threading.Thread(target=close)
    link._turns.take(0.0, lambda: (other.start(), other.join()))
    assert len(closed) == 1
    assert link.pending == 1
