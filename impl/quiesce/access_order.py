"""Which accesses to memory does nothing order? The checker of `spec/AccessOrder.tla`, by byte range.

A clock says how much of each stream is known to have finished. An access whose clock does not cover the last one that
conflicts with it is a race, whatever the schedule of this run was.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

import torch

from quiesce.errors import NotQuiescent

Clock = dict[int, int]
"""Stream number -> how many of its items are known to have finished."""


class Stream(Protocol):
    """What the checker needs to know of a stream; `behind()` counts the items enqueued so far."""

    name: str
    number: int

    def behind(self) -> int:
        """How many items have been enqueued so far."""


@dataclass(frozen=True)
class Access:
    """Bytes `start` to `stop` of one storage, touched by item `count` of a stream, as asked for at `site`."""

    start: int
    stop: int
    writes: bool
    stream: Stream
    count: int
    site: str


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders; the second call was made after the first, by a stream or by the host."""

    first: Access
    site: str
    writes: bool
    by: str

    def __str__(self) -> str:
        verbs = {True: "write", False: "read"}
        return (
            f"the {verbs[self.writes]} by {self.by} at {self.site} is not ordered behind the "
            f"{verbs[self.first.writes]} by stream {self.first.stream.name} at {self.first.site} (bytes "
            f"{self.first.start} to {self.first.stop} of the storage); wait for it on that stream, or on the host"
        )


class AccessOrder:
    """Watches accesses and keeps those that a later one must be ordered behind; `races` are those that were not."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._accesses: dict[int, list[Access]] = {}
        # An address must not come back as other memory.
        self._kept: dict[int, torch.UntypedStorage] = {}

    def note(self, tensor: torch.Tensor, writes: bool, clock: Clock, by: Stream | None, site: str) -> None:
        """Check an access that starts with `clock` against those before it. `by` is None for the host.

        What the host did is over before its next call, so that only accesses by streams are kept.
        """
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self._kept.setdefault(key, storage)
        start, stop = extent(tensor)
        kept = []
        for access in self._accesses.get(key, ()):
            overlaps = access.start < stop and start < access.stop
            ordered = clock.get(access.stream.number, 0) >= access.count
            if overlaps and (writes or access.writes) and not ordered:
                self.races.append(Race(access, site, writes, f"stream {by.name}" if by else "the host"))
            # A write stands for everything that it covers.
            if not (writes and by and start <= access.start and access.stop <= stop):
                kept.append(access)
        if by:
            kept.append(Access(start, stop, writes, by, by.behind(), site))
        self._accesses[key] = kept

    def check(self) -> None:
        """Raise `NotQuiescent`, naming both sites of the first race, if there was one."""
        if self.races:
            more = f" (and {len(self.races) - 1} more)" if len(self.races) > 1 else ""
            raise NotQuiescent(f"{self.races[0]}{more}")


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that lie between the first and the last element of a tensor."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    first = int(tensor.storage_offset())
    last = first + sum(
        int(n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * size, (last + 1) * size


def join(clock: Clock, other: Clock) -> Clock:
    """The later of two clocks, stream by stream."""
    joined = dict(clock)
    for stream, count in other.items():
        if joined.get(stream, 0) < count:
            joined[stream] = count
    return joined


def call_site() -> str:
    """The file and line of the nearest caller outside this library."""
    frame = sys._getframe(1)
    inner = frame
    while frame and frame.f_globals.get("__name__", "").startswith(("quiesce.", "contextlib")):
        if frame.f_back is None:
            frame = inner
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
