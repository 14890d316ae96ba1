"""Host staging on a simulated device: a producer, a transport that reads late, and their faults by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from quiesce.host_staging import HostStaging, Staged
from quiesce.lifecycle import Tracker
from quiesce.simulated import Choose, SimulatedBackend, SimulatedWorld

ELEMENTS = 6


class Reader:
    """The transport: it may look at the buffer until it is done, and looks when it ends."""

    def __init__(self, view: torch.Tensor, version: int):
        self.view = view
        self.version = version
        self.done = False

    def end(self) -> bool:
        """Read, and be done; whether the bytes were those that were lent."""
        self.done = True
        return bool((self.view == self.version).all())


class Stuck(Exception):
    """Nothing can happen any more, and not all was staged."""


class Stager:
    """What HostStaging.tla describes, with the order of everything chosen."""

    def __init__(self, choose: Choose, staging: type[HostStaging] = HostStaging, steps: int = 3):
        self.choose = choose
        self.world = SimulatedWorld(choose)
        self.backend = SimulatedBackend(self.world, eager=False)
        self.staging = staging(self.backend, ELEMENTS * 4, limit=2)
        self.steps = steps
        self.step = 0
        self.made: torch.Tensor | None = None
        self.copying: list[tuple[int, Staged]] = []
        self.settled: list[tuple[int, Staged, torch.Tensor]] = []
        self.readers: list[Reader] = []
        self.wrong = 0

    def moves(self) -> list[tuple[str, Any]]:
        """What can happen next, by the names of the specification."""
        found: list[tuple[str, Any]] = [(name, stream) for name, stream in self.world.runnable()]
        if self.made is None and self.step < self.steps:
            found.append(("Produce", None))
        self.staging.pool.settle(2)
        if self.made is not None and (self.staging.pool.free or self.staging.made < self.staging.limit):
            found.append(("Stage", None))
        early = getattr(self.staging, "reads_early", False)
        found += [("Settle", entry) for entry in self.copying if early or entry[1]._event.reached]
        found += [("Lend", entry) for entry in self.settled]
        found += [("EndLoan", reader) for reader in self.readers]
        return found

    def move(self, name: str, what: Any) -> None:
        """Let one of them happen."""
        if name == "Produce":
            self.step += 1
            step = self.step
            self.made = self.backend.empty((ELEMENTS,), torch.int32)
            self.backend.launch(lambda tensor: tensor.fill_(step), writes=[self.made])
        elif name == "Stage":
            assert self.made is not None
            self.copying.append((self.step, self.staging.stage(self.made, timeout=0.0)))
            self.made = None
        elif name == "Settle":
            self.copying.remove(what)
            version, staged = what
            self.settled.append((version, staged, staged.settle(0.0)))
        elif name == "Lend":
            self.settled.remove(what)
            version, staged, view = what
            self.wrong += not bool((view == version).all())
            reader = Reader(view, version)
            self.readers.append(reader)
            staged.lend([reader])
        elif name == "EndLoan":
            self.readers.remove(what)
            self.wrong += not what.end()
        else:
            self.world.run(what)

    def run(self) -> int:
        """Run to the end; how many reads found other bytes than were lent. Raises `Stuck`."""
        while moves := self.moves():
            self.move(*moves[self.choose(len(moves))])
        if self.step < self.steps or self.made is not None:
            raise Stuck(f"only {self.step} of {self.steps} were staged")
        return self.wrong


class ReadBeforeCopy(HostStaging):
    """The host reads without waiting for the event."""

    reads_early = True

    def stage(self, tensor: torch.Tensor, timeout: float = 0.0) -> Staged:
        staged = super().stage(tensor, timeout)
        staged._event = self.backend.record()
        staged._event.point = None
        return staged


class EventBeforeCopy(HostStaging):
    """The event is recorded before the copy is enqueued."""

    def stage(self, tensor: torch.Tensor, timeout: float = 0.0) -> Staged:
        with self.backend.using(self.stream):
            before = self.backend.record()
        staged = super().stage(tensor, timeout)
        staged._event = before
        return staged


class _LentToNobody(Staged):
    def lend(self, trackers: Iterable[Tracker]) -> torch.Tensor:
        return super().lend([])


class PinnedRecycledEarly(HostStaging):
    """The buffer comes back as soon as it is lent."""

    def stage(self, tensor: torch.Tensor, timeout: float = 0.0) -> Staged:
        staged = super().stage(tensor, timeout)
        staged.__class__ = _LentToNobody
        return staged


class _NoWait:
    """The device, with one call left out; everything else is passed on."""

    def __init__(self, backend: SimulatedBackend, left_out: str):
        self._backend = backend
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        return (lambda *args: None) if name == self._left_out else getattr(self._backend, name)


class CopyUnordered(HostStaging):
    """The copy is not ordered behind the work that produces its source."""

    def __init__(self, backend: Any, nbytes: int, limit: int = 8):
        super().__init__(_NoWait(backend, "wait"), nbytes, limit)  # type: ignore[arg-type]


class NoRecordStream(HostStaging):
    """The source is dropped without telling the allocator of the copy."""

    def __init__(self, backend: Any, nbytes: int, limit: int = 8):
        super().__init__(_NoWait(backend, "record_stream"), nbytes, limit)  # type: ignore[arg-type]


class _NeverDone:
    done = False


class _LentForEver(Staged):
    def lend(self, trackers: Iterable[Tracker]) -> torch.Tensor:
        return super().lend([*trackers, _NeverDone()])


class PinnedNeverRecycled(HostStaging):
    """Buffers that were lent never come back."""

    def stage(self, tensor: torch.Tensor, timeout: float = 0.0) -> Staged:
        staged = super().stage(tensor, timeout)
        staged.__class__ = _LentForEver
        return staged


CORRUPTING: dict[str, type[HostStaging]] = {
    "read_before_copy": ReadBeforeCopy,
    "event_before_copy": EventBeforeCopy,
    "pinned_recycled_early": PinnedRecycledEarly,
    "copy_unordered": CopyUnordered,
    "no_record_stream": NoRecordStream,
}
STOPPING: dict[str, type[HostStaging]] = {"pinned_never_recycled": PinnedNeverRecycled}
