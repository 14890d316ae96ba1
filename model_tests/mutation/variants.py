"""The faulty variant of the implementation that stands for a mutant of the specification, found by its name."""

from __future__ import annotations

import importlib
from typing import Any

from quiesce.model.manifest import Mutant

WHERE = {
    "payload_reuse": "model_tests.payload_reuse.faulty",
    "broadcast_ring": "model_tests.broadcast_ring.faults",
    "stage_handoff": "model_tests.stage_handoff.faults",
    "host_staging": "model_tests.stage_handoff.stager",
}
"""The modules with the faulty variants of each protocol."""
SHIPPED = {
    "payload_reuse": ("quiesce.payload_reuse.PayloadSender",),
    "broadcast_ring": ("quiesce.broadcast_ring.BroadcastRing", "quiesce.ring_reader.RingReader"),
    "stage_handoff": ("quiesce.stage_handoff.StageLink", "quiesce.simulated_transport.SimulatedTransport"),
    "host_staging": ("quiesce.host_staging.HostStaging",),
}
"""What the variants of each protocol are variants of."""


def fault(mutant: Mutant) -> str:
    """The fault that a mutant switches on: its name, unless it is another one seen in another way."""
    return mutant.overrides["Fault"].strip('"')


def variant(protocol: str, name: str) -> type[Any]:
    """The faulty class of that name. Raises `AttributeError` if there is none."""
    found: type[Any] = getattr(importlib.import_module(WHERE[protocol]), name.title().replace("_", ""))
    return found


def base(protocol: str, kind: type[Any]) -> str:
    """The shipped class, with its module, that a faulty one is a variant of."""
    names = {f"{one.__module__}.{one.__qualname__}" for one in kind.__mro__}
    return next(path for path in SHIPPED[protocol] if path in names)
