"""Host staging: device output reaches the host through pinned buffers that are never read or written too early.

    staging = HostStaging(backend, nbytes=1 << 20)
    staged = staging.stage(output)           # enqueues a copy and returns; output may be dropped
    host = staged.settle()                   # waits for the copy alone; now the host may read
    loan = sender.lend(host)                 # whatever reads it: anything with `done`
    staged.lend([loan])                      # the buffer comes back once the readers are done

The rules, P1 to P4, and the faults they prevent are in `spec/HostStaging.tla`. A staging belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from quiesce.borrowing import Counters, age
from quiesce.errors import Closed, NotQuiescent, QuiesceError, QuiesceTimeout
from quiesce.events import action
from quiesce.lifecycle import BufferPool, Tracker, seconds
from quiesce.streams import StreamBackend

TIMEOUT = 60.0
"""Seconds that a wait may take unless told otherwise."""
_NAP = 100e-6


class CopyTracker:
    """Done once the stream has passed the event behind a copy."""

    def __init__(self, backend: StreamBackend, event: Any):
        self._backend = backend
        self._event = event

    @property
    def done(self) -> bool:
        """Whether the copy has finished."""
        return self._backend.query(self._event)


class Staged:
    """One tensor on its way to the host, in a pinned buffer. Settle it, then lend it; or discard it."""

    def __init__(self, staging: HostStaging, buffer: torch.Tensor, view: torch.Tensor, event: Any):
        self._staging = staging
        self._buffer: torch.Tensor | None = buffer
        self._view = view
        self._event = event
        self._settled = False

    @action("Settle", lambda staged, result, timeout=TIMEOUT: {"p": id(staged._buffer)})
    def settle(self, timeout: float = TIMEOUT) -> torch.Tensor:
        """The tensor in host memory, once its copy has finished; it is the buffer itself, so write nothing there.

        Raises `QuiesceTimeout` after `timeout` seconds.
        """
        seconds(timeout)
        self._owned()
        self._staging.backend.synchronize(self._event, timeout)
        self._settled = True
        self._staging.backend.host_access(self._view)
        return self._view

    @action("Lend", lambda staged, result, trackers: {"p": id(result)})
    def lend(self, trackers: Iterable[Tracker]) -> torch.Tensor:
        """Let go of the buffer until all `trackers` are done. Raises `NotQuiescent` before `settle`."""
        buffer = self._owned()
        if not self._settled:
            raise NotQuiescent(
                "the copy into this buffer may still be running; call settle() before you lend it"
            )
        self._buffer = None
        self._staging.pool.lend(buffer, list(trackers))
        return buffer

    def discard(self) -> None:
        """Give the buffer back unread, once its copy has finished. Does nothing after `lend`."""
        if self._buffer is not None:
            tracker = CopyTracker(self._staging.backend, self._event)
            self._staging.pool.lend(self._buffer, [tracker])
            self._buffer = None

    def _owned(self) -> torch.Tensor:
        if self._buffer is None:
            raise NotQuiescent("this buffer was lent or discarded, and may hold another tensor by now")
        return self._buffer


class HostStaging:
    """Pinned buffers of `nbytes` bytes, at most `limit` of them, and a stream that copies into them."""

    def __init__(self, backend: StreamBackend, nbytes: int, limit: int = 8):
        if nbytes < 1 or limit < 1:
            raise ValueError(f"nbytes is {nbytes}, limit {limit}; both must be positive")
        self.backend = backend
        self.nbytes = nbytes
        self.limit = limit
        self.stream = backend.stream("copy")
        self.pool: BufferPool[torch.Tensor] = BufferPool(
            lambda: backend.pinned(nbytes),
            free_limit=limit,
            free_bytes=nbytes * limit,
            size=torch.Tensor.numel,
        )
        self._closed = False
        self._staged = self._waits = 0

    @action("Stage", lambda staging, result, tensor, timeout=TIMEOUT: {"p": id(result._buffer)})
    def stage(self, tensor: torch.Tensor, timeout: float = TIMEOUT) -> Staged:
        """Copy `tensor` to a pinned buffer, behind all work on the current stream, without waiting for the copy.

        The tensor may be dropped at once, but not written before the copy: `settle` waits for that. Waits at most
        `timeout` seconds for a buffer; raises `QuiesceTimeout` if none comes back, `QuiesceError` if the tensor does
        not fit.
        """
        seconds(timeout)
        size = tensor.numel() * tensor.element_size()
        if size > self.nbytes:
            raise QuiesceError(
                f"a tensor of {size} bytes does not fit the pinned buffers of {self.nbytes} bytes"
            )
        if self._closed:
            raise Closed("this staging was closed")
        if self.backend.capturing():
            raise QuiesceError(
                "nothing can be staged under graph capture; stage static outputs after the replay"
            )
        buffer = self._take(timeout)
        try:
            view = buffer[:size].view(tensor.dtype).view(tensor.shape)
            produced = self.backend.record()
            with self.backend.using(self.stream):
                self.backend.wait(produced)
                self.backend.copy(view, tensor)
                self.backend.record_stream(tensor)
                return Staged(self, buffer, view, self.backend.record())
        except BaseException:
            # The copy may have been enqueued: the buffer comes back behind it.
            with self.backend.using(self.stream):
                self.pool.lend(buffer, [CopyTracker(self.backend, self.backend.record())])
            raise

    def close(self, timeout: float = TIMEOUT) -> None:
        """Drop all buffers; `NotQuiescent` if some are still read after `timeout` seconds."""
        seconds(timeout)
        self._closed = True
        self.pool.close(timeout)

    @property
    def made(self) -> int:
        """Pinned buffers made so far."""
        return self.pool.made

    def counters(self) -> Counters:
        """What is lent now; a fallback is a buffer that had to be made, a wait one for a buffer to come back."""
        since = self.pool.since
        return Counters(
            in_flight=self.pool.pending,
            oldest_s=age(since),
            holder="" if since is None else "whoever it was lent to",
            messages=self._staged,
            fallbacks=self.made,
            waits=self._waits,
        )

    def __enter__(self) -> HostStaging:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _take(self, timeout: float) -> torch.Tensor:
        deadline = time.monotonic() + timeout
        waited = False
        while True:
            self.pool.settle(self.limit)
            if self.pool.free or self.made < self.limit:
                self._staged += 1
                return self.pool.take()
            self._waits += not waited
            waited = True
            if time.monotonic() > deadline:
                raise QuiesceTimeout(
                    f"no pinned buffer came back within {timeout:g} s: all {self.limit} are staged, or a receiver "
                    "still reads them; settle and lend them, or raise limit"
                )
            time.sleep(_NAP)
