"""A plugin for pytest that puts a faulty variant in the place of the shipped class, before any test is imported.

The environment variable QUIESCE_VARIANT says which, as `protocol/name`; `protocol/none` are subclasses without a fault,
under which all tests must pass.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from model_tests.mutation.variants import SHIPPED, WHERE, base, variant

NONE = "none"
_shipped: list[tuple[str, str, type[Any]]] = []


def pytest_configure() -> None:
    protocol, _, name = os.environ["QUIESCE_VARIANT"].partition("/")
    if name == NONE:
        for path in SHIPPED[protocol]:
            _replace(path, __getattr__(path.rpartition(".")[2]))
    else:
        kind = variant(protocol, name)
        _replace(base(protocol, kind), kind)
    # What the tests have in common took the shipped class when it was imported, and is to take it again.
    for known in [known for known in sys.modules if known.startswith("model_tests.")]:
        if known not in (__name__, WHERE["broadcast_ring"]):  # readers are sent to processes by name
            del sys.modules[known]


def __getattr__(name: str) -> type[Any]:
    """A shipped class as a variant without a fault, which a process that a test starts finds here too."""
    for paths in SHIPPED.values():
        for path in paths:
            module, _, attribute = path.rpartition(".")
            if attribute == name:
                shipped = getattr(importlib.import_module(module), attribute)
                globals()[name] = type(attribute, (shipped,), {"__module__": __name__})
                return globals()[name]  # type: ignore[no-any-return]
    raise AttributeError(name)


def pytest_collection_finish() -> None:
    """The tests have the variant by now; `quiesce.events` has to find the shipped class where it is."""
    for module, attribute, kind in _shipped:
        setattr(sys.modules[module], attribute, kind)


def _replace(path: str, kind: type[Any]) -> None:
    module, _, attribute = path.rpartition(".")
    _shipped.append((module, attribute, getattr(sys.modules[module], attribute)))
    setattr(sys.modules[module], attribute, kind)
