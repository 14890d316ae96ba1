"""Runs a call in a thread of its own, one action of the specification at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quiesce import events

PATIENCE = 20.0
"""Seconds after which a call that neither stops nor ends fails the test."""


@dataclass(frozen=True)
class Stop:
    """Where the call stands: at an action's edge, or at its end ("return" with the value, "raise" with the error)."""

    action: str
    phase: str
    fields: dict[str, Any]


class Stepper:
    """`start` a call, then `resume` it from stop to stop. `wanted(event)` says at which events it stops."""

    def __init__(self, wanted: Callable[[events.Event], bool]) -> None:
        self._wanted = wanted
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._stop: Stop | None = None
        self._throw: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        """Whether a call is under way, standing at a stop."""
        return self._thread is not None

    def start(self, call: Callable[[], object]) -> Stop:
        """Begin `call` and let it run to its first stop."""
        assert self._thread is None, "one call at a time"
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()
        return self._await()

    def resume(self, throw: BaseException | None = None) -> Stop:
        """Let the call go on to its next stop; with `throw`, by raising that where it stands."""
        self._throw = throw
        self._go.release()
        return self._await()

    def _await(self) -> Stop:
        assert self._stopped.acquire(timeout=PATIENCE), "the call neither stopped nor ended"
        assert self._stop is not None
        if self._stop.action in ("return", "raise"):
            assert self._thread is not None
            self._thread.join(PATIENCE)
            self._thread = None
        return self._stop

    def _run(self, call: Callable[[], object]) -> None:
        try:
            with events.observe(self._observe):
                value = call()
        except BaseException as error:
            self._stop = Stop("raise", "", {"error": error})
        else:
            self._stop = Stop("return", "", {"value": value})
        self._stopped.release()

    def _observe(self, event: events.Event) -> None:
        if threading.current_thread() is not self._thread or not self._wanted(event):
            return
        self._stop = Stop(event.action, event.phase, dict(event.fields))
        self._stopped.release()
        assert self._go.acquire(timeout=PATIENCE), "nobody resumed the call"
        throw, self._throw = self._throw, None
        if throw is not None:
            raise throw
