"""What pages quote: text of the specifications, and the table of names, brought up to date in place.

`python -m quiesce.model.pages docs` (`make pages`) rewrites what stands between marks, and a test fails if that would
change anything. The marks are comments of Markdown:

    <!-- spec: PayloadReuse Settled, Recycle -->   definitions of a module; `rules` is the list in its header
    <!-- glossary -->                              the table spec | trace | code
    <!-- guards: last_frame_tracker, ... -->       what each mutant breaks, and the guard it leaves out

each up to the next `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from quiesce.model import guard_lines, manifest
from quiesce.model.errors import ModelError, UnknownName
from quiesce.model.paths import spec_directory

PROTOCOLS = {
    "payload_reuse": "PayloadReuse",
    "broadcast_ring": "BroadcastRing",
    "stage_handoff": "StageHandoff",
    "host_staging": "HostStaging",
}
"""The protocols with code, and their specifications."""

_MARK = re.compile(r"<!-- (spec: (\w+) ([^>]+?)|guards: ([^>]+?)|glossary) -->\n.*?<!-- end -->", re.DOTALL)


def rewritten(page: str) -> str:
    """The page with everything between marks as it ought to be. `ModelError` for what no specification has."""

    def replaced(match: re.Match[str]) -> str:
        if match[1] == "glossary":
            body = glossary()
        elif match[4]:
            body = guards([name.strip() for name in match[4].split(",")])
        else:
            body = (
                "```tla\n"
                + "\n\n".join(excerpt(match[2], name.strip()) for name in match[3].split(","))
                + "\n```"
            )
        return f"<!-- {match[1]} -->\n\n{body}\n\n<!-- end -->"

    return _MARK.sub(replaced, page)


def excerpt(module: str, name: str) -> str:
    """A definition of a module with the comment above it, or its `rules`."""
    text = _module(module)
    if name == "rules":
        lines = [line.removeprefix("(*").removesuffix("*)").rstrip()[1:] for line in text.splitlines()]
        first = next((i for i, line in enumerate(lines) if line.rstrip().endswith("Rules:")), None)
        if first is None:
            raise ModelError(f"the header of {module} lists no rules")
        rest = lines[first + 1 :]
        last = next((i for i, line in enumerate(rest) if not line.startswith("  ")), len(rest))
        return "\n".join(line[2:].rstrip() for line in rest[:last])
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if re.match(rf"{name}(?:\(.*?\))?\s*==", line)), None)
    if start is None:
        raise ModelError(f"{module} defines no {name}")
    stop = start + 1
    while stop < len(lines) and (lines[stop].startswith(" ") or not lines[stop].strip()):
        stop += 1
    while start and lines[start - 1].startswith("\\*"):
        start -= 1
    return "\n".join(lines[start:stop]).rstrip()


def actions_of(module: str) -> list[str]:
    """The actions in the next-state relation of a specification, in its order."""

    def disjuncts(name: str) -> list[str]:
        body = re.search(rf"^{name}(?:\(.*?\))? ==[ \n]((?:[ ].*\n|\\/.*\n)+)", text, re.MULTILINE)
        if body is None or not body[1].lstrip().startswith("\\/"):
            return [name]
        terms = (line.strip().removeprefix("\\/") for line in body[1].splitlines())
        names = (term.split(":")[-1].strip().partition("(")[0] for term in terms)
        return [found for inner in names for found in disjuncts(inner)]

    text = _module(module)
    return list(dict.fromkeys(disjuncts("Next")))


def glossary() -> str:
    """The table of names: in the specification, in a recorded trace, in the code."""
    lines = ["| specification | trace | code |", "|---|---|---|"]
    for protocol, module in PROTOCOLS.items():
        code = guard_lines.actions(protocol)
        lines.append(f"| **{module}** | | |")
        for name in actions_of(module):
            base = re.sub(r"^(?:Begin|End)(?=[A-Z])", "", name)
            implemented = name if name in code else base
            if implemented not in code:
                lines.append(f"| `{name}` | | (none) |")
                continue
            event = (
                f"`{implemented}`"
                if implemented == name
                else f"`{implemented}`, {name.removesuffix(base).lower()}"
            )
            room, symbol = code[implemented]
            lines.append(f"| `{name}` | {event} | `quiesce.{room}`: `{symbol}` |")
    return "\n".join(lines)


def guards(mutants: list[str]) -> str:
    """A table of mutants: the property each violates, where the specification has the guard, and the line of code."""
    known = manifest.load()
    lines = [
        "| violated | mutant | guard in the specification | the same guard in the code |",
        "|---|---|---|---|",
    ]
    for name in mutants:
        mutant = known.mutants.get(name)
        if mutant is None:
            raise UnknownName("mutant", name, known.mutants)
        spec, code = guard_lines.in_spec(mutant, known)[0], guard_lines.in_code(mutant, known)
        there = guard_lines.NO_CODE.get(guard_lines.fault_of(mutant), "")
        if code is not None:
            entry = guard_lines.CODE.get(guard_lines.fault_of(mutant), "")
            text = (entry.partition(": ")[2] or code.text).replace("|", "\\|")
            # A label names the line by itself, whatever else stands there.
            text = "" if code.symbol.startswith("SYNC(") else f": `{text}`"
            there = f"`{Path(code.path).name}`, `{code.symbol}`{text}"
        lines.append(
            f"| `{mutant.violates}` | `{name}` | `{Path(spec.path).name}`, `{spec.symbol}` | {there} |"
        )
    return "\n".join(lines)


def _module(name: str) -> str:
    path = spec_directory() / f"{name}.tla"
    if not path.is_file():
        raise ModelError(f"there is no specification {name}")
    return path.read_text(encoding="utf-8")


def main(folder: str) -> None:
    """Bring all pages of a folder up to date."""
    for page in sorted(Path(folder).glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (new := rewritten(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page}: brought up to date")


if __name__ == "__main__":
    main(*sys.argv[1:])
