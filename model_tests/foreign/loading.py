"""vLLM's own modules, loaded alone from an unpacked wheel: what they import besides is a stand-in that does nothing.

`QUIESCE_FOREIGN_VLLM` names a folder with a folder for each version, as `fetch.py` makes it. Nothing of vLLM is
installed, and none of its dependencies.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VARIABLE = "QUIESCE_FOREIGN_VLLM"
VERSIONS = ("0.26.0", "0.33.0")
# What is loaded as it is; all else of vLLM, and of what only it needs, is a stand-in.
REAL = {
    "vllm.distributed.device_communicators.shm_broadcast",
    "vllm.distributed.device_communicators.shm_tensor_arena",
    "vllm.envs",
    "vllm.utils.network_utils",
    "vllm.v1.engine",
    "vllm.v1.engine.core",
    "vllm.v1.serial_utils",
    "vllm.v1.utils",
}
OTHERS = {"cloudpickle", "psutil", "uvloop", "pydantic", "pydantic_core", "regex", "urllib3"}


class _AnyType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyType(name, (Anything,), {})

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_AnyType):
    """Stands for a class, a decorator or a constant: can be called, indexed, inherited from, asked for attributes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args else None


class _StandIn(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in REAL:
            return importlib.import_module(full)
        value = _AnyType(name, (Anything,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


def _logger(name: str) -> Any:
    logger: Any = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, f"{level}_once", getattr(logger, level))
    return logger


# Where a stand-in must say something, because code under test asks it.
SAYING: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": _logger},
    "vllm.utils.torch_utils": {"PIN_MEMORY": False},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cuda_alike=lambda: False)},
    "vllm.platforms.interface": {"in_wsl": lambda: False},
    "vllm.distributed.utils": {"sched_yield": os.sched_yield, "StatelessProcessGroup": Anything},
    "vllm.utils.cpu_resource_utils": {"check_cgroup_memory_available": lambda *args: None},
    # Little memory, so that buffers have the system's size.
    "psutil": {"virtual_memory": lambda: types.SimpleNamespace(total=8 << 30, available=4 << 30)},
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loading = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in (OTHERS | {"vllm"} if self.loading else {"vllm"}):
            return None
        if name in REAL:
            place = self.folder.joinpath(*name.split("."))
            package = place.is_dir()
            file = place / "__init__.py" if package else place.with_suffix(".py")
            where = [str(place)] if package else None
            return importlib.util.spec_from_file_location(name, file, submodule_search_locations=where)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        vars(module).update(SAYING.get(spec.name, {}))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


_loaded: dict[str, dict[str, types.ModuleType]] = {}
_finders: dict[str, _Finder] = {}


def use(version: str) -> None:
    """Let `vllm`, whoever imports it, be this version from now on. Raises ImportError if it is not there."""
    if version not in available():
        raise ImportError(f"{VARIABLE} names no folder with {version} in it; `make foreign` makes one")
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]
    for finder in _finders.values():
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    sys.modules.update(_loaded.setdefault(version, {}))
    # Last, so that what is installed is taken as it is.
    sys.meta_path.append(_finders.setdefault(version, _Finder(Path(os.environ[VARIABLE], version))))


def module(version: str, name: str) -> Any:
    """One of vLLM's modules, in this version, which `vllm` is from now on."""
    use(version)
    finder = _finders[version]
    finder.loading = True
    try:
        found = importlib.import_module(name)
    finally:
        finder.loading = False
        for other in [other for other, value in sys.modules.items() if isinstance(value, _StandIn)]:
            if other.partition(".")[0] in OTHERS:
                del sys.modules[other]
    _loaded[version].update({n: m for n, m in sys.modules.items() if n.partition(".")[0] == "vllm"})
    return found


def available() -> Sequence[str]:
    """The versions that are there."""
    return [v for v in VERSIONS if VARIABLE in os.environ and Path(os.environ[VARIABLE], v, "vllm").is_dir()]
