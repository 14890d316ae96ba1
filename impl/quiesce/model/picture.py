"""An explanation as text for the terminal, as SVG, and as an HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quiesce.model.explaining import BROKEN, INTACT, PROMISED, Bar, Explanation
from quiesce.model.guard_lines import Line

_BAR_CHARACTERS = 16
_STYLES = {BROKEN: "bold red", INTACT: "green"}
_MARKS = {
    PROMISED: ("┊", "promised, not there yet"),
    INTACT: ("┃", "there, and may be read"),
    BROKEN: ("✗", "overwritten or not the one promised, and may be read"),
}


def in_terminal(explanation: Explanation, changes: bool = False, width: int = 120) -> RenderableType:
    """The lanes, a column for each memory and reader, and below them what it means; with `changes`, also those.

    Where the lanes do not fit into `width` characters, a column says who acts instead.
    """
    item = explanation
    lanes = _fits(item, width - (40 if changes else 0))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title=f"{item.mutant.name}")
    table.add_column("step", justify="right", no_wrap=True)
    for heading in item.lanes if lanes else ("who", "does"):
        table.add_column(heading, min_width=8 if lanes else 16)
    for bar in item.bars:
        heading = f"{bar.memory} may be read by {bar.reader}"
        table.add_column(heading, max_width=_BAR_CHARACTERS if lanes else 8)
    if changes:
        table.add_column("what changed", style="dim")
    for number, row in enumerate(item.rows):
        mark = "bold red" if number in item.marked else ""
        cells = [Text(f"{number + 1}", mark)]
        if lanes:
            for lane in item.lanes:
                mine = row.lane == lane
                cells.append(Text(row.label if mine else "│", (mark or "bold") if mine else "dim"))
        else:
            cells += [Text(row.lane, mark), Text(row.label, mark or "bold")]
        cells += [_cell(bar, number) for bar in item.bars]
        if changes:
            cells.append(Text("\n".join(row.changes)))
        table.add_row(*cells)
    loop = _goes_on(item)
    shown = {cell[0] for bar in item.bars for cell in bar.cells if cell}
    legend = "; ".join(f"{mark} {text}" for state, (mark, text) in _MARKS.items() if state in shown)
    lines = [
        *([Text(loop, "dim")] if loop else []),
        *([Text(legend, "dim")] if legend else []),
        Text.assemble(("what happens  ", "bold"), item.happening),
        Text.assemble(("the bug       ", "bold"), item.cause),
        Text.assemble(("what breaks   ", "bold"), item.consequence),
        *(Text.assemble(("guard         ", "bold"), f"{line}  ", (line.text, "cyan")) for line in item.spec),
        Text.assemble(("in the code   ", "bold"), *_code(item.code, item.elsewhere)),
    ]
    return Group(table, *lines)


def _fits(item: Explanation, width: int) -> bool:
    needed = 7 + (_BAR_CHARACTERS + 3) * len(item.bars)
    for lane in item.lanes:
        needed += 3 + max(len(lane), *(len(row.label) for row in item.rows if row.lane == lane))
    return needed <= width


def _code(line: Line | None, elsewhere: str) -> Iterator[str | tuple[str, str]]:
    if line is None:
        yield elsewhere
    else:
        yield f"{line}  {line.symbol}  "
        yield line.text, "cyan"


def _cell(bar: Bar, number: int) -> Text:
    cell = bar.cells[number]
    return Text("") if cell is None else Text(_shown(cell[0], cell[1]), _STYLES.get(cell[0], "dim"))


def _shown(state: str, version: object) -> str:
    what = "" if version == -1 else f" {version!r}"
    return f"{_MARKS[state][0]}{what}"


def _goes_on(item: Explanation) -> str:
    if item.trace.stutters:
        return "… and then nothing, for ever"
    return "" if item.trace.loop is None else f"… and back to step {item.trace.loop + 1}, for ever"


# ------------------------------------------------------------------------------------------------------- as SVG

_LANE, _BAR, _ROW, _TOP, _LEFT = 168, 124, 28, 64, 44  # pixels

_CSS = """
:root { color-scheme: light dark; --ink: #1d2430; --dim: #6b7585; --line: #c9d0da; --paper: #ffffff; --bad: #c0262d;
  --good: #2b7d55; --wash: #e7f3ec; --alarm: #fbe3e4; --code: #f3f5f8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ef; --dim: #98a3b3; --line: #3a4453; --paper: #14181f;
  --bad: #ff8589; --good: #7ad0a4; --wash: #1d3328; --alarm: #451d20; --code: #1e242d; } }
.quiesce-figure text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: var(--ink); }
.quiesce-figure .dim { fill: var(--dim); } .quiesce-figure .bad { fill: var(--bad); font-weight: 700; }
.quiesce-figure .head { font-weight: 700; } .quiesce-figure .life { stroke: var(--line); }
.quiesce-figure .act { fill: var(--paper); stroke: var(--line); } .quiesce-figure .act.marked { stroke: var(--bad); }
.quiesce-figure .strip { fill: var(--alarm); } .quiesce-figure .promised { fill: none; stroke: var(--dim);
  stroke-dasharray: 3 3; } .quiesce-figure .intact { fill: var(--wash); stroke: var(--good); }
.quiesce-figure .broken { fill: var(--alarm); stroke: var(--bad); }
"""
"""The style of the figures; whoever puts `svg` into a page puts this into it once."""


def style() -> str:
    """The style sheet that figures need, for light and dark."""
    return _CSS


def svg(explanation: Explanation) -> str:
    """The figure: lanes from the left, time downwards, a bar for each memory and reader at the right."""
    item = explanation
    lanes_end = _LEFT + _LANE * len(item.lanes)
    width = lanes_end + _BAR * len(item.bars) + 12
    height = _TOP + _ROW * (len(item.rows) + bool(_goes_on(item))) + 12
    parts = [
        f'<svg class="quiesce-figure" role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{escape(item.mutant.name)}: {escape(item.happening)}</title>'
    ]
    for number in item.marked:
        parts.append(
            f'<rect class="strip" x="0" y="{_TOP + _ROW * number}" width="{width}" height="{_ROW}" rx="4"/>'
        )
    for column, lane in enumerate(item.lanes):
        x = _LEFT + _LANE * column + _LANE // 2
        parts.append(f'<text class="head" x="{x}" y="36" text-anchor="middle">{escape(lane)}</text>')
        parts.append(f'<line class="life" x1="{x}" y1="46" x2="{x}" y2="{_TOP + _ROW * len(item.rows)}"/>')
    for column, bar in enumerate(item.bars):
        parts += _svg_bar(bar, lanes_end + _BAR * column)
    for number, row in enumerate(item.rows):
        y = _TOP + _ROW * number
        marked = number in item.marked
        parts.append(
            f'<text class="{"bad" if marked else "dim"}" x="34" y="{y + 18}" text-anchor="end">{number + 1}</text>'
        )
        if row.lane not in item.lanes:
            parts.append(f'<text class="dim" x="{_LEFT + 6}" y="{y + 18}">{escape(row.label)}</text>')
            continue
        x = _LEFT + _LANE * item.lanes.index(row.lane)
        parts.append(
            f'<g><rect class="act{" marked" if marked else ""}" x="{x + 4}" y="{y + 3}" width="{_LANE - 8}" '
            f'height="{_ROW - 6}" rx="4"/>'
            f'<text class="{"bad" if marked else ""}" x="{x + _LANE // 2}" y="{y + 18}" text-anchor="middle">'
            f"{escape(_cut(row.label, 25))}</text>"
            f"<title>{escape(chr(10).join([row.label, *row.changes]))}</title></g>"
        )
    if loop := _goes_on(item):
        y = _TOP + _ROW * len(item.rows) + 18
        parts.append(f'<text class="dim" x="{_LEFT + 6}" y="{y}">{escape(loop)}</text>')
    return "".join([*parts, "</svg>"])


def _svg_bar(bar: Bar, x: int) -> Iterator[str]:
    middle = x + _BAR // 2
    yield f'<text class="head" x="{middle}" y="20" text-anchor="middle">{escape(bar.memory)}</text>'
    yield f'<text class="dim" x="{middle}" y="36" text-anchor="middle">{escape(_cut(bar.reader, 20))}</text>'
    yield f'<text class="dim" x="{middle}" y="50" text-anchor="middle">may read</text>'
    start = 0
    while start < len(bar.cells):
        cell, stop = bar.cells[start], start + 1
        while stop < len(bar.cells) and bar.cells[stop] == cell:
            stop += 1
        if cell is not None:
            y = _TOP + _ROW * start + 2
            yield (
                f'<rect class="{cell[0]}" x="{middle - 20}" y="{y}" width="40" height="{_ROW * (stop - start) - 4}" '
                f'rx="3"/><text class="{"bad" if cell[0] == BROKEN else ""}" x="{middle}" y="{y + 16}" '
                f'text-anchor="middle">{escape(_shown(*cell).lstrip("┃┊ "))}</text>'
            )
        start = stop


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


# ------------------------------------------------------------------------------------------------------- as HTML

PAGE = """
body { margin: 0 auto; padding: 1.5rem; max-width: 75rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 ui-sans-serif, system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h1 code { font-size: 1em; }
p { margin: .25rem 0 .75rem; } dt { color: var(--dim); font-size: .85rem; margin-top: .75rem; }
dd { margin: 0; } .scroll { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem; }
code, pre { font-family: ui-monospace, monospace; font-size: .85rem; }
pre { background: var(--code); padding: .5rem .75rem; border-radius: 6px; overflow-x: auto; margin: .25rem 0; }
table { border-collapse: collapse; } td { border-top: 1px solid var(--line); padding: .25rem .75rem .25rem 0;
  vertical-align: top; } summary { cursor: pointer; }
"""


def html(explanation: Explanation) -> str:
    """A page of its own: nothing is fetched, no script runs, and it follows the reader's light or dark."""
    item = explanation
    guards = "".join(
        f"<dt>{escape(str(line))}</dt><dd><pre>{escape(line.text)}</pre></dd>" for line in item.spec
    )
    code = escape(item.elsewhere)
    if item.code is not None:
        code = f"{escape(str(item.code))}, {escape(item.code.symbol)}<pre>{escape(item.code.text)}</pre>"
    rows = "".join(
        f"<tr><td>{number}</td><td>{escape(row.lane)}</td><td>{escape(row.label)}</td>"
        f"<td><code>{'<br>'.join(map(escape, row.changes))}</code></td></tr>"
        for number, row in enumerate(item.rows, 1)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(item.mutant.name)} - quiesce</title><style>{_CSS}{PAGE}</style></head><body>"
        f"<h1><code>{escape(item.mutant.name)}</code> in {escape(item.mutant.model)}</h1>"
        f"<p>{escape(item.cause)}</p><p><strong>{escape(item.happening)}</strong></p>"
        f'<div class="scroll">{svg(item)}</div>'
        f"<dl><dt>What breaks</dt><dd>{escape(item.consequence)}</dd>"
        f"<dt>The guard that is left out, in the specification</dt><dd><dl>{guards}</dl></dd>"
        f"<dt>The same guard in the code</dt><dd>{code}</dd></dl>"
        f"<details><summary>What each step changed</summary><table>{rows}</table></details></body></html>"
    )
