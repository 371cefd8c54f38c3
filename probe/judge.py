"""Judge every cell of one candidate: is its difference allowed?

The result is arrays, from which rows of the table, the outcome and the first divergence are read. This module must not
know how runs are combined into an outcome.

Shapes: S steps, R ranks, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probe.check import Check
from probe.differences import MISSING, Differences
from probe.limits import Limits
from probe.point import Kind
from probe.series import BEFORE, BoolArray, FloatArray, IntArray

NO_CHECK = -1

CLEARLY = 3.0
"""Times the tight tolerance at which a parameter has moved by more than luck with three runs explains."""
FEW_PARAMETERS = 0.1
"""Part of the parameters in which signs flip by chance at once; a wrong optimizer moves nearly all of them."""

REQUIRED_KINDS = (Kind.LOSS, Kind.GRAD, Kind.GRAD_NORM, Kind.LR, Kind.PARAM, Kind.EXPLICIT)
"""Kinds that a sound branch cannot stop having; an intermediate it may legally no longer compute."""


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
    """Difference of the unmodified code with itself, NaN where not known."""
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

    def worst_series(self, steps: int | None = None) -> FloatArray:
        """Return the largest excess of each series, [series], over the first steps; NaN where none of it is judged."""
        return np.asarray(np.fmax.reduce(self.differences.index.largest(self.excess[:steps]), axis=0))

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


def assign(differences: Differences, checks: Sequence[Check]) -> IntArray:
    """Give each series, at each step, the first check that selects it, [S, series]."""
    keys = differences.index.keys
    if all(check.steps is None for check in checks):
        row = [next((n for n, check in enumerate(checks) if check.selects(key)), NO_CHECK) for key in keys]
        return np.tile(np.array(row, dtype=np.intp), (len(differences.steps), 1))
    return np.array(
        [
            [next((n for n, check in enumerate(checks) if check.selects(key, step)), NO_CHECK) for key in keys]
            for step in differences.steps
        ],
        dtype=np.intp,
    )


def judge(
    differences: Differences, limits: Limits | None, checks: Sequence[Check], flaky: BoolArray | None = None
) -> Judgement:
    """Judge all cells of one pair of runs.

    Args:
        limits: Tolerances laid out for the same series and steps; None: assumed floors.
        flaky: [series] exact kinds that differ among the baselines themselves, and are not judged.
    """
    d, index = differences, differences.index
    cell_of = index.of_cell
    check = assign(d, checks)
    form_of = np.array([c.form for c in checks] + ["none"])
    form = form_of[check][:, None, cell_of]
    required = np.array([c.required for c in checks] + [False])[check][:, None, cell_of]
    kinds = np.array([key.kind in REQUIRED_KINDS for key in index.keys])[cell_of]
    required = (required | kinds) & (form != "record only")

    shape = d.difference.shape
    if limits is None:
        tolerance, tight = d.assumed.copy(), d.assumed.copy()
        spread, flip, within_horizon = np.full(shape, np.nan), np.zeros(shape), np.ones(shape, dtype=bool)
        assumed = d.present & ~d.exact
    else:
        tolerance, tight, spread, flip = (
            np.broadcast_to(values[:, None, cell_of], shape).copy()
            for values in (limits.tolerance, limits.tight, limits.spread, limits.flip)
        )
        within_horizon = np.broadcast_to(limits.judged[:, None, cell_of] > 0, shape)
        assumed = np.zeros(shape, dtype=bool)
    shown = d.difference.copy()
    with np.errstate(all="ignore"):
        excess = shown / tolerance
        for number, declared in enumerate(checks):
            if declared.form in ("rel", "abs", "rel or abs", "rel + abs", "ratio"):
                cells = (check == number)[:, None, cell_of] & d.present
                bounds = _declared(declared, d)
                shown[cells], tolerance[cells], excess[cells] = (values[cells] for values in bounds)
                tight[cells] = tolerance[cells]
    declared_form = np.isin(form, ("rel", "abs", "rel or abs", "rel + abs", "ratio")) & np.ones(shape, dtype=bool)
    assumed &= ~declared_form
    exact = (d.exact & ~declared_form) | ((form == "exact") & d.present)
    excess[exact] = np.where(d.identical[exact], 0.0, np.inf)
    tolerance[exact] = tight[exact] = 0.0
    assumed &= ~exact

    comparable = d.present & (d.nonfinite == 0) & (exact | ~d.reshaped)
    in_check = np.broadcast_to((check != NO_CHECK)[:, None, cell_of], shape) & (form != "record only")
    after_data = _after_other_data(d, exact & (excess > 1)) & comparable & in_check
    beyond = comparable & in_check & ~exact & ~declared_form & ~within_horizon & ~np.isnan(tolerance)
    unknown = comparable & in_check & ~exact & np.isnan(tolerance)
    if flaky is not None:
        unknown |= comparable & in_check & exact & flaky[cell_of]
    judged = comparable & in_check & ~after_data & ~beyond & ~unknown
    param = np.array([key.kind is Kind.PARAM for key in index.keys])[cell_of]
    lost = required & ((d.absent == MISSING) | (d.present & d.reshaped & ~exact) | (d.present & d.retyped & param))
    return Judgement(
        differences=d,
        check=check,
        shown=shown,
        tolerance=tolerance,
        excess=np.where(judged, excess, np.nan),
        tight=tight,
        flip=flip,
        spread=spread,
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


def _declared(check: Check, d: Differences) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return difference, tolerance and their quotient in a declared form, relative to the baseline's own value."""
    absolute = d.absolute
    magnitude = np.abs(d.expected)
    relative = np.where(absolute == 0, 0.0, absolute / magnitude)
    rel, bound = check.rel or 0.0, check.abs or 0.0
    if check.form == "rel":
        return relative, np.full_like(relative, rel), _quotient(relative, rel)
    if check.form == "abs":
        return absolute, np.full_like(absolute, bound), _quotient(absolute, bound)
    if check.form == "rel + abs":
        allowed = bound + rel * magnitude
        return absolute, allowed, np.where(absolute == 0, 0.0, absolute / allowed)
    if check.form == "rel or abs":
        allowed = np.fmax(bound, rel * magnitude)
        return absolute, allowed, np.where(absolute == 0, 0.0, absolute / allowed)
    larger = np.fmax(np.abs(d.actual), magnitude) / np.fmin(np.abs(d.actual), magnitude)
    larger = np.where(d.actual == d.expected, 1.0, larger)
    return larger, np.full_like(larger, check.ratio or 1.0), larger / (check.ratio or 1.0)


def _quotient(values: FloatArray, bound: float) -> FloatArray:
    return np.asarray(np.where(values == 0, 0.0, values / bound), dtype=np.float64)


def _after_other_data(d: Differences, unequal: BoolArray) -> BoolArray:
    """Return the cells behind the first step at which a rank saw other data; what no data enter stays judged."""
    batch = np.array([key.kind is Kind.BATCH for key in d.index.keys])[d.index.of_cell]
    per_step = (unequal & batch).any(axis=(1, 2))
    after = np.maximum.accumulate(per_step)
    fixed = np.array(
        [key.kind in (Kind.BATCH, Kind.STATE, Kind.LR) or key.item == BEFORE for key in d.index.keys], dtype=bool
    )[d.index.of_cell]
    return np.asarray(np.broadcast_to(after[:, None, None], unequal.shape) & ~fixed, dtype=np.bool_)
