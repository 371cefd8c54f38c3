"""What commands write: the comparison on stdout, and report files that nothing is lost to.

This module must not know how anything was judged or is drawn.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from probe.errors import ProbeError

if TYPE_CHECKING:
    from probe.check import Check
    from probe.judge.cells import Judgement
    from probe.judge.comparison import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """Files that a comparison is written to, beside what is printed; None: not wanted."""

    report: Path | None = None
    markdown: Path | None = None
    junit: Path | None = None
    summary: Path | None = None
    """The file that GitHub Actions shows; appended to."""


def refuse_overwriting(outputs: Sequence[Path], *, force: bool) -> None:
    """Refuse to replace files, before any work is done.

    Raises:
        ProbeError: One of the files exists and `force` is not set.
    """
    for path in outputs:
        if path.is_dir():
            raise ProbeError(f"Output {path} is a folder. Name a file.")
        if path.exists() and not force:
            raise ProbeError(f"File {path} exists already. Choose another name, or replace it with --force.")


def github_summary() -> Path:
    """Return the file that GitHub Actions shows as the step's summary.

    Raises:
        ProbeError: The command does not run in a GitHub Actions step.
    """
    path = os.environ.get("GITHUB_STEP_SUMMARY", "")
    if not path:
        raise ProbeError(
            "Option --github needs the environment variable GITHUB_STEP_SUMMARY, which is not set. "
            "GitHub Actions sets it; elsewhere use --markdown FILE."
        )
    return Path(path)


def show_comparison(
    comparison: Comparison,
    judgements: Sequence[Judgement],
    checks: Sequence[Check],
    reports: Reports,
    *,
    as_json: bool,
    everything: bool,
) -> int:
    """Print a comparison, write its reports, and return its exit status."""
    if as_json:
        from probe.report.machine import to_json

        click.echo(to_json(comparison))
    else:
        from probe.report.text import print_comparison

        print_comparison(comparison, everything=everything)
    _write_reports(comparison, markdown=reports.markdown, junit=reports.junit, summary=reports.summary)
    if reports.report is not None:
        from probe.report.grid import grid_of
        from probe.report.html import to_html

        _write(reports.report, to_html(comparison, grid_of(judgements, checks)))
    return comparison.outcome.exit_status


def _write_reports(comparison: Comparison, *, markdown: Path | None, junit: Path | None, summary: Path | None) -> None:
    if markdown is not None or summary is not None:
        from probe.report.markdown import to_markdown

        text = to_markdown(comparison)
        if markdown is not None:
            _write(markdown, text)
        if summary is not None:
            _write(summary, text + "\n", mode="a")
    if junit is not None:
        from probe.report.junit import to_junit

        _write(junit, to_junit(comparison))


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open(mode, encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise ProbeError(f"Report {path} cannot be written: {error.strerror}.") from error
    click.echo(f"Report is in {path}.", err=True)
