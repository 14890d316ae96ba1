"""The counterexample of a mutant, kept as long as nothing that it depends on changes.

`quiesce check` leaves the counterexamples that it finds; who asks for one that is not there waits for a run of TLC.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from quiesce.model import paths
from quiesce.model.errors import ModelError
from quiesce.model.manifest import Manifest, Model, Mutant
from quiesce.model.output import CheckResult, Counterexample, TraceStep
from quiesce.model.values import parse, parse_state, show

_NAMED = re.compile(r"^\s*EXTENDS\s+(.*)$|\bINSTANCE\s+(\w+)", re.MULTILINE)
_FORMAT = 1
_COMMENT = re.compile(r"\\\*[^\n]*|\(\*.*?\*\)", re.DOTALL)


def modules(entry: Model | Mutant, manifest: Manifest) -> list[Path]:
    """The file of the entry's module, and those of all modules that it extends or instantiates."""
    todo, found = [manifest.model(entry.name).module], dict[str, Path]()
    while todo:
        name = todo.pop(0)
        path = next((p for folder in manifest.libraries if (p := folder / f"{name}.tla").is_file()), None)
        if path is None or name in found:  # a standard module is TLC's own
            continue
        found[name] = path
        for extended, instance in _NAMED.findall(path.read_text(encoding="utf-8")):
            todo += re.findall(r"\w+", extended) or [instance]
    return list(found.values())


def meaning(entry: Model | Mutant, manifest: Manifest) -> str:
    """What these modules say, but for comments and blanks: while it stays, so does what was found with them."""
    texts = [file.read_text(encoding="utf-8") for file in modules(entry, manifest)]
    return " ".join(_COMMENT.sub("", "\n".join(texts)).split())


def keep(entry: Mutant, manifest: Manifest, result: CheckResult) -> None:
    """Remember what TLC found for this mutant of the project's own manifest."""
    trace = result.counterexample
    if trace is None or manifest.directory != paths.spec_directory() / "models":
        return
    file = _file(entry, manifest)
    text = json.dumps({"violated": result.violated, **as_data(trace)})
    with suppress(OSError):  # a place that cannot be written keeps nothing
        file.parent.mkdir(parents=True, exist_ok=True)
        for other in file.parent.glob(f"{entry.name}-*.json"):
            other.unlink(missing_ok=True)
        # Two processes may find the same one at the same time.
        scratch = file.with_suffix(f".{os.getpid()}")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)


def load(entry: Mutant, manifest: Manifest) -> Counterexample | None:
    """What was kept for this mutant; None if nothing was, or if the specification has changed since."""
    try:
        data = json.loads(_file(entry, manifest).read_text(encoding="utf-8"))
        return _read(data)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, ModelError):  # written by another release
        return None


def as_data(trace: Counterexample) -> dict[str, object]:
    """A counterexample as plain data; values are TLA+ text."""
    return {
        "steps": [
            {
                "action": step.action,
                "parameters": {name: show(value) for name, value in step.parameters.items()},
                "state": repr(step.state),
            }
            for step in trace.steps
        ],
        "loop": trace.loop,
        "stutters": trace.stutters,
    }


def _read(data: dict[str, object]) -> Counterexample:
    steps = data["steps"]
    if not isinstance(steps, Iterable):
        raise ValueError("steps")
    return Counterexample(
        tuple(
            TraceStep(
                step["action"],
                parse_state(step["state"]),
                {name: parse(text) for name, text in step["parameters"].items()},
            )
            for step in steps
        ),
        data["loop"],  # type: ignore[arg-type]
        bool(data["stutters"]),
    )


def _file(entry: Mutant, manifest: Manifest) -> Path:
    mark = hashlib.sha256(f"{_FORMAT} {entry.violates}\n{manifest.config(entry).text()}".encode())
    for path in modules(entry, manifest):
        mark.update(path.read_bytes())
    return paths.cache_directory() / "counterexamples" / f"{entry.name}-{mark.hexdigest()[:16]}.json"
