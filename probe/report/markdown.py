"""The comparison as Markdown for a pull request: the table a reviewer reads, and what lets them repeat it.

Cells that depart from their tolerance say in how many of their values, where most, and both values. This module must
not know how anything was judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from probe.judge.comparison import CheckResult, Comparison, Verdict, Worst
from probe.report import words
from probe.report.commands import ADD_RUNS, NARROW_DOWN, next_commands, reproduce, script
from probe.report.elements import sentences
from probe.report.headlines import headlines
from probe.report.legend import legend, tight

MOST = 20
"""Names listed of what could not be matched."""


def to_markdown(comparison: Comparison) -> str:
    """Return the Markdown text, with a newline at the end."""
    sections = (
        [f"### Numerical comparison: {comparison.outcome.value}", "", _escaped(words.sentence(comparison))],
        [f"* {_where(text)}" for text in headlines(comparison)],
        list(_table(comparison)),
        list(_divergence(comparison)),
        list(_block(script(next_commands(comparison), NARROW_DOWN))),
        list(_not_judged(comparison)),
        list(_bullets("Tensors kept whole", sentences(comparison))),
        list(_bullets("Differences between the arms", comparison.provenance_changes)),
        list(_bullets("Notes", comparison.notes)),
        list(_bullets("Runs to add", [comparison.more_runs] if comparison.more_runs else [])),
        list(_block(script(next_commands(comparison), ADD_RUNS))),
        list(_pairs(comparison)),
        list(_runs(comparison)),
        list(_environment(comparison)),
        list(_reproduce(comparison)),
    )
    return "\n\n".join("\n".join(section) for section in sections if section) + "\n"


def _escaped(text: str) -> str:
    """Make text safe inside a table cell and outside code spans."""
    return re.sub(r"([\\|*_<>`~\[\]])", r"\\\1", text).replace("\n", " ")


def _code(text: str) -> str:
    """Write a code span; a bar would end the table cell even there, so it is escaped, as GitHub wants it."""
    text = text.replace("\n", " ").replace("|", "\\|")
    ticks = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _where(text: str) -> str:
    """Escape a description, whose code spans stay code spans."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return _escaped(text)
    return "".join(_code(part) if number % 2 else _escaped(part) for number, part in enumerate(parts))


def _rows(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    header = list(header)
    yield f"| {' | '.join(header)} |"
    yield f"|{' --- |' * len(header)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _table(comparison: Comparison) -> Iterator[str]:
    if not comparison.checks:
        return
    header = ("What is recorded", "Where", "Unmodified vs itself", "Actual difference to baseline", "Tolerance")
    rows = (
        (_what(check), _where(check.where), words.spread(check), _difference(check), _tolerance(check))
        for check in words.by_severity(comparison.checks)
    )
    yield from _rows(header, rows)
    below = [line for line in (words.totals(comparison.checks), *legend(comparison.checks, with_marks=False)) if line]
    if below:
        yield ""
        yield "<br>".join(_escaped(line) for line in below)


def _what(check: CheckResult) -> str:
    if not check.cells:
        return _escaped(check.what)
    return f"{_escaped(check.what)} ({words.counts(check)})"


def _difference(check: CheckResult) -> str:
    text = words.actual_difference(check)
    if check.verdict in words.FAILING:
        text = f"{text}, **{words.verdict(check)}**" if text != words.NOTHING else f"**{words.verdict(check)}**"
        if check.worst is not None:
            text += f"; worst at {_values(check.worst)}"
    elif check.verdict in (Verdict.NOT_COMPARABLE, Verdict.RECORDED_ONLY):
        text = f"{text}, {check.verdict.value}" if text != words.NOTHING else check.verdict.value
    if words.shows_values(check) and check.worst is not None:
        text += f"; at {_values(check.worst)}"
    return text


def _values(worst: Worst) -> str:
    expected, actual = map(_escaped, words.pair(worst.expected, worst.actual))
    where = f"step {worst.place.step}, rank {worst.place.rank}, {_code(words.quantity(worst.place))}"
    return f"{where}: {words.values(expected, actual, worst.shown)}"


def _tolerance(check: CheckResult) -> str:
    notes = []
    if check.form not in ("calibrated", "exact", "record only") and not check.bound:
        notes.append(check.form)
    if check.assumed:
        notes.append("assumed")
    if words.fit(check):
        notes.append(words.fit(check))
    if not math.isnan(check.smallest_detectable):
        notes.append(f"sees {words.detectable_range(check)}")
    return words.tolerance(check) + (f" ({', '.join(notes)})" if notes else "")


def _divergence(comparison: Comparison) -> Iterator[str]:
    found = comparison.first_divergence
    if found is None:
        return
    place, _, name = words.divergence_place(found, words.world_size(comparison)).partition(": ")
    yield f"**First divergence:** {place}: {_code(name)} ({_escaped(found.phase)})"
    yield ""
    yield f"* {_escaped(words.divergence_values(found))}"
    yield f"* {words.ORIGINS[found.origin]}: {_where(found.because)}"
    yield from (f"* {_where(text)}" for text in [tight(comparison), *words.lines_after(comparison)] if text)


def _block(lines: list[str]) -> Iterator[str]:
    """Write lines to paste as a code block, which wraps and escapes nothing."""
    if lines:
        yield from ("```sh", *lines, "```")


def _not_judged(comparison: Comparison) -> Iterator[str]:
    lines = []
    for check in comparison.checks:
        if check.verdict is Verdict.RECORDED_ONLY:
            lines.append(f"{_escaped(check.what)}: recorded only")
        if words.not_compared(check, comparison.tolerances):
            lines.append(f"{_escaped(check.what)}: {_escaped(words.not_compared(check, comparison.tolerances))}")
        if words.horizon(check):
            lines.append(f"{_escaped(check.what)}: {words.horizon(check)}")
    coverage = comparison.coverage
    for title, names in (
        ("Only in the baseline", coverage.missing),
        ("Only in the candidate", coverage.unexpected),
        ("With another shape", coverage.reshaped),
        ("With another element type", coverage.retyped),
    ):
        if names:
            more = f" and {len(names) - MOST:,} more" if len(names) > MOST else ""
            lines.append(
                f"{title} ({words.quantities_of(len(names))}): {', '.join(_code(name) for name in names[:MOST])}{more}"
            )
    yield "**Not recorded or not judged**"
    yield ""
    yield f"* Coverage: {words.coverage(coverage)}"
    yield from (f"* {line}" for line in lines or ["nothing: all that was recorded in both arms was judged"])


def _bullets(title: str, texts: Iterable[str]) -> Iterator[str]:
    texts = list(texts)
    if texts:
        yield f"**{title}**"
        yield ""
        yield from (f"* {_where(text)}" for text in texts)


def _pairs(comparison: Comparison) -> Iterator[str]:
    if len(comparison.pairs) < 2:
        return
    rows = (
        (
            pair.relation,
            _code(PurePath(pair.first).name),
            _code(PurePath(pair.second).name),
            words.number(pair.ratio),
            _code(pair.where) if pair.where else "",
        )
        for pair in sorted(comparison.pairs, key=lambda pair: pair.relation)
    )
    yield from _rows(("Pair", "Run", "Run", "Largest difference / tolerance", "Where"), rows)


def _runs(comparison: Comparison) -> Iterator[str]:
    if not comparison.runs:
        return
    attention = any("attention" in run.environment for run in comparison.runs)
    rows = (
        (
            run.arm + (f" ({_escaped(run.perturb)})" if run.perturb else ""),
            _code(PurePath(run.path).name or run.run_id),
            _code(run.commit[:10]) if run.commit else words.NOTHING,
            {True: "yes", False: "no", None: words.NOTHING}[run.dirty],
            _code(run.command) if run.command else words.NOTHING,
            _escaped(run.seed) or words.NOTHING,
            *([_escaped(run.environment.get("attention", words.NOTHING))] if attention else []),
        )
        for run in comparison.runs
    )
    header = ("Arm", "Run", "Commit", "Dirty", "Command", "Seed", *(["Attention"] if attention else []))
    calibrated = (
        (
            "calibration" + (f" ({_escaped(run.perturb)})" if run.perturb else ""),
            _code(run.path or run.run_id),
            _code(run.commit[:10]) if run.commit else words.NOTHING,
            words.NOTHING,
            _code(run.command) if run.command else words.NOTHING,
            words.NOTHING,
            *([words.NOTHING] if attention else []),
        )
        for run, compared in words.calibration_runs(comparison)
        if not compared
    )
    yield from _rows(header, [*rows, *calibrated])
    if comparison.calibration is not None:
        yield ""
        yield f"Tolerances: {words.number(comparison.calibration.k)} x the spread of {_listed_runs(comparison)}."
    problems = [f"* {_code(run.path)}: {_escaped(problem)}" for run in comparison.runs for problem in run.problems]
    if problems:
        yield ""
        yield from problems


def _listed_runs(comparison: Comparison) -> str:
    return ", ".join(_code(words.calibrated_name(run)) for run, _ in words.calibration_runs(comparison))


def _environment(comparison: Comparison) -> Iterator[str]:
    names = sorted({name for run in comparison.runs for name in run.environment})
    if not names:
        return
    yield "<details><summary>Environment</summary>"
    yield ""
    for name in names:
        values = list(dict.fromkeys(run.environment.get(name, "not set") for run in comparison.runs))
        yield f"* {_code(name)}: {' and '.join(_code(value or ' ') for value in values)}"
    yield ""
    yield "</details>"


def _reproduce(comparison: Comparison) -> Iterator[str]:
    lines = reproduce(comparison)
    if lines:
        yield "<details><summary>Reproduce</summary>"
        yield ""
        yield from _block(lines)
        yield ""
        yield "</details>"
