"""Baselines, candidates and tolerances make a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import Fault, SyntheticCapture, breaks, run
from test_calibrate import baselines, reverse

from probe.check import Check, default_checks
from probe.errors import IncomparableError, ToleranceError
from probe.judge.calibrate import calibrate
from probe.judge.compare import compare
from probe.judge.comparison import (
    Calibration,
    CheckResult,
    CodeChange,
    Comparison,
    Coverage,
    Outcome,
    PairSummary,
    Verdict,
    Wanted,
)
from probe.judge.tolerance import Tolerances
from probe.point import Key, Kind
from probe.selection import parse_steps
from probe.store.layout import StepRows

BASE = baselines(ranks=2)
TOLERANCES = calibrate(BASE)

few = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def candidate(
    name: str = "opt-0", *, seed: int = 100, fault: Fault | None = None, **options: object
) -> SyntheticCapture:
    options = {"ranks": 2, "code": "bbbb"} | options
    return run(name, run_seed=seed, fault=fault, **options)  # type: ignore[arg-type]


def judged(*candidates: SyntheticCapture, tolerances: Tolerances | None = TOLERANCES) -> Comparison:
    return compare(BASE, candidates, tolerances)


def row(comparison: Comparison, what: str) -> CheckResult:
    return next(check for check in comparison.checks if check.what == what)


def only(
    kind: Kind, name: str, change: Callable[[np.ndarray], object], *, step: int = 0, rank: int | None = None
) -> Fault:
    def fault(key: Key, at: int, on: int, value: np.ndarray) -> object:
        here = key.kind is kind and key.name == name and key.item == "" and step in (0, at) and rank in (None, on)
        return change(value) if here else value

    return fault


def test_identical_code_is_never_called_different_and_seldom_needs_more_runs() -> None:
    outcomes = [judged(candidate(seed=seed)).outcome for seed in range(200, 220)]
    assert outcomes.count(Outcome.DIFFERENT) == 0
    assert outcomes.count(Outcome.INCONCLUSIVE) <= 3


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Kind.FORWARD, "blocks.0.attn"),
        (Kind.FORWARD, "blocks.2"),
        (Kind.LOSS, "micro_loss"),
        (Kind.BACKWARD, "blocks.1"),
        (Kind.GRAD, "blocks.2.lora_A.weight"),
    ],
)
def test_a_fault_is_found_wherever_it_starts(kind: Kind, name: str) -> None:
    comparison = judged(candidate(fault=breaks(kind, name)))
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.first_divergence is not None
    place = comparison.first_divergence.place
    assert (place.kind, place.name, place.step) == (kind, name, 1)


def test_a_passing_comparison_says_how_close_it_came_and_what_it_would_have_seen() -> None:
    comparison = judged(candidate())
    assert comparison.outcome is Outcome.EQUIVALENT
    assert comparison.reason.startswith("All that was judged is within tolerance; the closest call is ")
    assert comparison.first_divergence is None
    attention = row(comparison, "attention outputs")
    allowed = [TOLERANCES.members()[f"forward/blocks.{n}.attn"].tolerance[0] for n in range(3)]
    assert attention.verdict is Verdict.WITHIN
    assert (attention.cells, attention.above, attention.quantities) == (18, 0, 3)
    assert attention.smallest_detectable == max(allowed)
    assert comparison.more_runs == ""


def test_one_red_quantity_is_provisional_and_the_runs_to_add_are_named() -> None:
    comparison = judged(candidate(fault=only(Kind.FORWARD, "blocks.1", lambda value: value * 1.001)))
    assert comparison.outcome is Outcome.INCONCLUSIVE
    assert comparison.more_runs == (
        "Record two more baselines and one more candidate, calibrate with all baselines, and compare all candidates."
    )
    assert comparison.wanted == Wanted(baselines=2, candidates=1, calibration=True)
    assert (
        "Provisionally, the first divergence is forward of blocks.1 at step 1, ranks 0, 1 (forward)."
        in comparison.reason
    )


def test_what_is_red_again_with_five_baselines_and_two_candidates_is_different() -> None:
    fault = only(Kind.FORWARD, "blocks.1", lambda value: value * 1.001)
    five = baselines(5, ranks=2)
    both = [candidate(f"opt-{n}", seed=100 + n, fault=fault) for n in range(2)]
    comparison = compare(five, both, calibrate(five))
    assert comparison.outcome is Outcome.DIFFERENT
    assert "1 quantities are above tolerance in every candidate: forward/blocks.1 is " in comparison.reason


def test_what_does_not_repeat_is_equivalent_after_escalation() -> None:
    fault = only(Kind.FORWARD, "blocks.1", lambda value: value * 1.001)
    five = baselines(5, ranks=2)
    comparison = compare(five, [candidate("opt-0", fault=fault), candidate("opt-1", seed=101)], calibrate(five))
    assert comparison.outcome is Outcome.EQUIVALENT
    assert comparison.notes == (
        "1 quantities were above tolerance in one candidate and within in another (escalated).",
    )
    assert row(comparison, "block outputs").verdict is Verdict.WITHIN


def test_what_does_not_repeat_hides_neither_a_lost_rank_nor_an_interrupted_run_nor_a_check_without_values() -> None:
    five = baselines(5, ranks=2)
    tolerances = calibrate(five)
    off = candidate("opt-0", fault=only(Kind.FORWARD, "blocks.1", lambda value: value * 1.001, rank=0))
    other = candidate("opt-1", seed=101)
    one_rank = replace(other, segments={place: rows for place, rows in other.segments.items() if not place[0]})
    killed = replace(
        candidate("opt-1", seed=101, steps=(1, 2)), problems=("rank 0 was not closed cleanly, last step 2",)
    )
    for second, reason in (
        (one_rank, "The candidate 'opt-1' lacks rank 1 of the baseline."),
        (killed, "The candidate 'opt-1' lacks step 3 of the baseline: its run was interrupted. Record it again."),
    ):
        comparison = compare(five, [off, second], tolerances)
        assert comparison.outcome is Outcome.NOT_COMPARABLE
        assert comparison.reason.startswith(reason)
    nothing = Check(what="misspelled", where="", select=("forward/bloks.*",), form="rel", rel=0.1)
    comparison = compare(five, [off, other], tolerances, checks=(nothing, *default_checks()))
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert comparison.reason.startswith("Check 'misspelled' judged nothing")


def test_three_quantities_far_above_need_no_repeat() -> None:
    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        return value * 1.001 if key.kind is Kind.FORWARD and key.name.endswith("attn") else value

    comparison = judged(candidate(fault=fault))
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.reason.startswith("3 quantities are more than 10 times above tolerance.")


def test_one_flipped_sign_of_an_update_is_not_called_different() -> None:
    """One element of one parameter moves by twice the update, and all that follows moves with it."""

    def flip(value: np.ndarray) -> np.ndarray:
        moved = value.copy()
        moved[3, 4] += 2e-3
        return moved

    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        if key.kind is Kind.PARAM and key.name == "blocks.0.lora_A.weight" and key.item == "":
            return flip(value)
        return value * (1 + 1e-3) if step > 1 and key.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.GRAD) else value

    comparison = judged(candidate(fault=fault))
    assert comparison.outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_frozen_parameter_is_found(part: float) -> None:
    """A parameter that moves by a part of its update only."""
    initial = {n: np.random.default_rng([0, 9, n]).standard_normal((20, 30)) for n in range(3)}

    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        if key.kind is not Kind.PARAM or key.item:
            return value
        start = initial[int(key.name.split(".")[1])]
        return start + part * (value - start)

    comparison = judged(candidate(fault=fault))
    assert row(comparison, "LoRA parameters after step").verdict is Verdict.ABOVE
    assert comparison.outcome in (Outcome.DIFFERENT, Outcome.INCONCLUSIVE)
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.phase == "optimizer update"


def test_other_data_are_different_and_what_follows_is_not_comparable() -> None:
    comparison = judged(candidate(data_seed=7))
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.reason == (
        "The data differ: batch/x at step 1, so that what follows is not comparable. "
        "The first divergence is batch of x at step 1, ranks 0, 1 (batch)."
    )
    assert row(comparison, "attention outputs").verdict is Verdict.NOT_COMPARABLE
    assert row(comparison, "attention outputs").not_compared_why == "18 after other data"


def test_data_that_differ_later_leave_the_steps_before_judged() -> None:
    comparison = judged(candidate(fault=only(Kind.BATCH, "x", lambda value: value + 1, step=2, rank=1)))
    assert comparison.outcome is Outcome.DIFFERENT
    assert row(comparison, "attention outputs").cells == 6
    assert comparison.first_divergence is not None
    assert (comparison.first_divergence.place.step, comparison.first_divergence.ranks) == (2, (1,))


def test_a_run_shifted_by_a_step_is_never_equivalent() -> None:
    late = candidate()
    moved = replace(late, segments={(rank, step): late.rows(rank, min(step + 1, 3)) for rank, step in late.segments})
    assert judged(moved).outcome is Outcome.DIFFERENT


def test_a_run_with_its_ranks_swapped_is_never_equivalent() -> None:
    right = candidate()
    swapped = replace(right, segments={(rank, step): right.rows(1 - rank, step) for rank, step in right.segments})
    assert judged(swapped).outcome is Outcome.DIFFERENT


def test_a_run_of_another_seed_on_the_same_data_is_different() -> None:
    def other(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        if key.kind in (Kind.BATCH, Kind.LR, Kind.STATE) or key.name == "loss_scale":
            return value
        return np.random.default_rng([step, rank, len(key.label)]).standard_normal(value.shape)

    assert judged(candidate(fault=other)).outcome is Outcome.DIFFERENT


@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.GRAD, Kind.PARAM, Kind.LOSS, Kind.GRAD_NORM])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_never_passes(kind: Kind, bad: float) -> None:
    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        return np.full(value.shape, bad) if key.kind is kind and step == 3 and key.name != "loss_scale" else value

    comparison = judged(candidate(fault=fault))
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.reason.startswith("A value is not finite in the candidate and finite in the baseline: ")


def test_not_even_in_a_row_that_is_only_recorded() -> None:
    comparison = judged(candidate(fault=only(Kind.LOSS, "loss_scale", lambda value: value * math.nan)))
    assert comparison.outcome is Outcome.DIFFERENT
    assert row(comparison, "loss scale").verdict is Verdict.NOT_FINITE


def test_what_is_not_finite_in_both_arms_is_not_comparable() -> None:
    broken = only(Kind.FORWARD, "blocks.1", lambda value: value * math.nan, step=2)
    base = [run(f"base-{n}", run_seed=n, fault=broken) for n in range(3)]
    comparison = compare(base, [run("opt", run_seed=9, code="bbbb", fault=broken)], calibrate(base))
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert comparison.reason == "The baseline itself is not finite at forward/blocks.1, step 2: it cannot be compared."
    assert row(comparison, "block outputs").verdict is Verdict.NOT_FINITE


@pytest.mark.parametrize("kind", [Kind.GRAD, Kind.PARAM, Kind.LOSS, Kind.GRAD_NORM, Kind.LR])
def test_a_required_quantity_that_is_missing_fails(kind: Kind) -> None:
    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray | None:
        return None if key.kind is kind and step == 2 and key.name != "loss_scale" else value

    comparison = judged(candidate(fault=fault))
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.reason.startswith("A required quantity is missing, reshaped or of another type: ")
    assert comparison.first_divergence is not None
    assert (comparison.first_divergence.place.kind, comparison.first_divergence.actual) == (kind, "missing")


def test_an_intermediate_that_is_no_longer_computed_is_counted_and_passes() -> None:
    comparison = judged(candidate(fault=only(Kind.FORWARD, "blocks.1.attn", lambda value: None)))
    assert comparison.outcome is Outcome.EQUIVALENT
    attention = row(comparison, "attention outputs")
    assert (attention.cells, attention.not_compared, attention.not_compared_why) == (12, 6, "6 in the baseline only")
    assert comparison.coverage == Coverage(matched=144, missing=("forward/blocks.1.attn",), missing_cells=6)


def test_a_reshaped_intermediate_is_counted_and_passes() -> None:
    comparison = judged(candidate(fault=only(Kind.FORWARD, "blocks.1.attn", lambda value: value.reshape(-1))))
    assert comparison.outcome is Outcome.EQUIVALENT
    assert comparison.coverage.reshaped == ("forward/blocks.1.attn",)
    assert row(comparison, "attention outputs").not_compared_why == "6 of another shape"


def test_a_reshaped_gradient_fails() -> None:
    fault = only(Kind.GRAD, "blocks.0.lora_A.weight", lambda value: value.reshape(-1))
    assert row(judged(candidate(fault=fault)), "LoRA gradients").verdict is Verdict.MISSING


def test_a_check_in_which_nothing_matched_does_not_pass() -> None:
    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray | None:
        return None if key.kind is Kind.FORWARD and key.name.endswith("attn") else value

    assert row(judged(candidate(fault=fault)), "attention outputs").verdict is Verdict.NOT_COMPARABLE


def test_a_candidate_that_lacks_most_values_is_not_comparable() -> None:
    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray | None:
        return None if key.kind in (Kind.FORWARD, Kind.BACKWARD) else value

    base = baselines(layers=8, steps=(1,))
    comparison = compare(
        base, [run("opt", layers=8, steps=(1,), run_seed=9, code="bbbb", fault=fault)], calibrate(base)
    )
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert comparison.reason == "Only 48% of the baseline's values are in the candidate in the same shape."


def test_a_state_that_is_not_equal_fails() -> None:
    comparison = judged(candidate(fault=only(Kind.STATE, "train_mode", lambda value: value - 1)))
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.reason.startswith("A value that is judged exactly is not equal: state/train_mode at step 1.")


def test_a_parameter_of_another_type_fails_and_a_gradient_of_another_type_is_shown() -> None:
    def retyped(kind: Kind) -> SyntheticCapture:
        def edit(rows: StepRows) -> StepRows:
            dtype = [
                "bfloat16" if key.kind is kind and not key.item else old
                for key, old in zip(rows.keys, rows.dtype, strict=True)
            ]
            return replace(rows, dtype=tuple(dtype))

        return candidate().edited(edit)

    grad, param = judged(retyped(Kind.GRAD)), judged(retyped(Kind.PARAM))
    assert (grad.outcome, len(grad.coverage.retyped)) == (Outcome.EQUIVALENT, 3)
    assert (param.outcome, len(param.coverage.retyped)) == (Outcome.DIFFERENT, 3)


def test_a_run_that_stopped_early_is_different() -> None:
    comparison = judged(candidate(steps=(1, 2)))
    assert comparison.outcome is Outcome.DIFFERENT
    assert comparison.reason == "The candidate 'opt-0' lacks step 3 of the baseline: it stopped early."


def test_a_run_that_was_killed_or_failed_before_its_last_step_is_not_comparable() -> None:
    short = candidate(steps=(1, 2))
    killed = replace(short, problems=("rank 0 was not closed cleanly, last step 2",))
    failed = replace(short, manifest={**short.manifest, "exit_status": 1})
    for short_run, how in ((killed, "was interrupted"), (failed, "ended with status 1")):
        comparison = judged(short_run)
        assert comparison.outcome is Outcome.NOT_COMPARABLE
        assert comparison.reason.startswith(
            f"The candidate 'opt-0' lacks step 3 of the baseline: its run {how}. Record it again."
        )


def test_a_run_that_the_tolerances_were_calibrated_from_is_no_candidate() -> None:
    with pytest.raises(IncomparableError) as raised:
        compare([candidate()], [BASE[1]], TOLERANCES)
    assert str(raised.value) == (
        "The candidate 'base-1' is one of the runs that the tolerances were calibrated from, so that it is within them "
        "whatever it holds. Give the capture of the branch as the candidate, after the baseline; give --same-code if "
        "this is meant."
    )
    assert compare([candidate()], [BASE[1]], TOLERANCES, same_code=True).outcome is Outcome.EQUIVALENT


def test_a_run_that_was_to_record_other_steps_is_not_comparable() -> None:
    short = candidate(steps=(1, 2))
    told = replace(short, manifest={**short.manifest, "config": {**short.manifest["config"], "steps": "1-2"}})
    comparison = judged(told)
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert comparison.reason == (
        "The candidate 'opt-0' lacks step 3 of the baseline: it was told to record '1-2', not '1-3'."
    )


def test_a_missing_rank_is_not_comparable() -> None:
    whole = candidate()
    comparison = judged(
        replace(whole, segments={place: rows for place, rows in whole.segments.items() if not place[0]})
    )
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert comparison.reason == "The candidate 'opt-0' lacks rank 1 of the baseline."


def test_runs_without_a_common_step_are_refused() -> None:
    with pytest.raises(IncomparableError) as raised:
        judged(candidate(steps=(8, 9)))
    assert str(raised.value) == (
        "The runs have no step in common on any rank: 'base-0' has steps 1-3 and 'opt-0' has 8-9. "
        "Record the same --steps in both."
    )


def test_an_arm_without_runs_is_refused() -> None:
    with pytest.raises(IncomparableError) as raised:
        compare(BASE, [], TOLERANCES)
    assert str(raised.value) == (
        "A comparison needs at least one run of each arm, and got 3 baselines and 0 candidates."
    )


def test_tolerances_of_another_job_are_refused() -> None:
    renamed = {"x": {f"forward/other.{n}": member for n, member in enumerate(TOLERANCES.members().values())}}
    with pytest.raises(ToleranceError) as names:
        judged(candidate(), tolerances=replace(TOLERANCES, families=renamed))
    with pytest.raises(ToleranceError) as world:
        judged(candidate(), tolerances=replace(TOLERANCES, world_size=8))
    assert str(names.value) == (
        "The tolerances are of another job: none of their 21 series is among the 27 of 'base-0'. "
        "Calibrate with runs of this job."
    )
    assert str(world.value) == (
        "The tolerances are of another job: they were calibrated with 8 ranks, and 'base-0' has 2. "
        "Calibrate with runs of this job."
    )


def test_an_edited_tolerance_is_used_and_named() -> None:
    family = dict(TOLERANCES.families["attention outputs"])
    member = family["forward/blocks.0.attn"]
    family["forward/blocks.0.attn"] = replace(member, tolerance=(1.0,) * 3)
    wide = replace(TOLERANCES, families={**TOLERANCES.families, "attention outputs": family})
    fault = only(Kind.FORWARD, "blocks.0.attn", lambda value: value * 1.001)
    comparison = judged(candidate(fault=fault), tolerances=wide)
    assert comparison.outcome is Outcome.EQUIVALENT
    assert "Tolerances edited since calibration: forward/blocks.0.attn." in comparison.notes


def test_without_tolerances_only_bit_identity_is_equivalent() -> None:
    same = judged(
        replace(BASE[0], run_id="again", path=candidate().path, manifest=candidate().manifest), tolerances=None
    )
    near = judged(candidate(noise=1e-7), tolerances=None)
    off = judged(candidate(fault=breaks(Kind.FORWARD, "blocks.0")), tolerances=None)
    assert [c.outcome for c in (same, near, off)] == [Outcome.EQUIVALENT, Outcome.INCONCLUSIVE, Outcome.INCONCLUSIVE]
    assert all(check.assumed for check in off.checks if check.form == "calibrated")
    assert off.more_runs == "Calibrate with the baselines, and compare with -t."
    assert off.wanted == Wanted(calibration=True)


def test_without_tolerances_the_runs_that_a_calibration_lacks_are_named() -> None:
    one = compare(BASE[:1], [candidate(noise=1e-7)], None)
    assert (one.outcome, one.more_runs) == (
        Outcome.INCONCLUSIVE,
        "Record two more baselines, calibrate, and compare with -t. Where repeats are bit-identical, calibrate with "
        "runs of the unmodified code recorded with `probe record --perturb ulp:1`, `ulp:2` and `ulp:3`.",
    )
    assert one.wanted == Wanted(baselines=2, if_identical=("ulp:1", "ulp:2", "ulp:3"), calibration=True)
    identical = compare(baselines(2, ranks=2, noise=0.0), [candidate(noise=1e-7)], None)
    assert identical.more_runs == (
        "The baselines are bit-identical: record three runs of the unmodified code with `probe record --perturb "
        "ulp:1`, `ulp:2` and `ulp:3`, calibrate with them, and compare with -t."
    )
    assert identical.wanted == Wanted(perturbed=("ulp:1", "ulp:2", "ulp:3"), calibration=True)


def test_what_code_differs_and_what_the_tolerances_come_from_is_part_of_the_comparison() -> None:
    found = judged(candidate())
    assert found.code == CodeChange(changed=("train.py",))
    assert found.calibration == Calibration(k=3.0, runs=TOLERANCES.runs)


def test_other_code_with_the_same_bits_is_asked_whether_it_ran() -> None:
    same = judged(replace(BASE[0], run_id="again", manifest=candidate().manifest))
    assert same.outcome is Outcome.EQUIVALENT
    assert same.notes == ("The code differs, and every recorded value is bit-identical. Did the changed code run?",)


def test_a_required_quantity_without_a_tolerance_does_not_pass() -> None:
    families = {what: members for what, members in TOLERANCES.families.items() if what != "loss"}
    comparison = judged(candidate(), tolerances=replace(TOLERANCES, families=families))
    assert comparison.outcome is Outcome.INCONCLUSIVE
    assert comparison.reason == "A required quantity has no tolerance: loss/micro_loss at step 1."
    assert comparison.more_runs == "Calibrate again, with baselines that record what the candidate records."
    assert row(comparison, "loss").not_compared_why == "6 without a tolerance"


def test_assumed_floors_call_nothing_different_that_only_shows_after_an_update() -> None:
    base = baselines(noise=0.0)
    assumed = calibrate(base)
    late = run("late", noise=0.0, code="bbbb", fault=breaks(Kind.FORWARD, "blocks.0", step=2))
    soon = run("soon", noise=0.0, code="bbbb", fault=breaks(Kind.FORWARD, "blocks.0", step=1))
    outcomes = [compare(base, [opt], assumed).outcome for opt in (late, soon)]
    assert outcomes == [Outcome.INCONCLUSIVE, Outcome.DIFFERENT]
    assert compare(base, [late], assumed).more_runs == (
        "Repeats are bit-identical: record three runs of the unmodified code with `probe record --perturb ulp:1`, "
        "`ulp:2` and `ulp:3`, and calibrate with them."
    )
    assert compare(base, [late], assumed).wanted == Wanted(perturbed=("ulp:1", "ulp:2", "ulp:3"), calibration=True)


def test_tolerances_from_other_code_are_used_and_said_to_be() -> None:
    runs = tuple(replace(each, code="cccc") for each in TOLERANCES.runs)
    comparison = judged(candidate(), tolerances=replace(TOLERANCES, runs=runs))
    assert comparison.outcome is Outcome.EQUIVALENT
    assert comparison.notes == ("The tolerances were calibrated from other code than the baseline's.",)


def test_only_exact_checks_that_passed_are_no_proof() -> None:
    checks = [Check(what="batch", where="in", form="exact", kinds=(Kind.BATCH,))]
    comparison = compare(BASE, [candidate()], TOLERANCES, checks=checks)
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert comparison.reason == "No check could have told a scrambled run from a sound one."


def test_noise_that_hides_a_scrambled_run_is_not_comparable() -> None:
    loud = baselines(noise=3.0)
    comparison = compare(loud, [run("opt", run_seed=9, code="bbbb", noise=3.0)], calibrate(loud))
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    blocks = row(comparison, "block outputs")
    assert (blocks.vacuous, blocks.cells, blocks.not_compared_why) == (True, 0, "9 beyond the horizon")
    assert "The self-test failed: a baseline scrambled by step shift is not told from the baseline." in comparison.notes


def test_deterministic_baselines_ask_for_perturbed_runs_and_five_of_them_settle_it() -> None:
    plain = run("base-0", noise=0.0)

    def perturbed(count: int) -> list[SyntheticCapture]:
        return [run(f"ulp-{n}", run_seed=n, noise=1e-5, perturb=f"ulp:{n}") for n in range(1, count + 1)]

    fault = only(Kind.FORWARD, "blocks.1", lambda value: value * 1.001)
    opt = run("opt", noise=0.0, code="bbbb", fault=fault)
    three = compare([plain], [opt], calibrate([plain, *perturbed(3)]))
    five = compare([plain], [opt], calibrate([plain, *perturbed(5)]))
    assert three.outcome is Outcome.INCONCLUSIVE
    assert three.more_runs == (
        "Repeats are bit-identical: record two more perturbed runs of the unmodified code "
        "(`probe record --perturb ulp:4` and so on), calibrate with all, and compare again."
    )
    assert three.wanted == Wanted(perturbed=("ulp:4", "ulp:5"), calibration=True)
    assert five.outcome is Outcome.DIFFERENT


def test_a_loss_scale_that_is_undone_is_no_difference() -> None:
    def scaled(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        before_clipping = key.kind in (Kind.BACKWARD, Kind.GRAD)
        return value * 1024 if before_clipping or key.name == "loss_scale" else value

    comparison = judged(candidate(fault=scaled))
    assert comparison.outcome is Outcome.EQUIVALENT
    assert comparison.notes == (
        "The candidate's loss is scaled by 1024 in 6 microbatches; gradients before clipping are compared after "
        "dividing by it.",
    )


def test_a_loss_scale_that_is_not_undone_is_found_in_what_the_optimizer_got() -> None:
    def scaled(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        wrong = key.kind in (Kind.BACKWARD, Kind.GRAD, Kind.GRAD_NORM) or key.name == "loss_scale"
        return value * 1024 if wrong else value

    comparison = judged(candidate(fault=scaled))
    assert row(comparison, "gradient norm").verdict is Verdict.ABOVE


def test_all_pairs_of_runs_are_shown() -> None:
    comparison = compare(BASE[:2], [candidate("opt-0"), candidate("opt-1", seed=101)], TOLERANCES)
    assert [(pair.first, pair.second, pair.relation) for pair in comparison.pairs] == [
        ("base-0", "base-1", "baseline pair"),
        ("base-0", "opt-0", "cross pair"),
        ("base-0", "opt-1", "cross pair"),
        ("base-1", "opt-0", "cross pair"),
        ("base-1", "opt-1", "cross pair"),
        ("opt-0", "opt-1", "candidate pair"),
    ]
    assert all(isinstance(pair, PairSummary) and 0 < pair.ratio < 1.5 and pair.where for pair in comparison.pairs)


@pytest.mark.parametrize(
    ("check", "verdict", "difference", "tolerance"),
    [
        ({"form": "rel", "rel": 0.05}, Verdict.ABOVE, 0.1, 0.05),
        ({"form": "rel", "rel": 0.2}, Verdict.WITHIN, 0.1, 0.2),
        ({"form": "abs", "abs": 0.5}, Verdict.WITHIN, 0.2, 0.5),
        ({"form": "abs", "abs": 0.1}, Verdict.ABOVE, 0.2, 0.1),
        ({"form": "rel or abs", "rel": 0.01, "abs": 0.5}, Verdict.WITHIN, 0.2, 0.5),
        ({"form": "rel or abs", "rel": 0.01, "abs": 0.01}, Verdict.ABOVE, 0.2, 0.02),
        ({"form": "rel + abs", "rel": 0.05, "abs": 0.15}, Verdict.WITHIN, 0.2, 0.25),
        ({"form": "ratio", "ratio": 20.0}, Verdict.WITHIN, 1.1, 20.0),
        ({"form": "ratio", "ratio": 1.05}, Verdict.ABOVE, 1.1, 1.05),
        ({"form": "record only"}, Verdict.RECORDED_ONLY, 0.1, math.nan),
    ],
)
def test_declared_forms_judge_by_their_own_bounds(
    check: dict[str, object], verdict: Verdict, difference: float, tolerance: float
) -> None:
    def made(value: float) -> Fault:
        return only(Kind.GRAD_NORM, "grad_norm", lambda _: np.array(value))

    base = run("base-0", noise=0.0, fault=made(2.0))
    opt = run("opt-0", noise=0.0, code="bbbb", fault=made(2.2))
    declared = Check(what="norm", where="clip", kinds=(Kind.GRAD_NORM,), **check)  # type: ignore[arg-type]
    found = compare([base], [opt], None, checks=[declared]).checks[0]
    assert (found.verdict, found.form) == (verdict, check["form"])
    assert found.difference == pytest.approx(difference)
    assert found.tolerance == pytest.approx(tolerance, nan_ok=True)


def test_step_bands_judge_the_steps_they_name() -> None:
    fault = only(Kind.GRAD_NORM, "grad_norm", lambda value: value * 1.1, step=1)
    checks = [
        Check(what="first", where="", kinds=(Kind.GRAD_NORM,), form="rel", rel=0.2, steps=parse_steps("1")),
        Check(what="later", where="", kinds=(Kind.GRAD_NORM,), form="rel", rel=0.01, steps=parse_steps("2-")),
    ]
    first, later = compare(BASE, [candidate(fault=fault)], TOLERANCES, checks=checks).checks
    assert (first.verdict, first.cells, later.verdict, later.cells) == (Verdict.WITHIN, 2, Verdict.WITHIN, 4)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"select": ("grad/blok.*",)}, "its selection matches nothing that was recorded"),
        ({"select": ("loss/*",), "form": "record only"}, "all that it selects belongs to checks before it"),
        ({"select": ("loss/*",), "steps": parse_steps("10-")}, "none of its steps 10- was recorded"),
        (
            {"select": ("forward/*",), "metric": ("value",)},
            "no such number can be made of what was recorded",
        ),
        ({"select": ("loss/*",), "window": 50}, "no such number can be made of what was recorded"),
    ],
)
def test_a_declared_check_that_judges_nothing_never_passes(fields: dict[str, object], why: str) -> None:
    declared = Check(what="x", where="", **fields)  # type: ignore[arg-type]
    comparison = compare(BASE, [candidate()], TOLERANCES, checks=[*default_checks(), declared])
    assert comparison.outcome is Outcome.NOT_COMPARABLE
    assert comparison.reason == f"Check 'x' judged nothing: {why}. Correct or remove it."
    assert row(comparison, "x").verdict is Verdict.NOT_COMPARABLE


@pytest.mark.parametrize("form", ["exact", "rel"])
def test_an_integer_is_judged_exactly_unless_a_tolerance_is_declared(form: str) -> None:
    def counted(name: str, value: float, code: str) -> SyntheticCapture:
        def as_integer(rows: StepRows) -> StepRows:
            return replace(
                rows,
                dtype=tuple(
                    "int64" if key.kind is Kind.GRAD_NORM else dtype
                    for key, dtype in zip(rows.keys, rows.dtype, strict=True)
                ),
            )

        made = only(Kind.GRAD_NORM, "grad_norm", lambda _: np.array(value))
        return run(name, noise=0.0, code=code, fault=made).edited(as_integer)

    check = Check(what="n", where="", kinds=(Kind.GRAD_NORM,), form=form, rel=0.01 if form == "rel" else None)
    found = compare([counted("b", 400.0, "a")], [counted("c", 402.0, "b")], None, checks=[check]).checks[0]
    expected = (Verdict.WITHIN, 0.005) if form == "rel" else (Verdict.ABOVE, 2.0)
    assert (found.verdict, found.difference) == (expected[0], pytest.approx(expected[1]))


@few
@given(st.randoms(use_true_random=False))
def test_permuting_rows_changes_no_verdict(random: object) -> None:
    opt = candidate(fault=breaks(Kind.FORWARD, "blocks.1", step=2, size=1e-4))

    def shuffled(rows: StepRows) -> StepRows:
        order = list(range(len(rows.keys)))
        random.shuffle(order)  # type: ignore[attr-defined]
        pick = np.array(order)
        return replace(
            rows,
            **{
                name: tuple(getattr(rows, name)[i] for i in order)
                for name in ("keys", "dtype", "shape", "text", "where")
            },
            **{n: getattr(rows, n)[pick] for n in ("order", "numel", "nonfinite", "value", "sketch", "sample", "hash")},
            scalars={name: values[pick] for name, values in rows.scalars.items()},
        )

    plain, mixed = judged(opt), judged(opt.edited(shuffled))
    assert repr((mixed.outcome, mixed.checks, mixed.first_divergence)) == repr(
        (plain.outcome, plain.checks, plain.first_divergence)
    )


def test_reversing_the_files_of_ranks_changes_no_verdict() -> None:
    opt = candidate(fault=breaks(Kind.FORWARD, "blocks.1", step=2))
    turned = replace(opt, segments=dict(reversed(opt.segments.items()))).edited(reverse)
    assert repr(judged(turned).checks) == repr(judged(opt).checks)


@few
@given(st.sampled_from([2.0**-20, 0.5, 4.0, 2.0**20]))
def test_scaling_every_value_leaves_the_verdict(factor: float) -> None:
    def scaled(rows: StepRows) -> StepRows:
        numbers = np.array([key.kind is not Kind.LOSS or key.name != "loss_scale" for key in rows.keys])
        by = np.where(numbers, factor, 1.0)
        return replace(
            rows,
            value=rows.value * by,
            scalars={name: values * by for name, values in rows.scalars.items()},
            sketch=(rows.sketch * by[:, None]).astype(np.float32),
        )

    base, opt = [each.edited(scaled) for each in BASE], candidate(fault=breaks(Kind.LOSS, "micro_loss", size=1e-5))
    plain, by_factor = judged(opt), compare(base, [opt.edited(scaled)], calibrate(base))
    assert by_factor.outcome is plain.outcome
    assert [check.verdict for check in by_factor.checks] == [check.verdict for check in plain.checks]
    assert [check.above for check in by_factor.checks] == [check.above for check in plain.checks]


@few
@given(st.integers(0, 10_000))
def test_more_baselines_never_turn_within_into_above(seed: int) -> None:
    more = baselines(5, ranks=2)
    opt = candidate(seed=seed)
    three, five = compare(more, [opt], calibrate(more[:3])), compare(more, [opt], calibrate(more))
    above_of_five = {check.what: check.above for check in five.checks}
    assert all(above_of_five[check.what] <= check.above for check in three.checks)


@few
@given(st.integers(0, 20), st.integers(1, 3), st.integers(0, 1))
def test_one_nan_anywhere_never_passes(row_number: int, step: int, rank: int) -> None:
    def edit(rows: StepRows) -> StepRows:
        if (rows.step, rows.rank) != (step, rank):
            return rows
        nonfinite = rows.nonfinite.copy()
        nonfinite[row_number % len(rows.keys)] = 1
        return replace(rows, nonfinite=nonfinite)

    assert judged(candidate().edited(edit)).outcome is Outcome.DIFFERENT


def test_past_the_horizon_nothing_passes_but_what_is_further_off_than_a_scrambled_run_is_told() -> None:
    loud = baselines(noise=0.1)
    tolerances = calibrate(loud)
    sound = run("opt", run_seed=9, code="bbbb", noise=0.1)

    def scaled(rows: StepRows) -> StepRows:
        factor = np.array([30.0 if key.label == "forward/blocks.0" else 1.0 for key in rows.keys])
        scalars = {name: values * factor for name, values in rows.scalars.items()}
        return replace(rows, sketch=(rows.sketch * factor[:, None]).astype(np.float32), scalars=scalars)

    weak = row(compare(loud, [sound], tolerances), "block outputs")
    assert (weak.cells, weak.above) == (0, 0)
    comparison = compare(loud, [sound.edited(scaled)], tolerances)
    told = row(comparison, "block outputs")
    assert (told.verdict, told.cells, told.above) == (Verdict.ABOVE, 3, 3)
    assert told.worst is not None
    assert told.worst.place.name == "blocks.0"
