"""The report is one page that loads in a browser without complaint, filters, zooms, and fits a desk and a telephone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quiesce.model import manifest, state_picture
from quiesce.model.graph import Graph
from quiesce.model.oracle import Oracle

MODEL = "ring_flags_tso"
"""The smallest model: seconds to check, and its state graph is drawn."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `quiesce check` found, a mutant that got away, and the results of some other subcommand."""
    folder = tmp_path_factory.mktemp("results")
    mutant = next(m for m in manifest.load().mutants.values() if m.protocol == "memory_order")
    done = subprocess.run(
        [sys.executable, "-m", "quiesce.cli", "check", MODEL, mutant.name, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(done.stdout)
    survivor = {
        **found[-1],
        "good": False,
        "problems": ["survived: <nobody> & nothing"],
        "counterexample": None,
    }
    (folder / "check.json").write_text(json.dumps([*found, survivor]))
    (folder / "bench-some.json").write_text(json.dumps({"rows": [{"size": 1024, "ratio": 1.23456}], "n": 3}))
    return folder


@pytest.fixture(scope="module")
def page(results: Path) -> Path:
    path = results / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "quiesce.cli", "report", "-o", str(path), "--results", str(results)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to load the page with")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


def test_the_page_needs_nothing_else(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for reference in ("src=", "@import", "url(", "http://", "https://"):
        assert reference not in text.replace('xmlns="http://www.w3.org/2000/svg"', ""), reference


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_loads_and_fits(browser: Any, page: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab = context.new_page()
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: request.url.startswith("file:") or complaints.append(request.url))
    tab.goto(page.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert tab.locator("svg.quiesce-figure").count() >= 1
    assert tab.locator("svg.quiesce-graph").count() == 1
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = tab.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    light, dark = sorted((_brightness(ink), _brightness(paper)), reverse=True)
    assert light - dark > 0.6
    assert (_brightness(paper) == light) == (scheme == "light")
    assert not [text for text in complaints if not text.startswith("data:")]
    context.close()


def _brightness(colour: str) -> float:
    channels = [int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    return sum(channels) / (3 * 255)


def test_filters(browser: Any, page: Path) -> None:
    tab = browser.new_page()
    tab.goto(page.as_uri())
    rows = tab.locator("#models tbody tr, #mutants tbody tr")
    everything = rows.count()
    visible = tab.locator("#models tbody tr:visible, #mutants tbody tr:visible")
    assert visible.count() == everything
    tab.fill("#text", MODEL)
    assert 0 < visible.count() < everything
    tab.fill("#text", "")
    tab.check("#bad")
    assert visible.count() == 1
    assert "<nobody> & nothing" in visible.first.inner_text()
    tab.uncheck("#bad")
    tab.select_option("#protocol", "memory_order")
    assert visible.count() == everything
    tab.close()


def test_pictures_zoom(browser: Any, page: Path) -> None:
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    figure = tab.locator("#state-graphs figure").first
    width = int(figure.locator("svg").get_attribute("width"))
    figure.get_by_role("button", name="larger").click()
    assert float(figure.locator("svg").get_attribute("width")) == 1.25 * width
    figure.get_by_role("button", name="as it was").click()
    assert float(figure.locator("svg").get_attribute("width")) == width
    tab.close()


def test_other_results_become_tables(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "Bench some" in text
    assert "1.235" in text


def test_tables_of_the_pages_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for heading in ("Mutation matrix", "Edge coverage", "Memory order", "Benchmarks: payload reuse"):
        assert f"<h2>{heading}</h2>" in text
    assert "last_frame_tracker" in text.split("<h2>Mutation matrix</h2>")[1].split("<h2>")[0]


def test_layers_are_distances() -> None:
    graph = Graph.explore(Oracle.load(MODEL))
    columns = state_picture.layers(graph)
    assert columns[0] == list(graph.initial)
    assert sorted(state for column in columns for state in column) == list(range(len(graph.states)))
    depth = {state: number for number, column in enumerate(columns) for state in column}
    assert all(depth[edge.target] <= depth[edge.source] + 1 for edge in graph.edges)
    drawn = state_picture.svg(graph, "a <title>")
    assert drawn.count("<circle") == len(graph.states)
    assert "a &lt;title&gt;" in drawn
