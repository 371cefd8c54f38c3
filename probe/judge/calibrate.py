"""Turn repeated runs of the unmodified code into tolerances.

The rule is the user's, tolerance = 3 x the spread of three runs. Taken cell by cell it rejects identical code in every
realistic comparison, is zero where repeats are bit-identical, and in a chaotic run grows until a scrambled run passes.
So the spread is pooled over ranks and forward over steps, has a floor from the precision of the numbers, is never under
a third of what sibling layers have, and is not used past the step at which a scrambled run would come near it.

Source: the project's statistics study, sections 0b and 0c. This module must not know candidates or verdicts.

Shapes: S steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import numpy as np

from probe.check import NO_CHECK, Check, default_checks, owner
from probe.errors import ToleranceError
from probe.judge.fit import bounds_of
from probe.judge.limits import with_siblings
from probe.judge.provenance_changes import FEW_RUNS, calibrated_run, check_same_job, few_runs, perturbations
from probe.judge.repeats import Repeats, measure_repeats
from probe.judge.tolerance import ALL_JUDGED, K, Tolerance, Tolerances
from probe.measure.differences import Axes
from probe.measure.distance import ASSUMED_EPSILONS
from probe.measure.reduced import reduced
from probe.measure.series import CaptureLike, FloatArray, perturbation
from probe.measure.whole import whole
from probe.point import Kind

MARGIN_TENSOR, MARGIN_NUMBER = 0.1, 0.01
"""A step is judged while the tolerance is below this share of what a scrambled run differs by. Numbers need more: other
initial weights change the loss of an untrained model by 1 % only. Source: the project's statistics study, section 4."""

HARDLY_CHANGES = 0.01
"""A tensor that differs by less than this from step to step, and by no more than its noise, is constant (the table of a
fixed schedule): scrambling does not change it, so there is no horizon, and its tolerance is as good at every step."""


def calibrate(captures: Sequence[CaptureLike], *, k: float = K, checks: Sequence[Check] | None = None) -> Tolerances:
    """Measure the spread of repeated runs and derive tolerances from it.

    A run recorded with `--perturb` is paired with the plain runs as well as with other perturbed ones: a candidate is
    compared with the plain run, and with a single perturbed run there would be no pair at all.

    Args:
        captures: Two or more runs of the same unmodified code, three recommended. Perturbed runs may be among them, and
            are needed where plain repeats are bit-identical.
        k: Multiple of the spread.
        checks: Families of the table; None: the default ones.

    Raises:
        ToleranceError: The runs are too few, share no steps, or are not separate runs of one job on the same data.
    """
    if not 0 < k < float("inf"):
        raise ToleranceError(f"The multiple of the spread is {k!r}. It must be finite and above 0; 3 is the custom.")
    checks = default_checks() if checks is None else checks
    ordered = sorted(
        reduced([whole(capture) for capture in captures], checks), key=lambda capture: bool(perturbation(capture))
    )
    notes = list(check_same_job(ordered))
    axes = Axes.shared(ordered)
    if not axes.steps:
        raise ToleranceError(
            f"The {len(ordered)} runs have no step in common on any rank. Record the same --steps in all of them."
        )
    _require_same_steps(ordered)
    repeats = measure_repeats(ordered, axes)
    assumed = repeats.identical and not any(perturbation(capture) for capture in ordered)
    if assumed:
        first, *others = (f"`{how}`" for how in perturbations(ordered[0]))
        notes.append(
            "All runs are bit-identical, so nothing was measured: tolerances are assumed floors of "
            f"{ASSUMED_EPSILONS:.0f} eps of the recorded type. Record runs of the unmodified code with "
            f"`probe record --perturb {first[1:]}, {' and '.join(others)}, and calibrate with them."
        )
    elif len(ordered) == FEW_RUNS:
        notes.insert(0, few_runs(repeatable=repeats.identical))
    allowed = _allow(repeats, k, assumed)
    families = _families(repeats, allowed, assumed, checks)
    return Tolerances(
        k=k,
        created_utc=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        steps=axes.steps,
        world_size=ordered[0].world_size,
        runs=tuple(calibrated_run(capture) for capture in ordered),
        families=families,
        assumed=assumed,
        repeatable=repeats.identical,
        self_test=_self_test(repeats, families),
        notes=tuple(notes),
        declared=bounds_of(checks),
    )


def _require_same_steps(captures: Sequence[CaptureLike]) -> None:
    steps = [{step for rank in capture.ranks for step in capture.steps(rank)} for capture in captures]
    longest = max(range(len(captures)), key=lambda run: len(steps[run]))
    for capture, found in zip(captures, steps, strict=True):
        lacking = sorted(steps[longest] - found)
        if lacking:
            raise ToleranceError(
                f"The capture {str(capture.path)!r} lacks step {', '.join(map(str, lacking))}, which "
                f"{str(captures[longest].path)!r} has: the tolerances would not cover it. Leave the capture out, or "
                "record it again with the same --steps."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed:
    """Tolerances of all series, [S, series], never decreasing with the step."""

    spread: FloatArray
    floor: FloatArray
    flip: FloatArray
    tolerance: FloatArray
    noise: FloatArray
    """The tolerance without what is allowed for one flipped sign: what the horizon is about."""


def _allow(repeats: Repeats, k: float, assumed: bool) -> _Allowed:
    """Apply the rule. A step at which a series was not recorded has what was known before it."""
    spread = np.maximum.accumulate(np.nan_to_num(repeats.spread, nan=0.0, posinf=0.0), axis=0)
    rounding = _never_falling(repeats.assumed_floor if assumed else repeats.floor)
    flip = _never_falling(repeats.flip)
    noise = np.fmax(k * spread, rounding)
    own = np.fmax(noise, flip)
    index = repeats.index
    return _Allowed(
        spread=spread,
        floor=rounding,
        flip=flip,
        tolerance=with_siblings(own, index.largest_sibling(own)),
        noise=with_siblings(noise, index.largest_sibling(noise)),
    )


def _never_falling(floor: FloatArray) -> FloatArray:
    least = np.nanmin(np.where(np.isnan(floor), np.inf, floor), axis=0, initial=np.inf)
    filled = np.where(np.isnan(floor), np.where(np.isfinite(least), least, 0.0), floor)
    return np.asarray(np.maximum.accumulate(filled, axis=0), dtype=np.float64)


def _families(
    repeats: Repeats, allowed: _Allowed, assumed: bool, checks: Sequence[Check]
) -> dict[str, dict[str, Tolerance]]:
    families: dict[str, dict[str, Tolerance]] = {check.what: {} for check in checks}
    for series, key in enumerate(repeats.index.keys):
        number = owner(checks, key)
        check = None if number == NO_CHECK else checks[number]
        if (
            repeats.exact[series]
            or check is None
            or check.form == "exact"
            or (check.form == "record only" and not check.bound)
        ):
            continue
        control = float(repeats.control[series])
        noise = allowed.noise[:, series]
        if control == 0 or (control <= noise[0] and control < HARDLY_CHANGES and key.kind is not Kind.PARAM):
            control = float("nan")
        margin = MARGIN_NUMBER if repeats.number[series] else MARGIN_TENSOR
        horizon, mark = _horizon(noise, control, margin, repeats.axes.steps)
        families[check.what][repeats.index.labels[series]] = Tolerance(
            spread=_floats(allowed.spread[:, series]),
            floor=_floats(allowed.floor[:, series]),
            flip=_floats(allowed.flip[:, series]) if allowed.flip[:, series].any() else (),
            tolerance=_floats(allowed.tolerance[:, series]),
            control=control,
            horizon=horizon,
            mark=mark or ("insensitive" if assumed else ""),
        )
    return {what: dict(sorted(members.items())) for what, members in families.items() if members}


def _horizon(noise: FloatArray, control: float, margin: float, steps: Sequence[int]) -> tuple[int, str]:
    """Return the last step that is judged (0: none) and the mark of a series that is not judged at all."""
    if np.isnan(control):
        return ALL_JUDGED, ""
    informative = noise < margin * control
    if informative.all():
        return ALL_JUDGED, ""
    count = int(np.argmin(informative))
    if count:
        return steps[count - 1], ""
    return 0, "vacuous" if bool((noise >= control).all()) else "weak"


def _self_test(repeats: Repeats, families: Mapping[str, Mapping[str, Tolerance]]) -> dict[str, str]:
    """Judge the first baseline shifted by one step, and with its ranks rotated: both must be found different.

    The learning rate is left out: a schedule tells steps apart whatever the numbers are.
    """
    members = {label: member for family in families.values() for label, member in family.items()}
    column = {label: number for number, label in enumerate(repeats.index.labels)}
    steps = np.array(repeats.axes.steps)
    result = {}
    for name, differences in (("step shift", repeats.shifted), ("rank rotation", repeats.rotated)):
        seen = told = False
        for label, member in members.items():
            if repeats.index.keys[column[label]].kind is Kind.LR:
                continue
            values = differences[:, column[label]]
            judged = (steps <= member.horizon) & ~np.isnan(values)
            seen = seen or bool((~np.isnan(values)).any())
            told = told or bool((values[judged] > np.array(member.tolerance)[judged]).any())
        result[name] = "different" if told else ("not told apart" if seen else "not run")
    return result


def _floats(values: FloatArray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
