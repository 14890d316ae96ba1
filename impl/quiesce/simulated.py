"""A device without a GPU: work runs late, in any order that streams allow, on real bytes of CPU tensors.

Work enqueued on a stream is kept as a closure. It runs when the world chooses, by `choose(n)`, a number below n: a
seeded generator or a Hypothesis draw. Each item runs in two steps, and what it writes is scrambled in between, so
that a missing wait shows as wrong bytes under some schedule. Memory comes from a caching allocator that hands out
what has died at once. Independently of the schedule drawn, every access is checked: the world keeps vector clocks
(`spec/AccessOrder.tla`), and reports two accesses to overlapping bytes, one of them a write, that nothing orders.

Not simulated: concurrency within a stream, priorities, graph capture, ordering that a message from another rank
implies (such a program is reported although it is correct).
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quiesce.access_order import AccessOrder, Clock, call_site, join
from quiesce.errors import QuiesceError, QuiesceTimeout
from quiesce.streams import Kernel

Choose = Callable[[int], int]
SCRAMBLE = 0xA5


def chooser(seed: int) -> Choose:
    """A choice function from a seed."""
    return random.Random(seed).randrange


@dataclass(eq=False)
class Item:
    """One thing in a stream: a wait for a point, work in two steps, or one side of a transfer along a line."""

    kind: str
    point: tuple[SimulatedStream, int] | None = None
    begin: Callable[[], None] | None = None
    end: Callable[[], None] | None = None
    tensor: torch.Tensor | None = None
    line: tuple[int, int] = (0, 0)
    running: bool = False


@dataclass(eq=False)
class SimulatedStream:
    """A queue of items, how many have finished, and the clock behind the last one enqueued."""

    name: str
    number: int
    queue: deque[Item] = field(default_factory=deque)
    ran: int = 0
    clock: Clock = field(default_factory=dict)

    def behind(self) -> int:
        """The count that is reached when everything enqueued now has finished."""
        return self.ran + len(self.queue)


@dataclass(eq=False)
class SimulatedEvent:
    """A captured point and its clock. Never recorded: reached, and orders nothing."""

    point: tuple[SimulatedStream, int] | None = None
    clock: Clock = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        """Whether everything before the point has finished."""
        return self.point is None or self.point[0].ran >= self.point[1]


class SimulatedWorld:
    """The streams of all simulated devices of a test, and the choice of what runs next."""

    def __init__(self, choose: Choose):
        self.choose = choose
        self.streams: list[SimulatedStream] = []
        self.receivers: dict[tuple[int, int], SimulatedStream] = {}
        self.order = AccessOrder()

    def stream(self, name: str) -> SimulatedStream:
        """A new stream of some device."""
        stream = SimulatedStream(name, len(self.streams))
        self.streams.append(stream)
        return stream

    def runnable(self) -> list[tuple[str, SimulatedStream]]:
        """What streams could do next, by the names that the specification gives to it."""
        found = []
        for stream in self.streams:
            if not stream.queue:
                continue
            item = stream.queue[0]
            if item.kind == "wait":
                assert item.point is not None
                if item.point[0].ran >= item.point[1]:
                    found.append(("Pass", stream))
            elif item.kind == "work":
                found.append(("EndWork" if item.running else "BeginWork", stream))
            elif item.kind == "send":
                if item.running:
                    found.append(("EndTransfer", stream))
                else:
                    other = self.receivers.get(item.line)
                    if other and other.queue and other.queue[0].kind == "recv":
                        found.append(("BeginTransfer", stream))
        return found

    def run(self, stream: SimulatedStream) -> None:
        """Let `stream` take the one step that it can take now."""
        item = stream.queue[0]
        if item.kind == "wait":
            self._finish(stream)
        elif not item.running:
            item.running = True
            if item.kind == "send":
                self._transfer(item, 0)
            elif item.begin:
                item.begin()
        else:
            if item.kind == "send":
                self._transfer(item, 1)
                self._finish(self.receivers[item.line])
            elif item.end:
                item.end()
            self._finish(stream)

    def step(self) -> bool:
        """Let a stream, chosen among those that can, take a step; False if none can."""
        runnable = self.runnable()
        if runnable:
            self.run(runnable[self.choose(len(runnable))][1])
        return bool(runnable)

    def interleave(self) -> None:
        """Let streams run for as long as the choice falls on it."""
        while self.choose(2) and self.step():
            pass

    def run_until(self, reached: Callable[[], bool]) -> bool:
        """Let streams run until `reached()`; False if they come to a halt before."""
        while not reached():
            if not self.step():
                return False
        return True

    def drain(self) -> None:
        """Let streams run until nothing can."""
        while self.step():
            pass

    def _finish(self, stream: SimulatedStream) -> None:
        stream.queue.popleft()
        stream.ran += 1

    def _transfer(self, send: Item, half: int) -> None:
        source, target = send.tensor, self.receivers[send.line].queue[0].tensor
        assert source is not None
        assert target is not None
        if (target.numel(), target.dtype) != (source.numel(), source.dtype):
            raise QuiesceError(
                "a transfer's two sides differ in size; the metadata told the receiver something else"
            )
        source, target = source.view(-1), target.view(-1)
        middle = (source.numel() + 1) // 2
        here, rest = (slice(0, middle), slice(middle, None)) if half == 0 else (slice(middle, None), None)
        target[here].copy_(source[here])
        if rest:
            scramble(target[rest])


def scramble(tensor: torch.Tensor) -> None:
    """Leave bytes in a tensor that no kernel wrote."""
    if tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(SCRAMBLE)
    else:
        tensor.fill_(-SCRAMBLE)


@dataclass(eq=False)
class _Block:
    """Memory of the caching allocator: the bytes, the stream it belongs to, and what must run before reuse."""

    memory: np.ndarray[Any, Any]
    stream: SimulatedStream
    users: list[SimulatedStream] = field(default_factory=list)
    hold: list[tuple[SimulatedStream, int]] = field(default_factory=list)


class SimulatedBackend:
    """One simulated device of a world: a `StreamBackend`.

    With `eager`, every call lets streams run first for as long as the choice falls on it; without, they run only when
    the host waits or the test says so (`world.run`).
    """

    def __init__(self, world: SimulatedWorld, name: str = "", eager: bool = True):
        self.world = world
        self.name = name
        self.clock: Clock = {}
        self._eager = eager
        self._default = self._current = self.stream("compute")
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []

    def stream(self, name: str) -> SimulatedStream:
        """A new stream of this device."""
        return self.world.stream(f"{self.name}.{name}" if self.name else name)

    def current(self) -> SimulatedStream:
        """The stream that work goes to now."""
        return self._current

    @contextmanager
    def using(self, stream: SimulatedStream) -> Iterator[None]:
        """Make `stream` the current stream."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def launch(
        self, kernel: Kernel, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        """Enqueue `kernel(*reads, *writes)`; it reads in its first step, and what it writes shows after the second."""
        self._go_on()
        # A kernel in flight does not keep its tensors alive.
        inputs, outputs = [self.alias(t) for t in reads], [self.alias(t) for t in writes]
        results: list[torch.Tensor] = []

        def begin() -> None:
            kernel(*inputs, *outputs)
            for tensor in outputs:
                results.append(tensor.clone())
                scramble(tensor)

        def end() -> None:
            for tensor, result in zip(outputs, results, strict=True):
                tensor.copy_(result)

        self.enqueue(Item("work", begin=begin, end=end), inputs, outputs)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between device and pinned memory."""
        self.launch(_copy, (source,), (destination,))

    def copy_pageable(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy from pageable host memory, which has been read when the call returns."""
        self.host_access(source)
        read = source.clone()
        self.launch(lambda target: target.copy_(read), (), (destination,))

    def enqueue(
        self,
        item: Item,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        stream: SimulatedStream | None = None,
    ) -> None:
        """Append an item to a stream (the current one), with the accesses (to aliases) that it will make."""
        stream = stream or self._current
        clock = join(stream.clock, self.clock)
        stream.queue.append(item)
        site = call_site()
        for tensor in reads:
            self.world.order.note(tensor, False, clock, stream, site)
        for tensor in writes:
            self.world.order.note(tensor, True, clock, stream, site)
        clock[stream.number] = stream.behind()
        stream.clock = clock

    def record(
        self, event: SimulatedEvent | None = None, stream: SimulatedStream | None = None
    ) -> SimulatedEvent:
        """Capture the point behind everything enqueued on a stream (the current one)."""
        stream = stream or self._current
        event = event or SimulatedEvent()
        event.point = (stream, stream.behind())
        event.clock = join(stream.clock, self.clock)
        return event

    def wait(self, event: SimulatedEvent, stream: SimulatedStream | None = None) -> None:
        """Hold back later work on a stream (the current one)."""
        self._go_on()
        stream = stream or self._current
        stream.queue.append(Item("wait", point=event.point or (stream, 0)))
        stream.clock = join(stream.clock, event.clock)

    def query(self, event: SimulatedEvent) -> bool:
        """Whether the point is reached; if so, the host knows what lies before it."""
        self._go_on()
        if event.reached:
            self.clock = join(self.clock, event.clock)
        return event.reached

    def synchronize(self, event: SimulatedEvent, timeout: float) -> None:
        """Let streams run until the point is reached. Raises `QuiesceTimeout` at once if they come to a halt before."""
        if not self.world.run_until(lambda: event.reached):
            raise QuiesceTimeout(
                "the event can never be reached: no stream has anything left that it can run"
            )
        self.clock = join(self.clock, event.clock)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on memory of the caching allocator, taken from what has died on the current stream if it fits."""
        nbytes = max(1, int(np.prod(shape, dtype=np.int64))) * torch.empty(0, dtype=dtype).element_size()
        block = self._take(nbytes)
        held = np.frombuffer(block.memory, dtype=np.uint8)
        base = torch.from_numpy(held)
        # The storage keeps `held` alive: when it dies, the last view is gone.
        weakref.finalize(held, self._freed, block).atexit = False
        self._blocks[base.data_ptr()] = block
        return base[:nbytes].view(dtype)[: int(np.prod(shape, dtype=np.int64))].view(tuple(shape))

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Keep the memory, once the tensor dies, until what the current stream has by then has run."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block and self._current not in block.users:
            block.users.append(self._current)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that copies use when their stream gets there."""
        return torch.zeros(nbytes, dtype=torch.uint8)

    def host_access(self, tensor: torch.Tensor, writes: bool = False) -> None:
        """Check that the host knows all that could conflict to have finished."""
        self._go_on()
        self.world.order.note(self.alias(tensor), writes, self.clock, None, call_site())

    def capturing(self) -> bool:
        """Never: graph capture is not simulated."""
        return False

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes without keeping the allocator's block in use, as a raw pointer does."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:
            return tensor
        base = torch.from_numpy(block.memory)
        usable = base.numel() // tensor.element_size() * tensor.element_size()
        return (
            base[:usable]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        )

    def _take(self, nbytes: int) -> _Block:
        for block in self._free:
            fits = block.stream is self._current and block.memory.nbytes >= nbytes
            if fits and self._reusable(block):
                self._free.remove(block)
                for stream, count in block.hold:
                    self.clock = join(self.clock, {stream.number: count})
                block.hold.clear()
                return block
        return _Block(np.zeros(-(-nbytes // 64) * 64, dtype=np.uint8), self._current)

    @staticmethod
    def _reusable(block: _Block) -> bool:
        return all(stream.ran >= count for stream, count in block.hold)

    def _freed(self, block: _Block) -> None:
        block.hold = [(user, user.behind()) for user in block.users]
        block.users.clear()
        self._free.append(block)

    def _go_on(self) -> None:
        if self._eager:
            self.world.interleave()


def _copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    destination.copy_(source)
