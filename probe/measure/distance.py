"""Measure how far two recorded values are apart: one judged number per quantity.

* A tensor: the distance of the two sketches, |S(a) - S(b)|, or what the two means prove it to be at least,
  |mean(a) - mean(b)| * sqrt(n), whichever is larger; divided by the l2 norm of the baseline's tensor.
* A number: |a - b|, to be divided by the scale of its series (median magnitude in the first baseline).
* Exact kinds (the batch, integers, flags, text): equal or not.

Why the mean: the sketch has one sign for 251 consecutive elements, so a constant shift can hide between the signs
(1st percentile of the estimate: 2 % of the truth). By Cauchy-Schwarz |mean(a) - mean(b)| * sqrt(n) <= |a - b|, so
taking the larger of the two never exceeds the true distance, repairs that blind spot, and adds no alarm: for rounding
noise the mean's share is 1 / sqrt(n) of the distance. Judging means against their own spread would see coherent shifts
below the noise of the elements, but added alarms and found nothing more.

Source: the project's statistics study, sections 0c, 5, 6 and 8. This module must not know what is allowed.

Shapes: Q paired rows, K sketch buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.built import built
from probe.measure.series import Alignment, BoolArray, FloatArray, IntArray
from probe.measure.side import Side
from probe.point import Key, Kind
from probe.reduction import SAMPLE
from probe.store.layout import StepRows

INTERFACE = 1
"""How the compiled distance is called here; a build that is called in another way is not used."""
compiled = built("probe.measure._sketches", INTERFACE)
"""The compiled distance; None where there was no C compiler when the package was installed, or the build is older."""

TINY = 2.0**-100
"""An l2 norm below this counts as zero: a parameter that starts at zero, moved by one ulp, is 1e-45, and nothing is
learned from 1e-45 being infinitely far from zero."""

EPSILON = {
    "float64": 2.0**-52,
    "float": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e5m2": 2.0**-2,
}
"""Distance from 1 to the next number of the type (IEEE 754 and the OCP fp8 formats)."""
EPSILON_FLOAT32 = EPSILON["float32"]

ASSUMED_EPSILONS = 32.0
"""Bit-identical runs say nothing of re-ordered work; 32 eps of the recorded type passed all sound branches of the study
and its faults from 262 x in fp32, 3 x in bf16. Source: the project's statistics study, section 3."""

ADDED_UP = 8.0
"""eps of fp32 by which sums over shards and over the whole may differ: the floor of a re-ordered sum, which is what
they are (the project's statistics study, sections 0b and 3)."""

_BLOCK = 256
"""Sketches that are measured at once: what lies between two sketches and their distance, half a megabyte, stays in the
cache. 1.2 times as fast as 128."""

INTEGER_TYPES = frozenset(
    {"int", "bool", "str", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "long", "none"}
)
"""Element types that are judged exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Two segments, row by row of their alignment. Arrays are [Q]."""

    cells: IntArray
    difference: FloatArray
    """Relative for tensors, absolute for numbers, 0 or 1 for exact kinds without a magnitude; NaN if not comparable."""
    number: BoolArray
    """The difference is absolute, of one number."""
    single: BoolArray
    """Has one element: what is shown is the value itself, not a norm."""
    exact: BoolArray
    unequal: BoolArray
    """Exact kinds: the values are not the same."""
    identical: BoolArray
    """Everything that was recorded of the value is the same."""
    nonfinite: npt.NDArray[np.int8]
    """1: NaN or infinity in the baseline, 2: in the candidate, 3: in both."""
    reshaped: BoolArray
    retyped: BoolArray
    expected: FloatArray
    """The number, or the tensor's l2 norm; NaN for text."""
    actual: FloatArray
    order: npt.NDArray[np.int32]
    """Execution index in the baseline."""
    texts: dict[int, tuple[float | str, float | str]]
    """Both texts, by cell, where either is not empty, and the two samples that are furthest apart."""
    assumed: FloatArray
    """Tolerance where nothing was measured: `ASSUMED_EPSILONS` of the recorded type, relative."""


@lru_cache(maxsize=64)
def epsilons(dtypes: tuple[str, ...]) -> FloatArray:
    """Return the eps of each recorded type, [Q], and fp32's, in which sums are recorded, where that is larger."""
    return np.asarray(np.maximum(_own_epsilons(dtypes), EPSILON_FLOAT32), dtype=np.float64)


@lru_cache(maxsize=64)
def _own_epsilons(dtypes: tuple[str, ...]) -> FloatArray:
    return np.array([EPSILON.get(plain_type(dtype), 0.0) for dtype in dtypes])


def plain_type(dtype: str) -> str:
    """Return the name of an element type without torch's prefix."""
    return dtype.removeprefix("torch.")


def is_exact(key: Key, dtype: str) -> bool:
    """Tell whether a quantity is judged by equality: the batch, facts about the job, integers, flags and text."""
    return key.kind in (Kind.BATCH, Kind.STATE) or plain_type(dtype) in INTEGER_TYPES


def sketch_distance(one: Side, two: Side, pairs: Alignment, divisor: FloatArray | None) -> FloatArray:
    """Return ||a - b|| / ||b|| of paired tensors, [Q], as estimated from sketches and means.

    Args:
        divisor: [Q] by which the candidate's values are divided first, or None.

    Returns:
        0 where both tensors are zero; divided by the candidate's norm where only the baseline's is zero.
    """
    rows_b, rows_a = pairs.baseline, pairs.candidate
    baseline, candidate = one.rows, two.rows
    l2_b, l2_a = baseline.scalars["l2"][rows_b], candidate.scalars["l2"][rows_a]
    mean_b, mean_a = baseline.scalars["mean"][rows_b], candidate.scalars["mean"][rows_a]
    if divisor is not None:
        l2_a, mean_a = l2_a / np.abs(divisor), mean_a / divisor
    distance = _squared_distance(baseline.sketch[rows_b], candidate.sketch[rows_a], divisor)
    np.sqrt(distance, out=distance)
    at_least = np.abs(mean_a - mean_b) * one.root_size[rows_b]
    # Without a sketch (integer tensors that are not judged exactly) the norms are the best bound there is.
    bare = np.flatnonzero(np.isnan(distance))
    distance[bare] = np.abs(l2_a[bare] - l2_b[bare])
    np.fmax(distance, at_least, out=distance)
    scale = np.where(l2_b >= TINY, l2_b, np.where(l2_a >= TINY, l2_a, np.inf))
    return np.divide(distance, scale, out=distance)


def _squared_distance(
    baseline: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32], divisor: FloatArray | None
) -> FloatArray:
    """Return ||a - b||^2 of paired sketches, [Q].

    The compiled module gives the same bits in half the time. Without it this goes block by block: what is between two
    sketches never leaves the cache.
    """
    if compiled is not None and divisor is None and baseline.dtype == candidate.dtype == np.float32:
        squared = np.empty(len(baseline))
        compiled.squared(np.ascontiguousarray(baseline), np.ascontiguousarray(candidate), squared)
        return squared
    squared, kind = np.empty(len(baseline)), np.result_type(baseline, candidate)
    between = np.empty((min(_BLOCK, len(baseline)), baseline.shape[1]))
    for begin in range(0, len(baseline), _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        delta = between[: len(baseline) - begin]
        if divisor is None:
            np.subtract(baseline[rows], candidate[rows], out=delta, dtype=kind)
        else:
            np.subtract(baseline[rows], candidate[rows] / divisor[rows, None], out=delta)
        np.einsum("qk,qk->q", delta, delta, out=squared[rows])
    return squared


def measure(baseline: StepRows, candidate: StepRows, pairs: Alignment, divisor: FloatArray | None = None) -> Measured:
    """Measure all paired rows of two segments.

    Args:
        divisor: [Q] by which the candidate's values are divided first (an agreed loss scale), or None.
    """
    return measure_sides(Side(baseline), Side(candidate), pairs, divisor)


def measure_sides(one: Side, two: Side, pairs: Alignment, divisor: FloatArray | None = None) -> Measured:
    """Do what `measure` does, for segments that are measured against several others."""
    baseline, candidate = one.rows, two.rows
    rows_b, rows_a = pairs.baseline, pairs.candidate
    reshaped = _unlike(baseline.shape, candidate.shape, pairs)
    retyped = _unlike(baseline.dtype, candidate.dtype, pairs)
    other_text = _unlike(baseline.text, candidate.text, pairs)
    exact, assumed = _by_type(pairs, baseline.dtype)
    single = _paired(one.number, rows_b)
    value_b, value_a = baseline.value[rows_b], candidate.value[rows_a]
    with np.errstate(all="ignore"):
        difference = sketch_distance(one, two, pairs, divisor)
        furthest = _furthest_samples(baseline, candidate, pairs, difference, divisor)
        at = np.flatnonzero(single)
        scaled = value_a[at] if divisor is None else value_a[at] / divisor[at]
        difference[at] = np.abs(value_b[at] - scaled)
    empty = one.empty[rows_b]
    difference[empty] = 0.0
    unlike = other_text | reshaped | retyped
    has_hash_b, has_hash_a = one.hashed[rows_b], two.hashed[rows_a]
    hashed = has_hash_b & has_hash_a
    hash_b, hash_a = baseline.hash[rows_b], candidate.hash[rows_a]
    same_hash = hashed & (hash_b[:, 0] == hash_a[:, 0]) & (hash_b[:, 1] == hash_a[:, 1])
    identical = same_hash & ~(reshaped | retyped)
    # Where the norms differ, nobody asks for anything else.
    left = np.flatnonzero(~(hashed | unlike) & _same(baseline.scalars["l2"][rows_b], candidate.scalars["l2"][rows_a]))
    left = left[_same(value_b[left], value_a[left])]
    identical[_same_scalars(baseline, rows_b, candidate, rows_a, left)] = True
    # Sums over shards have no fingerprint, and are equal to sums over the whole but for their rounding.
    added_up = has_hash_b ^ has_hash_a
    if added_up.any():
        with np.errstate(invalid="ignore"):
            identical |= added_up & (difference <= ADDED_UP * EPSILON_FLOAT32) & ~unlike
    unequal = exact & ~identical
    at = np.flatnonzero(exact)
    missing_size = at[~np.isfinite(difference[at]) | (unequal[at] & (difference[at] == 0))]
    difference[missing_size] = unequal[missing_size]
    if reshaped.any():
        difference[reshaped & ~exact] = np.nan
    nonfinite = _nothing(len(exact), "i1")
    if one.nonfinite is not None or two.nonfinite is not None:
        nonfinite = ((baseline.nonfinite[rows_b] > 0) + 2 * (candidate.nonfinite[rows_a] > 0)).astype(np.int8)
        # An attention mask holds -inf by design. The batch is judged by its bits, and infinity (not NaN) there is no
        # fault.
        nonfinite[exact & same_hash & np.isposinf(baseline.scalars["max_abs"][rows_b])] = 0
        difference[nonfinite > 0] = np.nan
    return Measured(
        cells=pairs.cells,
        difference=difference,
        number=single & ~exact,
        single=single,
        exact=exact,
        unequal=unequal,
        identical=identical,
        nonfinite=nonfinite,
        reshaped=reshaped,
        retyped=retyped,
        expected=_paired(one.magnitude, rows_b),
        actual=_paired(two.magnitude, rows_a),
        order=_order(baseline, pairs),
        texts={
            int(pairs.cells[row]): (baseline.text[_row(rows_b, row)], candidate.text[_row(rows_a, row)])
            for row in np.flatnonzero(empty & exact).tolist()
        }
        | furthest,
        assumed=assumed,
    )


def _paired(column: Any, rows: IntArray | slice) -> Any:
    """Take the rows of a column; the column itself where that is all of them, for what is one object is kept once."""
    return column if isinstance(rows, slice) else column[rows]


def _row(rows: IntArray | slice, row: int) -> int:
    return int(row if isinstance(rows, slice) else rows[row])


@lru_cache(maxsize=256)
def _nothing(count: int, code: str) -> Any:
    """Return zeros, [Q]: always the same ones, which must not be changed."""
    nothing = np.zeros(count, code)
    nothing.flags.writeable = False
    return nothing


def _same(one: FloatArray, two: FloatArray) -> BoolArray:
    return np.asarray((one == two) | (np.isnan(one) & np.isnan(two)))


@lru_cache(maxsize=256)
def _sampled_rows(pairs: Alignment) -> IntArray:
    rows = [row for row, key in enumerate(pairs.keys) if key.item.endswith(f"({SAMPLE})")]
    return np.array(rows, dtype=np.intp)


def _furthest_samples(
    baseline: StepRows, candidate: StepRows, pairs: Alignment, difference: FloatArray, divisor: FloatArray | None
) -> dict[int, tuple[float | str, float | str]]:
    """Measure rows of sampled values, in place: largest |a - b| over largest |b|; return both values by cell."""
    rows = _sampled_rows(pairs)
    if not rows.size:
        return {}
    expected = baseline.sample[pairs.baseline][rows].astype(np.float64)
    actual = candidate.sample[pairs.candidate][rows].astype(np.float64)
    if divisor is not None:
        actual = actual / divisor[rows, None]
    apart = np.nan_to_num(np.abs(expected - actual), nan=0.0)
    at = np.argmax(apart, axis=1)
    size = np.asarray(np.fmax.reduce(np.abs(expected), axis=1))
    size = np.asarray(np.where(size > 0, size, np.fmax.reduce(np.abs(actual), axis=1)))
    largest = np.asarray(apart.max(axis=1), dtype=np.float64)
    fraction = largest / np.where(np.asarray(size) > 0, size, 1.0)
    difference[rows] = np.where(largest > 0, fraction, 0.0)
    cells = pairs.cells[rows]
    moved = [int(n) for n in np.flatnonzero(largest)]
    return {int(cells[n]): (float(expected[n, at[n]]), float(actual[n, at[n]])) for n in moved}


def _order(baseline: StepRows, pairs: Alignment) -> npt.NDArray[np.int32]:
    """Return when each paired row was executed in the baseline, [Q].

    A clipped gradient that the baseline has only unclipped comes after all gradients and their norm.
    """
    order = _paired(baseline.order, pairs.baseline)
    if pairs.stand_ins.size:
        kinds = np.array([key.kind in (Kind.GRAD, Kind.GRAD_NORM) for key in baseline.keys])
        order = order.copy()
        order[pairs.stand_ins] = baseline.order[kinds].max()
    return np.asarray(order, dtype=np.int32)


@lru_cache(maxsize=256)
def _known_types(pairs: Alignment) -> list[tuple[tuple[str, ...], BoolArray, FloatArray]]:
    """Return what `_by_type` remembers. It is not looked up by the types: their hash takes longer than all else."""
    return []


def _by_type(pairs: Alignment, dtypes: tuple[str, ...]) -> tuple[BoolArray, FloatArray]:
    """Return which pairs are judged by equality, and the tolerances where nothing was measured, [Q] each.

    Remembered: asking 2,000 keys per segment is most of the cost.
    """
    known = _known_types(pairs)
    for others, exact, assumed in known:
        if others is dtypes or others == dtypes:
            return exact, assumed
    of_b = np.arange(len(dtypes))[pairs.baseline]
    exact = np.array([is_exact(key, dtypes[b]) for key, b in zip(pairs.keys, of_b, strict=True)], dtype=bool)
    known.insert(0, (dtypes, exact, ASSUMED_EPSILONS * epsilons(dtypes)[pairs.baseline]))
    del known[16:]
    return known[0][1:]


def rounding_floor(rows: StepRows) -> FloatArray:
    """Return the distance that one ulp of a tensor's largest element makes, [Q]: eps(dtype) * max|x| / ||x||.

    For single numbers it is absolute, eps(dtype) * |x|. In bf16 a massive channel that flips by one ulp once in a
    hundred runs is the whole distance, and three baselines do not see it.

    Source: the project's statistics study, section 0c, item 3.
    """
    epsilon = _own_epsilons(rows.dtype)
    l2, largest = rows.scalars["l2"], rows.scalars["max_abs"]
    with np.errstate(all="ignore"):
        share = np.where(l2 >= TINY, largest / l2, 0.0)
        floor = epsilon * np.where(rows.numel == 1, np.abs(rows.value), share)
    return np.asarray(np.nan_to_num(floor, nan=0.0, posinf=0.0), dtype=np.float64)


def _same_scalars(
    baseline: StepRows, rows_b: IntArray | slice, candidate: StepRows, rows_a: IntArray | slice, left: IntArray
) -> IntArray:
    """Return those of the pairs, given by number, whose scalars and sketches are the same."""
    for name, values in baseline.scalars.items():  # Where one differs, nobody asks for the others.
        left = left[_same(values[rows_b][left], candidate.scalars[name][rows_a][left])]
    one_s, two_s = baseline.sketch[rows_b][left], candidate.sketch[rows_a][left]
    equal = (one_s.view(np.uint32) == two_s.view(np.uint32)).all(axis=1)
    return np.asarray(left[equal | (np.isnan(one_s[:, 0]) & np.isnan(two_s[:, 0]))])


def _unlike(one: tuple[object, ...], two: tuple[object, ...], pairs: Alignment) -> BoolArray:
    """Return which paired rows have other objects in a column, [Q]."""
    count = len(pairs.cells)
    if isinstance(pairs.baseline, slice) and isinstance(pairs.candidate, slice):
        if one is two or one == two:
            return _nothing(count, "?")  # type: ignore[no-any-return]
        return np.array([of_one != of_two for of_one, of_two in zip(one, two, strict=True)], dtype=bool)
    of_one, of_two = np.arange(len(one))[pairs.baseline], np.arange(len(two))[pairs.candidate]
    return np.array([one[i] != two[j] for i, j in zip(of_one, of_two, strict=True)], dtype=bool)
