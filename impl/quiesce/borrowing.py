"""Who borrowed memory and since when: counters of the protocols, and a warning for loans that grow old."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from dataclasses import dataclass

_log = logging.getLogger("quiesce.borrowing")
_old_after: float | None = None


@dataclass(frozen=True)
class Counters:
    """What a protocol object has lent now, and what it has done since it was made. `counters()` of each gives one.

    in_flight: buffers, slots or sends that somebody may still read, as far as was looked;
    oldest_s: the age in seconds of the oldest of them, 0 if there is none;
    holder: who has that one, as far as the object knows, "" if there is none;
    messages: what was sent or published;
    fallbacks: how often the cheap way was not open (each `counters()` says which way that is);
    waits: how often a call had to wait for a reader or a peer.
    """

    in_flight: int
    oldest_s: float
    holder: str
    messages: int
    fallbacks: int
    waits: int


class Borrowing:
    """A loan's beginning: when, and where in the code if loans are watched."""

    __slots__ = ("_stack", "since")

    def __init__(self) -> None:
        self.since = time.monotonic()
        self._stack: traceback.StackSummary | None = None
        if _old_after is not None:
            frames = traceback.walk_stack(sys._getframe(1))
            self._stack = traceback.StackSummary.extract(frames, limit=32, lookup_lines=False)
            self._stack.reverse()

    def look(self, what: str) -> None:
        """Log a warning, once, if this loan of `what` has grown old."""
        if self._stack is None or _old_after is None:
            return
        age = time.monotonic() - self.since
        if age > _old_after:
            stack, self._stack = self._stack, None
            _log.warning(
                "%s has been lent for %.1f s, more than the %g s allowed; it was borrowed at\n%s",
                what,
                age,
                _old_after,
                "".join(stack.format()).rstrip(),
            )


def warn_of_loans(older_than: float | None) -> None:
    """From now on, log a warning with the stack of the borrower for each new loan that gets `older_than` seconds old.

    None, as at first, warns of none. Loans are looked at when their owner is used: at each send, `settle` and
    `publish`. Watching costs some tens of microseconds a loan. The logger is "quiesce.borrowing".
    """
    global _old_after
    if older_than is not None and not older_than >= 0:
        raise ValueError(f"older_than is {older_than!r}; give a number of seconds, 0 or more, or None")
    _old_after = older_than


def age(since: float | None) -> float:
    """Seconds since then, as `time.monotonic()` counts; 0 for None."""
    return 0.0 if since is None else time.monotonic() - since
