"""Pictures and tables of the pages, from the JSON of the benchmarks: `quiesce bench plots FILE...`.

Each table goes between markers `<!-- bench NAME -->` and `<!-- end -->`; a picture is an SVG beside the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from quiesce.bench.measuring import shown

LEND = "quiesce, lend"
_MARKED = re.compile(r"(<!-- bench (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of the same columns in Markdown, without what they are about."""
    columns = [column for column in rows[0] if column != "what" or len({row["what"] for row in rows}) > 1]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(shown(row.get(column)) for column in columns)} |" for row in rows]


def grouped(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["what"], []).append(row)
    return found


def made_on(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"`{data['command']}`, {data['date']}, on {machine['cores']} cores ({machine['processor']}), Python "
        f"{machine['python']}, {packages}; load at the start {machine['load'][0]}."
    )


def compact(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The trips of payload reuse, a row for each way and transport, a column for each size."""
    ways: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if "trip us" not in row:
            continue
        transport, size = row["what"].split(", ")
        entry = ways.setdefault((transport, row["way"]), {"transport": transport, "way": row["way"]})
        entry[size] = f"{shown(row['trip us'][0])} ({shown(row['trip / lend'][0])})"
    return list(ways.values())


def ring(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The figures of the ring: a table for each quantity and number of readers, a column for each message."""
    sizes = list(dict.fromkeys(row["message"] for row in rows))
    runs = {(row["way"], row["readers"], row["message"]): row for row in rows}
    for readers in dict.fromkeys(row["readers"] for row in rows):
        for title, told in _RING.items():
            count = f"{readers} reader{'s' * (readers > 1)}"
            yield from ["", f"| {title}, {count} | {' | '.join(sizes)} |", "|---" * (len(sizes) + 1) + "|"]
            for way in dict.fromkeys(way for way, each, _ in runs if each == readers):
                cells = []
                for size in sizes:
                    row = runs.get((way, readers, size), {})
                    copy = runs.get(("plain copy", readers, size), {})
                    value = told(row, runs.get((row.get("beside"), readers, size), {}), copy)
                    cells.append("-" if value is None else shown(value))
                if set(cells) != {"-"}:
                    yield f"| {way} | {' | '.join(cells)} |"


def _ratio(name: str, row: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    return row[name] / base[name] if name in row and name in base and row is not base else None


_RING: dict[str, Callable[[Any, Any, Any], float | None]] = {
    "latency, us": lambda row, ours, copy: row.get("latency"),
    "used, us": lambda row, ours, copy: row.get("used"),
    "messages/s": lambda row, ours, copy: row.get("rate"),
    "rate, % of a plain copy": lambda row, ours, copy: (
        100 * row["rate"] / copy["rate"] if "rate" in row and "rate" in copy else None
    ),
    "latency, ring = 1": lambda row, ours, copy: _ratio("latency", row, ours),
    "CPU a message, ring = 1": lambda row, ours, copy: _ratio("cpu", row, ours),
}
"""What a table tells of a row, of the ring's row that waits in the same way, and of the plain copy."""


def text(data: Mapping[str, Any]) -> str:
    """What a page says of one run."""
    lines = [made_on(data), ""]
    rows = data["rows"]
    if data["benchmark"] == "payload":
        for transport in dict.fromkeys(row["what"].split(", ")[0] for row in rows if "trip us" in row):
            own = [row for row in compact(rows) if row["transport"] == transport]
            lines += [
                f"**{transport}**",
                "",
                *table([{k: v for k, v in r.items() if k != "transport"} for r in own]),
            ]
            lines.append("")
        rows = [row for row in rows if "trip us" not in row]
    if data["benchmark"] == "ring":
        lines += ring(rows)
        rows = []
    for what, own in grouped(rows).items():
        lines += [
            f"**{what}**",
            "",
            *table([{k: v for k, v in row.items() if k != "what"} for row in own]),
            "",
        ]
    return "\n".join([*lines, *data["notes"]]).rstrip() + "\n"


def picture(data: Mapping[str, Any], file: Path) -> None:
    """Trips by size, as multiples of the bare one; the line at 1 is the limit."""
    import matplotlib as mpl
    from matplotlib import pyplot

    mpl.rcParams.update({"svg.hashsalt": "quiesce", "svg.fonttype": "none", "font.size": 8})
    trips = [row for row in data["rows"] if "trip us" in row]
    transports = list(dict.fromkeys(row["what"].split(", ")[0] for row in trips))
    figure, axes = pyplot.subplots(
        1, len(transports), figsize=(4 * len(transports), 3.4), sharey=True, squeeze=False
    )
    for axis, transport in zip(axes[0], transports, strict=True):
        own = [row for row in trips if row["what"].split(", ")[0] == transport]
        sizes = list(dict.fromkeys(row["what"].split(", ")[1] for row in own))
        bare = {row["what"]: row["trip us"][0] for row in own if row["way"] == "bare libzmq"}
        for way in dict.fromkeys(row["way"] for row in own):
            points = [
                (row["what"].split(", ")[1], row["trip us"][0] / bare[row["what"]])
                for row in own
                if row["way"] == way
            ]
            style = {"linewidth": 2.2} if way.startswith("quiesce") else {"linewidth": 1, "linestyle": "--"}
            axis.plot(
                [sizes.index(size) for size, _ in points],
                [y for _, y in points],
                marker=".",
                label=way,
                **style,
            )
        axis.set_xticks(range(len(sizes)), sizes, rotation=45, ha="right")
        axis.set_yscale("log")
        axis.set_title(transport)
    axes[0][0].set_ylabel("trip / bare libzmq")
    axes[0][-1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(file, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def main(files: Sequence[Path], page: Path) -> None:
    """Write the tables of these runs into the page, and the pictures beside it."""
    runs = {
        data["benchmark"]: data for data in (json.loads(file.read_text(encoding="utf-8")) for file in files)
    }
    old = page.read_text(encoding="utf-8")

    def replaced(found: re.Match[str]) -> str:
        return found[1] + text(runs[found[2]]) + found[3] if found[2] in runs else found[0]

    page.write_text(_MARKED.sub(replaced, old), encoding="utf-8")
    if "payload" in runs:
        picture(runs["payload"], page.with_name("performance_payload.svg"))
