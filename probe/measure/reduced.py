"""Add to a capture the numbers that checks make of what was recorded, as if they had been recorded.

A tensor's mean, the norm of a group of gradients, the mean of a window of steps or of all ranks become rows of their
own, so that they are calibrated, judged, located and shown by the same rules as everything else. This module must not
know what is allowed.

Shapes: Q rows of a segment, P rows that are made, K sketch buckets, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from probe.check import PLAIN_FORM_EXISTS, Check
from probe.measure.loss_scale import as_backward_got
from probe.measure.series import CaptureLike, FloatArray, IntArray, View
from probe.point import STEP_CLOCK, Key
from probe.reduction import AS_JUDGED, COUNT, NORM, SAMPLE, SUM_SQUARES
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K, StepRows


def reduced(captures: Sequence[CaptureLike], checks: Sequence[Check]) -> list[CaptureLike]:
    """Return the captures with the numbers that the checks make; the same captures if they make none."""
    making = tuple(check for check in checks if check.suffixes)
    return [ReducedCapture(capture, making) for capture in captures] if making else list(captures)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one check makes of the segments that have the same keys."""

    check: Check
    metric: str
    keys: tuple[Key, ...]
    """[P] names of the numbers in the segment, before windows and ranks are averaged."""
    sources: tuple[IntArray, ...]
    """[P] rows that each number is made of."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers of one segment, [P]."""

    keys: tuple[Key, ...]
    value: FloatArray
    nonfinite: IntArray
    order: IntArray
    dtype: tuple[str, ...]
    where: tuple[str, ...]


class ReducedCapture(View):
    """A capture with more rows."""

    def __init__(self, capture: CaptureLike, checks: Sequence[Check]) -> None:
        super().__init__(capture)
        self._checks = tuple(checks)
        self._layouts: list[tuple[tuple[Key, ...], tuple[_Part, ...]]] = []
        self._remembered: dict[tuple[int, int], dict[int, _Numbers]] = {}

    def rows(self, rank: int, step: int) -> StepRows:
        """Return a segment with the numbers that are made of it; means stand at the last step and the first rank."""
        rows = self._capture.rows(rank, step)
        known = as_backward_got(rows)
        made: list[StepRows] = []
        averaged: dict[int, _Numbers] = {}
        seen: set[Key] = set()
        for part in self._parts(rows.keys):
            number = self._checks.index(part.check)
            averages = part.check.window is not None or part.check.over_ranks
            if not averages and part.check.steps is not None and step not in part.check.steps:
                continue
            if averages:
                averaged[number] = _joined(averaged.get(number), _numbers(known, part))
                continue
            fresh = _only(part, [key not in seen for key in part.keys])
            seen.update(fresh.keys)
            made.append(_samples(known, fresh) if part.metric == SAMPLE else _as_rows(rows, _numbers(known, fresh)))
        self._remembered[rank, step] = averaged
        for number, check in enumerate(self._checks):
            judged = check.steps is None or step in check.steps
            if judged and (check.window is not None or check.over_ranks):
                numbers = self._averaged(number, check, rank, step)
                if numbers is not None and not seen & set(numbers.keys):
                    seen.update(numbers.keys)
                    made.append(_as_rows(rows, numbers))
        return _stacked(rows, made)

    def across_ranks(self, step: int) -> bool:
        """Tell whether a check averages over ranks, or what is below does."""
        return any(check.over_ranks for check in self._checks) or super().across_ranks(step)

    def _parts(self, keys: tuple[Key, ...]) -> tuple[_Part, ...]:
        for known, parts in self._layouts:
            if known is keys or known == keys:
                return parts
        parts = tuple(part for check in self._checks for part in _lay_out(check, keys))
        self._layouts.insert(0, (keys, parts))
        del self._layouts[16:]
        return parts

    def _averaged(self, number: int, check: Check, rank: int, step: int) -> _Numbers | None:
        """Return the mean over a window that ends here, or over all ranks; None where there is none."""
        steps = [step]
        if check.window is not None:
            steps = list(range(step - check.window + 1, step + 1))
            if step % check.window or not set(steps) <= set(self.steps(rank)):
                return None
        ranks = [rank]
        if check.over_ranks:
            ranks = list(self.ranks)
            if rank != min(ranks) or not all(set(steps) <= set(self.steps(each)) for each in ranks):
                return None
        found = [self._of_segment(number, each, at) for at in steps for each in ranks]
        return _mean(found, self._of_segment(number, rank, step), check)

    def _of_segment(self, number: int, rank: int, step: int) -> _Numbers:
        if (rank, step) not in self._remembered:
            rows = as_backward_got(self._capture.rows(rank, step))
            averaged: dict[int, _Numbers] = {}
            for part in self._parts(rows.keys):
                if part.check.window is not None or part.check.over_ranks:
                    at = self._checks.index(part.check)
                    averaged[at] = _joined(averaged.get(at), _numbers(rows, part))
            self._remembered[rank, step] = averaged
        return self._remembered[rank, step].get(number, _NOTHING)


_NOTHING = _Numbers((), np.empty(0), np.empty(0, np.intp), np.empty(0, np.intp), (), ())


def _lay_out(check: Check, keys: tuple[Key, ...]) -> list[_Part]:
    """Find which rows a check makes its numbers of."""
    rows = [row for row, key in enumerate(keys) if check.reads(key)]
    if not check.reduce:
        names = [each for each in check.metric if each != AS_JUDGED] or [""]
        return [
            _Part(
                check,
                metric,
                tuple(replace(keys[row], item=keys[row].item + suffix) for row in rows),
                tuple(np.array([row]) for row in rows),
            )
            for metric, suffix in zip(names, check.suffixes, strict=True)
        ]
    groups: dict[Key, list[int]] = {}
    for row in rows:
        key = keys[row]
        role = key.item if key.item in PLAIN_FORM_EXISTS else ""
        group = Key(kind=key.kind, name=check.group, item=role + check.suffixes[0], microbatch=key.microbatch)
        groups.setdefault(group, []).append(row)
    metric = check.metric[0] if check.metric else ""
    return [_Part(check, metric, tuple(groups), tuple(np.array(members) for members in groups.values()))]


def _only(part: _Part, wanted: Sequence[bool]) -> _Part:
    if all(wanted):
        return part
    keys = tuple(key for key, keep in zip(part.keys, wanted, strict=True) if keep)
    return replace(part, keys=keys, sources=tuple(s for s, keep in zip(part.sources, wanted, strict=True) if keep))


def _column(rows: StepRows, metric: str) -> FloatArray:
    """Return one metric of every row, [Q]; NaN where a row has no such number. Without a metric: the number or l2."""
    single = rows.numel == 1
    if metric == "value":
        return np.where(single, rows.value, np.nan)
    of_one = rows.value if metric in ("", "mean") else np.abs(rows.value)
    return np.where(single, of_one, rows.scalars[metric or "l2"])


def _numbers(rows: StepRows, part: _Part) -> _Numbers:
    """Compute the numbers of a part; quantities that have no such number are left out, unless it is not finite."""
    check = part.check
    if not part.keys:
        return _NOTHING
    last = np.array([source[-1] for source in part.sources], dtype=np.intp)
    if check.reduce:
        value, nonfinite, order = _of_groups(rows, part)
    else:
        value = _column(rows, part.metric)[last]
        nonfinite, order = rows.nonfinite[last].astype(np.intp), rows.order[last].astype(np.intp)
    kept = [int(one) for one in np.flatnonzero(~np.isnan(value) | (nonfinite > 0))]
    as_it_is = not check.reduce and part.metric in ("", "value")
    single = rows.numel[last] == 1
    plain = "int64" if check.reduce == COUNT else "float32"
    return _Numbers(
        tuple(part.keys[one] for one in kept),
        value[kept],
        np.where(np.isfinite(value), nonfinite, np.maximum(nonfinite, 1))[kept],
        order[kept],
        tuple(rows.dtype[int(last[one])] if as_it_is and single[one] else plain for one in kept),
        (check.where,) * len(kept),
    )


def _of_groups(rows: StepRows, part: _Part) -> tuple[FloatArray, IntArray, IntArray]:
    """Return the number of each group, how many elements in it are not finite, and when its last member ran, [P] each.

    Members without such a number are left out; a group without any has NaN.
    """
    how = part.check.reduce
    column = _column(rows, "l2" if how in (NORM, SUM_SQUARES) else part.metric)
    value, nonfinite, order = [], [], []
    for source in part.sources:
        bad = int(rows.nonfinite[source].sum())
        known = column[source] if bad else column[source][~np.isnan(column[source])]
        value.append(float(len(source)) if how == COUNT else _reduce(known, how) if known.size else np.nan)
        nonfinite.append(bad)
        order.append(int(rows.order[source].max()))
    return np.array(value), np.array(nonfinite, dtype=np.intp), np.array(order, dtype=np.intp)


def _reduce(values: FloatArray, how: str) -> float:
    with np.errstate(all="ignore"):
        if how in (NORM, SUM_SQUARES):
            squares = float(np.square(values).sum())
            return float(np.sqrt(squares)) if how == NORM else squares
        return float(values.mean())


def _joined(one: _Numbers | None, two: _Numbers) -> _Numbers:
    if one is None:
        return two
    return _Numbers(
        one.keys + two.keys,
        np.concatenate([one.value, two.value]),
        np.concatenate([one.nonfinite, two.nonfinite]),
        np.concatenate([one.order, two.order]),
        one.dtype + two.dtype,
        one.where + two.where,
    )


def _mean(found: Sequence[_Numbers], here: _Numbers, check: Check) -> _Numbers | None:
    """Average the numbers of several segments by key; over a window also over microbatches.

    A key that one of the segments lacks has no mean: it would be of something else.
    """

    def plain(key: Key) -> Key:
        return key if check.window is None else replace(key, microbatch=STEP_CLOCK)

    sums: dict[Key, list[tuple[float, int]]] = {}
    segments: dict[Key, int] = {}
    for numbers in found:
        for key in {plain(key) for key in numbers.keys}:
            segments[key] = segments.get(key, 0) + 1
        for key, value, bad in zip(numbers.keys, numbers.value, numbers.nonfinite, strict=True):
            sums.setdefault(plain(key), []).append((float(value), int(bad)))
    about: dict[Key, tuple[int, str]] = {}
    for key, order, dtype in zip(here.keys, here.order, here.dtype, strict=True):
        about[plain(key)] = (int(order), dtype)
    keys = tuple(key for key in sums if segments[key] == len(found) and key in about)
    if not keys:
        return None
    value = np.array([np.mean([one for one, _ in sums[key]]) for key in keys])
    bad_counts = np.array([sum(bad for _, bad in sums[key]) for key in keys], dtype=np.intp)
    # The mean of integers is no integer.
    dtypes = tuple(about[key][1] if about[key][1].startswith(("float", "bfloat")) else "float32" for key in keys)
    orders = np.array([about[key][0] for key in keys], dtype=np.intp)
    return _Numbers(keys, value, bad_counts, orders, dtypes, (check.where,) * len(keys))


def _as_rows(rows: StepRows, numbers: _Numbers) -> StepRows:
    count = len(numbers.keys)
    return replace(
        rows,
        keys=numbers.keys,
        order=numbers.order.astype(np.int32),
        dtype=numbers.dtype,
        shape=((),) * count,
        numel=np.ones(count, dtype=np.int64),
        nonfinite=numbers.nonfinite.astype(np.int64),
        value=numbers.value,
        scalars={name: np.full(count, np.nan) for name in SCALARS},
        sketch=np.full((count, SKETCH_K), np.nan, dtype=np.float32),
        sample=np.full((count, SAMPLES), np.nan, dtype=np.float32),
        hash=np.zeros((count, 2), dtype=np.uint64),
        text=("",) * count,
        where=numbers.where,
    )


def _samples(rows: StepRows, part: _Part) -> StepRows:
    """Make rows of the sampled values alone: their bits decide about identity, their largest stands for their size."""
    sources = np.array([source[0] for source in part.sources], dtype=np.intp)
    unknown = np.isnan(rows.sample[sources]).all(axis=1) & (rows.nonfinite[sources] == 0)
    kept = np.flatnonzero((rows.numel[sources] > 0) & ~unknown)
    held = [int(sources[one]) for one in kept]
    keys = tuple(part.keys[one] for one in kept)
    at = np.array(held, dtype=np.intp)
    sample = rows.sample[at]
    count = np.minimum(rows.numel[at], SAMPLES)
    largest = np.abs(np.where(np.isnan(sample), 0.0, sample)).max(axis=1, initial=0.0).astype(np.float64)
    bits = [
        xxhash.xxh3_128_intdigest(np.ascontiguousarray(one[:n]).tobytes()) for one, n in zip(sample, count, strict=True)
    ]
    return replace(
        _as_rows(rows, _Numbers(keys, largest, rows.nonfinite[at], rows.order[at].astype(np.intp), (), ())),
        dtype=tuple(rows.dtype[row] for row in held),
        shape=tuple((int(n),) for n in count),
        # Two at least: one value would be a number and is judged as one.
        numel=np.maximum(count, 2),
        value=np.full(len(held), np.nan),
        scalars={name: largest if name in ("l2", "max_abs") else np.full(len(held), np.nan) for name in SCALARS},
        sample=sample,
        hash=np.array([(each >> 64, each & (2**64 - 1)) for each in bits], dtype=np.uint64).reshape(-1, 2),
        where=(part.check.where,) * len(held),
    )


def _stacked(rows: StepRows, made: Sequence[StepRows]) -> StepRows:
    made = [each for each in made if each.keys]
    if not made:
        return rows
    parts = [rows, *made]

    columns: dict[str, Any] = {
        name: tuple(one for part in parts for one in getattr(part, name))
        for name in ("keys", "dtype", "shape", "text", "where")
    }
    columns |= {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("order", "numel", "nonfinite", "value", "sketch", "sample", "hash")
    }
    scalars = {name: np.concatenate([part.scalars[name] for part in parts]) for name in rows.scalars}
    return replace(rows, scalars=scalars, **columns)
