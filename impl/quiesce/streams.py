"""Streams behind one small interface: on a GPU, on the CPU, and (in `quiesce.simulated`) under a chosen schedule.

The interface names what the protocols need and nothing else: enqueue work on the current stream, record an event
behind it, hold a stream or the host back until an event is reached. What is promised, and what is not, is
`spec/StreamOrdering.tla`; code written against it and run on the simulated backend is checked for accesses that
nothing orders.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from quiesce.errors import QuiesceError, QuiesceTimeout

Kernel = Callable[..., object]

POLL = 20e-6
"""Seconds between two looks at an event that the host waits for; doubled up to a millisecond."""


class StreamBackend(Protocol):
    """What the protocols ask of a device.

    Streams and events are opaque. Work goes to the current stream, in order; whether it has run when the call
    returns is up to the backend. Sizes are in bytes, times in seconds.
    """

    def stream(self, name: str) -> Any:
        """A new stream; the name is for reports."""

    def current(self) -> Any:
        """The stream that work goes to now."""

    def using(self, stream: Any) -> AbstractContextManager[None]:
        """Make `stream` the current stream for the length of a with-block."""

    def launch(
        self, kernel: Kernel, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        """Enqueue `kernel(*reads, *writes)` on the current stream."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy on the current stream. It has not happened yet, unless a side is pageable."""

    def record(self, event: Any = None) -> Any:
        """Capture the point behind everything enqueued on the current stream; in `event`, or in a new one."""

    def wait(self, event: Any) -> None:
        """Hold back later work on the current stream until the point that `event` has captured *now* is reached."""

    def query(self, event: Any) -> bool:
        """Whether the point is reached."""

    def synchronize(self, event: Any, timeout: float) -> None:
        """Hold back the host until the point is reached. Raises `QuiesceTimeout` after `timeout` seconds."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Device memory from the caching allocator; when the tensor dies, it may be handed out again at once."""

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Once `tensor` dies, keep its memory until what the current stream had by then has run."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory (uint8, one dimension) that copies may read or write after they returned."""

    def host_access(self, tensor: torch.Tensor, writes: bool = False) -> None:
        """Say that the host is about to read, or write, memory that streams use too."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""


class CpuBackend:
    """The CPU: work has run when the call returns, so that every event is reached and every wait is over."""

    def stream(self, name: str) -> None:
        """None: there is one stream, the host itself."""
        return None

    def current(self) -> None:
        """None, as `stream`."""
        return None

    @contextmanager
    def using(self, stream: None) -> Iterator[None]:
        """Changes nothing."""
        yield

    def launch(
        self, kernel: Kernel, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        """Run `kernel(*reads, *writes)` now."""
        kernel(*reads, *writes)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy now."""
        destination.copy_(source)

    def record(self, event: None = None) -> None:
        """None: everything before it has run."""
        return None

    def wait(self, event: None) -> None:
        """Returns at once."""
        return None

    def query(self, event: None) -> bool:
        """True."""
        return True

    def synchronize(self, event: None, timeout: float) -> None:
        """Returns at once."""
        return None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory, not initialised; `shape` in elements."""
        return torch.empty(tuple(shape), dtype=dtype)

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Nothing to record: no work is under way."""
        return None

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory of `nbytes` bytes (uint8, one dimension), not initialised."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def host_access(self, tensor: torch.Tensor, writes: bool = False) -> None:
        """Always right."""
        return None

    def capturing(self) -> bool:
        """False: there are no graphs."""
        return False


class CudaBackend:
    """Streams and events of `torch.cuda`, on one device."""

    def __init__(self, device: torch.device | str | int | None = None):
        if not torch.cuda.is_available():
            raise QuiesceError("there is no CUDA device; use CpuBackend, or SimulatedBackend in tests")
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
        )

    def stream(self, name: str) -> torch.cuda.Stream:
        """A new stream of the device; CUDA does not keep the name."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        """The device's current stream in this thread."""
        return torch.cuda.current_stream(self.device)

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Make `stream` current for the length of a with-block."""
        return torch.cuda.stream(stream)

    def launch(
        self, kernel: Kernel, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        """Call `kernel(*reads, *writes)`, which enqueues on the current stream."""
        kernel(*reads, *writes)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy; with pinned memory on the host side it has not happened when this returns."""
        destination.copy_(source, non_blocking=True)

    def record(self, event: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Record an event on the current stream: `event`, or a new one."""
        event = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.current())
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """Hold the current stream back until the point that `event` has captured now."""
        self.current().wait_event(event)

    def query(self, event: torch.cuda.Event) -> bool:
        """Whether the device has passed the event."""
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, event: torch.cuda.Event, timeout: float) -> None:
        """Poll the event until it is reached; `QuiesceTimeout` after `timeout` seconds."""
        # Event.synchronize() cannot be bounded.
        deadline, pause = time.monotonic() + timeout, POLL
        while not self.query(event):
            if time.monotonic() > deadline:
                raise QuiesceTimeout(
                    f"an event was not reached within {timeout:g} s; its stream is stuck or overloaded"
                )
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Device memory from the caching allocator, on the current stream; `shape` in elements."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def record_stream(self, tensor: torch.Tensor) -> None:
        """Tell the allocator that the current stream uses `tensor`."""
        tensor.record_stream(self.current())

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked host memory of `nbytes` bytes (uint8, one dimension)."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def host_access(self, tensor: torch.Tensor, writes: bool = False) -> None:
        """Not checked on a device; the simulated backend checks it."""
        return None

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()


def backend_for(device: torch.device | str) -> StreamBackend:
    """The backend of a device: `CudaBackend` for "cuda", `CpuBackend` for "cpu"."""
    device = torch.device(device)
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda":
        return CudaBackend(device)
    raise QuiesceError(f"there is no stream backend for {device}; it must be a cpu or cuda device")
