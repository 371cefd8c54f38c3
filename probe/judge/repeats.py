"""What repeated runs of the unmodified code say: spread, floors, and how far a scrambled run would be off.

Everything is measured in one pass over the segments: all pairs of runs, the first baseline against itself one step
later, and each of its ranks against the next. This module must not know the rule that makes tolerances of it.

Shapes: S steps, R ranks, C cells, Q rows.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from probe.errors import ToleranceError
from probe.measure.differences import Axes, Collector, Stop, series_scale, walk
from probe.measure.distance import EPSILON_FLOAT32, Measured, measure, rounding_floor
from probe.measure.loss_scale import as_backward_got
from probe.measure.series import (
    BEFORE,
    Alignment,
    BoolArray,
    CaptureLike,
    Catalog,
    FloatArray,
    SeriesIndex,
    perturbation,
)
from probe.point import Kind
from probe.store.layout import StepRows

FLOOR_EPSILONS = 8.0
"""A recorded number is a sum in fp32: 8 eps let every sound re-ordering of it pass. Source: the project's statistics
study, sections 0b and 3."""

PARAMETER_EPSILONS = 2.0
"""A parameter is no sum but one rounding per step, whatever the order of work: half an ulp per element, at most eps of
its norm. The lower floor is what sees a missing weight decay (1e-6 of the norm per step with lr 1e-4, decay 0.01)."""

FLIP_SHARE = 1.0 / 3.0
"""At most this share of an update's norm is allowed for a flipped sign, so that in a tensor of a few elements a frozen
parameter (the whole update) still stands out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Measurements of repeated runs. Arrays are [S, series] where not said; NaN where nothing was recorded."""

    axes: Axes
    index: SeriesIndex
    spread: FloatArray
    """Largest difference of any two runs in that step, over ranks and microbatches."""
    floor: FloatArray
    """Least tolerance, from the precision of the numbers."""
    flip: FloatArray
    """How far one flipped sign of an update moves a parameter; 0 for what is none."""
    assumed_floor: FloatArray
    """Least tolerance where nothing was measured."""
    control: FloatArray
    """[series] median difference of a scrambled run; NaN where it cannot be told."""
    shifted: FloatArray
    """Largest difference of the first baseline from itself one recorded step later."""
    rotated: FloatArray
    """Largest difference of the first baseline from itself on the next rank."""
    number: BoolArray
    """[series] numbers, not tensors."""
    exact: BoolArray
    """[series] judged by equality."""
    identical: bool
    """All plain runs computed the same bits (true for a single one)."""


def measure_repeats(captures: Sequence[CaptureLike], axes: Axes) -> Repeats:
    """Measure all pairs of runs, and the first run against scrambled versions of itself.

    Args:
        captures: Plain runs first.

    Raises:
        ToleranceError: Two plain runs saw different data.
    """
    catalog = Catalog()
    plain = [not perturbation(capture) for capture in captures]
    pairs = {pair: Collector() for pair in itertools.combinations(range(len(captures)), 2)}
    shift, rotation = Collector(), Collector()
    identical = True
    last: dict[int, tuple[int, StepRows]] = {}
    floors: list[tuple[tuple[int, int], Measured, FloatArray, FloatArray]] = []
    ranks: list[tuple[int, StepRows]] = []
    at = 0
    for stop in walk(captures, axes):
        rows = [as_backward_got(each) for each in stop.rows]
        for (one, two), collector in pairs.items():
            aligned = catalog.align(rows[one].keys, rows[two].keys)
            measured = measure(rows[one], rows[two], aligned)
            collector.add(stop.s, stop.r, measured, aligned, rows[one])
            if plain[one] and plain[two]:
                _same_data(measured, catalog, captures[one], captures[two], stop)
                # What is judged exactly says nothing of noise: unseeded generators differ where all numbers are equal.
                same = bool((measured.identical | measured.exact).all())
                identical = identical and same and not aligned.missing.size
        if stop.s != at:
            _rotate(rotation, ranks, at, catalog)
            ranks, at = [], stop.s
        ranks.append((stop.r, rows[0]))
        s_before, before = last.get(stop.r, (-1, None))
        if before is not None:
            aligned = catalog.align(before.keys, rows[0].keys)
            shift.add(s_before, stop.r, measure(before, rows[0], aligned), aligned, before)
        aligned = catalog.align(rows[0].keys, rows[0].keys)
        itself = measure(rows[0], rows[0], aligned)
        floors.append(((stop.s, stop.r), itself, rounding_floor(rows[0]), flip_floor(before, rows[0], catalog)))
        last[stop.r] = (stop.s, rows[0])
    _rotate(rotation, ranks, at, catalog)
    return _pool(axes, catalog, list(pairs.values()), (shift, rotation), floors, identical)


def flip_floor(before: StepRows | None, rows: StepRows, catalog: Catalog) -> FloatArray:
    """Return how far one flipped sign of an update moves each parameter, [Q], relative to its norm; 0 for other rows.

    Adam's first update is +-lr whatever the size of the gradient, so noise that flips the sign of one nearly zero
    gradient moves that element by twice the update's magnitude: 2 / sqrt(n) of the update's norm. Three repeats seldom
    see such a flip, and without this floor the candidate that has one is a thousand times above tolerance. A frozen or
    stale parameter is off by the whole update and stays sqrt(n) / 2 times above it.

    Source: the project's statistics study, section 1.8; the zoo's measurements of AdamW.

    Args:
        before: Rows of the step recorded before; None: the first, whose parameters have a `before` row.
    """
    floor = np.zeros(len(rows.keys))
    earlier = rows if before is None else before
    row_of = {key: row for row, key in enumerate(earlier.keys) if key.kind is Kind.PARAM}
    now, then = [], []
    for row, key in enumerate(rows.keys):
        if key.kind is Kind.PARAM and key.item != BEFORE:
            other = row_of.get(key if before is not None else replace(key, item=BEFORE))
            if other is not None:
                now.append(row)
                then.append(other)
    if not now:
        return floor
    of_now, of_then = np.array(now, dtype=np.intp), np.array(then, dtype=np.intp)
    nothing = np.empty(0, dtype=np.intp)
    cells = catalog.cells(rows.keys)[of_now]
    aligned = Alignment(
        cells, tuple(rows.keys[row] for row in now), of_now, of_then, nothing, nothing, nothing, nothing
    )
    update = np.nan_to_num(measure(rows, earlier, aligned).difference, nan=0.0, posinf=0.0)
    numel = np.maximum(rows.numel[of_now], 1)
    floor[of_now] = np.minimum(2 / np.sqrt(numel), FLIP_SHARE) * update
    return floor


def _rotate(rotation: Collector, ranks: list[tuple[int, StepRows]], s: int, catalog: Catalog) -> None:
    """Measure each rank's rows against the next rank's."""
    if len(ranks) < 2:
        return
    for (r, mine), (_, theirs) in zip(ranks, ranks[1:] + ranks[:1], strict=True):
        aligned = catalog.align(mine.keys, theirs.keys)
        rotation.add(s, r, measure(mine, theirs, aligned), aligned, mine)


def _same_data(measured: Measured, catalog: Catalog, one: CaptureLike, two: CaptureLike, stop: Stop) -> None:
    for row in np.flatnonzero(measured.unequal):
        key = catalog.keys[measured.cells[row]]
        if key.kind is Kind.BATCH:
            raise ToleranceError(
                f"The baselines saw different data: {key.label!r} differs at step {stop.step}, rank {stop.rank}, "
                f"between {str(one.path)!r} and {str(two.path)!r}. Record all with the same --seed and data order."
            )


def _pool(
    axes: Axes,
    catalog: Catalog,
    pairs: Sequence[Collector],
    scrambled: tuple[Collector, Collector],
    floors: Sequence[tuple[tuple[int, int], Measured, FloatArray, FloatArray]],
    identical: bool,
) -> Repeats:
    index = SeriesIndex(catalog.keys)
    shape = (len(axes.steps), len(axes.ranks), len(catalog))
    expected, rounding, flips, assumed = (np.full(shape, np.nan) for _ in range(4))
    number, exact = np.zeros(len(catalog), dtype=bool), np.zeros(len(catalog), dtype=bool)
    for place, itself, rounded, flip in floors:
        here = (*place, itself.cells)
        expected[here] = np.where(itself.number, itself.expected, np.nan)
        rounding[here], flips[here] = rounded, flip
        assumed[here] = itself.assumed
        number[itself.cells] |= itself.number
        exact[itself.cells] |= itself.exact
    scale = series_scale(expected, index)[index.of_cell]

    def relative(collector: Collector) -> FloatArray:
        raw = collector.dense("difference", axes, catalog)
        return np.where(number, raw / scale, raw)

    spread = np.full((shape[0], len(index)), np.nan)
    for pair in pairs:
        spread = np.fmax(spread, index.largest(relative(pair)))
    shifted, rotated = (relative(collector) for collector in scrambled)
    is_param = np.array([key.kind is Kind.PARAM for key in catalog.keys])
    least = np.where(is_param, PARAMETER_EPSILONS, FLOOR_EPSILONS) * EPSILON_FLOAT32
    floor = np.fmax(np.where(number, rounding / scale, rounding), least)
    return Repeats(
        axes=axes,
        index=index,
        spread=spread,
        floor=index.largest(floor),
        flip=index.largest(np.where(number, flips / scale, flips)),
        assumed_floor=index.largest(np.fmax(assumed, floor)),
        control=_control(shifted, rotated, index, spread),
        shifted=index.largest(shifted),
        rotated=index.largest(rotated),
        number=_any_cell(number, index),
        exact=_any_cell(exact, index),
        identical=identical,
    )


def _control(shifted: FloatArray, rotated: FloatArray, index: SeriesIndex, spread: FloatArray) -> FloatArray:
    """Return the difference of a typical scrambled run, [series].

    It is the median over steps of the smaller of two medians over ranks and microbatches: against the next step, and
    against the next rank (left out where ranks agree to ten times the spread, as after a reduction across them).

    Source: the project's statistics study, section 4.
    """
    members: list[list[int]] = [[] for _ in range(len(index))]
    for cell, series in enumerate(index.of_cell):
        members[series].append(cell)
    control = np.full(len(index), np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Medians of nothing are NaN, which is what is meant.
        for series, cells in enumerate(members):
            if np.isnan(shifted[:, :, cells]).all() and np.isnan(rotated[:, :, cells]).all():
                continue  # A single step of a single rank: medians of nothing take a third of a calibration.
            one = np.nanmedian(shifted[:, :, cells], axis=(1, 2))
            two = np.nanmedian(rotated[:, :, cells], axis=(1, 2))
            agree = two <= 10 * np.nan_to_num(spread[:, series], nan=0.0)
            smaller = np.fmin(one, np.where(agree, np.nan, two))
            control[series] = np.nanmedian(smaller)
    return control


def _any_cell(flags: BoolArray, index: SeriesIndex) -> BoolArray:
    out = np.zeros(len(index), dtype=bool)
    np.logical_or.at(out, index.of_cell, flags)
    return out
