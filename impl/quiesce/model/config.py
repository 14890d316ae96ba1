"""TLC configuration files, read and rewritten: constants overridden, checks left out, comments kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quiesce.model.errors import ModelError, UnknownName

_SECTIONS = {
    "CONSTANT": "constant",
    "CONSTANTS": "constant",
    "INVARIANT": "invariant",
    "INVARIANTS": "invariant",
    "PROPERTY": "property",
    "PROPERTIES": "property",
    "INIT": "init",
    "NEXT": "next",
    "SPECIFICATION": "specification",
    "CONSTRAINT": "constraint",
    "CONSTRAINTS": "constraint",
    "ACTION_CONSTRAINT": "action_constraint",
    "ACTION_CONSTRAINTS": "action_constraint",
    "SYMMETRY": "symmetry",
    "VIEW": "view",
    "TYPE": "type",
    "TYPE_CONSTRAINT": "type_constraint",
}
_TOKEN = re.compile(r'\\\*[^\n]*|\(\*.*?\*\)|"(?:[^"\\]|\\.)*"|<-|\w+|[^\s\w]', re.DOTALL)


@dataclass(frozen=True)
class Config:
    """What a .cfg file says: `constants` as name -> "= value" or "<- operator", all else as names."""

    constants: Mapping[str, str]
    names: Mapping[str, tuple[str, ...]]

    @classmethod
    def parse(cls, text: str, source: str = "the configuration") -> Config:
        """Read the text of a .cfg file."""
        tokens = [token for token in _TOKEN.findall(text) if not token.startswith(("\\*", "(*"))]
        constants: dict[str, str] = {}
        names: dict[str, list[str]] = {}
        section = ""
        body: list[str] = []

        def close() -> None:
            if section == "constant":
                constants.update(_constants(body, source))
            elif section:
                names.setdefault(section, []).extend(token for token in body if token != ",")
            elif body:
                raise ModelError(
                    f"{source} begins with {body[0]!r}, not with a keyword such as SPECIFICATION"
                )
            body.clear()

        for token in tokens:
            if token in _SECTIONS:
                close()
                section = _SECTIONS[token]
            else:
                body.append(token)
        close()
        return cls(constants, {kind: tuple(found) for kind, found in names.items()})

    @property
    def invariants(self) -> tuple[str, ...]:
        """The invariants to be checked, in the order of the file."""
        return self.names.get("invariant", ())

    @property
    def properties(self) -> tuple[str, ...]:
        """The temporal properties to be checked, in the order of the file."""
        return self.names.get("property", ())

    def override(self, values: Mapping[str, str]) -> Config:
        """The same with assigned constants set to other TLA+ texts, or to "<- Operator"."""
        for name in values:
            if name not in self.constants:
                raise UnknownName("constant of the configuration", name, self.constants)
        changed = {name: value if value.startswith("<-") else f"= {value}" for name, value in values.items()}
        return replace(self, constants={**self.constants, **changed})

    def only(self, checked: str | None) -> Config:
        """The same with one invariant or property left; None leaves none, for a run after deadlocks."""
        if checked is not None and checked not in self.invariants + self.properties:
            raise UnknownName(
                "invariant or property of the configuration", checked, self.invariants + self.properties
            )
        kept = {"invariant", "property"}
        names = {
            kind: tuple(name for name in found if kind not in kept or name == checked)
            for kind, found in self.names.items()
        }
        return replace(self, names=names)

    def without(self, sections: Iterable[str]) -> Config:
        """The same without whole sections, such as "symmetry" and "view"."""
        dropped = set(sections)
        return replace(self, names={kind: found for kind, found in self.names.items() if kind not in dropped})

    def text(self) -> str:
        """The text of a .cfg file that says this."""
        lines = [f"CONSTANT {name} {value}" for name, value in self.constants.items()]
        lines += [f"{kind.upper()} {name}" for kind, found in self.names.items() for name in found]
        return "\n".join(lines) + "\n"


def _constants(body: list[str], source: str) -> dict[str, str]:
    found: dict[str, str] = {}
    starts = [index for index, token in enumerate(body) if token in ("=", "<-")]
    for number, start in enumerate(starts):
        if start == 0 or not re.fullmatch(r"\w+", body[start - 1]):
            raise ModelError(f"{source}: no constant stands before {' '.join(body[start : start + 3])!r}")
        end = starts[number + 1] - 1 if number + 1 < len(starts) else len(body)
        value = body[start + 1 : end]
        if not value:
            raise ModelError(f"{source}: the constant {body[start - 1]} has no value")
        found[body[start - 1]] = f"{body[start]} {_join(value)}"
    if body and not starts:
        raise ModelError(f"{source}: CONSTANT {' '.join(body)} assigns nothing")
    return found


def _join(tokens: list[str]) -> str:
    text = " ".join(tokens)
    return re.sub(r"- (?=\d)", "-", text)
