"""The faults that the demo knows: one for each protocol, by the name of the mutant, as role and module:class."""

from __future__ import annotations

import weakref
from typing import Any

from quiesce.codec import Buffer
from quiesce.ring_reader import RingReader


class ReleaseWithMessage(RingReader):
    """Ends a lease with the message it came in, and not with the last view of its tensors."""

    leased: int | None = None
    mappings: list[list[Buffer]] = []

    def _lease(self, slot: int, pieces: list[tuple[int, int]]) -> list[Buffer]:
        self.leased = slot
        frames = super()._lease(slot, pieces)
        # A mapping that lives on does not release its slot a second time.
        self.mappings.append(frames)
        return frames

    def receive(self, timeout: float = 30.0) -> Any:
        self.leased = None
        value = super().receive(timeout)
        if self.leased is not None:
            weakref.finalize(value, self._releaser.release, self.leased).atexit = False
        return value


FAULTS = {
    "last_frame_tracker": ("sender", "model_tests.payload_reuse.faulty:LastFrameTracker"),
    "release_with_a_view": ("reader", "model_tests.demo.faults:ReleaseWithMessage"),
    "handles_dropped": ("link", "model_tests.stage_handoff.worker:WaitSkipped"),
}
