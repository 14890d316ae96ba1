"""The faults of AccessOrder.tla, by name: devices that keep a promise badly, and a checker that forgets."""

from __future__ import annotations

from typing import Any

import torch

from quiesce.access_order import AccessOrder
from quiesce.simulated import Item, SimulatedBackend, SimulatedEvent, SimulatedStream, SimulatedWorld


class LateCapture(SimulatedBackend):
    """A wait looks at its event when it runs, so that recording again moves it."""

    def wait(self, event: SimulatedEvent, stream: SimulatedStream | None = None) -> None:
        super().wait(event, stream)
        item = (stream or self.current()).queue[-1]

        class Late(Item):
            @property
            def point(self) -> Any:
                return event.point or (stream or item.point[0], 0)  # type: ignore[index]

            @point.setter
            def point(self, value: Any) -> None:
                return None

        item.__class__ = Late


class CapturesWhatRan(SimulatedBackend):
    """An event captures what has run, not what is enqueued."""

    def record(
        self, event: SimulatedEvent | None = None, stream: SimulatedStream | None = None
    ) -> SimulatedEvent:
        event = super().record(event, stream)
        event.point = (stream or self.current(), (stream or self.current()).ran)
        return event


class UnrecordedBlocks(SimulatedBackend):
    """A wait for an event never recorded blocks the stream."""

    def wait(self, event: SimulatedEvent, stream: SimulatedStream | None = None) -> None:
        super().wait(event, stream)
        if event.point is None:
            stream = stream or self.current()
            stream.queue[-1].point = (stream, 1 << 30)


class WaitReturnsEarly(SimulatedBackend):
    """Synchronising with an event returns before it is reached: the device need not have run anything."""

    def synchronize(self, event: SimulatedEvent, timeout: float) -> None:
        return None


class RecordStreamIgnored(SimulatedBackend):
    """The allocator hands a block out although a recorded stream still uses it."""

    @staticmethod
    def _reusable(block: Any) -> bool:
        return True


class PageableReadLate(SimulatedBackend):
    """A copy from pageable memory reads it when the stream gets there."""

    def copy_pageable(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.host_access(source)
        self.launch(lambda target: target.copy_(source), (), (destination,))


class _Forgetful(AccessOrder):
    def note(self, tensor: torch.Tensor, writes: bool, *rest: Any) -> None:
        if writes:
            super().note(tensor, writes, *rest)


class ReadsForgotten(SimulatedBackend):
    """The checker lets a write pass a read that it is not ordered behind."""

    def __init__(self, world: SimulatedWorld, name: str = "", eager: bool = True):
        super().__init__(world, name, eager)
        world.order = _Forgetful()


FAULTS: dict[str, type[SimulatedBackend]] = {
    "late_capture": LateCapture,
    "captures_what_ran": CapturesWhatRan,
    "unrecorded_blocks": UnrecordedBlocks,
    "wait_returns_early": WaitReturnsEarly,
    "record_stream_ignored": RecordStreamIgnored,
    "pageable_read_late": PageableReadLate,
    "reads_forgotten": ReadsForgotten,
}
