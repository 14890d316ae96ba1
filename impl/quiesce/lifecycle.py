"""The law in code: a buffer may be overwritten only once nobody who was promised its old bytes can read them.

`BufferPool` takes buffers round the way of `spec/BufferLifecycle.tla`: taken, held, lent, and reusable when every
tracker of the loan is done. `Loan` is what a caller gets who lent its own memory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from quiesce.borrowing import Borrowing
from quiesce.errors import NotQuiescent, QuiesceTimeout
from quiesce.events import action

B = TypeVar("B")

FREE_LIMIT = 1024
"""Buffers that a free list keeps."""
FREE_BYTES = 256 << 20
"""Bytes that the buffers of a free list may hold together."""
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 10e-3  # seconds between two looks at trackers
_LOOKS = 8  # pending buffers looked at in passing: enough to keep up, and flat in the number pending


class Tracker(Protocol):
    """Tells when one reader let go; `zmq.MessageTracker` and an event on a stream are trackers."""

    @property
    def done(self) -> bool:
        """Whether that reader reads no more; once True, it stays so."""


class Loan:
    """Memory of the caller that was lent: it may be written again once `done`.

    `what` names the loan in errors; `touch`, if given, is what makes trackers of a dead peer fire. The loan keeps what
    it was given by `add` alive until then, so that nobody reads freed memory even if a tracker is lost.
    """

    def __init__(self, what: str, touch: Callable[[], object] | None = None) -> None:
        self.what = what
        self._lent: dict[int, tuple[Tracker, object]] = {}
        self._added = 0
        self._touch = touch
        self._borrowing = Borrowing()

    def add(self, tracker: Tracker, memory: object) -> None:
        """One more reader of the lent memory, and what keeps that alive."""
        self._added += 1
        self._lent[self._added] = tracker, memory

    def clear(self) -> None:
        """Nobody reads any of it."""
        self._lent.clear()

    @property
    def done(self) -> bool:
        """Whether nobody reads the lent memory any more."""
        # One by one, for another thread may add to it, or clear it, meanwhile.
        for number, (tracker, _) in tuple(self._lent.items()):
            if tracker.done:
                self._lent.pop(number, None)
        if self._lent:
            self._borrowing.look(self.what)
        return not self._lent

    @property
    def since(self) -> float:
        """When it was lent, as `time.monotonic()` counts."""
        return self._borrowing.since

    def wait(self, timeout: float) -> None:
        """Return when the memory may be written; QuiesceTimeout after `timeout` seconds."""
        if not _wait(lambda: self.done, seconds(timeout), self._touch):
            raise QuiesceTimeout(
                f"{self.what} is still being read after {timeout} s by {len(self._lent)} frame(s) in flight; "
                "do not write it yet: wait longer, or close the sender"
            )

    def __repr__(self) -> str:
        return f"<Loan of {self.what}: {'done' if self.done else 'in flight'}>"


def _remembered(
    pool: object, result: object, buffer: object, trackers: Sequence[Tracker]
) -> dict[str, object]:
    return {"buffer": id(buffer), "asked": [id(tracker) for tracker in trackers]}


class BufferPool(Generic[B]):
    """Buffers that are written again and again, each only when its last loan is over.

    `new()` makes one; the free list keeps at most `free_limit` buffers and `free_bytes` bytes, where `size(buffer)` is
    in bytes. `settled(buffer)` is called when nobody reads it any more. Not thread-safe: whoever shares a pool
    locks it.
    """

    def __init__(
        self,
        new: Callable[[], B],
        free_limit: int = FREE_LIMIT,
        free_bytes: int = FREE_BYTES,
        size: Callable[[B], int] = lambda buffer: 0,
        settled: Callable[[B], object] = lambda buffer: None,
    ) -> None:
        if free_limit < 0 or free_bytes < 0:
            raise ValueError(f"free_limit is {free_limit}, free_bytes {free_bytes}; neither can be negative")
        self._new = new
        self._size = size
        self._when_settled = settled
        self.free_limit = free_limit
        self.free_bytes = free_bytes
        self._free: list[B] = []
        self._bytes = 0
        self._pending: deque[tuple[B, Sequence[Tracker], Borrowing]] = deque()
        self.made = 0
        """Buffers made so far, because none was free."""

    @property
    def free(self) -> int:
        """Buffers on the free list."""
        return len(self._free)

    @property
    def pending(self) -> int:
        """Buffers lent and not yet reusable."""
        return len(self._pending)

    @property
    def since(self) -> float | None:
        """When the oldest pending buffer was lent, as `time.monotonic()` counts; None if none is."""
        return min((borrowing.since for _, _, borrowing in tuple(self._pending)), default=None)

    @action("Take", lambda pool, buffer: {"buffer": id(buffer), "free_limit": pool.free_limit})
    def take(self) -> B:
        """A buffer that nobody reads: from the free list, else new."""
        if not self._free:
            self.made += 1
            return self._new()
        buffer = self._free.pop()
        self._bytes -= self._size(buffer)
        return buffer

    def give_back(self, buffer: B) -> None:
        """Return a buffer that was taken and never lent."""
        if self._has_room(buffer):
            self._keep(buffer)

    @action("Remember", _remembered)
    def lend(self, buffer: B, trackers: Sequence[Tracker]) -> None:
        """Let go of a buffer until all trackers are done."""
        self._pending.append((buffer, [tracker for tracker in trackers if not tracker.done], Borrowing()))

    def settle(self, looks: int = _LOOKS) -> int:
        """Recycle what is settled among the `looks` buffers longest not looked at; return how many were."""
        settled = 0
        for _ in range(min(looks, len(self._pending))):
            buffer, trackers, borrowing = self._pending.popleft()
            if self._settled(trackers):
                self._when_settled(buffer)
                recycle = self._recycle if self._has_room(buffer) else self._drop_surplus
                recycle(buffer)
                settled += 1
            else:
                self._pending.append((buffer, trackers, borrowing))
                borrowing.look("a reused buffer")
        return settled

    def _settled(self, trackers: Sequence[Tracker]) -> bool:
        return all(tracker.done for tracker in trackers)

    def _has_room(self, buffer: B) -> bool:
        return len(self._free) < self.free_limit and self._bytes + self._size(buffer) <= self.free_bytes

    def _keep(self, buffer: B) -> None:
        self._free.append(buffer)
        self._bytes += self._size(buffer)

    @action("Recycle", lambda pool, result, buffer: {"buffer": id(buffer)})
    def _recycle(self, buffer: B) -> None:
        self._keep(buffer)

    @action("DropSurplus", lambda pool, result, buffer: {"buffer": id(buffer)})
    def _drop_surplus(self, buffer: B) -> None:
        """Let the buffer go; its memory is freed with the last reference."""

    def close(self, timeout: float, touch: Callable[[], object] | None = None) -> None:
        """Drop every buffer; NotQuiescent if some are still read after `timeout` seconds, then call again."""
        self.free_limit = 0
        self._free.clear()
        self._bytes = 0

        def settled() -> bool:
            self.settle(len(self._pending))
            return not self._pending

        if not _wait(settled, timeout, touch):
            raise NotQuiescent(
                f"{len(self._pending)} buffer(s) were still being read {timeout} s after closing; a receiver in this "
                "process holds their frames"
            )


def seconds(timeout: float) -> float:
    """`timeout` if it is a finite number of seconds, 0 or more; else ValueError."""
    try:
        fits = 0 <= timeout < math.inf
    except TypeError:  # None, or text
        fits = False
    if not fits:
        raise ValueError(f"timeout is {timeout!r}; give a finite number of seconds, 0 or more")
    return timeout


def _wait(done: Callable[[], bool], timeout: float, touch: Callable[[], object] | None) -> bool:
    deadline = time.monotonic() + timeout
    nap = _SHORTEST_NAP
    while not done():
        if touch is not None:
            touch()
        left = deadline - time.monotonic()
        if left <= 0:
            return done()
        time.sleep(min(left, nap))
        nap = min(2 * nap, _LONGEST_NAP)
    return True
