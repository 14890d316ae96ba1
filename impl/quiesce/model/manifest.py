"""The models and mutants of the project, as `spec/models/manifest.toml` pins them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quiesce.model.config import Config
from quiesce.model.errors import ModelError, UnknownName
from quiesce.model.output import CheckResult
from quiesce.model.paths import spec_directory

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEADLOCK = "Deadlock"
SMALL, LARGE = "small", "large"


@dataclass(frozen=True)
class Model:
    """One run of TLC that must hold: a module and a configuration, with the numbers it is pinned to."""

    name: str
    protocol: str
    module: str
    config: str
    proves: str
    distinct: int | None = None
    depth: int | None = None
    size: str = SMALL
    set: Mapping[str, str] = field(default_factory=dict)
    untaken: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Mutant:
    """One named fault switched on in a model, and the violation that TLC must report."""

    name: str
    protocol: str
    model: str
    bug: str
    violates: str
    depth: int | None = None
    set: Mapping[str, str] = field(default_factory=dict)

    @property
    def overrides(self) -> dict[str, str]:
        """The constants it overrides: `Fault`, which is its name unless `set` says otherwise, and those of `set`."""
        return {"Fault": f'"{self.name}"', **self.set}


@dataclass(frozen=True)
class Manifest:
    """All models and mutants, and the directory their modules and configurations are in."""

    models: Mapping[str, Model]
    mutants: Mapping[str, Mutant]
    directory: Path
    path: Path

    @property
    def libraries(self) -> list[Path]:
        """The directories that modules are looked for in."""
        specs = spec_directory()
        return list(dict.fromkeys([self.directory, self.directory.parent, specs, specs / "models"]))

    def find(self, name: str) -> Model | Mutant:
        """The model or mutant of that name."""
        known: dict[str, Model | Mutant] = {**self.mutants, **self.models}
        if name not in known:
            raise UnknownName("model or mutant", name, known)
        return known[name]

    def model(self, name: str) -> Model:
        """The model of that name, or the model that the mutant of that name is switched on in."""
        entry = self.find(name)
        return entry if isinstance(entry, Model) else self.models[entry.model]

    def config(self, entry: Model | Mutant) -> Config:
        """The configuration a run of this entry uses."""
        model = self.models[entry.model] if isinstance(entry, Mutant) else entry
        path = self.directory / model.config
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"model {model.name}: cannot read {path}: {error.strerror}") from error
        config = Config.parse(text, path.name).override(model.set)
        if isinstance(entry, Mutant):
            config = config.override(entry.overrides)
            config = config.only(None if entry.violates == DEADLOCK else entry.violates)
        return config


def load(path: str | Path | None = None) -> Manifest:
    """Read and validate a manifest; the project's own if no path is given."""
    # TLC runs in a directory of its own, where a relative path would lead elsewhere.
    path = Path(path).resolve() if path is not None else spec_directory() / "models" / "manifest.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"cannot read the manifest {path}: {error.strerror}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelError(f"{path} is not TOML: {error}") from error
    for key in data:
        if key not in ("model", "mutant"):
            raise ModelError(f"{path}: {UnknownName('table', key, ('model', 'mutant'))}")
    models = {entry.name: entry for entry in _entries(data, "model", Model, path)}
    mutants = {entry.name: entry for entry in _entries(data, "mutant", Mutant, path)}
    for name in models.keys() & mutants.keys():
        raise ModelError(f"{path}: {name!r} is both a model and a mutant")
    for model in models.values():
        if model.size not in (SMALL, LARGE):
            raise ModelError(
                f"{path}: model {model.name}: size is {model.size!r}; it must be 'small' or 'large'"
            )
    for mutant in mutants.values():
        if mutant.model not in models:
            raise ModelError(f"{path}: mutant {mutant.name}: {UnknownName('model', mutant.model, models)}")
    return Manifest(models, mutants, path.parent, path)


def _entries(data: Mapping[str, Any], kind: str, cls: Any, path: Path) -> list[Any]:
    found: list[Any] = []
    tables = data.get(kind, [])
    if not isinstance(tables, list):
        raise ModelError(f"{path}: write [[{kind}]], with two brackets, for each {kind}")
    for number, table in enumerate(tables, 1):
        where = f"{path}: {kind} {table.get('name', f'number {number}')}"
        found.append(_entry(table, cls, where))
        if sum(entry.name == found[-1].name for entry in found) > 1:
            raise ModelError(f"{where}: there are two of that name")
    return found


_TYPES = {
    "distinct": (int, "a number"),
    "depth": (int, "a number"),
    "set": (dict, "a table"),
    "untaken": (dict, "a table"),
}


def _entry(table: Mapping[str, Any], cls: Any, where: str) -> Any:
    known = {item.name for item in fields(cls)}
    optional = {"distinct", "depth", "size", "set", "untaken"}
    for key, value in table.items():
        if key not in known:
            raise ModelError(f"{where}: {UnknownName('key', key, known)}")
        expected, wanted = _TYPES.get(key, (str, "a string"))
        if not isinstance(value, expected) or isinstance(value, bool):
            raise ModelError(f"{where}: {key} = {value!r}, but it must be {wanted}")
        if isinstance(value, dict):
            for name, text in value.items():
                if not isinstance(text, str) or not text.strip():
                    raise ModelError(
                        f"{where}: {key}.{name} = {text!r}, but it must be a string that says something"
                    )
    for key in sorted(known - optional - table.keys()):
        raise ModelError(f"{where}: {key} is missing")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", table["name"]):
        raise ModelError(f"{where}: names are snake case")
    return cls(**table)


def pin(manifest: Manifest, results: Mapping[str, CheckResult]) -> None:
    """Write the numbers of these runs into the manifest's file; its layout and comments stay as they are."""
    lines = manifest.path.read_text(encoding="utf-8").split("\n")
    for name, result in results.items():
        entry = manifest.find(name)
        steps = len(result.counterexample.steps) if result.counterexample else 0
        if isinstance(entry, Model) and result.holds:
            numbers = {"distinct": result.distinct, "depth": result.depth}
        elif isinstance(entry, Mutant) and result.violated == entry.violates:
            numbers = {"depth": steps}
        else:
            continue
        _pin(lines, name, numbers)
    manifest.path.write_text("\n".join(lines), encoding="utf-8")


def _pin(lines: list[str], name: str, numbers: Mapping[str, int]) -> None:
    title = re.compile(rf'\s*name\s*=\s*["\']{re.escape(name)}["\']')
    start = next(index for index, line in enumerate(lines) if title.match(line))
    for key, number in numbers.items():
        end = next((i for i in range(start, len(lines)) if lines[i].lstrip().startswith("[")), len(lines))
        for index in range(start, end):
            if match := re.match(rf"(\s*{key}\s*=\s*)[\d_]+", lines[index]):
                lines[index] = f"{match[1]}{number}{lines[index][match.end() :]}"
                break
        else:
            last = max(
                i for i in range(start, end) if lines[i].strip() and not lines[i].lstrip().startswith("#")
            )
            lines.insert(last + 1, f"{key} = {number}")
