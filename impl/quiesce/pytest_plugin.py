"""`pytest --quiesce-adapter=module:Class`: an implementation held to its model, as tests.

The adapter's class is looked for in `module`. What is run is lockstep in its own model, and for each of its small
models a walk along every edge; other tests are not collected.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OPTION = "--quiesce-adapter"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("quiesce").addoption(
        OPTION,
        metavar="MODULE:CLASS",
        help="hold this adapter's implementation to its model, and run nothing else",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With the option, other tests are left alone."""
    return True if config.getoption(OPTION) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """With the option, these are the tests."""
    named = config.getoption(OPTION)
    if named:
        items[:] = _items(session, _adapter(named))


def _adapter(named: str) -> Any:
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"{OPTION}={named}: {error}; give module:Class") from error
    from quiesce.model.adapter import Adapter

    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise pytest.UsageError(f"{OPTION}={named}: {name} is no subclass of quiesce.model.adapter.Adapter")
    return found


def _items(session: pytest.Session, adapter: Any) -> Iterator[pytest.Item]:
    yield _Item.from_parent(
        session, name=f"lockstep[{adapter.__name__}]", adapter=adapter, small="", tour=False
    )
    for small in adapter.small:
        name = f"tour[{adapter.__name__}, {small}]"
        yield _Item.from_parent(session, name=name, adapter=adapter, small=small, tour=True)


class _Item(pytest.Item):
    def __init__(self, *, adapter: Any, small: str, tour: bool, **more: Any) -> None:
        super().__init__(**more)
        self.adapter, self.small, self.tour = adapter, small, tour

    def runtest(self) -> None:
        """Run lockstep, or a tour."""
        if not self.tour:
            from quiesce.model.lockstep import lockstep

            lockstep(self.adapter)
            return
        from quiesce.model.adapter import Divergence
        from quiesce.model.coverage import Coverage
        from quiesce.model.schedule import explain
        from quiesce.model.tours import drive

        coverage = Coverage.of(self.adapter, self.small)
        try:
            drive(self.adapter, self.small, coverage)
        except Divergence as divergence:
            raise explain(divergence, self.small) from None
        unexplained = coverage.untaken()[1]
        if unexplained:
            lines = "\n".join(map(str, unexplained[:20]))
            pytest.fail(
                f"{len(unexplained)} edges were not taken, and no reason says why:\n{lines}", pytrace=False
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A divergence says all there is to say."""
        from quiesce.model.adapter import Divergence

        return (
            str(excinfo.value)
            if isinstance(excinfo.value, Divergence)
            else super().repr_failure(excinfo, style)
        )

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where the test is said to be."""
        return Path(importlib.import_module(self.adapter.__module__).__file__ or "."), None, self.name
