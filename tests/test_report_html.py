"""The HTML page: what is in it, and what a browser makes of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_cases import ABOVE, DIVERGENCE, FAILING, GRID, INCONCLUSIVE, NAN, NOT_COMPARABLE, PASSING

from probe.judge.comparison import Comparison
from probe.report.commands import ADD_RUNS, NARROW_DOWN, next_commands, reproduce, script
from probe.report.grid import CellGrid
from probe.report.html import to_html
from probe.report.machine import as_object
from probe.report.page import STYLE
from probe.report.plots import distribution, ratio_over_steps

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DIFFERENT = replace(FAILING, first_divergence=replace(DIVERGENCE, place=replace(DIVERGENCE.place, step=2)))


class Page(HTMLParser):
    """Collects the texts of elements by id and by tag, and every address the page mentions."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.addresses: list[str] = []
        self.stack: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "link", "br", "input", "line", "rect", "circle", "polyline", "polygon"):
            self.stack.append((tag, found.get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        if self.stack and self.stack[-1][0] == tag:
            self.stack.pop()

    def handle_data(self, data: str) -> None:
        for tag, name in self.stack:
            for key in {tag, f"#{name}"}:
                self.texts[key] = self.texts.get(key, "") + data


@pytest.mark.parametrize("comparison", [PASSING, FAILING, INCONCLUSIVE, NOT_COMPARABLE])
def test_every_element_is_closed_and_the_page_asks_for_nothing(comparison: Comparison) -> None:
    text = to_html(comparison, GRID)
    page = Page(text)
    assert page.stack == []
    assert page.addresses == ["data:,"]
    assert re.findall(r"url\(|@import|https?://|\bsrc=|XMLHttpRequest|fetch\(|WebSocket|sendBeacon", text) == []
    assert page.texts["h1"] == comparison.outcome.value.capitalize()


def test_the_verdict_and_the_first_divergence_stand_first() -> None:
    page = Page(to_html(FAILING, GRID))
    assert page.texts["#verdict"] == (
        "Different: 3 quantities are more than 10 times above tolerance. The first divergence is blocks.2.attn."
    )
    assert page.texts["#first"] == "step 1, microbatch 0, rank 1 only: forward/blocks.2.attn"


def test_what_a_reader_must_know_stands_with_the_verdict() -> None:
    card = to_html(FAILING, GRID).partition('id="verdict"')[2].partition("</div>")[0]
    assert re.findall(r"<li>(.*?)</li>", card) == [
        "Code that differs: 2 files changed (<code>model/attention.py</code>, <code>model/mlp.py</code>), 1 file only "
        "in the candidate (<code>model/fused.py</code>), 1 file outside the source trees.",
        "Modules in the baseline only (no longer called, or inside a compiled region): <code>blocks.*.mlp</code> (12).",
        "Modules in the candidate only: <code>blocks.0.fused|mlp</code>.",
        "1 check judged nothing: LoRA parameters of every block after step (no quantity of this check is in both "
        "arms).",
        "1 check proved nothing by passing, for a scrambled run would pass too (vacuous): norm outputs.",
        "10 of 2,538 values were not judged, in 2 checks; the rows say why.",
    ]


def test_commands_are_whole_lines_that_one_click_selects() -> None:
    blocks = [unescape(block) for block in re.findall(r'<pre class="paste">(.*?)</pre>', to_html(INCONCLUSIVE), re.S)]
    assert [block.splitlines() for block in blocks] == [
        script(next_commands(INCONCLUSIVE), NARROW_DOWN),
        script(next_commands(INCONCLUSIVE), ADD_RUNS),
        reproduce(INCONCLUSIVE),
    ]
    assert ".paste{user-select:all}" in STYLE


def test_the_words_of_the_page_are_explained_where_they_are_used() -> None:
    failing = to_html(replace(FAILING, checks=(*FAILING.checks, replace(ABOVE, fit="flaky", assumed=True))))
    lists = [re.findall(r"<dt>(.*?)</dt>", found) for found in re.findall(r"<dl.*?</dl>", failing)]
    assert lists == [
        ["origin", "tight tolerance"],
        ["value", "spread", "tolerance", "sees", "horizon", "vacuous", "flaky", "assumed"],
    ]
    marked = set(re.findall(r'<abbr title="([^:"]*): [^"]+">', failing))
    assert marked == {"origin", "tight tolerance", "spread", "tolerance", "sees", "vacuous", "flaky", "assumed"}
    assert [re.findall(r"<dt>(.*?)</dt>", found) for found in re.findall(r"<dl.*?</dl>", to_html(PASSING))] == [
        ["value", "spread", "tolerance", "sees", "assumed"]
    ]
    uncovered = to_html(replace(PASSING, checks=(replace(ABOVE, horizon=1, covered=(1,)),)))
    assert "<dt>horizon</dt>" not in uncovered


def test_the_runs_that_tolerances_come_from_stand_beside_those_compared() -> None:
    table = to_html(FAILING).partition('id="runs"')[2].partition("<details>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table)[1:]
    cells = [re.findall(r"<span>(.*?)</span></td>", row)[:2] for row in rows]
    assert [(arm, re.sub("<.*", "", run.removeprefix("<code>"))) for arm, run in cells] == [
        ("baseline", "base-0"),
        ("candidate", "opt-0"),
        ("calibration", "base-1"),
        ("calibration", "base-2"),
    ]
    assert "Tolerances: 3 x the spread of <code>base-0</code>, <code>base-1</code>, <code>base-2</code>." in table
    assert "No tolerances were measured." in to_html(NOT_COMPARABLE)


def test_names_cannot_become_markup() -> None:
    odd = "</script><img src=x onerror=alert(1)>"
    worst = replace(ABOVE.worst, place=replace(ABOVE.worst.place, name=odd), expected=odd)
    grid = replace(GRID, labels=("batch/input", "forward/blocks.1.attn", "forward/blocks.2.attn", f"forward/{odd}"))
    comparison = replace(
        FAILING,
        reason=odd,
        checks=(replace(ABOVE, what=odd, where=odd, worst=worst),),
        notes=(odd,),
        coverage=replace(FAILING.coverage, missing=(odd,)),
        runs=(replace(FAILING.runs[0], command=odd, environment={odd: odd}),),
        first_divergence=replace(DIVERGENCE, because=odd, place=replace(DIVERGENCE.place, name=odd)),
    )
    text = to_html(comparison, grid)
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert Page(text).stack == []


def test_the_data_of_the_heat_map_are_those_of_the_grid() -> None:
    data = json.loads(Page(to_html(DIFFERENT, GRID)).texts["#grid"])
    assert {name: data[name] for name in ("labels", "steps", "families", "family", "ranks", "first")} == {
        "labels": list(GRID.labels),
        "steps": [1, 2, 5],
        "families": list(GRID.families),
        "family": [0, 1, 1, 2],
        "ranks": [0, 0, 0, 0, 1, 1, 0, 1, 1, 0, 1, -1],
        "first": [2, 1],
    }


def test_without_cells_the_plots_are_left_out() -> None:
    text = to_html(FAILING)
    assert ("<svg" in text, 'id="map"' in text, Page(text).stack) == (False, False, [])


def test_a_plot_draws_line_band_and_tolerance() -> None:
    drawing = ratio_over_steps("a<b", (1, 2, 5), np.array([0.5, 40.0, NAN]), np.array([0.1, 0.2, 0.2]))
    assert Page(drawing).stack == []
    assert 'aria-label="a&lt;b: largest difference / tolerance over steps, 40 at most"' in drawing
    assert re.findall(r'class="(dot[^"]*)"', drawing) == ["dot", "dot above"]
    heights = {
        name: float(re.search(rf'class="{name}"[^>]*?(?:y1|cy)="([0-9.]+)"', drawing)[1])  # type: ignore[index]
        for name in ("dot", "dot above", "limit")
    }
    assert heights["dot above"] < heights["limit"] < heights["dot"]
    assert drawing.count('class="band"') == 1


def test_a_plot_of_one_step_and_of_unknown_spread_is_drawn() -> None:
    drawing = ratio_over_steps("x", (3,), np.array([0.0]), np.array([NAN]))
    assert (drawing.count("<circle"), drawing.count('class="band"')) == (1, 0)


def test_the_distribution_counts_shares_of_both() -> None:
    drawing = distribution(np.array([0.1, 0.1, 20.0, NAN]), np.array([0.1]))
    tips = re.findall(r"<title>([^<]*)</title>", drawing)
    assert tips == ["66.7 % of the values between 0.1 and 0.18", "33.3 % of the values between 18 and 32"]
    ends = re.findall(r'<text[^>]*text-anchor="(?:middle|end)"[^>]*>([^<]*)</text>', drawing)
    assert ends == ["≤ 1e-4", "0.001", "0.01", "0.1", "1", "10", "100", "≥ 1000"]


def large(series: int = 2000, steps: int = 30) -> CellGrid:
    random = np.random.default_rng(0)
    return CellGrid(
        labels=tuple(f"forward/blocks.{number}.attn.qkv_proj" for number in range(series)),
        steps=tuple(range(1, steps + 1)),
        families=("attention outputs",),
        family=np.zeros(series, dtype=np.intp),
        ratio=10.0 ** random.normal(-1, 1, (series, steps)),
        spread_ratio=10.0 ** random.normal(-1, 1, (series, steps)),
        rank=random.integers(0, 8, (series, steps)).astype(np.int32),
    )


def test_two_thousand_quantities_over_thirty_steps_stay_far_below_5_megabytes() -> None:
    assert len(to_html(FAILING, large()).encode()) < 2_000_000


NOBODY = "http://127.0.0.1:1"
"""A proxy that is not there: what is asked for goes nowhere."""


def opened(tmp_path: Path, page: Path, fragment: str = "") -> tuple[str, str, list[str]]:
    """Open a page in a browser; return the document it made, what it wrote to the console, and what it asked for."""
    assert CHROMIUM is not None
    log = tmp_path / "requests.json"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--proxy-server={NOBODY}", "--proxy-bypass-list=<-loopback>", f"--log-net-log={log}"]
    command += ["--virtual-time-budget=2000", f"--user-data-dir={tmp_path / 'profile'}", f"{page.as_uri()}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    started = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # The browser has errands of its own, which no page began.
    asked = [each["url"] for each in started if each.get("initiator", "not an origin") != "not an origin"]
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line), asked


def dom(tmp_path: Path, comparison: Comparison, grid: CellGrid, fragment: str = "") -> tuple[str, str]:
    """Open the page of a comparison, which must ask for nothing; return its document and console."""
    page = tmp_path / "page.html"
    page.write_text(to_html(comparison, grid), encoding="utf-8")
    document, console, asked = opened(tmp_path, page, fragment)
    assert asked == []
    return document, console


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")


@needs_browser
def test_a_page_that_asks_for_something_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    asking = '<script>new WebSocket("ws://elsewhere.invalid/");throw new Error("x")</script>'
    page.write_text(f'{asking}<img src="http://elsewhere.invalid/x.png">')
    _, console, asked = opened(tmp_path, page)
    assert "Uncaught Error: x" in console
    assert sorted(asked) == ["http://elsewhere.invalid/x.png", "ws://elsewhere.invalid/"]


@needs_browser
def test_a_browser_shows_the_table_of_the_json_object(tmp_path: Path) -> None:
    document, console = dom(tmp_path, FAILING, GRID)
    assert console == ""
    found = {check["what"]: check for check in as_object(FAILING)["checks"]}
    body = document.partition('id="checks"')[2].partition("</table>")[0].partition("<tbody>")[2]
    rows = [
        [unescape(text) for text in re.findall(r"<td[^>]*><span>(?:<b[^>]*>)?([^<]*)", row)]
        for row in re.findall(r"<tr.*?</tr>", body)
    ]
    assert sorted(row[0] for row in rows) == sorted(found)
    for what, where, _, difference, allowed, verdict in rows:
        check = found[what]
        of = check["cells"] + check["unjudged_failures"]
        above = f" {check['above']:,} of {of:,}" if check["verdict"] in ("above", "not finite") else ""
        assert (verdict, where) == (f"{check['verdict']}{above}", check["where"].partition("`")[0])
        for shown, number in ((difference, check["difference"]), (allowed, check["tolerance"])):
            if shown.endswith(" %"):
                assert float(shown.removesuffix(" %")) == pytest.approx(100 * number, rel=5e-3)


@needs_browser
def test_a_browser_shows_the_cells_of_the_heat_map(tmp_path: Path) -> None:
    document, console = dom(tmp_path, DIFFERENT, GRID)
    assert console == ""
    names = re.findall(r'role="rowheader"[^>]*><bdi>([^<]*)</bdi>', document)
    assert [unescape(name) for name in names] == list(GRID.labels)
    cells = re.findall(r'aria-label="(step \d+: [^"]*)"', document)
    assert cells == [
        "step 1: identical",
        "step 2: identical",
        "step 5: identical",
        "step 1: difference / tolerance = 0.2",
        "step 2: difference / tolerance = 0.25",
        "step 5: difference / tolerance = 0.4",
        "step 1: difference / tolerance = 0.5",
        "step 2: difference / tolerance = 40",
        "step 5: difference / tolerance = 2.5",
        "step 1: difference / tolerance = 0.005",
        "step 2: not equal, not finite, or 1e8 x the tolerance or more",
        "step 5: not judged",
    ]
    assert re.findall(r'<span class="cell first"[^>]*data-at="([^"]*)"', document) == ["2 1"]
    # Blue up to 1: h0 to h4 end at 0.01, 0.1, 0.3, 0.6 and 1; the cell that was not judged has no colour.
    colours = re.findall(r"background: var\(--(h\d)\)", document)
    assert colours == ["h0", "h0", "h0", "h2", "h2", "h3", "h3", "h7", "h5", "h0", "h8"]


@needs_browser
def test_a_browser_opens_a_large_map_at_the_first_divergence_and_draws_only_what_is_seen(tmp_path: Path) -> None:
    grid = large()
    place = replace(DIVERGENCE.place, step=7, name="blocks.1500.attn.qkv_proj")
    comparison = replace(FAILING, first_divergence=replace(DIVERGENCE, place=place))
    document, console = dom(tmp_path, comparison, grid)
    assert console == ""
    assert re.findall(r'<span class="cell first"[^>]*data-at="([^"]*)"', document) == ["1500 6"]
    assert document.count('role="rowheader"') < 60


@needs_browser
def test_a_browser_filters_rows_cells_and_plots_by_name(tmp_path: Path) -> None:
    document, console = dom(tmp_path, DIFFERENT, GRID, "#filter=attention")
    assert console == ""
    assert "2 of 4 quantities" in document
    assert "1 of 4 quantities" in dom(tmp_path, DIFFERENT, GRID, "#filter=Blocks.2")[0]
    assert re.findall(r'data-at="([^"]*)"', document) == [f"{series} {step}" for series in (1, 2) for step in range(3)]
    assert re.findall(r'data-family="(\d)"( hidden="")?', document) == [
        ("0", ' hidden=""'),
        ("1", ""),
        ("2", ' hidden=""'),
    ]
    hidden = re.findall(r'<tr data-filter="([^"]*)"( hidden="")?', document)
    assert [(name.split(" ")[0], bool(off)) for name, off in hidden] == [
        ("loss", True),
        ("attention", False),
        ("LoRA", True),
        ("norm", False),
        ("batch", True),
        ("state,", False),
    ]
