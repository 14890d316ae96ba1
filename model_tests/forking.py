"""Calls in a forked process that ends by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable


def forked(call: Callable[[], object], seconds: int) -> int:
    """Fork a process that makes a call; its id. It exits with 0 if the call returns, and is ended after `seconds`."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def status(child: int) -> int:
    """How a forked process ended: 0, or what went wrong."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
