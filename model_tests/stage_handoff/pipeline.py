"""A pipeline of two ranks on simulated devices: hosts that call their links, and streams, in an order that is chosen.

Each rank's host is a small machine whose states are those of `at` in StageHandoff.tla. A move is one call of the
link, or one step of a stream; what may move next is decided as the specification decides it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from quiesce.simulated import Choose, SimulatedBackend, SimulatedStream, SimulatedWorld
from quiesce.simulated_transport import SimulatedPeers, SimulatedTransport
from quiesce.stage_handoff import ReceivedDict, StageLink

ELEMENTS = 6
SCHEDULES = {"dev": 300, "ci": 5_000, "nightly": 100_000}[os.environ.get("QUIESCE_PROFILE", "dev")]
"""Schedules that shipped code must survive."""
DRAWS = 1_000
"""Schedules among which a fault must show."""


@dataclass(frozen=True)
class Shape:
    """What kind of pipeline: the constants of StageHandoff.tla, and the classes that may be faulty."""

    flavour: str = "nccl"
    steps: int = 3
    in_flight: int = 2
    max_pending: int = 2
    fresh: bool = False
    gather: bool = False
    extra: bool = False
    wait_twice: bool = False
    scratch: bool = True
    link: type[StageLink] = StageLink
    transport: type[SimulatedTransport] = SimulatedTransport

    def __str__(self) -> str:
        kinds = [name for name in ("fresh", "gather", "extra", "wait_twice") if getattr(self, name)]
        return "-".join([self.flavour, *(kinds or ["static"])])


SHAPES = [
    Shape(),
    Shape(fresh=True),
    Shape(gather=True),
    Shape(extra=True, max_pending=3),
    Shape(flavour="gloo", wait_twice=True),
    Shape(flavour="gloo", extra=True, max_pending=3),
    Shape(flavour="gloo", fresh=True),
    Shape(flavour="gloo", gather=True),
]


class Deadlock(Exception):
    """Nobody can move, and the pipeline has not finished."""


class Rank:
    """The host of one rank, its device, and its end of the link."""

    def __init__(self, world: SimulatedWorld, peers: SimulatedPeers, number: int, shape: Shape):
        self.number = number
        self.shape = shape
        self.backend = SimulatedBackend(world, str(number), eager=False)
        self.transport = shape.transport(peers, self.backend, number, shape.flavour)
        peer = 3 - number
        self.link = shape.link(
            self.transport,
            source=peer,
            to=peer,
            backend=self.backend,
            max_pending=shape.max_pending,
            tensor_parallel=(0, 2) if shape.gather and number == 1 else (0, 1),
        )
        if shape.gather:
            self.link._parts = 2
        self.inbox = peers.mailbox(peer, number)
        self.step = 1
        self.received: ReceivedDict | None = None
        self.outputs: list[torch.Tensor] = []
        self.inputs: dict[str, torch.Tensor] = {}
        self.results: list[int] = []
        if not (shape.fresh and number == 1):
            self.outputs = [self.backend.empty((ELEMENTS,), torch.int32)]
        if number == 2:
            # Slices are received into memory of the link's own.
            self.memory = {"whole" if shape.gather else "in": self.backend.empty((ELEMENTS,), torch.int32)}
            self.inputs = {"x": next(iter(self.memory.values()))}
        self.at = self._begins()

    def _begins(self) -> str:
        if self.step > self.shape.steps:
            return "done"
        return "settle" if self.number == 1 and self.step <= self.shape.in_flight else "receive"

    def may_move(self) -> bool:
        """Whether the host's next call would return without anybody else's host moving."""
        gloo = self.shape.flavour == "gloo"
        if self.at in ("done", "failed") or (gloo and self.backend.current().queue):
            return False
        blocked = getattr(self.link, "blocked_on", None)
        if blocked and not blocked.received:
            return False
        if self.at in ("receive", "extra"):
            return bool(self.inbox.messages)
        if self.at in ("await", "again"):
            assert self.received is not None
            return not gloo or getattr(self.link, "reads_early", False) or _reached(self.received.handles)
        if self.at == "settle":
            waited = getattr(self.link, "waits_for", self.link._unsettled)
            return not gloo or _reached(waited)
        if self.at in ("metadata", "more"):
            return self.link.pending < self.link.max_pending or self.link._pending[0][0].received
        return True

    def move(self) -> None:
        """Make the host's next call. With gloo the host has computed itself, and knows it."""
        if self.shape.flavour == "gloo":
            self.backend.synchronize(self.backend.record(), 0.0)
        getattr(self, f"_{self.at}")()

    def _receive(self) -> None:
        self.received = self.link.irecv_tensor_dict(into=self.inputs)
        if self.received.metadata.tensors:
            self.at = "await"
        else:
            values = self.received.wait()
            assert values == {"token": self.step - self.shape.in_flight}
            self.at = "settle"

    def _await(self) -> None:
        assert self.received is not None
        self.received.wait()
        if self.shape.wait_twice:
            self.at = "again"
        else:
            self.at = "extra" if self.shape.extra else "settle"

    def _again(self) -> None:
        assert self.received is not None
        self.received.wait()
        for handle in self.received.handles:
            handle.wait(1.0)
        self.at = "extra" if self.shape.extra else "settle"

    def _extra(self) -> None:
        assert self.link.irecv_tensor_dict().wait() == {"step": self.step}
        self.at = "settle"

    def _settle(self) -> None:
        self.link.before_forward()
        if self.shape.fresh and self.number == 1:
            self.outputs.clear()
        self.at = "forward"

    def _forward(self) -> None:
        step = self.step
        if self.number == 1:
            if self.shape.fresh:
                self.outputs = [self.backend.empty((ELEMENTS,), torch.int32)]
            self.backend.launch(lambda output: output.fill_(step), writes=self.outputs)
        else:
            self.backend.launch(self._infer, [self.inputs["x"]], self.outputs)
        self.at = "metadata"

    def _infer(self, source: torch.Tensor, output: torch.Tensor) -> None:
        values = source.unique().tolist()
        self.results.append(values[0] if len(values) == 1 else -1)
        output.copy_(source)

    def _metadata(self) -> None:
        if self.number == 1:
            self.link.isend_tensor_dict({"x": self.outputs[0]})
            if self.shape.fresh:
                # From here on only the handle keeps the output alive.
                self.outputs.clear()
            self.at = "more" if self.shape.extra else "ended"
        else:
            self.link.isend_tensor_dict({"token": self.step})
            self.at = "ended"
        self._end()

    def _more(self) -> None:
        self.link.isend_tensor_dict({"step": self.step})
        self.at = "ended"
        self._end()

    def _end(self) -> None:
        if self.at == "ended":
            if self.shape.fresh and self.shape.scratch and self.number == 1:
                # What any program does between steps: memory of its own, written and dropped.
                scratch = self.backend.empty((ELEMENTS,), torch.int32)
                self.backend.launch(lambda memory: memory.fill_(-7), writes=[scratch])
            self.step += 1
            self.at = self._begins()


def _reached(handles: list[object]) -> bool:
    return all(handle.event.reached for handle in handles)  # type: ignore[attr-defined]


class Pipeline:
    """Two ranks, and the choice of who moves."""

    def __init__(self, choose: Choose, shape: Shape = SHAPES[0]):
        self.shape = shape
        self.choose = choose
        self.world = SimulatedWorld(choose)
        peers = SimulatedPeers()
        self.ranks = [Rank(self.world, peers, number, shape) for number in (1, 2)]

    def moves(self) -> Iterator[Rank | SimulatedStream]:
        """Hosts and streams that can move now."""
        yield from (rank for rank in self.ranks if rank.may_move())
        yield from (stream for _, stream in self.world.runnable())

    def move(self, mover: Rank | SimulatedStream) -> None:
        """One call of a host, or one step of a stream."""
        if isinstance(mover, Rank):
            mover.move()
        else:
            self.world.run(mover)

    def run(self) -> list[int]:
        """Run to the end; the versions that the second rank's forwards found. Raises `Deadlock`."""
        while moves := list(self.moves()):
            self.move(moves[self.choose(len(moves))])
        if any(rank.at != "done" for rank in self.ranks):
            raise Deadlock(f"ranks are at {[rank.at for rank in self.ranks]}")
        return self.ranks[1].results


def meant(shape: Shape) -> list[int]:
    """What `Pipeline.run` returns if nothing is corrupted."""
    return list(range(1, shape.steps + 1))


def faulty(shape: Shape, **classes: type) -> Shape:
    """The same pipeline with a faulty link or transport."""
    return replace(shape, **classes)  # type: ignore[arg-type]
