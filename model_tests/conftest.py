"""Hypothesis profiles: QUIESCE_PROFILE is dev (seconds), ci (minutes, always the same) or nightly (hours)."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from hypothesis import HealthCheck, Phase, settings

PROFILE = os.environ.get("QUIESCE_PROFILE", "dev")

_common = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", _common, max_examples=50)
settings.register_profile("ci", _common, max_examples=200, derandomize=True)
settings.register_profile("nightly", _common, max_examples=20_000)
settings.load_profile(PROFILE)

SEARCHING = settings(
    max_examples=400,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
"""For a search for what a faulty variant does: always the same, whatever the profile, and not shrunk."""


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """A context whose sockets are closed after the test, with what they had not sent."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PROFILE != "nightly":
        skip = pytest.mark.skip(reason="set QUIESCE_PROFILE=nightly to run this")
        for item in items:
            if "nightly" in item.keywords:
                item.add_marker(skip)
