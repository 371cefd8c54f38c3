"""The Markdown report, word for word."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from report_cases import ABOVE, FAILING, NOT_COMPARABLE, PASSING

from probe.report.markdown import to_markdown

JOB = "accelerate launch --num_processes 2 train.py --lr 1e-4"
TO_BASE = "git switch --detach 0391d1c7aa && "
PUT_BACK = "the uncommitted changes of the recorded run are not in the commit: bring them back before recording"
FAILING_TEXT = (Path(__file__).parent / "reports" / "failing.md").read_text(encoding="utf-8")


def test_a_failing_comparison_reads_like_this() -> None:
    assert to_markdown(FAILING) == FAILING_TEXT


def test_bars_backticks_and_markup_in_names_do_not_break_the_table() -> None:
    worst = replace(ABOVE.worst, place=replace(ABOVE.worst.place, name="a|b`c"), expected="<x>", actual="*y*")
    row = next(
        line
        for line in to_markdown(replace(FAILING, checks=(replace(ABOVE, what="a_b|c", worst=worst),))).splitlines()
        if line.startswith("| a")
    )
    assert row == (
        r"| a\_b\|c (4 quantities, 1,240 values) | outputs of attention modules | 0.411 % | "
        r"21.3 %, **above 31 of 1,240**; worst at step 1, rank 1, ``a\|b`c``: l2 norm expected '\<x\>', "
        r"actual '\*y\*' | 1.23 % (sees 0.012 % to 0.61 %) |"
    )


def test_a_passing_comparison_shows_pairs_and_how_to_repeat_it() -> None:
    text = to_markdown(PASSING)
    assert "| baseline pair | `base-0` | `base-1` | 0.31 |  |" in text
    assert (
        text[text.index("```sh\n") :]
        == f"""\
```sh
# baseline, commit 0391d1c7aa; put uncommitted changes away first, such as with `git stash`
{TO_BASE}probe record -o captures/again-base-0 --seed 42 --steps 1-5 -- {JOB}
{TO_BASE}probe record -o captures/again-base-1 --seed 42 --steps 1-5 -- {JOB}
probe calibrate captures/again-base-0 captures/again-base-1 -o tolerances/again-job.toml
# candidate, commit ce9f454b00 + changes; {PUT_BACK}
git switch --detach ce9f454b00 && probe record -o captures/again-opt-0 --seed 42 --steps 1-5 -- {JOB} --fused
probe diff captures/again-base-0 captures/again-base-1 --candidate captures/again-opt-0 -t tolerances/again-job.toml
```

</details>
"""
    )


def test_what_was_not_judged_is_said_even_when_it_is_nothing() -> None:
    text = to_markdown(replace(PASSING, checks=(ABOVE,)))
    assert "* nothing: all that was recorded in both arms was judged" in text


def test_without_tolerances_no_calibration_is_suggested() -> None:
    text = to_markdown(NOT_COMPARABLE)
    assert "probe calibrate" not in text
    assert "probe diff captures/again-base-0 captures/again-opt-0\n" in text
