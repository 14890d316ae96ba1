"""What became of the mutants that `quiesce mutate` made, kept in the source tree and shown in docs/mutation.md."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quiesce.model.counterexamples import meaning
from quiesce.model.errors import ModelError
from quiesce.model.manifest import Manifest, Model
from quiesce.model.mutation import PROTOCOLS, Fate, Key, Trial, held_against, reasons
from quiesce.model.paths import source_tree

_MARKED = re.compile(r"<!-- score -->\n.*?<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Kept:
    """A trial as it is kept: `models` is a digest of the models that it says something of, as they were then."""

    protocol: str
    module: str
    action: str
    guard: str
    fate: Fate
    by: str
    models: str

    @property
    def key(self) -> Key:
        """That of the guard."""
        return self.module, self.action, self.guard

    @property
    def killer(self) -> str:
        """The model that killed the mutant; "" if none did."""
        return self.by.partition(":")[0]


def path() -> Path:
    """The file that results are kept in. Raises `ModelError` where there is no source tree."""
    tree = source_tree()
    if tree is None:
        raise ModelError("results are kept in docs/mutation_guards.json: run this in a checkout of quiesce")
    return tree / "docs" / "mutation_guards.json"


def read() -> list[Kept]:
    """What is kept, also of specifications that have changed since."""
    return [Kept(**entry) for entry in json.loads(path().read_text("utf-8"))] if path().is_file() else []


class Score:
    """What is kept of the protocols' guards, held against the specifications as they are."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._reasons = reasons(manifest)
        self._digests: dict[str, str] = {}

    def valid(self, kept: Kept) -> bool:
        """Whether the models are still those that the result was had with; one without an answer needs a reason."""
        answered = kept.fate != "undetermined" or kept.key in self._reasons
        return answered and kept.models == self._digest(kept.protocol, kept.key, kept.killer)

    def kept(self, protocol: str, trial: Trial) -> Kept:
        """The trial as it is kept."""
        killer = trial.by.partition(":")[0]
        digest = self._digest(protocol, trial.guard.key, killer)
        return Kept(protocol, *trial.guard.key, trial.fate, trial.by, digest)

    def _digest(self, protocol: str, key: Key, killer: str) -> str:
        """Of the model that killed, which nothing else can undo, or of all that did not."""
        mark = hashlib.sha256()
        for model in held_against(key, protocol, self._manifest):
            if killer in ("", model.name):
                mark.update(self._of(model).encode())
        return mark.hexdigest()[:16]

    def _of(self, model: Model) -> str:
        """Of its configuration and its modules, but for comments and blanks."""
        if model.name not in self._digests:
            both = f"{self._manifest.config(model).text()}\n{meaning(model, self._manifest)}"
            self._digests[model.name] = hashlib.sha256(both.encode()).hexdigest()
        return self._digests[model.name]


def write(protocol: str, guards: Iterable[Key], found: Iterable[Kept], explained: Mapping[Key, str]) -> None:
    """Keep what was found of a protocol, drop guards that are no more, and bring docs/mutation.md up to date."""
    known = read()
    mine = {kept.key: kept for kept in known if kept.protocol == protocol}
    mine.update({kept.key: kept for kept in found})
    rows = [kept for kept in known if kept.protocol != protocol] + [
        mine[key] for key in guards if key in mine
    ]
    rows.sort(key=lambda kept: PROTOCOLS.index(kept.protocol))
    path().write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n", "utf-8")
    page = path().with_name("mutation.md")
    page.write_text(rewritten(page.read_text("utf-8"), rows, explained), "utf-8")


def rewritten(page: str, rows: Sequence[Kept], explained: Mapping[Key, str]) -> str:
    """The page with the score and the survivors of these between its marks."""
    return _MARKED.sub(lambda _: f"<!-- score -->\n\n{table(rows, explained)}\n\n<!-- end -->", page)


def table(rows: Sequence[Kept], explained: Mapping[Key, str]) -> str:
    """The score of each protocol, and every survivor with its reason, as Markdown."""
    lines = [
        "| protocol | tried | killed | survive: the same states | survive: more states | no answer |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    fates: tuple[Fate, ...] = ("killed", "same", "weaker", "undetermined")
    for protocol in PROTOCOLS:
        those = [row.fate for row in rows if row.protocol == protocol]
        if those:
            lines.append(f"| {protocol} | {len(those)} | {' | '.join(str(those.count(f)) for f in fates)} |")
    lines += ["", "| action | guard | states | why it stands |", "|---|---|---|---|"]
    for row in rows:
        if row.fate != "killed":
            guard, why = (
                text.replace("|", "\\|") for text in (row.guard, explained.get(row.key, "not explained"))
            )
            lines.append(f"| {row.action} | `{guard}` | {_STATES[row.fate]} | {why} |")
    return "\n".join(lines)


_STATES = {"same": "the same", "weaker": "more", "undetermined": "no answer"}
