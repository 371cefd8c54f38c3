"""Numbers and places in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from report_cases import ABOVE, ATTENTION, BATCH, DIVERGENCE, FAILING, LONG, LOSS, NAN, NOT_FINITE, PASSING, RUN, STATE

from probe.judge.command_change import command_change
from probe.judge.comparison import Coverage, Place, Shown, Verdict
from probe.point import Kind
from probe.report import words
from probe.report.legend import metrics, tight


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (12.3456, "12.3"),
        (999.9, "1,000"),
        (123456.0, "123,000"),
        (1234567.0, "1.23e+06"),
        (0.000123456, "0.000123"),
        (0.0000123456, "1.23e-05"),
        (-0.5, "-0.5"),
        (float("nan"), "NaN"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0041, "relative", "0.41 %"),
        (0.00001, "relative", "0.001 %"),
        (0.0000099, "relative", "9.9e-06"),
        (4.1e-7, "relative", "4.1e-07"),
        (4.8, "relative", "480 %"),
        (0.0, "relative", "0"),
        (float("inf"), "relative", "inf"),
        (0.03, "absolute", "0.03 abs"),
        (0.0, "absolute", "0"),
        (5.744, "ratio", "5.74x"),
        (NAN, "relative", "-"),
    ],
)
def test_relative_differences_are_percentages_down_to_a_thousandth(value: float, unit: str, text: str) -> None:
    assert words.difference(value, unit) == text


def test_two_bounds_show_both_numbers_of_the_difference() -> None:
    both = replace(
        LOSS, form="rel or abs", unit="absolute", difference=0.0076, tolerance=0.0475, bound="15 % or 0.03 abs"
    )
    worst = replace(LOSS.worst, expected=0.3167, actual=0.3243) if LOSS.worst else None
    both = replace(both, worst=worst)
    assert (words.actual_difference(both), words.tolerance(both)) == ("0.0076 abs (2.4 %)", "15 % or 0.03 abs")
    blow_up = replace(both, form="ratio", unit="ratio", difference=5.744, tolerance=20.0, bound="20x")
    assert (words.actual_difference(blow_up), words.tolerance(blow_up)) == ("5.74x", "20x")


def test_what_a_check_could_have_seen_is_any_change_where_it_is_exact() -> None:
    found = [words.detectable(check) for check in (replace(BATCH, smallest_detectable=0.0), ATTENTION, LOSS)]
    assert found == ["any", "0.61 %", "-"]


def test_the_spread_shown_is_that_of_the_place_whose_tolerance_is_shown() -> None:
    assert ATTENTION.worst is not None
    silent = replace(ATTENTION, worst=replace(ATTENTION.worst, spread=0.0))
    unknown = replace(ATTENTION, worst=replace(ATTENTION.worst, spread=NAN))
    assert [words.spread(check) for check in (ATTENTION, silent, unknown, BATCH)] == [
        "0.411 %",
        "0",
        "0.777 %",
        "0 (bit-identical)",
    ]


def test_what_the_tolerances_do_not_know_says_what_to_do() -> None:
    unknown = replace(LONG, not_compared_why="8 without a tolerance")
    assert [words.not_compared(unknown, file) for file in ("t.toml", "")] == [
        "8 values not compared (8 without a tolerance); not recorded when t.toml was calibrated: calibrate again from "
        "runs that have them, or leave out -t",
        "8 values not compared (8 without a tolerance)",
    ]


def test_a_horizon_of_tolerances_that_end_is_not_called_drift() -> None:
    found = [
        words.horizon(replace(ATTENTION, horizon=horizon, covered=covered))
        for horizon, covered in ((1, (1,)), (3, (1, 2, 3)), (0, (1, 2)))
    ]
    assert found == [
        "judged up to step 1 only: the tolerances cover step 1",
        "judged up to step 3 only: the tolerances cover steps 1-3",
        "judged at no step: the tolerances cover steps 1-2",
    ]


def test_a_horizon_says_up_to_where_and_why() -> None:
    assert [words.horizon(replace(ATTENTION, horizon=step)) for step in (None, 0, 3)] == [
        "",
        "some quantities are judged at no step, for unmodified runs drift apart from the first",
        "some quantities are judged up to step 3 only, for unmodified runs drift apart after it",
    ]


@pytest.mark.parametrize(
    ("other", "change"),
    [
        ("t.py --id 0 --lr 1", ""),
        ("t.py --id 3 --lr 1", "--id 3 instead of --id 0"),
        ("t.py --id 0 --lr 1 --fused", "with --fused"),
        ("t.py --lr 1", "without --id 0"),
        ("u.py --id 0 --lr 2", "u.py instead of t.py; --lr 2 instead of --lr 1"),
    ],
)
def test_a_command_is_described_by_what_it_changes(other: str, change: str) -> None:
    assert command_change("t.py --id 0 --lr 1", other) == change


def test_what_was_not_compared_says_how_much_and_why() -> None:
    checks = [LONG, replace(LONG, not_compared=1, not_compared_why=""), replace(STATE, not_compared=9), BATCH]
    assert [words.not_compared(check, "t.toml") for check in checks] == [
        "8 values not compared (no quantity of this check is in both arms)",
        "1 value not compared",
        "",
        "",
    ]


def test_two_values_get_as_many_digits_as_tell_them_apart() -> None:
    assert words.pair(12.3456, 12.6) == ("12.3", "12.6")
    assert words.pair(12.3456, 12.3457) == ("12.3456", "12.3457")
    assert words.pair(1.5, 1.5) == ("1.5", "1.5")
    assert words.pair("fa2", 3.0) == ("'fa2'", "3")


def test_cells_of_the_table_say_identical_exact_and_recorded_only() -> None:
    cells = [
        (words.actual_difference(check), words.tolerance(check), words.spread(check), words.verdict(check))
        for check in (
            BATCH,
            replace(BATCH, verdict=Verdict.ABOVE, difference=1.0, above=3),
            ATTENTION,
            ABOVE,
            LOSS,
            NOT_FINITE,
            STATE,
        )
    ]
    assert cells == [
        ("identical", "exact", "0 (bit-identical)", "identical"),
        ("differs", "exact", "0 (bit-identical)", "above 3 of 30"),
        ("0.41 %", "1.23 %", "0.411 %", "within"),
        ("21.3 %", "1.23 %", "0.411 %", "above 31 of 1,240"),
        ("4.1e-07", "9.5e-07", "-", "within"),
        ("-", "9.5e-07", "-", "not finite 2 of 20"),
        ("-", "none", "-", "recorded only"),
    ]


def test_a_place_is_named_with_item_microbatch_and_call() -> None:
    place = Place(step=1, rank=0, kind=Kind.FORWARD, name="a.b", item="[1]", microbatch=2, call=1)
    assert words.quantity(place) == "a.b[1]@2#2"
    assert words.quantity(Place(step=1, rank=0, kind=Kind.PARAM, name="w", item="before")) == "w:before"


def test_ranks_are_folded() -> None:
    folded = [
        words.ranks(replace(DIVERGENCE, ranks=ranks), of)
        for ranks, of in (((0, 1), 2), ((1,), 2), ((0, 2), 4), ((1,), 1))
    ]
    assert folded == ["all ranks", "rank 1 only", "ranks 0, 2", "rank 1"]


def test_a_divergence_of_something_exact_has_no_distance() -> None:
    exact = replace(DIVERGENCE, tolerance=0.0, expected="fa2", actual="sdpa")
    exact = replace(exact, shown=Shown.TEXT)
    assert words.divergence_values(exact) == "differs where exactness is judged, expected 'fa2', actual 'sdpa'"
    assert words.divergence_values(DIVERGENCE) == (
        "difference 21.3 %, 51.8 x its tight tolerance (0.411 %), l2 norm expected 12.3, actual 12.6"
    )


def test_a_divergence_that_has_no_ratio_names_the_tolerance_alone() -> None:
    assert words.divergence_values(replace(DIVERGENCE, difference=float("nan"))).startswith(
        "difference -, tight tolerance 0.411 %, "
    )
    far = words.divergence_values(replace(DIVERGENCE, difference=4.4, tolerance=0.001))
    assert far.startswith("difference 440 %, 4,400 x its tight tolerance (0.1 %), ")


def test_what_a_check_sees_is_a_range_where_its_quantities_differ() -> None:
    checks = [
        ATTENTION,
        replace(ATTENTION, finest_detectable=0.0061),
        replace(BATCH, smallest_detectable=0.0, finest_detectable=0.0),
        replace(ATTENTION, finest_detectable=float("nan")),
        LOSS,
    ]
    assert [words.detectable_range(check) for check in checks] == ["0.012 % to 0.61 %", "0.61 %", "any", "0.61 %", "-"]


def test_the_parts_of_the_coverage_add_up() -> None:
    unit = "A value is one quantity at one step, in one microbatch, on one rank."
    counted = Coverage(
        matched=1000,
        missing=("a", "b"),
        unexpected=("c",),
        reshaped=("d",),
        retyped=("e", "f"),
        missing_cells=90,
        unexpected_cells=5,
        reshaped_cells=1,
    )
    assert [words.coverage(each) for each in (counted, Coverage(matched=1), Coverage(matched=7, missing=("a",)))] == [
        "1,000 of 1,096 values in both arms, of which 2 quantities have another element type; the others: 2 quantities "
        f"(90 values) only in the baseline, 1 quantity (5 values) only in the candidate, 1 quantity (1 value) with "
        f"another shape. {unit}",
        f"1 value in both arms; there are no others. {unit}",
        f"7 values in both arms; the others: 1 quantity only in the baseline. {unit}",
    ]


def test_what_cannot_be_judged_is_no_part_of_what_was_judged() -> None:
    lost = replace(ABOVE, verdict=Verdict.MISSING, above=91, unjudged_failures=90, not_compared=90)
    assert words.verdict(lost) == "missing 91 of 1,330"
    assert words.totals([BATCH, ATTENTION]) == "0 of 1,270 values are above tolerance."
    assert words.totals([BATCH, replace(ATTENTION, not_compared=9), STATE]) == (
        "0 of 1,270 values are above tolerance. Not among the 1,270: 9 not compared; 20 recorded only."
    )
    assert words.totals([lost, BATCH]) == (
        "1 of 1,270 values is above tolerance. Not among the 1,270: 90 missing, of another shape or type, or not "
        "finite."
    )


def test_values_that_are_norms_say_so() -> None:
    assert ABOVE.worst is not None
    assert words.worst(ABOVE.worst) == "step 1, rank 1, blocks.2.attn: l2 norm expected 12.3, actual 12.6"
    number = replace(ABOVE.worst, shown=Shown.VALUE)
    assert words.worst(number) == "step 1, rank 1, blocks.2.attn: expected 12.3, actual 12.6"


def test_an_estimated_norm_is_called_an_estimate() -> None:
    sketched = replace(ATTENTION, metric="||a - b|| / ||b|| (sketch)")
    assert metrics([sketched]) == [
        "difference: ||a - b|| / ||b|| (sketch).",
        "sketch: the norm of the difference is estimated from 251 signed sums over the tensor, within 4.5 % (one "
        "standard deviation).",
        "l2 norm: the size of the whole tensor in each arm; two tensors of one size can still differ.",
    ]
    assert not any(line.startswith("sketch") for line in metrics([ATTENTION, LOSS]))


def test_the_tight_tolerance_is_explained_where_it_is_not_the_only_one() -> None:
    exact = replace(FAILING, first_divergence=replace(DIVERGENCE, tolerance=0.0))
    texts = [tight(each) for each in (FAILING, PASSING, exact, replace(FAILING, calibration=None))]
    assert texts == [
        "tight tolerance: what the quantity's own spread and floor allow; sibling layers count in the table only.",
        "",
        "",
        "",
    ]


def test_runs_that_were_only_calibrated_from_are_told_from_those_compared() -> None:
    assert [(run.path, compared) for run, compared in words.calibration_runs(FAILING)] == [
        ("base-0", True),
        ("base-1", False),
        ("base-2", False),
    ]
    assert words.calibration_runs(PASSING) == []
    run = FAILING.calibration.runs[0] if FAILING.calibration else None
    assert run is not None
    named = [words.calibrated_name(replace(run, path=path, perturb="ulp:1")) for path in ("base-ulp-1", "noisy")]
    assert (words.calibrated_name(run), named) == ("base-0", ["base-ulp-1", "noisy (ulp:1)"])


def test_steps_are_folded_into_ranges() -> None:
    assert [words.steps(steps) for steps in ((1, 2, 3, 7), (5,), ())] == ["1-3,7", "5", ""]


def test_a_dirty_commit_says_so() -> None:
    commits = [words.commit(run) for run in (RUN, replace(RUN, dirty=True), replace(RUN, commit=""))]
    assert commits == ["0391d1c7aa", "0391d1c7aa + changes", "-"]


def test_failing_rows_come_first_and_equals_keep_their_order() -> None:
    checks = [
        replace(BATCH, what=str(number), verdict=verdict) for number, verdict in enumerate([*Verdict, Verdict.WITHIN])
    ]
    assert [(check.what, check.verdict.value) for check in words.by_severity(checks)] == [
        ("3", "not finite"),
        ("4", "missing"),
        ("2", "above"),
        ("5", "unexpected"),
        ("6", "not comparable"),
        ("1", "within"),
        ("8", "within"),
        ("0", "identical"),
        ("7", "recorded only"),
    ]
