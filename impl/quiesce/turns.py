"""Who may use an object: the process that made it, one call at a time."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

# Its own farewell, which forgets what is lent, must be registered before ours, to be run after it.
import zmq.utils.garbage  # noqa: F401

from quiesce.errors import QuiesceError, QuiesceTimeout, WrongProcess
from quiesce.lifecycle import seconds

R = TypeVar("R")
_open: weakref.WeakSet[Abandoned] = weakref.WeakSet()


class Abandoned(Protocol):
    """What lends memory to libzmq, whose thread reads it until the process is gone."""

    def _abandon(self) -> None:
        """Take the memory back, in a second at most."""


def abandon_at_exit(sender: Abandoned) -> None:
    """Have it abandoned by an interpreter that exits, if it still lives: before the memory that it lent is freed."""
    _open.add(sender)


@atexit.register
def _abandon_all() -> None:
    for sender in tuple(_open):
        with contextlib.suppress(QuiesceError):
            sender._abandon()


class Turns:
    """Calls of several threads, taken one after the other, in the process that made the object, `what` in errors."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._pid = os.getpid()
        # Re-entrant because such a lock knows its owner; a second entry is refused.
        self._lock = threading.RLock()

    def check_process(self) -> None:
        """WrongProcess after a fork, where sockets and trackers are of no use and locks may stay taken for ever."""
        if os.getpid() != self._pid:
            raise WrongProcess(
                f"{self.what} was made in process {self._pid}; after a fork, make one of your own"
            )

    @property
    def mine(self) -> bool:
        """Whether this thread is in the middle of a call."""
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def take(self, timeout: float, call: Callable[[], R]) -> R:
        """`call()` in a turn of its own. QuiesceTimeout if others do not end theirs within `timeout` seconds.

        WrongProcess; QuiesceError in a signal handler or finalizer that interrupted a turn of its own thread.
        """
        self._refuse()
        try:
            # In here, so that no exception can come between the acquiring and the releasing.
            self._acquire(timeout)
            return call()
        finally:
            # Not contextlib.suppress: an exception could come before its block is entered.
            try:  # noqa: SIM105
                self._lock.release()
            except RuntimeError:
                pass  # it is another thread's

    def _refuse(self) -> None:
        self.check_process()
        if self.mine:
            raise QuiesceError(
                f"{self.what} is in the middle of a call of this thread, which a signal handler or finalizer "
                "interrupted; use another one there"
            )

    def _acquire(self, timeout: float) -> None:
        if not self._lock.acquire(timeout=min(seconds(timeout), threading.TIMEOUT_MAX)):
            raise QuiesceTimeout(
                f"another thread has used {self.what} for {timeout:g} s; nothing was done, try again"
            )
