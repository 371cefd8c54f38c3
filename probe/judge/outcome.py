"""Decide: equivalent, different, inconclusive or not comparable, and which runs to add.

A red result is provisional until it repeats, because three baselines promise one false alarm in twenty at best: unless
three quantities are ten times above tolerance, or something is wrong in itself (missing, not finite,
other data, an exact value that is not equal), two more baselines and one more candidate are asked for, and only what is
above again with them makes the candidate different.

Source: the project's statistics study, sections 0b and 1.6. This module must not know how a difference is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probe.judge.cells import Judgement
from probe.judge.comparison import NOTHING_WANTED, CheckResult, Outcome, Verdict, Wanted
from probe.judge.tolerance import Tolerances
from probe.measure.series import BEFORE, FloatArray
from probe.point import Kind

FAR = 10.0
"""Times the tolerance (30 x the spread) that identical code did not reach in three quantities at once in 880 runs."""
FAR_QUANTITIES = 3
ENOUGH_BASELINES, ENOUGH_CANDIDATES = 5, 2
RECOMMENDED_BASELINES = 3
"""Runs to begin a calibration with."""
LEAST_MATCHED = 0.5
"""A candidate that shares less than this part of the baseline's cells is no candidate for equivalence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The outcome and why."""

    outcome: Outcome
    reason: str
    notes: tuple[str, ...] = ()
    more_runs: str = ""
    wanted: Wanted = NOTHING_WANTED
    """The runs of `more_runs`, counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What is known of the unmodified code's runs that are compared."""

    count: int
    repeat: bool | None
    """They have the same bits; None where there is a single one."""
    perturbations: tuple[str, ...]
    """How to perturb them, with as many as a calibration wants: `ulp:1` and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """What a candidate lacks as a whole."""

    matched_share: float
    """Part of the baseline's cells that every candidate has, in the same shape."""
    stopped: str = ""
    """The candidate was to record steps that it does not have, and ended in good order: a sentence."""
    interrupted: str = ""
    """The candidate's run was killed, or failed, before it had all steps: a sentence."""
    other_steps: str = ""
    """The candidate was told to record other steps: a sentence."""
    ranks: str = ""
    """The candidate lacks ranks: a sentence."""


def decide(
    judgements: Sequence[Judgement],
    checks: Sequence[CheckResult],
    tolerances: Tolerances | None,
    gaps: Gaps,
    baselines: Baselines,
) -> Decision:
    """Decide about all candidates together.

    Args:
        judgements: One for each candidate, against the first baseline.
        checks: Rows of the table.
        tolerances: None when nothing was calibrated.
    """
    wrong = _wrong_in_itself(judgements)
    if wrong:
        return Decision(outcome=Outcome.DIFFERENT, reason=wrong)
    if gaps.stopped:
        return Decision(outcome=Outcome.DIFFERENT, reason=gaps.stopped)
    declared = _above_declared(judgements)
    if declared is not None and declared.outcome is Outcome.DIFFERENT:
        return declared
    worst = np.array([judgement.worst_series(cells=~judgement.declared) for judgement in judgements])
    above = worst > 1
    # A flipped sign of one element's update (AdamW: +-lr whatever the gradient) is seen downstream in everything.
    flipped = [judgement.flipped_step() for judgement in judgements]
    until = [None if s is None else s + 1 for s in flipped]
    if tolerances is not None and tolerances.assumed:
        # How re-ordered work grows from step to step was not measured, so that only the first step is beyond doubt.
        until = [1] * len(judgements)
    worst_until = [j.worst_series(n, ~j.declared) for j, n in zip(judgements, until, strict=True)]
    far = (np.array(worst_until) > FAR).all(axis=0)
    if tolerances is not None and int(far.sum()) >= FAR_QUANTITIES:
        reason = f"{int(far.sum())} quantities are more than {FAR:.0f} times above tolerance."
        return Decision(outcome=Outcome.DIFFERENT, reason=reason)
    found = _provisional(worst, judgements, tolerances, baselines) if above.any() else None
    if found is not None and found.outcome is not Outcome.EQUIVALENT:
        return found
    calm = declared or _calm(judgements, checks, tolerances, gaps, baselines)
    # What did not repeat in every candidate passes on the same terms as what was never above.
    return found if found is not None and calm.outcome is Outcome.EQUIVALENT else calm


def _above_declared(judgements: Sequence[Judgement]) -> Decision | None:
    """Decide about what is above a bound that a person declared; None if nothing is.

    Such a bound is no estimate, so that nothing needs to repeat. Two things make it provisional: a candidate that is
    within, and unmodified code that exceeds the bound by itself.
    """
    firm = np.array([judgement.worst_series(cells=judgement.declared & ~judgement.flaky) for judgement in judgements])
    loose = np.array([judgement.worst_series(cells=judgement.flaky) for judgement in judgements])
    repeated = (firm > 1).all(axis=0)
    if repeated.any():
        return Decision(
            outcome=Outcome.DIFFERENT,
            reason=f"{_quantities(int(repeated.sum()))} above a declared tolerance"
            f"{' in every candidate' if len(judgements) > 1 else ''}: {_leading(judgements, firm)}.",
        )
    if (firm > 1).any():
        return Decision(
            outcome=Outcome.INCONCLUSIVE,
            reason=f"{_quantities(int((firm > 1).any(axis=0).sum()))} above a declared tolerance in one candidate and "
            f"within in another: {_leading(judgements, firm)}.",
            more_runs="Record one more candidate, or see why the candidates differ.",
            wanted=Wanted(candidates=1),
        )
    if (loose > 1).any():
        return Decision(
            outcome=Outcome.INCONCLUSIVE,
            reason=f"{_quantities(int((loose > 1).any(axis=0).sum()))} above a declared tolerance that the unmodified "
            f"code exceeds by itself: {_leading(judgements, loose)}.",
            more_runs="Declare a tolerance above the spread, or leave the check to calibration (form = 'calibrated').",
        )
    return None


def _quantities(count: int) -> str:
    return f"{count} quantities are" if count > 1 else "1 quantity is"


def _leading(judgements: Sequence[Judgement], worst: FloatArray) -> str:
    leading = int(np.nanargmax(np.nan_to_num(worst, nan=-1.0).max(axis=0)))
    times = float(np.nanmax(worst[:, leading]))
    label = judgements[0].differences.index.labels[leading]
    return f"{label} is {f'{times:.3g} times its tolerance' if np.isfinite(times) else 'off, and nothing is allowed'}"


def _wrong_in_itself(judgements: Sequence[Judgement]) -> str:
    """Return a sentence if something cannot be noise, in any candidate."""
    for judgement in judgements:
        d = judgement.differences
        unequal = judgement.exact & (judgement.excess > 1)
        batch = np.array([key.kind is Kind.BATCH for key in d.keys])
        for cells, text in (
            (unequal & batch, "The data differ: {label} at step {step}, so that what follows is not comparable."),
            (
                judgement.poisoned,
                "A value is not finite in the candidate and finite in the baseline: {label} at step {step}.",
            ),
            (judgement.lost, "A required quantity is missing, reshaped or of another type: {label} at step {step}."),
            (unequal, "A value that is judged exactly is not equal: {label} at step {step}."),
        ):
            if cells.any():
                s, _, cell = (int(i) for i in np.argwhere(cells)[0])
                return text.format(label=d.keys[cell].label, step=d.steps[s])
    return ""


def _provisional(
    worst: FloatArray, judgements: Sequence[Judgement], tolerances: Tolerances | None, baselines: Baselines
) -> Decision:
    labels = judgements[0].differences.index.labels
    leading = int(np.nanargmax(np.nan_to_num(worst, nan=-1.0).max(axis=0)))
    count = int((worst > 1).any(axis=0).sum())
    highest = float(np.nanmax(worst[:, leading]))
    one = f"{labels[leading]} is {highest:.3g} times its tolerance"
    if tolerances is None:
        return _uncalibrated(f"Nothing was calibrated, and under assumed tolerances {one}.", baselines)
    repeated = (worst > 1).all(axis=0)
    perturbed_only = tolerances.repeatable and not tolerances.assumed
    enough = len(judgements) >= ENOUGH_CANDIDATES and tolerances.plain_runs >= ENOUGH_BASELINES
    if perturbed_only:
        # Repeats of a repeatable program say nothing new; what three perturbed runs left open, more of them settle.
        enough = tolerances.perturbed_runs >= ENOUGH_BASELINES
    if enough and repeated.any():
        return Decision(
            outcome=Outcome.DIFFERENT,
            reason=f"{int(repeated.sum())} quantities are above tolerance in every candidate: {one}.",
        )
    if enough:
        return Decision(
            outcome=Outcome.EQUIVALENT,
            reason=f"No quantity is above tolerance in every candidate; the closest is {one} in one of them.",
            notes=(f"{count} quantities were above tolerance in one candidate and within in another (escalated).",),
        )
    more_runs, wanted = _more_runs(tolerances, len(judgements), baselines)
    return Decision(
        outcome=Outcome.INCONCLUSIVE,
        reason=f"{count} quantities are above tolerance, but not far enough to rule out chance: {one}.",
        more_runs=more_runs,
        wanted=wanted,
    )


def _more_runs(tolerances: Tolerances, candidates: int, baselines: Baselines) -> tuple[str, Wanted]:
    if tolerances.assumed:
        return (
            f"Repeats are bit-identical: record three runs of the unmodified code with {_perturbed(baselines)}, and "
            "calibrate with them."
        ), Wanted(perturbed=baselines.perturbations, calibration=True)
    if tolerances.repeatable:
        count = max(ENOUGH_BASELINES - tolerances.perturbed_runs, 1)
        form = baselines.perturbations[0].partition(":")[0]
        first = tolerances.perturbed_runs + 1
        return (
            f"Repeats are bit-identical: record {_count(count, 'more perturbed run')} of the unmodified code "
            f"(`probe record --perturb {form}:{first}` and so on), calibrate with all, and compare again."
        ), Wanted(perturbed=tuple(f"{form}:{number}" for number in range(first, first + count)), calibration=True)
    more_baselines = max(ENOUGH_BASELINES - tolerances.plain_runs, 0)
    more_candidates = max(ENOUGH_CANDIDATES - candidates, 0)
    parts = [_count(more_baselines, "more baseline")] if more_baselines else []
    parts += [_count(more_candidates, "more candidate")] if more_candidates else []
    return (
        f"Record {' and '.join(parts)}, calibrate with all baselines, and compare all candidates.",
        Wanted(baselines=more_baselines, candidates=more_candidates, calibration=bool(more_baselines)),
    )


def _uncalibrated(reason: str, baselines: Baselines) -> Decision:
    """Ask for what a calibration needs: repeats, or perturbed runs where repeats say nothing."""
    how = _perturbed(baselines)
    missing = max(RECOMMENDED_BASELINES - baselines.count, 0)
    if baselines.repeat:
        text = f"The baselines are bit-identical: record three runs of the unmodified code with {how}, calibrate with"
        text, wanted = f"{text} them, and compare with -t.", Wanted(perturbed=baselines.perturbations, calibration=True)
    elif not missing:
        text, wanted = "Calibrate with the baselines, and compare with -t.", Wanted(calibration=True)
    else:
        text = f"Record {_count(missing, 'more baseline')}, calibrate, and compare with -t. "
        text += f"Where repeats are bit-identical, calibrate with runs of the unmodified code recorded with {how}."
        alternative = baselines.perturbations if baselines.repeat is None else ()
        wanted = Wanted(baselines=missing, if_identical=alternative, calibration=True)
    return Decision(outcome=Outcome.INCONCLUSIVE, reason=reason, more_runs=text, wanted=wanted)


def _perturbed(baselines: Baselines) -> str:
    first, *others = baselines.perturbations
    return f"`probe record --perturb {first}`, " + " and ".join(f"`{one}`" for one in others)


def _count(count: int, what: str) -> str:
    return f"one {what}" if count == 1 else f"{count} {what}s" if count > 2 else f"two {what}s"


def _calm(
    judgements: Sequence[Judgement],
    checks: Sequence[CheckResult],
    tolerances: Tolerances | None,
    gaps: Gaps,
    baselines: Baselines,
) -> Decision:
    """Decide when nothing counts as above tolerance: was anything judged that could have been?"""
    for judgement in judgements:
        if judgement.blind.any():
            s, _, cell = (int(i) for i in np.argwhere(judgement.blind)[0])
            d = judgement.differences
            return _cannot(
                f"The baseline itself is not finite at {d.keys[cell].label}, step {d.steps[s]}: it cannot be compared."
            )
        if judgement.unsettled.any():
            s, _, cell = (int(i) for i in np.argwhere(judgement.unsettled)[0])
            d = judgement.differences
            return Decision(
                outcome=Outcome.INCONCLUSIVE,
                reason=f"A required quantity has no tolerance: {d.keys[cell].label} at step {d.steps[s]}.",
                more_runs="Calibrate again, with baselines that record what the candidate records.",
                wanted=Wanted(calibration=True),
            )
    if gaps.ranks:
        return _cannot(gaps.ranks)
    if gaps.interrupted:
        return _cannot(gaps.interrupted)
    if gaps.other_steps:
        return _cannot(gaps.other_steps)
    if gaps.matched_share < LEAST_MATCHED:
        return _cannot(
            f"Only {gaps.matched_share:.0%} of the baseline's values are in the candidate in the same shape."
        )
    nothing = [check for check in checks if not check.quantities]
    if nothing:
        return _cannot(
            f"Check {nothing[0].what!r} judged nothing: {nothing[0].not_compared_why}. Correct or remove it."
        )
    if not any(_telling(check) for check in checks):
        return _cannot("No check could have told a scrambled run from a sound one.")
    if tolerances is None:
        calm = (Verdict.IDENTICAL, Verdict.RECORDED_ONLY)
        if all(check.verdict in calm for check in checks if check.cells):
            return Decision(outcome=Outcome.EQUIVALENT, reason="All recorded values are bit-identical.")
        if all(check.verdict in calm or not check.assumed for check in checks if check.cells):
            return Decision(outcome=Outcome.EQUIVALENT, reason=_closest(judgements))
        return _uncalibrated("Nothing was calibrated: the values differ by less than assumed tolerances.", baselines)
    return Decision(outcome=Outcome.EQUIVALENT, reason=_closest(judgements))


def _telling(check: CheckResult) -> bool:
    """Tell whether a check judged something that training computes: not its inputs, settings or schedule."""
    if check.worst is None or not check.cells or check.vacuous or check.form == "record only":
        return False
    place = check.worst.place
    return place.kind not in (Kind.BATCH, Kind.STATE, Kind.LR) and place.item != BEFORE


def _cannot(reason: str) -> Decision:
    return Decision(outcome=Outcome.NOT_COMPARABLE, reason=reason)


def _closest(judgements: Sequence[Judgement]) -> str:
    worst = np.fmax.reduce([judgement.worst_series() for judgement in judgements])
    if not np.nan_to_num(worst, nan=0.0).any():
        return "All compared values are bit-identical or equal."
    leading = int(np.nanargmax(worst))
    label = judgements[0].differences.index.labels[leading]
    share = f"{float(worst[leading]):.0%} of its tolerance"
    return f"All that was judged is within tolerance; the closest call is {label} at {share}."
