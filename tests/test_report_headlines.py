"""What stands between the verdict and the table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_cases import ABOVE, ATTENTION, BATCH, CODE, FAILING, LONG, LOSS, NOT_COMPARABLE, PASSING, STATE

from probe.judge.comparison import CheckResult, CodeChange, Comparison, Coverage
from probe.report.headlines import folded, headlines

QUIET = replace(PASSING, checks=(BATCH, ATTENTION))


def of_checks(*checks: CheckResult) -> list[str]:
    return headlines(replace(QUIET, checks=checks, runs=()))


@pytest.mark.parametrize(
    ("comparison", "sentence"),
    [
        (QUIET, "Code: both arms ran the same files; the candidate ran with --fused."),
        (replace(QUIET, runs=QUIET.runs[:1]), "Code: both arms ran the same files."),
        (replace(QUIET, code=None), "Code: which files the arms ran was not recorded."),
        (
            replace(QUIET, code=CODE),
            "Code that differs: 2 files changed (`model/attention.py`, `model/mlp.py`), 1 file only in the candidate "
            "(`model/fused.py`), 1 file outside the source trees.",
        ),
        (
            replace(QUIET, code=CodeChange(removed=tuple(f"m{number}.py" for number in range(8)))),
            "Code that differs: 8 files only in the baseline (`m0.py`, `m1.py`, `m2.py`, `m3.py`, `m4.py`, `m5.py` and "
            "2 more).",
        ),
    ],
)
def test_which_code_differs_comes_first(comparison: Comparison, sentence: str) -> None:
    assert headlines(comparison) == [sentence]


def test_a_test_in_one_process_says_nothing_of_files() -> None:
    runs = tuple(replace(run, in_process=True) for run in QUIET.runs)
    assert headlines(replace(QUIET, runs=runs, code=None)) == []


def test_layers_are_folded_and_gradients_go_with_their_module() -> None:
    labels = [f"{kind}/blocks.{layer}.attn.q_norm" for kind in ("forward", "backward") for layer in range(4)]
    labels += ["forward/head[1]@2", "forward/head[0]#2", "backward/blocks.2.mlp", "grad/blocks.0.w", "grad/blocks.1.w"]
    assert folded(labels) == (
        ["`blocks.*.attn.q_norm` (4)", "`head`"],
        ["`backward/blocks.2.mlp`", "`grad/blocks.*.w` (2)"],
    )
    assert folded([]) == ([], [])


def test_what_only_one_arm_has_is_said_for_each_arm() -> None:
    coverage = Coverage(
        matched=1,
        missing=("forward/blocks.0.norm", "forward/blocks.1.norm", "param/w"),
        unexpected=("explicit/rope", "explicit/rope@1"),
    )
    assert headlines(replace(QUIET, coverage=coverage, runs=())) == [
        "Modules in the baseline only (no longer called, or inside a compiled region): `blocks.*.norm` (2).",
        "Also in the baseline only: `param/w`.",
        "In the candidate only: `explicit/rope`.",
    ]


def test_checks_that_prove_nothing_are_named() -> None:
    vacuous = replace(ATTENTION, vacuous=True)
    assert of_checks(BATCH, ATTENTION, STATE) == []
    assert of_checks(BATCH, vacuous) == [
        "1 check proved nothing by passing, for a scrambled run would pass too (vacuous): attention outputs."
    ]
    assert of_checks(replace(ABOVE, vacuous=True)) == []
    assert of_checks(replace(vacuous, fit="vacuous"), replace(LOSS, fit="flaky", assumed=False)) == [
        "1 check declared more than ten times as wide as calibration would allow (vacuous): attention outputs.",
        "1 check declared so narrow that the unmodified code exceeds it by itself (flaky): loss.",
    ]


def test_what_was_not_judged_is_counted() -> None:
    assert of_checks(replace(ATTENTION, not_compared=60), LONG) == [
        "1 check judged nothing: LoRA parameters of every block after step (no quantity of this check is in both "
        "arms).",
        "68 of 1,308 values were not judged, in 2 checks; the rows say why.",
    ]


def test_assumed_floors_are_named_or_said_of_all() -> None:
    assert of_checks(ATTENTION, LOSS) == ["1 check used assumed floors, for nothing was measured: loss."]
    assert of_checks(BATCH, replace(ATTENTION, assumed=True), LOSS) == [
        "All 2 calibrated checks used assumed floors: nothing was measured for them."
    ]


def test_all_of_it_stands_in_one_order() -> None:
    assert [text.split(" ")[0] for text in headlines(FAILING)] == ["Code", "Modules", "Modules", "1", "1", "10"]
    assert [text.split(" ")[0] for text in headlines(NOT_COMPARABLE)] == ["Code:", "1", "8"]
