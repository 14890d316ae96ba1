"""`NaiveRing` held to `spec/BroadcastRing.tla`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import zmq
from model_tests.foreign.naive import NaiveRing
from model_tests.stepper import PATIENCE

from quiesce.model import ModelValue, Oracle, State, Step
from quiesce.model.adapter import Adapter, does, lets

NBYTES = 4_096
_endpoints = itertools.count()


class Ring(Adapter):
    """A publication and a reception are one step each: the ring can be stopped nowhere within."""

    model = "ring_slots"
    constants: Mapping[str, str] = {"Slots": "{s1, s2}", "Window": "5", "Messages": "6", "Bodies": "TRUE"}

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle)
        self.readers = sorted(oracle.evaluate("Readers"))
        self.slots = sorted(oracle.evaluate("Slots"))
        self.context = zmq.Context()
        sockets = [self._pair() for _ in self.readers]
        self.ends = dict(zip(self.readers, (end for _, end in sockets), strict=True))
        self.ring = NaiveRing([start for start, _ in sockets], len(self.slots), NBYTES)
        self.got = dict.fromkeys(self.readers, 0)
        self.held: dict[ModelValue, dict[ModelValue, Any]] = {reader: {} for reader in self.readers}

    def _pair(self) -> tuple[zmq.Socket[Any], zmq.Socket[Any]]:
        start, end = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        start.bind(f"inproc://naive-ring-{next(_endpoints)}")
        end.rcvtimeo = int(1000 * PATIENCE)
        end.connect(start.last_endpoint)
        return start, end

    @lets("Take", "Overflow")
    def publish(self, wanted: Step) -> None:
        """The next message, which the ring puts where it likes."""
        slot = self.slots[self.ring.count % len(self.slots)]
        self.ring.publish(np.full(NBYTES, self.ring.count + 1, np.uint8))
        for action in ("Take", "BeginFill", "EndFill", "Publish"):
            self.happened(action, s=slot)
        for reader in self.readers:
            self.happened("Post", r=reader)
        self.happened("Return")

    @does("Open")
    def receive(self, r: ModelValue) -> None:
        array = self.ring.receive(self.ends[r])
        self.got[r] = int(array[0])
        self.held[r][self.slots[(self.got[r] - 1) % len(self.slots)]] = array
        self.happened("Open", r=r)
        self.happened("Lease", r=r)

    @does("Drop")
    def drop(self, r: ModelValue, s: ModelValue) -> None:
        del self.held[r][s]

    def attempts(self) -> list[Step]:
        """None: the ring has no guards; what it does where it may is enough to see it."""
        return []

    def view(self) -> Mapping[str, Any]:
        return {
            "published": self.ring.count,
            "got": dict(self.got),
            "held": {r: set(h) for r, h in self.held.items()},
        }

    def facts(self, state: State) -> Mapping[str, Any]:
        held = {r: {s for s, grip in state["grip"][r].items() if grip > 1} for r in self.readers}
        return {"published": state["sequence"], "got": dict(state["got"]), "held": held}

    def close(self) -> None:
        self.held.clear()
        self.context.destroy(linger=0)
        self.ring.close()
