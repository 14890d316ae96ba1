"""Mutants made by machine that the other tests did not notice, and what is now asked so that they are."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from model_tests.stage_handoff.test_link import pair

from quiesce.arrays import MAX_AXES
from quiesce.errors import Closed, DecodeError, EncodeError
from quiesce.events import Event, observe
from quiesce.stage_handoff import StageLink


def announce(shape: list[int], dtype: str = "uint8", sliced: int = 0, **options: Any) -> StageLink:
    """The link of a receiver, to which a tensor of this shape was announced."""
    link, peer, _ = pair(**options)
    link.transport.send_message(msgspec.msgpack.encode([0, {}, [["x", shape, dtype, sliced]], ["x"]]), 2)
    return peer


@pytest.mark.parametrize("shape", [[], [0], [16], [4, 4], [1] * MAX_AXES])
def test_what_fits_is_made_room_for(shape: list[int]) -> None:
    received = announce(shape, limit_bytes=16).irecv_tensor_dict()
    assert list(received.wholes["x"].shape) == shape


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([17], "uint8"),
        ([5], "float32"),
        ([0, 17], "uint8"),
        ([1] * (MAX_AXES + 1), "uint8"),
        ([-1, -1], "uint8"),
        ([1], "quint8"),
        ([1], "qint32"),
    ],
)
def test_what_does_not_fit_is_refused(shape: list[int], dtype: str) -> None:
    with pytest.raises(DecodeError):
        announce(shape, dtype, limit_bytes=16).irecv_tensor_dict()


def test_the_tensors_of_a_dict_share_the_limit() -> None:
    for limit, fits in ((16, True), (15, False)):
        link, peer, _ = pair(limit_bytes=limit)
        link.isend_tensor_dict({"x": torch.zeros(2), "y": torch.zeros(2)})
        if fits:
            peer.irecv_tensor_dict()
        else:
            with pytest.raises(DecodeError, match=r"'y' of .* more than 15 bytes"):
                peer.irecv_tensor_dict()


@pytest.mark.parametrize(
    ("keys", "values"),
    [(["x", "x"], {}), (["x", "y"], {}), ([], {}), (["x", "x"], {"x": 1}), (["x"], {"x": 1})],
)
def test_keys_that_are_not_those_of_the_values_are_refused(keys: list[str], values: dict[str, int]) -> None:
    link, peer, _ = pair()
    message = [0, values, [["x", [1], "uint8", 0]], keys]
    link.transport.send_message(msgspec.msgpack.encode(message), 2)
    with pytest.raises(DecodeError, match="keys of a dict from rank 1"):
        peer.irecv_tensor_dict()


@pytest.mark.parametrize(
    ("numel", "parts", "sliced"), [(4, 2, 2), (2, 2, 2), (3, 2, 0), (0, 2, 0), (4, 1, 0)]
)
def test_what_divides_is_sent_in_slices(numel: int, parts: int, sliced: int) -> None:
    link, peer, _ = pair(tensor_parallel=(parts - 1, parts))
    link.isend_tensor_dict({"x": torch.arange(numel)})
    received = peer.irecv_tensor_dict()
    (meta,) = received.metadata.tensors
    assert meta.sliced == sliced
    assert received.parts["x"].numel() == (numel // parts if sliced else numel)
    assert (received.parts["x"] is received.wholes["x"]) == (not sliced)


@pytest.mark.parametrize(("numel", "slices"), [(3, 2), (5, 2), (8, 4), (8, 1), (8, -2)])
def test_slices_that_cannot_be_gathered_here_are_refused(numel: int, slices: int) -> None:
    with pytest.raises(
        DecodeError, match=f"in {slices} slices, and is to be gathered from 2: see tensor_par"
    ):
        announce([numel], sliced=slices, tensor_parallel=(0, 2)).irecv_tensor_dict()


def test_a_message_on_its_way_is_told_of_by_its_number() -> None:
    told: list[tuple[str, object]] = []

    def note(event: Event) -> None:
        if event.phase == "end" and "message" in event.fields:
            told.append((event.action, event.fields["message"]))

    link, peer, _ = pair()
    with observe(note):
        for number in range(3):
            link.isend_tensor_dict({"number": number})
            peer.irecv_tensor_dict()
    assert told == [(action, n) for n in range(3) for action in ("SendMetadata", "ReceiveMetadata")]


class Noting:
    """A handle that notes how long it was waited for."""

    received = False

    def __init__(self, clock: list[float], takes: float) -> None:
        self.clock, self.takes = clock, takes
        self.waits: list[float] = []

    def wait(self, timeout: float) -> None:
        self.waits.append(timeout)
        self.clock[0] += self.takes


@pytest.mark.parametrize(("timeout", "waits"), [(5.0, [5.0, 3.0, 0.0]), (None, [60.0, 58.0, 53.0])])
def test_what_is_on_its_way_shares_the_time_there_is_to_close(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, waits: list[float]
) -> None:
    link, _, _ = pair()
    clock = [100.0]
    monkeypatch.setattr("quiesce.stage_handoff.time.monotonic", lambda: clock[0])
    tensors, metadata = [Noting(clock, 2.0), Noting(clock, 5.0)], Noting(clock, 0.0)
    link._unsettled += tensors
    link._pending.append((metadata, []))
    link.close(timeout)
    assert [handle.waits for handle in (*tensors, metadata)] == [[some] for some in waits]
    assert (link.unsettled, link.pending) == (0, 0)


def test_a_call_has_one_limit_for_all_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    received = announce([16], limit_bytes=16).irecv_tensor_dict()
    link, _, _ = pair()
    clock = [100.0]
    monkeypatch.setattr("quiesce.stage_handoff.time.monotonic", lambda: clock[0])
    sent, got = ([Noting(clock, 2.0), Noting(clock, 5.0), Noting(clock, 0.0)] for _ in range(2))
    link._unsettled += sent
    link.before_forward(6.0)
    received.handles[:] = got
    received.wait(6.0)
    assert [[handle.waits for handle in handles] for handles in (sent, got)] == [[[6.0], [4.0], [0.0]]] * 2


def test_a_link_left_by_an_error_waits_for_nothing() -> None:
    link, _, _ = pair()
    handle = Noting([0.0], 0.0)
    link._unsettled.append(handle)
    with pytest.raises(KeyError), link:
        raise KeyError
    assert (handle.waits, link.unsettled) == ([], 0)
    with pytest.raises(Closed, match="it was left by KeyError"):
        link.before_forward()
    link, _, _ = pair()
    with link:
        link._unsettled.append(handle)
    assert len(handle.waits) == 1


@pytest.mark.parametrize(("timeout", "waits"), [(None, 60.0), (2.0, 2.0), (0.0, 0.0)])
def test_a_wait_is_given_its_time_or_that_of_the_link(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None, waits: float
) -> None:
    link, _, _ = pair()
    handle, given = Noting([0.0], 0.0), []
    link._unsettled.append(handle)
    link.before_forward(timeout)
    monkeypatch.setattr(link.transport, "receive_message", lambda source, limit: given.append(limit) or b"")
    with pytest.raises(DecodeError):
        link.irecv_tensor_dict(timeout=timeout)
    assert handle.waits == given == [waits]


@pytest.mark.parametrize("part", [(-1, 2), (2, 2), (0, 0), (1, 1)])
def test_a_rank_outside_its_tensor_parallel_group_is_refused(part: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel"):
        pair(tensor_parallel=part)


def test_values_that_msgpack_does_not_know_are_refused() -> None:
    link, _, _ = pair()
    for value in (object(), 1 << 64, -(1 << 63) - 1, "\ud800"):
        with pytest.raises(EncodeError):
            link.isend_tensor_dict({"n": value})
    link.isend_tensor_dict({"n": (1 << 64) - 1})
