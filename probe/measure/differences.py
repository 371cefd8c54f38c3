"""Measure a whole run against another: one dense array for each thing that judging asks about a cell.

Segments are read once, step by step and rank by rank, and measured for all pairs of runs that are wanted; only a few
numbers per cell are kept. This module must not know tolerances or verdicts.

Shapes: S steps, R ranks, C cells (key with its microbatch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.measure.distance import TINY, Measured
from probe.measure.series import (
    Alignment,
    BoolArray,
    CaptureLike,
    Catalog,
    FloatArray,
    IntArray,
    SeriesIndex,
    common_steps,
)
from probe.measure.shared import Recent, Shared, same
from probe.point import Key
from probe.store.layout import StepRows

MISSING, UNEXPECTED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """How one run differs from another. Arrays are [S, R, C]."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    keys: tuple[Key, ...]
    """[C]"""
    index: SeriesIndex
    difference: FloatArray
    """Relative for tensors, in units of the series' scale for numbers; NaN where not comparable or absent."""
    numbers: FloatArray
    """[S, R, N] differences of numbers before they were divided by their scale."""
    number_cells: IntArray
    """[N] the cells that are numbers anywhere."""
    scale: FloatArray
    """[series] what differences of numbers are divided by."""
    expected: FloatArray
    """The number, or the l2 norm of the tensor."""
    actual: FloatArray
    present: BoolArray
    """In both runs."""
    exact: BoolArray
    """Of a kind that is judged by equality."""
    identical: BoolArray
    number: BoolArray
    single: BoolArray
    """Has one element: `expected` and `actual` are the value itself, not a norm."""
    nonfinite: npt.NDArray[np.int8]
    """1: in the baseline, 2: in the candidate, 3: both."""
    reshaped: BoolArray
    retyped: BoolArray
    absent: npt.NDArray[np.int8]
    """`MISSING` in the candidate, `UNEXPECTED` in it, or 0."""
    order: npt.NDArray[np.int32]
    """Execution index in the baseline; -1 where it has none."""
    texts: dict[tuple[int, int, int], tuple[float | str, float | str]]
    """Both values of cells whose number or norm is not what is shown, by (s, r, cell)."""
    assumed: FloatArray
    """Tolerance where nothing was measured."""

    @property
    def absolute(self) -> FloatArray:
        """The difference as an absolute one: times the baseline's l2 norm for tensors. Made anew each time.

        What has one element, integers included, differs by a number; what has more, by a part of its size.
        """
        size = np.where(np.abs(self.expected) >= TINY, self.expected, self.actual)
        with np.errstate(all="ignore"):
            absolute = np.where(self.single, self.difference, self.difference * size)
        at = self.number_cells
        absolute[:, :, at] = np.where(self.number[:, :, at], self.numbers, absolute[:, :, at])
        return absolute


@dataclass(frozen=True, slots=True)
class Stop:
    """One segment of every run: where the walk is."""

    s: int
    step: int
    r: int
    rank: int
    rows: tuple[StepRows, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The steps and ranks that several runs share."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    by_rank: dict[int, tuple[int, ...]]

    @classmethod
    def shared(cls, captures: Sequence[CaptureLike]) -> Axes:
        """Find the steps, rank by rank, that all captures have."""
        ranks = [r for r in captures[0].ranks if all(r in capture.ranks for capture in captures)]
        by_rank = {rank: common_steps(captures, rank) for rank in sorted(ranks)}
        by_rank = {rank: steps for rank, steps in by_rank.items() if steps}
        return cls(
            steps=tuple(sorted({step for steps in by_rank.values() for step in steps})),
            ranks=tuple(by_rank),
            by_rank=by_rank,
        )

    def part(self, steps: Sequence[int], ranks: Sequence[int]) -> Axes:
        """Take some of the steps and ranks, given by their indices."""
        return Axes(
            steps=tuple(self.steps[s] for s in steps),
            ranks=tuple(self.ranks[r] for r in ranks),
            by_rank={rank: self.by_rank[rank] for rank in (self.ranks[r] for r in ranks)},
        )


def walk(captures: Sequence[CaptureLike], axes: Axes) -> Iterator[Stop]:
    """Read the shared segments of several runs side by side, step by step, rank by rank."""
    held = [set(axes.by_rank[rank]) for rank in axes.ranks]
    for s, step in enumerate(axes.steps):
        for r, rank in enumerate(axes.ranks):
            if step in held[r]:
                yield Stop(s, step, r, rank, tuple(capture.rows(rank, step) for capture in captures))


_FIELDS: dict[str, tuple[float, type]] = {
    "difference": (np.nan, float),
    "expected": (np.nan, float),
    "actual": (np.nan, float),
    "assumed": (np.nan, float),
    "exact": (False, bool),
    "identical": (False, bool),
    "number": (False, bool),
    "single": (False, bool),
    "reshaped": (False, bool),
    "retyped": (False, bool),
    "nonfinite": (0, np.int8),
    "order": (-1, np.int32),
    "present": (False, bool),
    "absent": (0, np.int8),
}
"""Arrays of `Differences`: what stands where nothing was measured, and the element type."""


@dataclass(frozen=True, slots=True)
class Block:
    """Measurements of one pair of runs at some steps and ranks, before numbers are told in units of their scale."""

    fields: dict[str, npt.NDArray[Any]]
    """Each of `_FIELDS`: [S, R, C], or [1, 1, C] where it is the same at all steps and ranks."""
    texts: dict[tuple[int, int, int], tuple[float | str, float | str]]

    def finish(
        self, axes: Axes, keys: Sequence[Key], index: SeriesIndex, scale: FloatArray | None = None
    ) -> Differences:
        """Return everything as [S, R, C].

        Args:
            scale: [series] from `series_scale` of the first baseline; None: taken from this pair's baseline.
        """
        shape = (len(axes.steps), len(axes.ranks), len(keys))
        dense = {name: np.broadcast_to(values, shape) for name, values in self.fields.items()}
        raw, number = dense.pop("difference"), dense["number"]
        if scale is None:
            scale = series_scale(np.where(number, dense["expected"], np.nan), index)
        at = np.flatnonzero(self.fields["number"].any(axis=(0, 1)))
        numbers, difference = raw[:, :, at], np.array(raw)
        difference[:, :, at] = np.where(number[:, :, at], numbers / scale[index.of_cell[at]], numbers)
        return Differences(
            steps=axes.steps,
            ranks=axes.ranks,
            keys=tuple(keys),
            index=index,
            difference=difference,
            numbers=numbers,
            number_cells=at,
            scale=scale,
            texts=self.texts,
            **dense,
        )


@dataclass(frozen=True, slots=True)
class _Kept:
    """Measurements of one segment. Arrays are [Q], or [cells that are missing]."""

    s: int
    r: int
    pairs: Alignment
    fields: dict[str, npt.NDArray[Any]]
    missing_order: npt.NDArray[np.int32]
    texts: dict[int, tuple[float | str, float | str]]


class Collector:
    """Gather measured segments of one pair of runs, and make dense arrays of them once all keys are known."""

    def __init__(self, recent: Recent | None = None) -> None:
        """Begin with nothing.

        Args:
            recent: Of all pairs that are measured side by side.
        """
        self._kept: list[_Kept] = []
        self._recent = Recent() if recent is None else recent

    def add(self, s: int, r: int, measured: Measured, pairs: Alignment, baseline: StepRows) -> None:
        """Keep one segment's measurements."""
        fields = {name: getattr(measured, name) for name in _MEASURED}
        for name in _STEADY:
            fields[name] = self._recent.one(name, fields[name])
        self._kept.append(_Kept(s, r, pairs, fields, baseline.order[pairs.missing_rows], measured.texts))

    def dense(self, name: str, axes: Axes, catalog: Catalog) -> npt.NDArray[Any]:
        """Return one field of `Measured` as [S, R, C], NaN or nothing where nothing was measured."""
        shape = (len(axes.steps), len(axes.ranks), len(catalog))
        whole = len(self._kept) == shape[0] * shape[1] and all(each.pairs.covers(shape[2]) for each in self._kept)
        out = np.empty(shape, _FIELDS[name][1]) if whole else _empty(name, shape)
        for each in self._kept:
            out[each.s, each.r, each.pairs.place] = each.fields[name]
        return out

    def block(self, axes: Axes, catalog: Catalog, shared: Shared | None = None) -> Block:
        """Return everything that was gathered.

        Args:
            shared: Of all pairs that have the same axes and catalog.
        """
        shared = Shared() if shared is None else shared
        fields = {name: self._folded(name, axes, catalog, shared) for name in _FIELDS}
        texts = {(each.s, each.r, cell): both for each in self._kept for cell, both in each.texts.items()}
        return Block(fields, texts)

    def _folded(self, name: str, axes: Axes, catalog: Catalog, shared: Shared) -> npt.NDArray[Any]:
        """Return one field; made once for all pairs in which it is made of the same arrays."""
        of = [(each.s, each.r, each.pairs, each.fields.get(name)) for each in self._kept]
        key: tuple[Any, ...] = (_FIELDS[name], *((s, r, id(pairs), id(one)) for s, r, pairs, one in of))
        if name in ("present", "absent"):
            key = (name, *key)
        if name == "order" and any(each.missing_order.size for each in self._kept):
            key = (name, id(self), *key)
        return shared.made(key, of, lambda: _folded(self._field(name, axes, catalog)))

    def _field(self, name: str, axes: Axes, catalog: Catalog) -> npt.NDArray[Any]:
        if name not in ("present", "absent"):
            out = self.dense(name, axes, catalog)
            if name == "order":
                for each in self._kept:
                    out[each.s, each.r, each.pairs.missing] = each.missing_order
            return out
        out = _empty(name, (len(axes.steps), len(axes.ranks), len(catalog)))
        for each in self._kept:
            if name == "present":
                out[each.s, each.r, each.pairs.place] = True
            else:
                out[each.s, each.r, each.pairs.missing] = MISSING
                out[each.s, each.r, each.pairs.unexpected] = UNEXPECTED
        return out

    def finish(self, axes: Axes, catalog: Catalog, index: SeriesIndex, scale: FloatArray | None = None) -> Differences:
        """Return everything as [S, R, C]; see `Block.finish`."""
        return self.block(axes, catalog).finish(axes, catalog.keys, index, scale)


_MEASURED = tuple(name for name in _FIELDS if name not in ("present", "absent"))
"""What of a field is in `Measured`; the other fields tell which cells are in it."""
_STEADY = tuple(name for name in _MEASURED if _FIELDS[name][1] is not float)
"""Fields that hardly change from one segment to the next."""


def _empty(name: str, shape: tuple[int, int, int]) -> npt.NDArray[Any]:
    empty, kind = _FIELDS[name]
    return np.full(shape, empty, dtype=kind)


def _folded(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Keep once what is the same at all steps and ranks."""
    if not values.size:
        return values
    first = values[:1, :1]
    # Most of what differs does so from one step or rank to the next: all of a large array is seldom looked at.
    folds = all(same(some, np.broadcast_to(first, some.shape)) for some in (values[:1, -1:], values[-1:, :1], values))
    return first.copy() if folds else values


def joined(
    parts: Sequence[tuple[Block, range, range, IntArray]], shape: tuple[int, int, int], shared: Shared | None = None
) -> Block:
    """Put blocks together.

    Args:
        parts: Each with the indices of its steps, ranks and cells in the whole.
        shape: Of the whole.
        shared: Of all pairs that are in parts of the same steps, ranks and cells.
    """
    if len(parts) == 1:
        return parts[0][0]
    shared = Shared() if shared is None else shared
    alike = all(np.array_equal(cells, np.arange(shape[2])) for *_, cells in parts)

    def one(name: str) -> npt.NDArray[Any]:
        first = parts[0][0].fields[name]
        if alike and len(first) == 1 == first.shape[1] and all(same(part.fields[name], first) for part, *_ in parts):
            return first
        whole = np.empty(shape, first.dtype) if alike else _empty(name, shape)
        for part, steps, ranks, cells in parts:
            here = whole[steps.start : steps.stop, ranks.start : ranks.stop]
            here[:, :, slice(None) if alike else cells] = part.fields[name]
        return whole

    fields = {}
    for name in _FIELDS:
        of = [part.fields[name] for part, *_ in parts]
        fields[name] = shared.made((_FIELDS[name], *map(id, of)), of, partial(one, name))
    texts = {
        (steps[s], ranks[r], int(cells[cell])): both
        for part, steps, ranks, cells in parts
        for (s, r, cell), both in part.texts.items()
    }
    return Block(fields, texts)


def series_scale(numbers: FloatArray, index: SeriesIndex) -> FloatArray:
    """Return the scale of each series of numbers, [series]: the median magnitude over its recorded cells.

    A number is never divided by its own value: a mean-zero quantity would blow up. Where the median is zero, the root
    mean square takes its place; 1 where all are zero.

    Source: the project's statistics study, sections 0b and 6.

    Args:
        numbers: [S, R, C] values of the first baseline, NaN where the cell is no number.
    """
    scale = np.ones(len(index))
    magnitudes = np.abs(numbers).reshape(-1, numbers.shape[-1])
    cells = np.flatnonzero(np.isfinite(magnitudes).any(axis=0))
    by_series: dict[int, list[int]] = {}
    for cell in cells:
        by_series.setdefault(int(index.of_cell[cell]), []).append(int(cell))
    for series, members in by_series.items():
        values = magnitudes[:, members]
        values = values[np.isfinite(values)]
        middle = _median(values)
        scale[series] = middle or float(np.sqrt(np.mean(values**2))) or 1.0
    return scale


def _median(values: FloatArray) -> float:
    """Return what numpy's median does of finite values; numpy imports its masked arrays for it, a tenth of a start."""
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half] if len(values) % 2 else np.mean(ordered[half - 1 : half + 1]))


def cells_of(index: SeriesIndex, series: IntArray) -> BoolArray:
    """Return which cells, [C], belong to the given series."""
    return np.isin(index.of_cell, series)
