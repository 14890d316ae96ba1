"""`quiesce report`: everything that is known of the project's correctness, as one page that fetches nothing.

Models and mutants are checked, or taken from `check.json`; each mutant carries the picture of its counterexample, each
small enough model its state graph. Any other result that a subcommand printed with `--json` and that lies in the
results folder becomes a section of tables: mutate.json, edges.json, matrix.json, bench-*.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quiesce.console import FOUND, HOLDS, complete_models, writable
from quiesce.model import command, paths, picture, state_picture
from quiesce.model import manifest as manifests
from quiesce.model.checking import DEFAULT_TIMEOUT
from quiesce.model.errors import ModelError
from quiesce.model.explaining import explain
from quiesce.model.graph import Graph
from quiesce.model.manifest import Manifest
from quiesce.model.oracle import Oracle

Rows = Sequence[Mapping[str, Any]]
CHECK = "check.json"
PAGES = (
    ("Mutation matrix", "mutation.md", "<!-- matrix -->", "<!-- end -->"),
    ("Edge coverage", "conformance.md", "<!-- coverage -->", "<!-- end of coverage -->"),
    ("Memory order", "memory_order.md", "<!-- fence-table: begin .*?-->", "<!-- fence-table: end -->"),
    ("Benchmarks: payload reuse", "performance.md", "<!-- bench payload -->", "<!-- end -->"),
    ("Benchmarks: stage handoff", "performance.md", "<!-- bench stage -->", "<!-- end -->"),
    ("Benchmarks: the model tools", "performance.md", "<!-- bench tools -->", "<!-- end -->"),
)
"""Tables that commands wrote into pages of docs: their heading here, the page, and the marks around them."""


def report(
    page: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the page.", callback=writable)
    ] = Path("report.html"),
    results: Annotated[
        Path | None,
        typer.Option(
            help="A folder of results that subcommands printed with --json.", exists=True, file_okay=False
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Only this model and its mutants, or this mutant; may be repeated.",
            autocompletion=complete_models,
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="TLC processes at a time.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the page says, too, as JSON.")] = False,
) -> None:
    """Write one HTML page: models, mutants and their counterexamples, state graphs, and all results in a folder.

    Without `check.json` in that folder the small models are checked first, which takes minutes. Exits with 0 if all
    that was checked is as pinned, 1 if not, 2 if the page could not be made.
    """
    console = Console(stderr=True, soft_wrap=True)
    manifest = manifests.load()
    checked = _checked(manifest, results, names or [], jobs, console)
    others = dict(_others(results))
    page.write_text(html(manifest, checked, others, console), encoding="utf-8")
    console.print(f"written to {page}", markup=False, highlight=False)
    if as_json:
        print(json.dumps({"check": checked, **others}))
    raise typer.Exit(HOLDS if all(entry["good"] for entry in checked) else FOUND)


def _checked(
    manifest: Manifest, results: Path | None, names: Sequence[str], jobs: int, console: Console
) -> list[dict[str, Any]]:
    entries = command.select(manifest, names, large=False)
    if results is not None and (results / CHECK).is_file():
        wanted = {entry.name for entry in entries}
        return [entry for entry in _read(results / CHECK) if entry["name"] in wanted]
    console.print(f"checking {len(entries)} models and mutants; {CHECK} in --results saves that")
    judgements = command.run(
        manifest, entries, jobs=jobs, timeout=DEFAULT_TIMEOUT, heap=2 << 30, show=not console.quiet
    )
    return [command.as_data(judgement) for judgement in judgements]


def _others(results: Path | None) -> Iterator[tuple[str, Any]]:
    if results is None:
        return
    for path in sorted(results.glob("*.json")):
        if path.name != CHECK:
            yield path.stem, _read(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not the JSON of a subcommand: {error}") from error


# ---------------------------------------------------------------------------------------------------------- the page


def html(manifest: Manifest, checked: Rows, others: Mapping[str, Any], console: Console) -> str:
    """The page: `checked` as `quiesce check --json` prints it, `others` the other results by their name."""
    models = [entry for entry in checked if entry["kind"] == "model"]
    mutants = [entry for entry in checked if entry["kind"] == "mutant"]
    sections = [
        ("Models", _models(manifest, models)),
        ("Mutants", _mutants(manifest, mutants, console)),
        ("State graphs", _graphs(manifest, models)),
        *((_title(name), _tables(found)) for name, found in others.items()),
        *((title, _page(name, begin, end)) for title, name, begin, end in PAGES),
    ]
    shown = [(title, body) for title, body in sections if body]
    good = sum(entry["good"] for entry in checked)
    style = picture.style() + picture.PAGE + state_picture.STYLE + _STYLE
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    protocols = "".join(
        f"<option>{escape(p)}</option>" for p in dict.fromkeys(e["protocol"] for e in checked)
    )
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title, _ in shown)
    body = "".join(
        f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>{text}</section>' for title, text in shown
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>quiesce: report</title><style>{style}</style></head>"
        f"<body><h1>quiesce: report</h1><p>{good} of {len(checked)} models and mutants are as pinned. Made {made}.</p>"
        f'<nav>{links}</nav><form id="filters"><input id="text" type="search" placeholder="Filter rows" '
        f'aria-label="Filter rows"><select id="protocol" aria-label="Protocol"><option value="">every protocol</option>'
        f'{protocols}</select><label><input id="bad" type="checkbox"> only what is wrong</label></form>'
        f"{body}<script>{_SCRIPT}</script></body></html>"
    )


def _models(manifest: Manifest, models: Rows) -> str:
    rows = []
    for entry in models:
        taken = "".join(f"<li>{escape(name)}: {count}</li>" for name, count in entry["coverage"].items())
        coverage = f"<details><summary>{len(entry['coverage'])}</summary><ul>{taken}</ul></details>"
        cells = [
            f"<code>{escape(entry['name'])}</code>",
            _verdict(entry),
            escape(manifest.models[entry["name"]].proves),
            f"{entry['distinct']:,}",
            str(entry["depth"]),
            f"{entry['seconds']:.1f}",
            coverage,
        ]
        rows.append(_row(cells, entry))
    return _table(("model", "verdict", "what it proves", "states", "depth", "seconds", "actions taken"), rows)


def _mutants(manifest: Manifest, mutants: Rows, console: Console) -> str:
    rows = []
    for number, entry in enumerate(mutants, 1):
        name = entry["name"]
        console.print(f"picture {number} of {len(mutants)}: {name}", markup=False, highlight=False)
        mutant = manifest.mutants[name]
        steps = len(entry["counterexample"]["steps"]) if entry["counterexample"] else 0
        figure = ""
        if entry["good"]:
            explained = explain(name, manifest=manifest)
            guards = "".join(
                f"<pre>{escape(str(line))}  {escape(line.text)}</pre>" for line in explained.spec
            )
            figure = (
                f"<details><summary>{escape(mutant.bug)}</summary><p>{escape(explained.happening)}</p>"
                f"{_zoomable(picture.svg(explained))}<p>The guard that is left out:</p>{guards}</details>"
            )
        cells = [
            f"<code>{escape(name)}</code>",
            _verdict(entry),
            figure or escape(mutant.bug),
            escape(mutant.violates),
            str(steps),
            f"{entry['seconds']:.1f}",
        ]
        rows.append(_row(cells, entry))
    return _table(("mutant", "verdict", "the bug it reproduces", "violates", "steps", "seconds"), rows)


def _verdict(entry: Mapping[str, Any]) -> str:
    if not entry["good"]:
        return f'<span class="wrong">{escape("; ".join(entry["problems"]))}</span>'
    return '<span class="right">' + ("holds" if entry["kind"] == "model" else "caught") + "</span>"


def _graphs(manifest: Manifest, models: Rows) -> str:
    found = ""
    for entry in models:
        if 0 < entry["distinct"] <= state_picture.LARGEST and entry["good"]:
            graph = Graph.explore(Oracle.load(entry["name"], manifest=manifest))
            title = f"{entry['name']}: {len(graph.states)} states, {len(graph.edges)} edges"
            drawn = state_picture.svg(graph, title)
            found += f"<details><summary>{escape(title)}</summary>{_zoomable(drawn)}</details>"
    return found


def _zoomable(figure: str) -> str:
    buttons = "".join(
        f'<button type="button" data-zoom="{step}" aria-label="{name}">{sign}</button>'
        for step, name, sign in (("0.8", "smaller", "-"), ("1.25", "larger", "+"), ("0", "as it was", "1:1"))
    )
    return f'<figure><div class="zoom">{buttons}</div><div class="scroll">{figure}</div></figure>'


def _page(name: str, begin: str, end: str) -> str:
    """What a command wrote between two marks of a page of docs, which is in a source tree only."""
    tree = paths.source_tree()
    path = tree / "docs" / name if tree else None
    if path is None or not path.is_file():
        return ""
    marked = re.search(f"{begin}(.*?){end}", path.read_text("utf-8"), re.S)
    if marked is None:
        raise ModelError(f"{path} has nothing between {begin} and {end}; the command it names writes that")
    return "".join(_markdown(block) for block in marked[1].strip().split("\n\n"))


def _markdown(block: str) -> str:
    """A heading, a table or a paragraph: all there is between the markers."""
    lines = block.split("\n")
    if block.startswith("#"):
        return f"<h3>{_inline(block.lstrip('# '))}</h3>"
    if not block.startswith("|"):
        return f"<p>{_inline(block)}</p>"
    cells = [[_inline(cell.strip()) for cell in line.strip("|").split("|")] for line in lines]
    return _table(cells[0], [_row(row, {}) for row in cells[2:]])


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _tables(found: Any, title: str = "") -> str:
    """Whatever a subcommand printed: lists of flat mappings as tables, mappings by their names, the rest as text."""
    heading = f"<h3>{escape(title)}</h3>" if title else ""
    if isinstance(found, list) and found and all(isinstance(item, dict) for item in found):
        rows = [_flat(item) for item in found]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        cells = [_row([escape(_cell(row.get(name, ""))) for name in columns], row) for row in rows]
        return heading + _table([escape(name) for name in columns], cells)
    if isinstance(found, dict) and any(isinstance(item, (dict, list)) for item in found.values()):
        plain = {name: item for name, item in found.items() if not isinstance(item, (dict, list))}
        nested = {name: item for name, item in found.items() if name not in plain}
        first = _tables([plain]) if plain else ""
        return heading + first + "".join(_tables(item, name) for name, item in nested.items())
    if isinstance(found, dict):
        return heading + _tables([found])
    return heading + f"<p>{escape(_cell(found))}</p>"


def _flat(item: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in item.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "" if value is None else str(value)


def _table(headings: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _row(cells: Sequence[str], entry: Mapping[str, Any]) -> str:
    marks = f' data-protocol="{escape(entry["protocol"])}"' if "protocol" in entry else ""
    marks += f' data-good="{str(bool(entry["good"])).lower()}"' if "good" in entry else ""
    return f"<tr{marks}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _title(name: str) -> str:
    return name.replace("-", " ").replace("_", " ").capitalize()


def _anchor(title: str) -> str:
    return re.sub("[^a-z]+", "-", title.lower())


_STYLE = """
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0 1rem; } a { color: inherit; }
form { position: sticky; top: 0; display: flex; flex-wrap: wrap; gap: .5rem 1rem; padding: .5rem 0; z-index: 1;
  background: var(--paper); border-bottom: 1px solid var(--line); align-items: center; }
input, select, button { font: inherit; color: inherit; background: var(--code); border: 1px solid var(--line);
  border-radius: 4px; padding: .15rem .5rem; max-width: 100%; } h2 { margin: 2rem 0 .5rem; font-size: 1.2rem; }
h3 { margin: 1rem 0 .25rem; font-size: 1rem; } th { text-align: left; padding-right: .75rem; color: var(--dim); }
section { scroll-margin-top: 3rem; } .right { color: var(--good); } .wrong { color: var(--bad); font-weight: 700; }
td:nth-child(3) { min-width: 13rem; } figure { margin: .5rem 0; }
figure .scroll { max-height: 80vh; max-width: min(56rem, 80vw); overflow: auto; } .zoom { display: flex; gap: .25rem; }
"""
_SCRIPT = """
const text = document.getElementById('text'), protocol = document.getElementById('protocol'),
  bad = document.getElementById('bad');
function filter() {
  const wanted = text.value.toLowerCase();
  for (const row of document.querySelectorAll('tbody tr')) {
    const about = row.dataset.protocol;
    row.hidden = !row.textContent.toLowerCase().includes(wanted)
      || (protocol.value !== '' && about !== undefined && about !== protocol.value)
      || (bad.checked && row.dataset.good !== 'false');
  }
}
for (const control of [text, protocol, bad]) control.addEventListener('input', filter);
document.getElementById('filters').addEventListener('submit', event => event.preventDefault());
document.addEventListener('click', event => {
  const step = event.target.dataset && event.target.dataset.zoom;
  if (step === undefined) return;
  const drawn = event.target.closest('figure').querySelector('svg'), [, , width, height] =
    drawn.getAttribute('viewBox').split(' ').map(Number);
  const scale = Number(step) ? Number(step) * drawn.getAttribute('width') / width : 1;
  drawn.setAttribute('width', scale * width);
  drawn.setAttribute('height', scale * height);
});
"""
