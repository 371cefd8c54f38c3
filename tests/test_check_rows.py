"""A row of the table: what was not judged and why, what is shown all the same, and how small a change it sees."""

from __future__ import annotations

import math
from dataclasses import replace

from synthetic import breaks
from test_calibrate import baselines
from test_compare import BASE, TOLERANCES, candidate, judged, only, row

from probe.judge.calibrate import calibrate
from probe.judge.compare import compare_cells
from probe.judge.comparison import Coverage, Verdict
from probe.judge.coverage import count_coverage
from probe.judge.tolerance import Tolerances
from probe.point import Kind
from probe.report import words


def without(tolerances: Tolerances, part: str) -> Tolerances:
    """Return tolerances that lack the series whose label has a part in it."""
    families = {
        what: {label: member for label, member in members.items() if part not in label}
        for what, members in tolerances.families.items()
    }
    return replace(tolerances, families=families)


def test_what_has_no_tolerance_is_not_judged_and_its_difference_is_shown() -> None:
    comparison = judged(
        candidate(fault=breaks(Kind.FORWARD, "blocks.1.attn")), tolerances=without(TOLERANCES, "forward/blocks.1.attn")
    )
    known = row(comparison, "attention outputs")
    assert (known.verdict is Verdict.NOT_COMPARABLE, known.not_compared_why) == (False, "6 without a tolerance")
    none = row(
        judged(candidate(fault=breaks(Kind.FORWARD, "blocks.1.attn")), tolerances=without(TOLERANCES, ".attn")),
        "attention outputs",
    )
    assert (none.verdict, none.cells, none.not_compared_why) == (Verdict.NOT_COMPARABLE, 0, "18 without a tolerance")
    assert none.worst is not None
    assert none.worst.place.name == "blocks.1.attn"
    assert none.difference == none.worst.difference > 0.005
    assert math.isnan(none.tolerance)
    assert (words.actual_difference(none), words.tolerance(none)) == (f"{100 * none.difference:.3g} %", words.NOTHING)


def test_steps_after_the_last_calibrated_one_are_told_from_drift() -> None:
    short = calibrate(baselines(ranks=2, steps=(1,)))
    attention = row(judged(candidate(), tolerances=short), "attention outputs")
    assert (attention.horizon, attention.covered, attention.not_compared_why) == (
        1,
        (1,),
        "12 after the last calibrated step",
    )
    assert words.horizon(attention) == "judged up to step 1 only: the tolerances cover step 1"
    full = row(judged(candidate()), "attention outputs")
    assert (full.horizon, full.covered) == (None, ())


def test_a_check_sees_its_smallest_and_its_largest_tolerance() -> None:
    attention = row(judged(candidate()), "attention outputs")
    allowed = [TOLERANCES.members()[f"forward/blocks.{n}.attn"].tolerance[0] for n in range(3)]
    assert (attention.finest_detectable, attention.smallest_detectable) == (min(allowed), max(allowed))
    batch = row(judged(candidate()), "batch")
    assert (batch.finest_detectable, batch.smallest_detectable) == (0.0, 0.0)


def test_what_is_missing_is_counted_beside_what_was_judged() -> None:
    gone = only(Kind.GRAD, "blocks.1.lora_A.weight", lambda value: None, step=2)
    check = row(judged(candidate(fault=gone)), "LoRA gradients")
    assert (check.verdict, check.unjudged_failures, check.not_compared) == (Verdict.MISSING, 2, 2)
    assert check.above >= check.unjudged_failures
    assert words.verdict(check) == f"missing {check.above} of {check.cells + 2}"


def test_the_coverage_counts_values_and_names_quantities() -> None:
    gone = only(Kind.FORWARD, "blocks.1.attn", lambda value: None, step=2)
    comparison, judgements = compare_cells(BASE, [candidate(), candidate("opt-1", fault=gone)], TOLERANCES)
    counted = count_coverage([judgement.differences for judgement in judgements])
    assert counted == Coverage(matched=comparison.coverage.matched, missing=("forward/blocks.1.attn",), missing_cells=2)
    assert counted.matched + 2 == judged(candidate()).coverage.matched
