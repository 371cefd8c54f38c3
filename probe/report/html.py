"""The comparison as one HTML file that opens offline, for someone who has never seen the tool.

The verdict comes first, then where it first differs, the table, plots of every family over the steps, a heat map of
quantity x step, and how to repeat it all. The page asks nothing of any network: style, script, plots and data are in
it. This module must not know how anything was judged.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import PurePath
from typing import Any

import numpy as np

from probe.judge.comparison import CheckResult, Comparison, Outcome, Verdict
from probe.report import words
from probe.report.commands import ADD_RUNS, NARROW_DOWN, next_commands, reproduce, script
from probe.report.elements import sentences
from probe.report.glossary import (
    ASSUMED,
    ORIGIN,
    SEES,
    SPREAD,
    TIGHT,
    TOLERANCE,
    marked,
    meanings,
    of_divergence,
    of_table,
)
from probe.report.grid import CellGrid, encoded
from probe.report.headlines import headlines
from probe.report.legend import metrics
from probe.report.page import LEVELS, SCRIPT, STYLE
from probe.report.plots import distribution, ratio_over_steps
from probe.report.tree import module_tree

_TONE = {Outcome.EQUIVALENT: "good", Outcome.DIFFERENT: "bad"}
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""Content security policy of the page: the browser itself refuses any request."""

_ANSWERS = {
    Outcome.EQUIVALENT: "No value that was judged departs further from the baseline than is allowed.",
    Outcome.DIFFERENT: "The candidate departs from the baseline by more than is allowed, and not by chance.",
    Outcome.INCONCLUSIVE: "What was found may be chance, and may not: the runs named below would decide.",
    Outcome.NOT_COMPARABLE: "The runs could not be compared, so nothing is said about the candidate.",
}
_EXPLAINED = """
<details class="card"><summary>How to read this page</summary>
<p>The <b>baseline</b> is the unmodified training code, the <b>candidate</b> the changed one. Both were run with the
same data and seed while the values inside them were recorded. The baseline was run several times: how far it departs
from itself is its <b>spread</b>, and the <b>tolerance</b> is a multiple of it.</p>
<p>What is drawn below is <b>difference / tolerance</b>: up to 1 is within what is allowed, above 1 is not. After one
optimizer step nearly everything differs, so what counts is the <b>first divergence</b>: the earliest value, in the
order of execution, that is above. Words with a dotted line say what they mean under the pointer.</p></details>
"""
_OVER_STEPS = """
<h2>Difference / tolerance over steps</h2>
<p class="soft">Line: the largest over all quantities and ranks of the family. Band: what the unmodified code does by
itself. Dashed: the tolerance.</p>
"""
_DISTRIBUTED = """
<h2>How the values are distributed</h2>
<p class="soft">Bars: share of all judged values (each quantity and step, worst over ranks) with this difference /
tolerance. Line: the same for the unmodified code with itself. Bars right of the dashed line are above tolerance.</p>
"""


def to_html(comparison: Comparison, grid: CellGrid | None = None) -> str:
    """Return the page.

    Args:
        comparison: What to show.
        grid: Its cells; without them the plots and the heat map are left out.
    """
    plotted = grid is not None and bool(grid.labels) and bool(grid.steps)
    body = [
        _head(comparison),
        _divergence(comparison),
        _EXPLAINED,
        '<p><label for="filter">Filter by name</label><br><input type="search" id="filter" autocomplete="off" '
        'placeholder="e.g. blocks.3 or attention"></p>',
        _table(comparison),
        *(
            [_plots(grid), _heat_map(comparison, grid), module_tree(grid, comparison.first_divergence)]
            if grid is not None and plotted
            else []
        ),
        _coverage(comparison),
        _list("Tensors kept whole", sentences(comparison)),
        _list("Differences between the arms", comparison.provenance_changes),
        _list("Notes", comparison.notes),
        _runs_to_add(comparison),
        _runs(comparison),
        _reproduce(comparison),
    ]
    title = f"probe: {comparison.outcome.value}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _where(text: str) -> str:
    """Escape a description, whose code spans become code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(_code(part) if number % 2 else escape(part) for number, part in enumerate(parts))


def _head(comparison: Comparison) -> str:
    tone = _TONE.get(comparison.outcome, "maybe")
    return (
        f'<h1 class="{tone}">{escape(comparison.outcome.value.capitalize())}</h1>'
        f'<div class="card verdict {tone}"><p id="verdict"><b>{escape(words.sentence(comparison))}</b></p>'
        f"<p>{_ANSWERS[comparison.outcome]}</p>{_items(headlines(comparison))}</div>"
    )


def _items(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{_where(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _to_paste(comparison: Comparison, purpose: str) -> str:
    lines = script(next_commands(comparison), purpose)
    return f'<pre class="paste">{escape(chr(10).join(lines))}</pre>' if lines else ""


def _runs_to_add(comparison: Comparison) -> str:
    if not comparison.more_runs:
        return ""
    text = _where(comparison.more_runs)
    return f"<h2>Runs to add</h2><p>{text}</p>{_to_paste(comparison, ADD_RUNS)}"


def _divergence(comparison: Comparison) -> str:
    found = comparison.first_divergence
    if found is None:
        return ""
    place, _, name = words.divergence_place(found, words.world_size(comparison)).partition(": ")
    provisional = " (provisional)" if comparison.outcome is Outcome.INCONCLUSIVE else ""
    lines = [
        f'<p id="first">{escape(place)}: <b class="name">{escape(name)}</b></p>',
        f"<p>{escape(words.divergence_values(found)).replace(TIGHT, marked(TIGHT), 1)}</p>",
        f"<p><b>{marked(ORIGIN, words.ORIGINS[found.origin])}</b> ({escape(found.phase)}): {_where(found.because)}</p>",
    ]
    lines += [f"<p>{_where(text)}</p>" for text in words.lines_after(comparison)]
    lines += [_to_paste(comparison, NARROW_DOWN), meanings(of_divergence(comparison))]
    return f'<h2>First divergence{provisional}</h2><div class="card">{"".join(lines)}</div>'


def _table(comparison: Comparison) -> str:
    if not comparison.checks:
        return ""
    header = (
        "What is recorded",
        "Where",
        "Unmodified vs itself",
        "Actual difference to baseline",
        "Tolerance",
        "Verdict",
    )
    rows = []
    for check in words.by_severity(comparison.checks):
        cells = _cells(check, comparison.tolerances)
        columns = "".join(
            f'<td data-label="{name}"{" class=num" if 2 <= number <= 4 else ""}><span>{cell}</span></td>'
            for number, (name, cell) in enumerate(zip(header, cells, strict=True))
        )
        names = f"{check.what} {check.where} {check.worst.place.name if check.worst else ''}"
        rows.append(f'<tr data-filter="{escape(names)}">{columns}</tr>')
    total = escape(words.totals(comparison.checks))
    measured = "<br>".join(escape(line) for line in metrics(comparison.checks))
    return (
        f'<h2>Checks</h2><p class="soft">{total}</p>{_stacked(header, rows, "checks")}'
        f'{meanings(of_table(comparison))}<p class="soft">{measured}</p>'
    )


_MARKED = {"Unmodified vs itself": SPREAD, "Tolerance": TOLERANCE}
"""Headings that a word of the glossary explains."""


def _stacked(header: Sequence[str], rows: Iterable[str], name: str) -> str:
    """Write a table whose rows become cards where the page is narrow."""
    head = "".join(f"<th scope=col>{marked(_MARKED[each], each) if each in _MARKED else each}</th>" for each in header)
    return f'<table class="stack" id="{name}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _cells(check: CheckResult, tolerances: str) -> tuple[str, ...]:
    counts = f'<br><span class="worst">{words.counts(check)}</span>' if check.cells else ""
    tone = {True: "bad"}.get(check.verdict in words.FAILING, "")
    if check.verdict in (Verdict.WITHIN, Verdict.IDENTICAL):
        tone = "good"
    elif check.verdict is Verdict.NOT_COMPARABLE:
        tone = "maybe"
    verdict = f'<b class="{tone}">{escape(words.verdict(check))}</b>'
    if check.worst is not None and check.verdict not in (Verdict.IDENTICAL, Verdict.RECORDED_ONLY):
        verdict += f'<br><span class="worst">worst: {escape(words.worst(check.worst))}</span>'
    if words.not_compared(check, tolerances):
        verdict += f'<br><span class="worst">{escape(words.not_compared(check, tolerances))}</span>'
    if words.horizon(check):
        verdict += f'<br><span class="worst">{words.horizon(check)}</span>'
    remarks = [marked(ASSUMED)] * check.assumed + ([marked(words.fit(check))] if words.fit(check) else [])
    if not math.isnan(check.smallest_detectable):
        remarks.append(f"{marked(SEES)} {escape(words.detectable_range(check))}")
    allowed = escape(words.tolerance(check))
    if remarks:
        allowed += f'<br><span class="worst">{", ".join(remarks)}</span>'
    return (
        escape(check.what) + counts,
        _where(check.where),
        escape(words.spread(check)),
        escape(words.actual_difference(check)),
        allowed,
        verdict,
    )


def _plots(grid: CellGrid) -> str:
    figures = []
    for number, family in enumerate(grid.families):
        ratio, spread = grid.of_family(number)
        if not np.isnan(ratio).all():
            drawing = ratio_over_steps(family, grid.steps, ratio, spread)
            figures.append(f'<figure class="card" data-family="{number}"><h3>{escape(family)}</h3>{drawing}</figure>')
    cells = distribution(grid.ratio, grid.spread_ratio)
    return (
        f'{_OVER_STEPS}<div class="plots">{"".join(figures)}</div>'
        f'{_DISTRIBUTED}<div class="plots"><figure class="card">{cells}</figure></div>'
    )


def _first(comparison: Comparison, grid: CellGrid) -> list[int] | None:
    """Find the first divergence in the grid: series and step, by index."""
    found = comparison.first_divergence
    if found is None or found.place.step not in grid.steps:
        return None
    label = words.series_label(found.place)
    return [grid.labels.index(label), grid.steps.index(found.place.step)] if label in grid.labels else None


def _heat_map(comparison: Comparison, grid: CellGrid) -> str:
    first = _first(comparison, grid)
    data = {
        "labels": list(grid.labels),
        "steps": list(grid.steps),
        "families": list(grid.families),
        "family": grid.family.tolist(),
        "codes": base64.b64encode(encoded(grid.ratio).astype("<u2").tobytes()).decode(),
        "ranks": grid.rank.ravel().tolist(),
        "levels": list(LEVELS),
        "first": first,
    }
    jump = "" if first else " hidden"
    steps = "".join(f"<span>{step}</span>" for step in _header_steps(grid.steps))
    label = "Difference / tolerance of every quantity and step"
    return (
        '<h2>Quantity x step</h2><p class="soft">Worst over ranks, in the order of execution. '
        "The first divergence is framed.</p>"
        f'{_scale()}<p><button type="button" id="jump"{jump}>Go to the first divergence</button> '
        '<span id="count" class="soft"></span></p><p id="tip" class="tip name" aria-live="polite"></p>'
        f'<div class="map" id="map" role="table" tabindex="0" aria-label="{label}" style="--steps:{len(grid.steps)}">'
        f'<div class="head" role="row"><span></span>{steps}</div><div class="rows" id="rows"></div></div>'
        '<p id="nothing" hidden>No quantity has this in its name.</p>'
        f'<script type="application/json" id="grid">{_json(data)}</script>'
    )


def _header_steps(steps: Sequence[int]) -> list[str]:
    """Label at most fifteen steps; the others keep their column without a number."""
    every = math.ceil(len(steps) / 15)
    return [str(step) if number % every == 0 else "" for number, step in enumerate(steps)]


def _scale() -> str:
    names = [f"up to {level:g}" for level in LEVELS] + [f"above {LEVELS[-1]:g}"]
    items = [f'<span><i style="background:var(--h{number})"></i>{name}</span>' for number, name in enumerate(names)]
    return f'<div class="scale">{"".join(items)}<span><i class="none"></i>not judged</span></div>'


def _json(data: dict[str, Any]) -> str:
    """Write JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _coverage(comparison: Comparison) -> str:
    coverage = comparison.coverage
    parts = [f"<h2>Coverage</h2><p>{escape(words.coverage(coverage))}</p>"]
    for title, names in (
        ("Only in the baseline", coverage.missing),
        ("Only in the candidate", coverage.unexpected),
        ("With another shape", coverage.reshaped),
        ("With another element type", coverage.retyped),
    ):
        if names:
            items = "".join(f"<li>{_code(name)}</li>" for name in names)
            parts.append(
                f"<details><summary>{title}: {words.quantities_of(len(names))}</summary><ul>{items}</ul></details>"
            )
    recorded = [check.what for check in comparison.checks if check.verdict is Verdict.RECORDED_ONLY]
    if recorded:
        parts.append(f"<p>Recorded and not judged: {escape(', '.join(recorded))}.</p>")
    return "".join(parts)


def _list(title: str, texts: Iterable[str]) -> str:
    items = "".join(f"<li>{_where(text)}</li>" for text in texts)
    return f"<h2>{title}</h2><ul>{items}</ul>" if items else ""


def _runs(comparison: Comparison) -> str:
    if not comparison.runs:
        return ""
    header = ("Arm", "Run", "Ranks", "Steps", "Commit", "Seed", "Command")
    rows = []
    for run in comparison.runs:
        problems = "".join(f'<br><span class="bad">{escape(problem)}</span>' for problem in run.problems)
        cells = (
            escape(run.arm + (f" ({run.perturb})" if run.perturb else "")),
            _code(PurePath(run.path).name or run.run_id) + problems,
            f"{run.ranks} of {run.world_size}",
            words.steps(run.steps),
            _code(words.commit(run)),
            escape(run.seed or words.NOTHING),
            _code(run.command or words.NOTHING),
        )
        rows.append(_run_row(header, cells))
    rows += [
        _run_row(
            header,
            (
                "calibration" + (f" ({escape(run.perturb)})" if run.perturb else ""),
                _code(run.path or run.run_id),
                *[words.NOTHING] * 2,
                _code(run.commit[:10] or words.NOTHING),
                words.NOTHING,
                _code(run.command or words.NOTHING),
            ),
        )
        for run, compared in words.calibration_runs(comparison)
        if not compared
    ]
    names = sorted({name for run in comparison.runs for name in run.environment})
    environment = "".join(
        f"<li>{_code(name)}: "
        + " and ".join(map(_code, dict.fromkeys(run.environment.get(name, "not set") for run in comparison.runs)))
        + "</li>"
        for name in names
    )
    details = f"<details><summary>Environment</summary><ul>{environment}</ul></details>" if names else ""
    return f"<h2>Runs</h2>{_stacked(header, rows, 'runs')}{_calibration(comparison)}{details}"


def _run_row(header: Sequence[str], cells: Sequence[str]) -> str:
    columns = "".join(
        f'<td data-label="{name}"><span>{cell}</span></td>' for name, cell in zip(header, cells, strict=True)
    )
    return f"<tr>{columns}</tr>"


def _calibration(comparison: Comparison) -> str:
    """Say which runs the tolerances were measured from; those that are not compared have rows of their own."""
    if comparison.calibration is None:
        return '<p class="soft">No tolerances were measured.</p>'
    names = ", ".join(_code(words.calibrated_name(run)) for run, _ in words.calibration_runs(comparison))
    return f'<p class="soft">Tolerances: {words.number(comparison.calibration.k)} x the spread of {names}.</p>'


def _reproduce(comparison: Comparison) -> str:
    lines = reproduce(comparison)
    return f'<h2>Reproduce</h2><pre class="paste">{escape(chr(10).join(lines))}</pre>' if lines else ""
