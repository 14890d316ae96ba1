"""Calls in a forked process that ends by itself."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from multiprocessing.connection import wait

WAIT_S = 60.0
"""Seconds that a forked process is waited for; it is killed if its own alarm has not ended it by then."""


def forked(call: Callable[[], object], seconds: int) -> int:
    """Fork a process that makes a call; its id. It exits with 0 if the call returns, and is ended after `seconds`."""
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def status(child: int, timeout: float = WAIT_S) -> int:
    """How a forked process ended: 0, or what went wrong."""
    process = os.pidfd_open(child)
    try:
        if not wait([process], timeout):
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(process)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outcome(call: Callable[[], object], seconds: int) -> str:
    """What came of a call in a forked process: its answer as text, or the type and the text of what it raised."""
    reading, writing = os.pipe()

    def tell() -> None:
        try:
            said = str(call())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        # No more than a pipe takes at once, so that the child never waits for its parent.
        os.write(writing, said.encode(errors="replace")[: select.PIPE_BUF])

    try:
        ended = status(forked(tell, seconds), seconds + WAIT_S)
        # Only what is there is read: this end is open here too, so that a silent child's pipe never ends.
        if ended or not wait([reading], 0):
            raise ChildProcessError(
                f"the forked process ended with {ended} before it said what came of the call"
            )
        return os.read(reading, select.PIPE_BUF).decode(errors="replace")
    finally:
        os.close(reading)
        os.close(writing)
