"""One link at a time: the order in which it waits, what it refuses, and staging in front of a real socket."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
import torch
import zmq
from model_tests.forking import outcome
from model_tests.stage_handoff.faults import GoesOnHalfway, PeerDeathUnnoticed
from model_tests.stage_handoff.pipeline import Pipeline as Ring
from model_tests.stage_handoff.pipeline import Shape, faulty

from quiesce.borrowing import warn_of_loans
from quiesce.errors import Closed, DecodeError, EncodeError, NotQuiescent, QuiesceError, QuiesceTimeout
from quiesce.events import Event, observe
from quiesce.host_staging import HostStaging
from quiesce.payload_receiver import PayloadReceiver
from quiesce.payload_reuse import PayloadSender
from quiesce.simulated import SimulatedBackend, SimulatedWorld, chooser
from quiesce.simulated_transport import MessageHandle, SimulatedPeers, SimulatedTransport, TransferHandle
from quiesce.stage_handoff import StageLink
from quiesce.streams import CpuBackend


class Diary(SimulatedTransport):
    """A transport that writes down what is sent and waited for."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.lines: list[str] = []
        self.messages = self.tensors = 0

    def _keeping(self, handle: Any, name: str) -> Any:
        self.lines.append(f"send {name}")
        wait = handle.wait
        handle.wait = lambda timeout: (self.lines.append(f"wait {name}"), wait(timeout))
        return handle

    def send_message(self, message: bytes, to: int) -> MessageHandle:
        self.messages += 1
        return self._keeping(super().send_message(message, to), f"metadata {self.messages}")

    def send(self, tensor: torch.Tensor, to: int) -> TransferHandle:
        self.tensors += 1
        return self._keeping(super().send(tensor, to), f"tensor {self.tensors}")


def pair(flavour: str = "nccl", **options: Any) -> tuple[StageLink, StageLink, SimulatedWorld]:
    """The links of two ranks, the first of which keeps a diary."""
    world, peers = SimulatedWorld(chooser(0)), SimulatedPeers()
    links = []
    for rank, kind in ((1, Diary), (2, SimulatedTransport)):
        backend = SimulatedBackend(world, str(rank), eager=False)
        transport = kind(peers, backend, rank, flavour)
        links.append(StageLink(transport, source=3 - rank, to=3 - rank, backend=backend, **options))
    return links[0], links[1], world


def test_order_of_a_step() -> None:
    """The previous device handles are waited for, then forward, then the send; metadata is not waited for."""
    link, _, _ = pair()
    output = link.backend.empty((4,), torch.int32)
    diary = link.transport.lines  # type: ignore[attr-defined]
    handles: list[Any] = []
    for step in range(3):
        link.before_forward()
        link.backend.launch(lambda memory: memory.fill_(1), writes=[output])
        diary.append(f"forward {step + 1}")
        handles = link.isend_tensor_dict({"x": output})
        # The list is that of this step, the metadata first, and what is kept is the rest of it.
        assert isinstance(handles[0], MessageHandle)
        assert link._unsettled == handles[1:]
    assert diary == [
        "forward 1",
        "send metadata 1",
        "send tensor 1",
        "wait tensor 1",
        "forward 2",
        "send metadata 2",
        "send tensor 2",
        "wait tensor 2",
        "forward 3",
        "send metadata 3",
        "send tensor 3",
    ]
    assert link.pending == 3


def test_handles_of_two_dicts_add_up() -> None:
    """A second dict in a step leaves the handles of the first in the list."""
    link, _, _ = pair()
    link.isend_tensor_dict({"x": torch.zeros(4)})
    link.isend_tensor_dict({"x": torch.zeros(4), "y": torch.zeros(2)})
    link.isend_tensor_dict({"number": 3})
    assert link.unsettled == 3
    link.before_forward()
    assert link.unsettled == 0


def test_metadata_that_arrived_is_reaped() -> None:
    """Reaping waits for nothing: it takes what the peer is known to have taken, and leaves the rest."""
    link, peer, _ = pair()
    for number in range(3):
        link.isend_tensor_dict({"number": number})
    assert peer.irecv_tensor_dict().wait() == {"number": 0}
    assert peer.irecv_tensor_dict().wait() == {"number": 1}
    link.before_forward()
    assert link.pending == 1


def test_waiting_twice_is_harmless() -> None:
    """Handles and received dicts may be waited for again."""
    for flavour in ("nccl", "gloo"):
        link, peer, world = pair(flavour)
        (_, handle) = link.isend_tensor_dict({"x": torch.arange(4)})
        received = peer.irecv_tensor_dict()
        for _ in range(2):
            values = received.wait()
            handle.wait(1.0)
        world.drain()
        assert values["x"].tolist() == [0, 1, 2, 3]


def test_forward_without_settling_is_refused_in_the_end() -> None:
    """Who never calls before_forward is told so, before handles pile up."""
    link, peer, _ = pair(max_pending=4)
    for number in range(4):
        link.isend_tensor_dict({"number": number})
        peer.irecv_tensor_dict()
    with pytest.raises(NotQuiescent, match="before_forward"):
        link.isend_tensor_dict({"number": 4})


def test_keys_and_values_arrive_in_their_order() -> None:
    """A dict of tensors and other values comes out as it went in."""
    link, peer, world = pair()
    sent = {
        "a": 1,
        "x": torch.ones(2, 3),
        "b": [None, "s", b"b", 1.5],
        "y": torch.zeros(0),
        "z": torch.tensor(True),
    }
    link.isend_tensor_dict(sent)
    values = peer.irecv_tensor_dict().wait()
    world.drain()
    assert list(values) == list(sent)
    for key, value in sent.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(values[key], value)
            assert values[key].dtype == value.dtype
        else:
            assert values[key] == value


def test_a_tensor_that_is_not_contiguous_arrives_whole() -> None:
    """It is copied for the send; so are conjugate and transposed views."""
    link, peer, world = pair()
    sent = {"t": torch.arange(6).view(2, 3).t(), "c": torch.tensor([1 + 2j, 3 - 4j]).conj()}
    link.isend_tensor_dict(sent)
    values = peer.irecv_tensor_dict().wait()
    world.drain()
    assert all(torch.equal(values[key], sent[key]) for key in sent)


def test_what_cannot_be_encoded_is_refused_before_anything_is_sent() -> None:
    """The link goes on after an EncodeError, and the peer never sees the dict."""
    link, peer, _ = pair()
    for values in ({"f": object()}, {"n": 1 << 70}, {"s": torch.eye(2).to_sparse()}):
        with pytest.raises(EncodeError):
            link.isend_tensor_dict(values)
    link.isend_tensor_dict({"fine": True})
    assert peer.irecv_tensor_dict().wait() == {"fine": True}


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    """A static buffer must have the shape and dtype that the peer announced."""
    for buffer in (torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2)[:, 0]):
        link, peer, _ = pair()
        link.isend_tensor_dict({"x": torch.zeros(4)})
        with pytest.raises(DecodeError, match="must be contiguous"):
            peer.irecv_tensor_dict(into={"x": buffer})


@pytest.mark.parametrize("message", [b"", b"\xff", b"\x94\x00", msgspec.msgpack.encode([7, {}, [], []])])
def test_metadata_that_is_none_is_refused(message: bytes) -> None:
    """Garbage, and a dict out of turn, are DecodeErrors and nothing is built from them."""
    link, peer, _ = pair()
    link.transport.send_message(message, 2)
    with pytest.raises(DecodeError):
        peer.irecv_tensor_dict()


def test_hostile_dtypes_and_shapes_are_refused() -> None:
    """What a message says of a tensor is checked before memory is made for it."""
    for shape, dtype in (([-1], "float32"), ([2], "nn"), ([2], "no_such_dtype")):
        link, peer, _ = pair()
        link.transport.send_message(msgspec.msgpack.encode([0, {}, [["x", shape, dtype, False]], ["x"]]), 2)
        with pytest.raises(DecodeError):
            peer.irecv_tensor_dict()


def test_slices_need_the_same_group_on_both_sides() -> None:
    """A receiver that gathers nothing cannot receive slices, and says what to set."""
    link, peer, _ = pair(tensor_parallel=(0, 2))
    peer._parts = 1
    link.isend_tensor_dict({"x": torch.zeros(4)})
    with pytest.raises(DecodeError, match="tensor_parallel"):
        peer.irecv_tensor_dict()


def test_a_link_that_failed_stays_closed(caplog: pytest.LogCaptureFixture) -> None:
    """A wait that ran out has lost its place in the stream of messages."""
    caplog.set_level("INFO", "quiesce.stage_handoff")
    link, _, _ = pair()
    with pytest.raises(QuiesceTimeout):
        link.irecv_tensor_dict()
    assert "the stage link of rank 1 ends: it failed before" in caplog.text
    with pytest.raises(Closed, match="failed before"):
        link.before_forward()


class Cut(Exception):
    """What a signal handler raises."""


def cut_at(action: str, phase: str) -> Any:
    def observer(event: Event) -> None:
        if (event.action, event.phase) == (action, phase):
            raise Cut

    return observer


@pytest.mark.parametrize("kind", [StageLink, GoesOnHalfway])
def test_an_exception_between_metadata_and_tensors_ends_the_sender(kind: type[StageLink]) -> None:
    """Else the tensors of the next dict arrive in this one."""
    link, peer, world = pair()
    link.__class__ = kind
    with observe(cut_at("SendTensors", "begin")), pytest.raises(Cut):
        link.isend_tensor_dict({"x": torch.full((4,), 1)})
    if kind is StageLink:
        with pytest.raises(Closed, match="failed before"):
            link.isend_tensor_dict({"x": torch.full((4,), 2)})
    else:
        link.isend_tensor_dict({"x": torch.full((4,), 2)})
        values = peer.irecv_tensor_dict().wait()
        world.drain()
        assert values["x"].tolist() == [2] * 4


@pytest.mark.parametrize("kind", [StageLink, GoesOnHalfway])
def test_an_exception_between_metadata_and_tensors_ends_the_receiver(kind: type[StageLink]) -> None:
    """Else it takes the tensors of this dict for those of the next; so with a buffer that does not fit."""
    for fails in (cut_at("PostReceive", "begin"), lambda event: None):
        link, peer, world = pair()
        peer.__class__ = kind
        for number in (1, 2):
            link.isend_tensor_dict({"x": torch.full((4,), number)})
        wrong = {"x": torch.zeros(3, dtype=torch.int64)}
        with observe(fails), pytest.raises((Cut, DecodeError)):
            peer.irecv_tensor_dict(into=wrong)
        if kind is StageLink:
            with pytest.raises(Closed, match="failed before"):
                peer.irecv_tensor_dict()
        else:
            values = peer.irecv_tensor_dict().wait()
            world.drain()
            assert values["x"].tolist() == [1] * 4


@pytest.mark.parametrize("kind", [SimulatedTransport, PeerDeathUnnoticed])
def test_a_peer_that_says_nothing_is_waited_for_once(kind: type[SimulatedTransport]) -> None:
    link, _, _ = pair()
    link.transport.__class__ = kind
    with pytest.raises(QuiesceTimeout):
        link.irecv_tensor_dict()
    assert getattr(link.transport, "tries", 0) == (100 if kind is PeerDeathUnnoticed else 0)
    with pytest.raises(Closed):
        link.irecv_tensor_dict()


def test_a_link_is_of_its_process_and_used_by_one_thread_at_a_time() -> None:
    link, _, _ = pair()
    refused: list[BaseException] = []

    def other(event: Event) -> None:
        def use() -> None:
            try:
                link.before_forward()
            except QuiesceTimeout as error:
                refused.append(error)

        if event.action == "SendMetadata" and event.phase == "begin":
            thread = threading.Thread(target=use)
            thread.start()
            thread.join(20)

    with observe(other):
        link.isend_tensor_dict({"number": 0})
    assert "another thread has used this stage link" in str(refused[0])
    link.before_forward()
    for call in (link.before_forward, link.irecv_tensor_dict, lambda: link.isend_tensor_dict({}), link.close):
        assert outcome(call, 20).startswith("WrongProcess: ")


def test_close_settles_everything_or_says_so() -> None:
    """Closing waits for what is on its way; a closed link is of no use, and closing again does nothing."""
    link, peer, _ = pair("gloo")
    link.isend_tensor_dict({"x": torch.zeros(4)})
    peer.irecv_tensor_dict().wait()
    link.close()
    link.close()
    with pytest.raises(Closed):
        link.isend_tensor_dict({})
    link, _, _ = pair("gloo")
    link.isend_tensor_dict({"x": torch.zeros(4)})
    with pytest.raises(QuiesceTimeout):
        link.close(0.1)


def test_ends_of_a_pipeline() -> None:
    """The first rank receives from nobody and the last sends to nobody, and they are told."""
    transport = SimulatedTransport(SimulatedPeers(), SimulatedBackend(SimulatedWorld(chooser(0))), 1)
    link = StageLink(transport)
    with pytest.raises(QuiesceError, match="pass source"):
        link.irecv_tensor_dict()
    with pytest.raises(QuiesceError, match="pass `to`"):
        link.isend_tensor_dict({})
    for options in ({"max_pending": 0}, {"tensor_parallel": (2, 2)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            StageLink(transport, **options)  # type: ignore[arg-type]


class Capturing(CpuBackend):
    """A device whose stream is being captured into a graph."""

    def capturing(self) -> bool:
        return True


def test_graph_capture_is_refused() -> None:
    """Sends, receives and staging cannot be captured, and say what to capture instead."""
    link, _, _ = pair()
    link.backend = Capturing()
    for call in (link.before_forward, link.irecv_tensor_dict, lambda: link.isend_tensor_dict({})):
        with pytest.raises(QuiesceError, match="capture"):
            call()
    with pytest.raises(QuiesceError, match="capture"):
        HostStaging(Capturing(), 64).stage(torch.zeros(4))


def test_actions_are_reported() -> None:
    """Each call is seen as the actions of the specification, with the rank that took them."""
    seen: list[tuple[str, object]] = []

    def note(event: Event) -> None:
        if event.phase == "end":
            seen.append((event.action, event.fields["r"]))

    with observe(note):
        link, peer, _ = pair()
        link.before_forward()
        link.isend_tensor_dict({"x": torch.zeros(4)})
        peer.irecv_tensor_dict().wait()
    assert seen == [
        ("BeforeForward", 1),
        ("SendMetadata", 1),
        ("SendTensors", 1),
        ("ReceiveMetadata", 2),
        ("PostReceive", 2),
        ("AwaitReceive", 2),
    ]


def test_more_pending_than_in_flight_never_blocks() -> None:
    """With max_pending at least the number of steps in flight, a send never waits for the peer (H3)."""
    shape = faulty(Shape(steps=8, in_flight=4, max_pending=4))
    for seed in range(50):
        assert Ring(chooser(seed), shape).run() == list(range(1, 9))


def test_staged_output_goes_out_by_payload_reuse() -> None:
    """Output staged on the host and lent to a socket arrives as it was produced, from a few buffers used again."""
    context = zmq.Context()
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        port = push.bind_to_random_port("tcp://127.0.0.1")
        pull.connect(f"tcp://127.0.0.1:{port}")
        backend = CpuBackend()
        staging = HostStaging(backend, 256 << 10, limit=4)
        receiver: PayloadReceiver[dict[str, Any]] = PayloadReceiver(pull)
        output = torch.zeros(64 << 10, dtype=torch.int32)
        addresses = set()
        with PayloadSender(push) as sender:
            for number in range(100):
                output.fill_(number)
                staged = staging.stage(output)
                host = staged.settle()
                addresses.add(host.data_ptr())
                staged.lend([sender.lend({"x": host})])
                assert bool((receiver.receive(10.0).value["x"] == number).all())
                sender.touch()
        assert 1 <= len(addresses) <= 4
        staging.close(10.0)
    finally:
        push.close(0)
        pull.close(0)
        context.term()


def test_a_staged_buffer_is_used_in_turn() -> None:
    """Settle, then lend; not the other way round, not twice, and nothing larger than the buffer."""
    staging = HostStaging(CpuBackend(), 64, limit=1)
    staged = staging.stage(torch.ones(16))
    with pytest.raises(NotQuiescent, match="settle"):
        staged.lend([])
    with pytest.raises(QuiesceTimeout, match="raise limit"):
        staging.stage(torch.ones(1), timeout=0.01)
    assert staged.settle().tolist() == [1.0] * 16
    staged.lend([])
    with pytest.raises(NotQuiescent, match="lent or discarded"):
        staged.settle()
    staging.stage(torch.ones(2, 2)).discard()
    assert staging.stage(torch.ones(2, 2), timeout=1.0).settle().shape == (2, 2)
    with pytest.raises(QuiesceError, match="does not fit"):
        staging.stage(torch.ones(17))
    staging.close(1.0)
    with pytest.raises(Closed):
        staging.stage(torch.ones(1))


def test_staging_that_fails_gives_its_buffer_back() -> None:
    staging = HostStaging(CpuBackend(), 256, limit=1)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            staging.stage(torch.eye(4).to_sparse())
    staged = staging.stage(torch.ones(4), timeout=1.0)
    assert bool((staged.settle() == 1).all())
    staged.discard()
    staging.close()


def test_a_link_counts_and_tells_of_a_send_that_is_not_settled(caplog: pytest.LogCaptureFixture) -> None:
    """A step that forgets `before_forward` shows in the age of its oldest send, and in a warning if asked for."""
    warn_of_loans(0.0)
    try:
        link, peer, world = pair(max_pending=4)
        assert (link.counters().in_flight, link.counters().holder) == (0, "")
        link.isend_tensor_dict({"x": torch.zeros(4, 4), "y": torch.zeros(4)})
        counters = link.counters()
        assert (counters.in_flight, counters.messages, counters.fallbacks, counters.waits) == (2, 1, 0, 0)
        assert counters.holder == "the send to rank 2"
        assert counters.oldest_s > 0.0
        link.isend_tensor_dict({"x": torch.arange(16).view(4, 4).t()})
        assert link.counters().fallbacks == 1
        assert "what rank 1 sent has been lent for" in caplog.text
        for _ in range(2):
            peer.irecv_tensor_dict().wait()
        world.drain()
        link.before_forward()
        assert (link.counters().in_flight, link.counters().oldest_s) == (0, 0.0)
    finally:
        warn_of_loans(None)
