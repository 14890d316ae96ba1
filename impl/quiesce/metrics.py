"""Counters as Prometheus metrics; needs the extra `quiesce[metrics]`.

    metrics = Metrics()                  # registers with prometheus_client's default registry
    metrics.watch("outputs", sender)     # anything with `counters()`; watched as long as it lives

The metrics are `quiesce_in_flight`, `quiesce_oldest_loan_seconds`, `quiesce_messages_total`,
`quiesce_fallbacks_total` and `quiesce_waits_total`, each with the labels `name` (as given) and `kind` (the class). They
are read when they are scraped: watching costs the protocols nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from quiesce.borrowing import Counters

LABELS = ("name", "kind")


class Counted(Protocol):
    """What can be watched: a sender, a ring, a stage link, host staging."""

    def counters(self) -> Counters:
        """A snapshot."""


class Metrics(Collector):
    """Shows the counters of what it watches to a registry. Holds on to nothing: what dies is no longer shown."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._watched: dict[str, weakref.ref[Counted]] = {}
        registry.register(self)

    def watch(self, name: str, counted: Counted) -> None:
        """Show the counters of `counted` under `name`, in place of what had that name."""
        self._watched[name] = weakref.ref(counted)

    def collect(self) -> Iterator[Metric]:
        """The metrics of everything watched that still lives."""
        in_flight = GaugeMetricFamily("quiesce_in_flight", "Buffers that may still be read", labels=LABELS)
        oldest = GaugeMetricFamily("quiesce_oldest_loan_seconds", "Age of the oldest loan", labels=LABELS)
        messages = CounterMetricFamily("quiesce_messages", "Messages sent or published", labels=LABELS)
        fallbacks = CounterMetricFamily(
            "quiesce_fallbacks", "Times the cheap way was not open", labels=LABELS
        )
        waits = CounterMetricFamily("quiesce_waits", "Calls that waited for a reader or peer", labels=LABELS)
        for name, reference in tuple(self._watched.items()):
            counted = reference()
            if counted is None:
                self._watched.pop(name, None)
                continue
            found, labels = counted.counters(), (name, type(counted).__name__)
            in_flight.add_metric(labels, found.in_flight)
            oldest.add_metric(labels, found.oldest_s)
            messages.add_metric(labels, found.messages)
            fallbacks.add_metric(labels, found.fallbacks)
            waits.add_metric(labels, found.waits)
        yield from (in_flight, oldest, messages, fallbacks, waits)
