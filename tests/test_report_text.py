"""The terminal report, word for word, for each outcome."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from report_cases import FAILING, INCONCLUSIVE, NOT_COMPARABLE, PASSING

from probe.report import text
from probe.report.text import print_comparison, report_lines, to_text

PASTED = ("    probe ", "    git ", "    # ")
"""How the lines to paste begin, which are not wrapped."""
REPORTS = Path(__file__).parent / "reports"


def expected(name: str) -> str:
    return (REPORTS / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n")


def test_a_passing_report_reads_like_this() -> None:
    assert to_text(PASSING) == expected("passing")


def test_a_failing_report_reads_like_this() -> None:
    assert to_text(FAILING) == expected("failing")


def test_an_inconclusive_report_reads_like_this() -> None:
    assert to_text(INCONCLUSIVE) == expected("inconclusive")


def test_a_report_of_what_cannot_be_compared_reads_like_this() -> None:
    assert to_text(NOT_COMPARABLE) == expected("not-comparable")


def test_everything_details_each_row_and_names_all_that_is_unmatched() -> None:
    lines = to_text(FAILING, everything=True).splitlines()
    at = lines.index("batch                       identical       exact 0 (bit-identical)         -  identical")
    assert lines[at + 1 : at + 4] == [
        "  where: inputs of the root module",
        "  judged: 3 quantities, 30 values, exact",
        "  metric: equal or not",
    ]
    assert "forward/blocks.11.mlp" in to_text(FAILING, everything=True)
    assert "forward/blocks.11.mlp" not in to_text(FAILING)


def test_all_lines_but_the_verdict_and_the_commands_to_paste_fit_the_width() -> None:
    for comparison in (PASSING, FAILING, INCONCLUSIVE, NOT_COMPARABLE):
        for everything in (False, True):
            lines = to_text(comparison, everything=everything).splitlines()
            assert max(len(line) for line in lines[:-1] if not line.startswith(PASTED)) <= text.WIDTH


def test_the_table_goes_to_a_pipe_without_colour(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(FAILING)
    assert capsys.readouterr().out == expected("failing") + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, stdout: io.StringIO, **environment: str) -> str:
    """Print a comparison in an environment that says nothing else of colours."""
    for name in ("NO_COLOR", "FORCE_COLOR", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "100", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stdout)
    print_comparison(FAILING)
    return stdout.getvalue()


def test_the_table_has_colour_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = printed(monkeypatch, Terminal())
    assert "\x1b[31mattention outputs" in out
    assert "\x1b[1;31mDifferent: 3 quantities" in out
    assert re.sub(r"\x1b\[[0-9;]*m", "", out) == expected("failing") + "\n"


@pytest.mark.parametrize(("environment", "width"), [({"NO_COLOR": "1"}, 100), ({"TERM": "dumb"}, 80)], ids=str)
def test_a_terminal_that_wants_no_colour_gets_none(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], width: int
) -> None:
    assert printed(monkeypatch, Terminal(), **environment) == to_text(FAILING, width=width) + "\n"


def test_a_log_that_wants_colour_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[1;31mDifferent: 3 quantities" in printed(monkeypatch, io.StringIO(), FORCE_COLOR="1")


def test_a_narrow_terminal_gets_narrow_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    out = printed(monkeypatch, Terminal(), NO_COLOR="1", COLUMNS="70")
    assert out == to_text(FAILING, width=70) + "\n" != expected("failing") + "\n"


def test_the_verdict_is_coloured_by_its_outcome() -> None:
    styles = [report_lines(each)[-1].style for each in (PASSING, FAILING, INCONCLUSIVE, NOT_COMPARABLE)]
    assert styles == ["bold green", "bold red", "bold yellow", "bold yellow"]
