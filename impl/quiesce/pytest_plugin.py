"""`pytest --quiesce-adapter=module:Class`: an implementation held to its model, as tests.

The adapter's class is looked for in `module`. What is run is lockstep in its own model, for each of its small models a
walk along every edge, and, if it has a method `record`, the judgement of what that recorded; other tests are not
collected.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

OPTION = "--quiesce-adapter"
UNTESTED = pytest.StashKey[list[str]]()
"""The adapters whose lockstep asked for no forbidden step."""
LIMIT_S = 3600.0
"""For each of these tests, where the project sets a shorter limit for its own: large models take many minutes."""


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
        # As `python -m pytest` does, so that the module is found where it stands.
        if str(config.invocation_params.dir) not in sys.path:
            sys.path.insert(0, str(config.invocation_params.dir))
        items[:] = _items(session, _adapter(named))
        if _is_limited(config):
            for item in items:
                item.add_marker(pytest.mark.timeout(LIMIT_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say of which implementations no guard was put to the test."""
    for name in config.stash.get(UNTESTED, []):
        terminalreporter.write_line(
            f"{name}: no forbidden step was asked for: guards were not tested (see `attempts` in docs/conformance.md)"
        )


def _is_limited(config: pytest.Config) -> bool:
    """Whether pytest-timeout would end a long tour by the project's settings; the command line's word holds."""
    if not config.pluginmanager.hasplugin("timeout") or config.getoption("timeout") is not None:
        return False
    return 0 < float(config.getini("timeout") or 0) < LIMIT_S


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
    lockstep = partial(_lockstep, session.config.stash.setdefault(UNTESTED, []))
    checks = {"lockstep": lockstep, **{f"tour of {small}": partial(_tour, small) for small in adapter.small}}
    for name, check in {**checks, "traces": _traces}.items():
        yield _Item.from_parent(session, name=f"{adapter.__name__}: {name}", adapter=adapter, check=check)


def _lockstep(untested: list[str], adapter: Any) -> None:
    from quiesce.model.lockstep import lockstep

    attempted: list[object] = []
    lockstep(adapter, on_attempt=attempted.append)
    if not attempted:
        untested.append(adapter.__name__)


def _tour(small: str, adapter: Any) -> None:
    from quiesce.model.adapter import Divergence
    from quiesce.model.coverage import Coverage
    from quiesce.model.schedule import explain, shrink
    from quiesce.model.tours import drive

    coverage = Coverage.of(adapter, small)
    try:
        drive(adapter, small, coverage)
    except Divergence as divergence:
        raise explain(shrink(divergence), small) from None
    unexplained = coverage.untaken()[1]
    if unexplained:
        lines = "\n".join(map(str, unexplained[:20]))
        pytest.fail(
            f"{len(unexplained)} edges were not taken, and no reason says why:\n{lines}", pytrace=False
        )


def _traces(adapter: Any) -> None:
    from quiesce.model import judging, traces

    with tempfile.TemporaryDirectory(prefix="quiesce-traces-") as directory:
        try:
            adapter.record(Path(directory))
        except NotImplementedError:
            pytest.skip(f"{adapter.__name__} has no method `record`, so there are no traces to judge")
        verdicts = [judging.judge(case) for case in adapter.cases(traces.read(directory))]
    if judging.outcome_of(verdicts) != "accepted":
        told = [f"{v.case.title}: {v.outcome}: {v.explanation.message}" for v in verdicts]
        pytest.fail("\n".join(told) or "nothing was recorded that the model can judge", pytrace=False)


class _Item(pytest.Item):
    def __init__(self, *, adapter: Any, check: Callable[[Any], None], **more: Any) -> None:
        super().__init__(**more)
        self.adapter, self.check = adapter, check

    def runtest(self) -> None:
        """Run the check."""
        self.check(self.adapter)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A divergence says all there is to say, and so does what is wrong with an adapter's names."""
        from quiesce.model.adapter import Divergence
        from quiesce.model.errors import ModelError

        told = isinstance(excinfo.value, Divergence | ModelError)
        return str(excinfo.value) if told else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where the test is said to be."""
        return Path(importlib.import_module(self.adapter.__module__).__file__ or "."), None, self.name
