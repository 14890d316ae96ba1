"""A plugin for pytest that puts a faulty variant in the place of the shipped class, before any test is imported.

The environment variable QUIESCE_VARIANT says which, as `protocol/name`; `protocol/none` are subclasses without a fault,
under which all tests must pass.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from model_tests.mutation.variants import SHIPPED, base, variant

NONE = "none"


def pytest_configure() -> None:
    protocol, _, name = os.environ["QUIESCE_VARIANT"].partition("/")
    if name == NONE:
        for path in SHIPPED[protocol]:
            module, _, attribute = path.rpartition(".")
            shipped = getattr(importlib.import_module(module), attribute)
            _replace(path, type(attribute, (shipped,), {"__module__": __name__}))
    else:
        kind = variant(protocol, name)
        _replace(base(protocol, kind), kind)
    # What the tests have in common took the shipped class when it was imported, and is to take it again.
    for known in [known for known in sys.modules if known.startswith("model_tests.")]:
        if known != __name__:
            del sys.modules[known]


def _replace(path: str, kind: type[Any]) -> None:
    module, _, attribute = path.rpartition(".")
    setattr(sys.modules[module], attribute, kind)
