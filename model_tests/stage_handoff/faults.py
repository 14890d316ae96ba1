"""The faults of StageHandoff.tla, by name, as faulty links and transports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from model_tests.stage_handoff.pipeline import Shape, faulty

from quiesce.errors import QuiesceTimeout
from quiesce.simulated import SimulatedEvent, SimulatedStream
from quiesce.simulated_transport import SimulatedTransport, TransferHandle
from quiesce.stage_handoff import ReceivedDict, StageLink
from quiesce.transport import Handle


class HandlesDropped(StageLink):
    """The handles of the tensors are returned, and not kept."""

    waits_for: list[Handle] = []

    def _send_tensors(self, tensors: Mapping[str, torch.Tensor]) -> list[Handle]:
        handles = super()._send_tensors(tensors)
        self._unsettled.clear()
        self._pending[-1][1].clear()
        return handles


class OnlyMetadataWaited(StageLink):
    """The next forward waits for the metadata to arrive, and takes that for the tensors."""

    waits_for: list[Handle] = []

    @property
    def blocked_on(self) -> Handle | None:
        return self._pending[-1][0] if self._pending and self._unsettled else None

    def before_forward(self, timeout: float | None = None) -> None:
        while self._pending and self._unsettled:
            self._reap_metadata()
        self._unsettled.clear()
        super().before_forward(timeout)


class WaitedAfterForward(StageLink):
    """The handles of the previous step are waited for when the next dict is sent."""

    waits_for: list[Handle] = []

    def before_forward(self, timeout: float | None = None) -> None:
        self._since_settled = 0

    def isend_tensor_dict(self, values: Mapping[str, Any]) -> list[Handle]:
        super().before_forward()
        return super().isend_tensor_dict(values)


class WaitedOnWrongStream(StageLink):
    """The handles are waited for on the stream that sends."""

    def before_forward(self, timeout: float | None = None) -> None:
        with self.backend.using(self.transport.stream(f"out {self.to}")):  # type: ignore[attr-defined]
            super().before_forward(timeout)


class EventBeforeSend(SimulatedTransport):
    """The event that stands for the send is recorded before the send is enqueued."""

    def _transfer(
        self, kind: str, tensor: torch.Tensor, line: tuple[int, int], stream: SimulatedStream
    ) -> TransferHandle:
        if kind == "recv":
            return super()._transfer(kind, tensor, line, stream)
        before = SimulatedEvent((stream, stream.behind() + 1), dict(stream.clock))
        handle = super()._transfer(kind, tensor, line, stream)
        handle.event = before
        return handle


class HandlesOverwritten(StageLink):
    """The list of handles is replaced by each send, rather than added to."""

    def isend_tensor_dict(self, values: Mapping[str, Any]) -> list[Handle]:
        handles = super().isend_tensor_dict(values)
        self._unsettled = handles[1:]
        return handles


class ReceiveReadEarly(StageLink):
    """The dict is handed to forward without waiting for its tensors."""

    reads_early = True

    def _await_receive(self, received: ReceivedDict, timeout: float | None) -> None:
        return None


class ReceiveUnordered(SimulatedTransport):
    """A receive is not ordered behind the current stream, which may still read the buffer."""

    def receive(self, tensor: torch.Tensor, source: int) -> TransferHandle:
        flavour, self.flavour = self.flavour, "unordered"
        try:
            handle = super().receive(tensor, source)
        finally:
            self.flavour = flavour
        return handle


class GatherReadEarly(StageLink):
    """The gather is enqueued, and its handle not waited for."""

    def _all_gather(self, received: ReceivedDict, timeout: float | None) -> None:
        for meta in received.metadata.tensors:
            self.transport.gather(received.wholes[meta.key].view(-1), received.parts[meta.key].view(-1))


class TensorNotKept(SimulatedTransport):
    """Handles do not keep the tensor they send alive."""

    def send(self, tensor: torch.Tensor, to: int) -> TransferHandle:
        handle = super().send(tensor, to)
        handle._tensor = torch.empty(0)
        return handle


class PendingUnbounded(StageLink):
    """Metadata is sent however much is on its way."""

    def _send_metadata(self, message: bytes) -> Handle:
        bound, self.max_pending = self.max_pending, 1 << 30
        try:
            return super()._send_metadata(message)
        finally:
            self.max_pending = bound


class MetadataSendBlocking(StageLink):
    """The host goes no further before the peer has taken the metadata."""

    blocked_on: Handle | None = None

    def _send_metadata(self, message: bytes) -> Handle:
        self.blocked_on = super()._send_metadata(message)
        return self.blocked_on


class SecondWaitBlocks(SimulatedTransport):
    """A handle that was waited for blocks for ever when waited for again, as a bare gloo Work does."""

    def _handle(self, event: SimulatedEvent, tensor: torch.Tensor) -> TransferHandle:
        handle = super()._handle(event, tensor)
        wait = handle.wait

        def wait_once(timeout: float) -> None:
            if handle._tensor is None:
                raise QuiesceTimeout("a second wait never ends")
            wait(timeout)

        handle.wait = wait_once  # type: ignore[method-assign]
        return handle


class EmptyDictNotSent(StageLink):
    """A dict without tensors is taken to be nothing to send."""

    def isend_tensor_dict(self, values: Mapping[str, Any]) -> list[Handle]:
        if not any(isinstance(value, torch.Tensor) for value in values.values()):
            return []
        return super().isend_tensor_dict(values)


class GoesOnHalfway(StageLink):
    """A call that failed halfway is forgotten."""

    def _in_step(self, call: Callable[[], Any]) -> Any:
        return call()


class PeerDeathUnnoticed(SimulatedTransport):
    """Whoever waits for a message tries again for ever, here a hundred times, although nobody is left to send it."""

    tries = 0

    def receive_message(self, source: int, timeout: float) -> bytes:
        while True:
            try:
                return super().receive_message(source, timeout)
            except QuiesceTimeout:
                self.tries += 1
                if self.tries == 100:
                    raise


EXTRA = Shape(extra=True, max_pending=3)
CORRUPTING: dict[str, Shape] = {
    "handles_dropped": faulty(Shape(), link=HandlesDropped),
    "only_metadata_waited": faulty(Shape(), link=OnlyMetadataWaited),
    "waited_after_forward": faulty(Shape(), link=WaitedAfterForward),
    "waited_on_wrong_stream": faulty(Shape(), link=WaitedOnWrongStream),
    "event_before_send": faulty(Shape(), transport=EventBeforeSend),
    "handles_overwritten": faulty(EXTRA, link=HandlesOverwritten),
    "receive_read_early": faulty(Shape(), link=ReceiveReadEarly),
    "receive_unordered": faulty(Shape(), transport=ReceiveUnordered),
    "gather_read_early": faulty(Shape(gather=True), link=GatherReadEarly),
    "tensor_not_kept": faulty(Shape(fresh=True), transport=TensorNotKept),
}
"""Faults that some schedule turns into wrong values."""

STOPPING: dict[str, Shape] = {
    "metadata_send_blocking": faulty(Shape(), link=MetadataSendBlocking),
    "second_wait_blocks": faulty(Shape(flavour="gloo", wait_twice=True), transport=SecondWaitBlocks),
    "empty_dict_not_sent": faulty(Shape(), link=EmptyDictNotSent),
}
"""Faults that stop the pipeline."""

ENDING: dict[str, type] = {
    "goes_on_halfway": GoesOnHalfway,
    "peer_death_unnoticed": PeerDeathUnnoticed,
}
"""Faults of a link that should have ended."""
