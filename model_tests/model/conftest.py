"""The small specifications of these tests, and a manifest over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.model import manifest
from quiesce.model.config import Config
from quiesce.model.oracle import Oracle

SPECS = Path(__file__).parent / "specs"

MANIFEST = """
# The comments of this file must survive `--pin`.
[[model]]
name = "post"
protocol = "post"
module = "MCPost"
config = "MCPost.cfg"
proves = "no letter is lost"
distinct = 134  # pinned
depth = 13

[[model]]
name = "failing"
protocol = "failing"
module = "MCFailing"
config = "MCFailing.cfg"
proves = "it fails when it is told to"
distinct = 4
depth = 4
untaken = { Never = "there to be vacuous", Rest = "mutant only", Skip = "mutant only", Idle = "mutant only" }

[[mutant]]
name = "lose"
protocol = "post"
model = "post"
bug = "a plain letter is thrown away"
violates = "NothingLost"
depth = 4

[[mutant]]
name = "deadlock"
protocol = "failing"
model = "failing"
bug = "the counter never wraps"
violates = "Deadlock"
depth = 4
"""


@pytest.fixture
def specs() -> Path:
    """The directory of the specifications."""
    return SPECS


@pytest.fixture
def write_manifest(tmp_path: Path) -> Callable[..., Path]:
    """Write a manifest beside copies of the specifications, with texts replaced; returns its path."""

    def write(*replacements: tuple[str, str], text: str = MANIFEST) -> Path:
        for file in SPECS.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "manifest.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def own_manifest(tmp_path_factory: pytest.TempPathFactory) -> manifest.Manifest:
    """The manifest over the specifications of these tests."""
    path = tmp_path_factory.mktemp("manifest") / "manifest.toml"
    path.write_text(MANIFEST, encoding="utf-8")
    found = manifest.load(path)
    return manifest.Manifest(found.models, found.mutants, SPECS, path)


@pytest.fixture(scope="session")
def doors() -> Callable[..., tuple[Config, Oracle]]:
    """An oracle of `Doors` with another next-state relation, and its configuration."""
    loaded: dict[str, tuple[Config, Oracle]] = {}

    def load(next_state: str, more: str = "") -> tuple[Config, Oracle]:
        text = f'INIT Init\nNEXT {next_state}\nCONSTANTS Top = 3 Fault = "none"\n{more}'
        if text not in loaded:
            config = Config.parse(text)
            loaded[text] = config, Oracle(SPECS / "Doors.tla", config)
        return loaded[text]

    return load
