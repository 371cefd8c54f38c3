"""The comparison on a terminal: a table of checks, failing first, and the verdict as its last line.

The verdict stands at both ends: what is pasted is read from its head, and a terminal shows the tail. Colour is used
only where a terminal shows it, and nothing is said by colour alone. Lines fit the width they are given (100 columns
unless the terminal is narrower), except the last, long paths, and commands to paste, which are one line each. This
module must not know how anything was judged.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from probe.judge.command_change import command_change
from probe.judge.comparison import CheckResult, Comparison, Outcome, Verdict
from probe.report import words
from probe.report.commands import ADD_RUNS, NARROW_DOWN, next_commands, script
from probe.report.elements import sentences
from probe.report.headlines import headlines
from probe.report.legend import legend, tight

WIDTH = 100
MOST = 10
"""Names, notes and changes that are shown without `--all`."""

_COLUMNS = (("What is recorded", 26), ("Difference", 10), ("Tolerance", 11), ("Unmodified", 17), ("Sees", 9))
_STYLES = {Outcome.EQUIVALENT: "bold green", Outcome.DIFFERENT: "bold red"}


@dataclass(frozen=True, slots=True)
class Line:
    """Hold one line of the report and the style it has on a terminal."""

    text: str
    style: str = ""


def print_comparison(comparison: Comparison, *, everything: bool = False) -> None:
    """Print the report to stdout, in colour when that is a terminal."""
    if not (sys.stdout.isatty() or os.environ.get("FORCE_COLOR")):
        print(to_text(comparison, everything=everything))
        return
    # A pipe has no use for it, and it takes a tenth of the time of a small comparison to import.
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = min(WIDTH, max(console.width, 60))
    for line in report_lines(comparison, everything=everything, width=width):
        console.print(Text(line.text, style="" if console.no_color else line.style), soft_wrap=True)


def to_text(comparison: Comparison, *, everything: bool = False, width: int = WIDTH) -> str:
    """Return the report as plain text, without a newline at the end."""
    return "\n".join(line.text for line in report_lines(comparison, everything=everything, width=width))


def report_lines(comparison: Comparison, *, everything: bool = False, width: int = WIDTH) -> list[Line]:
    """Lay the report out.

    Args:
        comparison: What to show.
        everything: Detail every check, and name all that is unmatched, instead of ten of each.
        width: Columns.
    """
    most = 10**9 if everything else MOST
    style = _STYLES.get(comparison.outcome, "bold yellow")
    sections = (
        list(_head(comparison, style, width)),
        list(_table(comparison, everything, width)),
        list(_divergence(comparison, width)),
        list(_coverage(comparison, most, width)),
        list(_listed("Tensors kept whole", tuple(sentences(comparison)), 10**9, width)),
        list(_listed("Differences between the arms", comparison.provenance_changes, most, width)),
        list(_listed("Notes", comparison.notes, most, width)),
        list(_pairs(comparison, everything, width)),
        list(_runs(comparison, width)),
        list(_runs_to_add(comparison, width)),
        [Line(words.sentence(comparison), style)],
    )
    lines: list[Line] = []
    for section in sections:
        if section:
            lines += [Line("")] * bool(lines) + section
    return lines


def _wrapped(text: str, width: int, indent: str = "  ") -> Iterator[Line]:
    for part in textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield Line(part)


def _head(comparison: Comparison, style: str, width: int) -> Iterator[Line]:
    yield from (Line(line.text, style) for line in _wrapped(words.sentence(comparison), width, ""))
    for text in headlines(comparison):
        yield from _wrapped(text.replace("`", ""), width)


def _commands_to_paste(comparison: Comparison, purpose: str) -> Iterator[Line]:
    lines = script(next_commands(comparison), purpose)
    # What stands in a here-document is written to a file as it is, and an indented word does not end it.
    indent = "" if any("<<" in line for line in lines) else "    "
    yield from (Line(f"{indent}{line}") for line in lines)


def _runs_to_add(comparison: Comparison, width: int) -> Iterator[Line]:
    if comparison.more_runs:
        yield Line("Runs to add:")
        yield from _wrapped(comparison.more_runs, width)
        yield from _commands_to_paste(comparison, ADD_RUNS)


def _row(cells: list[str]) -> str:
    what, *numbers, verdict = cells
    text = what.ljust(_COLUMNS[0][1])
    for cell, (_, width) in zip(numbers, _COLUMNS[1:], strict=True):
        text += " " + cell.rjust(width)
    return f"{text}  {verdict}".rstrip()


def _table(comparison: Comparison, everything: bool, width: int) -> Iterator[Line]:
    if not comparison.checks:
        return
    yield Line(_row([name for name, _ in _COLUMNS] + ["Verdict"]), "bold")
    for check in words.by_severity(comparison.checks):
        what = check.what
        style = (
            "red" if check.verdict in words.FAILING else ("yellow" if check.verdict is Verdict.NOT_COMPARABLE else "")
        )
        if len(what) > _COLUMNS[0][1]:
            yield Line(what, style)
            what = ""
        cells = [words.actual_difference(check), words.tolerance(check) + words.marks(check), words.spread(check)]
        yield Line(_row([what, *cells, words.detectable(check), words.verdict(check)]), style)
        yield from _details(check, comparison.tolerances, everything, width)
    below = [text for text in (words.totals(comparison.checks), *legend(comparison.checks, with_marks=True)) if text]
    if below:
        yield Line("")
    for text in below:
        for line in _wrapped(text, width, ""):
            yield Line(line.text, "dim")


def _details(check: CheckResult, tolerances: str, everything: bool, width: int) -> Iterator[Line]:
    quiet = check.verdict in (Verdict.IDENTICAL, Verdict.RECORDED_ONLY) and not everything
    if (check.verdict in words.FAILING or everything) and check.where:
        yield from _wrapped(f"where: {check.where}", width)
    if check.worst is not None and not quiet:
        yield from _wrapped(f"worst: {words.worst(check.worst)}", width)
    if everything:
        yield from _wrapped(f"judged: {words.counts(check)}, {check.form}", width)
        yield from _wrapped(f"metric: {check.metric}", width)
    if words.horizon(check):
        yield from _wrapped(words.horizon(check), width)
    seen = words.detectable_range(check)
    if seen != words.detectable(check) and (check.verdict in words.FAILING or everything):
        yield from _wrapped(f"sees: {seen}", width)
    if words.not_compared(check, tolerances):
        yield from _wrapped(words.not_compared(check, tolerances), width)


def _divergence(comparison: Comparison, width: int) -> Iterator[Line]:
    found = comparison.first_divergence
    if found is None:
        return
    provisional = " (provisional)" if comparison.outcome is Outcome.INCONCLUSIVE else ""
    place = words.divergence_place(found, words.world_size(comparison))
    yield from _wrapped(f"First divergence{provisional}: {place}", width, "")
    yield from _wrapped(f"{words.divergence_values(found)}", width)
    yield from _wrapped(f"{words.ORIGINS[found.origin]} ({found.phase}): {found.because}", width)
    yield from (Line(line.text, "dim") for line in _wrapped(tight(comparison), width))
    for text in words.lines_after(comparison):
        yield from _wrapped(text, width)
    yield from _commands_to_paste(comparison, NARROW_DOWN)


def _cut(names: tuple[str, ...], most: int) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def _coverage(comparison: Comparison, most: int, width: int) -> Iterator[Line]:
    coverage = comparison.coverage
    named = (
        ("only in the baseline", coverage.missing),
        ("only in the candidate", coverage.unexpected),
        ("with another shape", coverage.reshaped),
        ("with another element type", coverage.retyped),
    )
    yield from _wrapped(f"Coverage: {words.coverage(coverage)}", width, "")
    for meaning, names in named:
        if names:
            yield from _wrapped(f"{meaning} ({words.quantities_of(len(names))}): {_cut(names, most)}", width)


def _listed(title: str, texts: tuple[str, ...], most: int, width: int) -> Iterator[Line]:
    if not texts:
        return
    yield Line(f"{title}:")
    for text in texts[:most]:
        yield from _wrapped(text, width)
    if len(texts) > most:
        yield Line(f"  and {len(texts) - most:,} more (--all shows them)")


def _pairs(comparison: Comparison, everything: bool, width: int) -> Iterator[Line]:
    """Show the pairs of runs: the largest of each relation, or all of them."""
    if len(comparison.pairs) < 2:
        return
    yield Line("Largest difference / tolerance between runs:")
    for relation in dict.fromkeys(sorted(pair.relation for pair in comparison.pairs)):
        pairs = [pair for pair in comparison.pairs if pair.relation == relation]
        pairs.sort(key=lambda pair: -1.0 if math.isnan(pair.ratio) else pair.ratio, reverse=True)
        for pair in pairs if everything else pairs[:1]:
            ratio = words.NOTHING if math.isnan(pair.ratio) else words.number(pair.ratio)
            where = f" at {pair.where}" if pair.where else ""
            of = "" if everything or len(pairs) == 1 else f" (the largest of {len(pairs)})"
            names = f"{PurePath(pair.first).name} and {PurePath(pair.second).name}"
            yield from _wrapped(f"{relation}, {names}: {ratio}{where}{of}", width)


def _runs(comparison: Comparison, width: int) -> Iterator[Line]:
    if not comparison.runs:
        return
    rows = [("Arm", "Run", "Ranks", "Steps", "Commit", "Seed", "Perturbed")]
    for run in comparison.runs:
        name = PurePath(run.path).name or run.run_id
        ranks = f"{run.ranks} of {run.world_size}"
        rows.append((run.arm, name, ranks, words.steps(run.steps), words.commit(run), run.seed, run.perturb))
    rows = [tuple(cell or words.NOTHING for cell in row) for row in rows]  # type: ignore[misc]
    if not any(run.perturb for run in comparison.runs):
        rows = [row[:-1] for row in rows]  # type: ignore[misc]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    problems = [(), *(run.problems for run in comparison.runs)]
    for number, row in enumerate(rows):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        yield Line(text, "" if number else "bold")
        for problem in problems[number]:
            yield from _wrapped(f"problem: {problem}", width)
    yield from _commands(comparison, width)
    yield from _attention(comparison, width)
    if comparison.tolerances:
        yield Line(f"Tolerances: {comparison.tolerances}")
    runs = words.calibration_runs(comparison)
    if runs:
        names = ", ".join(words.calibrated_name(run) for run, _ in runs)
        yield from _wrapped(f"Calibrated from {len(runs)} runs: {names}", width, "")


def _attention(comparison: Comparison, width: int) -> Iterator[Line]:
    """Show which attention kernels ran, runs with the same ones together."""
    runs_of: dict[str, list[str]] = {}
    for run in comparison.runs:
        if "attention" in run.environment:
            runs_of.setdefault(run.environment["attention"], []).append(PurePath(run.path).name or run.run_id)
    for kernels, names in runs_of.items():
        of = "" if len(runs_of) == 1 and len(names) == len(comparison.runs) else f" in {', '.join(names)}"
        yield from _wrapped(f"Attention{of}: {kernels}", width, "")


def _commands(comparison: Comparison, width: int) -> Iterator[Line]:
    """Show the first run's command, and of the others by what they differ from it."""
    runs = [run for run in comparison.runs if run.command]
    if not runs:
        return
    yield from _wrapped(f"Command: {runs[0].command}", width, "")
    for run in runs[1:]:
        change = command_change(runs[0].command, run.command)
        if change:
            yield from _wrapped(f"{PurePath(run.path).name or run.run_id}: {change}", width)
