"""Judge every cell of one candidate: is its difference allowed?

The result is arrays, from which rows of the table, the outcome and the first divergence are read. This module must not
know how runs are combined into an outcome.

Shapes: S steps, R ranks, C cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from probe.check import DECLARED, NO_CHECK, Check, owners
from probe.judge.limits import Limits
from probe.judge.tolerance import K
from probe.measure.differences import MISSING, Differences
from probe.measure.series import BEFORE, BoolArray, FloatArray, IntArray, SeriesIndex
from probe.point import Kind

CLEARLY = 3.0
"""Times the tight tolerance at which a parameter has moved by more than luck with three runs explains."""
FEW_PARAMETERS = 0.1
"""Part of the parameters in which signs flip by chance at once; a wrong optimizer moves nearly all of them."""

REQUIRED_KINDS = (Kind.LOSS, Kind.GRAD, Kind.GRAD_NORM, Kind.LR, Kind.PARAM, Kind.EXPLICIT)
"""Kinds that a sound branch cannot stop having; an intermediate it may legally no longer compute."""


BEYOND_SCRAMBLED, BEYOND_TOLERANCE = 2.0, 10.0
"""A cell past its horizon says nothing when it is within its tolerance, but still tells a fault when it is this many
times further off than a scrambled run (the control distance), and than its tolerance: runs of one code that drift apart
do not drift further apart than runs on other data. Without this, a quantity that hardly changes from step to step, such
as the attention of a nearly random model, is never judged in bf16, however wrong it is (seen in examples/minimax_h3,
where a lost softmax scale moved an attention by 3.4 times its control distance and 31 times its tolerance)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One candidate, cell by cell. Arrays are [S, R, C] where not said."""

    differences: Differences
    check: IntArray
    """[S, series] number of the check that each series belongs to, or `NO_CHECK`."""
    shown: FloatArray
    """The difference in the unit of the check's form."""
    tolerance: FloatArray
    """In the same unit; NaN where nothing is allowed for or known."""
    excess: FloatArray
    """Difference / tolerance; infinite where an exact kind is not equal; NaN where the cell is not judged."""
    tight: FloatArray
    """The tolerance by which the first divergence is found."""
    flip: FloatArray
    """What one flipped sign of an optimizer update moves a parameter by; 0 for what is none."""
    spread: FloatArray
    """Difference of the unmodified code with itself in the same unit, NaN where not known."""
    needed: FloatArray
    """What calibration would allow in the same unit; NaN where the spread was not measured or is zero."""
    declared: BoolArray
    """Judged by a bound that a person declared."""
    is_absolute: BoolArray
    """Shown and allowed as absolute differences."""
    is_ratio: BoolArray
    """Shown and allowed as ratios."""
    exact: BoolArray
    """Judged by equality."""
    assumed: BoolArray
    """The tolerance is an assumed floor."""
    poisoned: BoolArray
    """Not finite in the candidate, finite in the baseline."""
    blind: BoolArray
    """Not finite in the baseline: nothing can be compared there."""
    lost: BoolArray
    """Required, and missing, of another shape, or a parameter of another type."""
    beyond: BoolArray
    """Present and not judged, for it lies beyond the horizon."""
    unknown: BoolArray
    """Present and not judged, for there is no tolerance or no check."""
    unsettled: BoolArray
    """Required, present, and not judged, for there is no tolerance."""
    after_data: BoolArray
    """Present and not judged, for the data differ from there on."""

    @property
    def above(self) -> BoolArray:
        """Cells above tolerance."""
        return np.asarray(self.excess > 1)

    @property
    def relative_tolerance(self) -> FloatArray:
        """The tolerance as the least relative change that exceeds it."""
        magnitude = np.abs(self.differences.expected)
        with np.errstate(all="ignore"):
            relative = np.where(self.is_absolute, self.tolerance / magnitude, self.tolerance)
        return np.asarray(np.where(self.is_ratio, self.tolerance - 1, relative), dtype=np.float64)

    @property
    def flaky(self) -> BoolArray:
        """Cells whose declared tolerance the unmodified code exceeds by itself."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.declared & (self.spread > self.tolerance))

    def worst_series(self, steps: int | None = None, cells: BoolArray | None = None) -> FloatArray:
        """Return the largest excess of each series, [series]; NaN where none of it is judged.

        Args:
            steps: Only the first so many steps; None: all.
            cells: Only these cells; None: all.
        """
        excess = self.excess if cells is None else np.where(cells, self.excess, np.nan)
        return np.asarray(np.fmax.reduce(self.differences.index.largest(excess[:steps]), axis=0))

    def flipped_step(self) -> int | None:
        """Return the index of the step at which chance alone may have flipped signs of an optimizer's update.

        That is the first step at which a few parameters are clearly above their tight tolerance and within what a
        flipped sign moves, while nothing ahead of the update is above. What follows may come of one element.
        """
        d = self.differences
        param = np.array([key.kind is Kind.PARAM for key in d.keys])
        with np.errstate(invalid="ignore"):
            moved = param & (self.shown > CLEARLY * self.tight) & (self.shown <= self.flip) & (self.excess <= 1)
            others = (self.excess > 1) & ~param
        steps = np.flatnonzero(moved.any(axis=(1, 2)))
        if not steps.size or others[: steps[0] + 1].any():
            return None
        s = int(steps[0])
        few = max(1.0, FEW_PARAMETERS * float((param & ~np.isnan(self.excess[s])).any(axis=0).sum()))
        return s if float(moved[s].any(axis=0).sum()) <= few else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSeen:
    """How far the baselines at hand are apart, up to each step. Arrays are [S, series], NaN where it is not known."""

    calibrated: FloatArray
    """In the unit in which tolerances are calibrated."""
    relative: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    """Relative to the baselines' own values. Empty where no check declares a bound, as is `absolute`."""
    absolute: FloatArray = field(default_factory=lambda: np.empty((0, 0)))

    def in_unit(self, unit: str) -> FloatArray:
        """Return it in the unit of a declared form."""
        return 1 + self.relative if unit == "ratio" else {"relative": self.relative, "absolute": self.absolute}[unit]


def spread_seen(pairs: Sequence[Differences], checks: Sequence[Check]) -> SpreadSeen | None:
    """Measure the spread of baselines from all their pairs; None without one.

    Args:
        checks: Where none of them declares a bound, the spread is asked for in the calibrated unit only.
    """
    if not pairs:
        return None

    def largest(of: Callable[[Differences], FloatArray]) -> FloatArray:
        folded = np.fmax.reduce([d.index.largest(np.where(d.exact, np.nan, of(d))) for d in pairs])
        return np.asarray(np.fmax.accumulate(folded, axis=0), dtype=np.float64)

    def relative(d: Differences) -> FloatArray:
        absolute = d.absolute
        with np.errstate(all="ignore"):
            return np.where(absolute == 0, 0.0, absolute / np.abs(d.expected))

    calibrated = largest(lambda d: d.difference)
    if not any(_has_bound(check) for check in checks):
        return SpreadSeen(calibrated=calibrated)
    return SpreadSeen(calibrated=calibrated, relative=largest(relative), absolute=largest(lambda d: d.absolute))


def _has_bound(check: Check) -> bool:
    return check.form in DECLARED or bool(check.bound)


def assign(index: SeriesIndex, steps: Sequence[int], checks: Sequence[Check]) -> IntArray:
    """Give each series, at each step, the first check that selects it, [S, series]."""
    keys = index.keys
    if all(check.steps is None for check in checks):
        row = owners(checks, keys)
        return np.tile(np.array(row, dtype=np.intp), (len(steps), 1))
    # Steps in which the same checks judge have the same owners: a long run has few such bands.
    bands: dict[tuple[bool, ...], list[int]] = {}
    assigned = []
    for step in steps:
        band = tuple(check.steps is None or step in check.steps for check in checks)
        if band not in bands:
            bands[band] = owners(checks, keys, step)
        assigned.append(bands[band])
    return np.array(assigned, dtype=np.intp).reshape(len(steps), len(keys))


def judge(
    differences: Differences,
    limits: Limits | None,
    checks: Sequence[Check],
    flaky: BoolArray | None = None,
    seen: SpreadSeen | None = None,
    check: IntArray | None = None,
) -> Judgement:
    """Judge all cells of one pair of runs.

    Args:
        limits: Tolerances laid out for the same series and steps; None: assumed floors.
        flaky: [series] exact kinds that differ among the baselines themselves, and are not judged.
        seen: How far the baselines at hand are apart.
        check: From `assign`, which takes a while; None: it is asked.
    """
    d, index = differences, differences.index
    cell_of = index.of_cell
    check = assign(index, d.steps, checks) if check is None else check
    bounds = [_has_bound(one) for one in checks]
    declaring = bool(_flags(bounds, check).any())
    silent = _flags([one.form == "record only" for one in checks], check)
    kinds = np.array([key.kind in REQUIRED_KINDS for key in index.keys])
    required = ((_flags([one.required for one in checks], check) | kinds) & ~silent)[:, None, cell_of]

    shape = d.difference.shape
    shown, needed = d.difference, np.broadcast_to(np.nan, shape)
    if limits is None:
        tolerance = d.assumed.copy()
        tight = tolerance.copy() if declaring else tolerance
        spread, flip = np.broadcast_to(np.nan, shape), np.broadcast_to(0.0, shape)
        within_horizon = np.broadcast_to(True, shape)
        assumed = d.present & ~d.exact
        if seen is not None:
            spread = np.broadcast_to(seen.calibrated[:, None, cell_of], shape)
    else:
        tolerance, tight = (
            np.broadcast_to(values[:, None, cell_of], shape).copy() for values in (limits.tolerance, limits.tight)
        )
        known = limits.spread if seen is None else np.where(np.isnan(limits.spread), seen.calibrated, limits.spread)
        spread, flip = (np.broadcast_to(values[:, None, cell_of], shape) for values in (known, limits.flip))
        within_horizon = np.broadcast_to(limits.judged[:, None, cell_of] > 0, shape)
        assumed = d.present & ~d.exact & limits.assumed
    with np.errstate(all="ignore"):
        excess = shown / tolerance
        if declaring:
            shown, spread, needed, absolute = shown.copy(), spread.copy(), needed.copy(), d.absolute
            least = np.where(spread > 0, K * spread if limits is None else np.fmax(K * spread, tolerance), np.nan)
        for number, one in enumerate(checks):
            if declaring and bounds[number]:
                cells = (check == number)[:, None, cell_of] & d.present
                unit = shown_in(one, d)
                shown[cells] = unit(absolute)[cells] if one.form != "ratio" else _ratio(d)[cells]
                apart, needed[cells] = unit(in_absolute(d, spread)), unit(in_absolute(d, least))[cells]
                if seen is not None:
                    known = seen.in_unit(one.unit)[:, None, cell_of]
                    apart = np.where(np.isnan(known), apart, known)
                spread[cells] = apart[cells]
                allowed = _bounds(one, d)
                tolerance[cells], excess[cells] = allowed[cells], _quotient(one, shown, allowed)[cells]
                tight[cells] = tolerance[cells]
    declared_form = np.broadcast_to(_flags([one.form in DECLARED for one in checks], check)[:, None, cell_of], shape)
    if limits is not None:
        far = (d.difference > BEYOND_SCRAMBLED * limits.control[cell_of]) & (excess > BEYOND_TOLERANCE)
        within_horizon = within_horizon | (far & ~declared_form)
    by_equality = _flags([one.form == "exact" for one in checks], check)[:, None, cell_of]
    exact = (d.exact & ~declared_form) | (by_equality & d.present)
    excess[exact] = np.where(d.identical[exact], 0.0, np.inf)
    tolerance[exact] = tight[exact] = 0.0
    assumed &= ~(declared_form | exact)

    comparable = d.present & (d.nonfinite == 0) & (exact | ~d.reshaped)
    in_check = ((check != NO_CHECK) & ~silent)[:, None, cell_of]
    comparable &= in_check
    after_data = _after_other_data(d, exact & (excess > 1)) & comparable
    untold = np.isnan(tolerance)
    inexact = comparable & ~exact
    beyond = inexact & ~(declared_form | within_horizon | untold)
    unknown = inexact & untold
    if flaky is not None:
        unknown |= comparable & exact & flaky[cell_of]
    judged = comparable & ~(after_data | beyond | unknown)
    excess[~judged] = np.nan
    param = np.array([key.kind is Kind.PARAM for key in index.keys])[cell_of]
    lost = required & ((d.absent == MISSING) | (d.present & d.reshaped & ~exact) | (d.present & d.retyped & param))
    return Judgement(
        differences=d,
        check=check,
        shown=shown,
        tolerance=tolerance,
        excess=excess,
        tight=tight,
        flip=flip,
        spread=spread,
        needed=needed,
        declared=declared_form & judged & ~exact,
        is_absolute=declared_form & _flags([one.unit == "absolute" for one in checks], check)[:, None, cell_of],
        is_ratio=declared_form & _flags([one.unit == "ratio" for one in checks], check)[:, None, cell_of],
        exact=exact,
        assumed=assumed & judged,
        poisoned=d.nonfinite == 2,
        blind=(d.nonfinite & 1) > 0,
        lost=lost & ~after_data,
        beyond=beyond,
        unknown=unknown,
        unsettled=unknown & required & ~exact,
        after_data=after_data,
    )


def _flags(of_checks: Sequence[bool], check: IntArray) -> BoolArray:
    """Return which series, at each step, belong to a check of which something holds, [S, series]."""
    return np.array([*of_checks, False], dtype=bool)[check]


def in_absolute(d: Differences, values: FloatArray) -> FloatArray:
    """Turn differences as they are calibrated, [S, R, C], into absolute ones."""
    return np.asarray(values * np.where(d.number, d.scale[d.index.of_cell], np.abs(d.expected)), dtype=np.float64)


def shown_in(check: Check, d: Differences) -> Callable[[FloatArray], FloatArray]:
    """Return what turns absolute differences, [S, R, C], into the unit of a declared form.

    A relative difference is relative to the baseline's own value; a ratio is how much larger or smaller it can be.
    """
    magnitude = np.abs(d.expected)

    def convert(absolute: FloatArray) -> FloatArray:
        if check.unit == "absolute":
            return absolute
        with np.errstate(all="ignore"):
            relative = np.where(absolute == 0, 0.0, absolute / magnitude)
        return 1 + relative if check.unit == "ratio" else relative

    return convert


def _bounds(check: Check, d: Differences) -> FloatArray:
    """Return what a declared form allows in its unit, [S, R, C]."""
    magnitude = np.abs(d.expected)
    rel, bound = check.rel or 0.0, check.abs or 0.0
    if check.form == "rel + abs":
        return np.asarray(bound + rel * magnitude, dtype=np.float64)
    if check.form == "rel or abs":
        return np.fmax(bound, rel * magnitude)
    least = {"relative": rel, "absolute": bound, "ratio": check.ratio or 1.0}[check.unit]
    return np.full_like(magnitude, least)


def _ratio(d: Differences) -> FloatArray:
    """Return the larger of the two magnitudes over the smaller; 1 where both are zero."""
    expected, actual = np.abs(d.expected), np.abs(d.actual)
    return np.where(actual == expected, 1.0, np.fmax(actual, expected) / np.fmin(actual, expected))


def _quotient(check: Check, shown: FloatArray, bounds: FloatArray) -> FloatArray:
    """Return difference / tolerance; of a ratio, how much of the way from 1 to the bound it went."""
    nothing = 1.0 if check.unit == "ratio" else 0.0
    return np.asarray(np.where(shown == nothing, 0.0, (shown - nothing) / (bounds - nothing)), dtype=np.float64)


def _after_other_data(d: Differences, unequal: BoolArray) -> BoolArray:
    """Return the cells behind the first step at which a rank saw other data; what no data enter stays judged."""
    batch = np.array([key.kind is Kind.BATCH for key in d.index.keys])[d.index.of_cell]
    per_step = (unequal & batch).any(axis=(1, 2))
    after = np.maximum.accumulate(per_step)
    fixed = np.array(
        [key.kind in (Kind.BATCH, Kind.STATE, Kind.LR) or key.item == BEFORE for key in d.index.keys], dtype=bool
    )[d.index.of_cell]
    return np.asarray(np.broadcast_to(after[:, None, None], unequal.shape) & ~fixed, dtype=np.bool_)
