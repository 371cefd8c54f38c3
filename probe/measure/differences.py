"""Measure a whole run against another: one dense array for each thing that judging asks about a cell.

Segments are read once, step by step and rank by rank, and measured for all pairs of runs that are wanted; only a few
numbers per cell are kept. This module must not know tolerances or verdicts.

Shapes: S steps, R ranks, C cells (key with its microbatch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.measure.distance import Measured
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
    absolute: FloatArray
    """The same as an absolute difference: times the baseline's l2 norm for tensors."""
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


def places(axes: Axes) -> list[tuple[int, int]]:
    """List which segments the runs share, step by step, rank by rank: indices of step and rank."""
    held = [set(axes.by_rank[rank]) for rank in axes.ranks]
    return [(s, r) for s, step in enumerate(axes.steps) for r in range(len(axes.ranks)) if step in held[r]]


def walk(captures: Sequence[CaptureLike], axes: Axes, only: Sequence[tuple[int, int]] | None = None) -> Iterator[Stop]:
    """Read the shared segments of several runs side by side, step by step, rank by rank.

    Args:
        only: Some of `places`, in their order; None: all.
    """
    for s, r in places(axes) if only is None else only:
        step, rank = axes.steps[s], axes.ranks[r]
        yield Stop(s, step, r, rank, tuple(capture.rows(rank, step) for capture in captures))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What was measured at one stop."""

    s: int
    r: int
    cells: IntArray
    measured: Measured
    missing: IntArray
    missing_order: npt.NDArray[np.int32]
    unexpected: IntArray


class Collector:
    """Gather measured segments of one pair of runs, and make dense arrays of them once all keys are known."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(self, s: int, r: int, measured: Measured, pairs: Alignment, baseline: StepRows) -> None:
        """Keep one segment's measurements."""
        self._parts.append(
            _Part(
                s=s,
                r=r,
                cells=measured.cells,
                measured=measured,
                missing=pairs.missing,
                missing_order=baseline.order[pairs.missing_rows],
                unexpected=pairs.unexpected,
            )
        )

    def take(self, other: Collector, cells: IntArray) -> None:
        """Add what another collector gathered.

        Args:
            cells: What the other's cells are called here.
        """
        renumbered: dict[int, IntArray] = {}  # Most stops have the same cells, in one array.
        for part in other._parts:
            measured, at = part.measured, id(part.cells)
            if at not in renumbered:
                renumbered[at] = cells[part.cells]
            texts = {int(cells[cell]): both for cell, both in measured.texts.items()}
            self._parts.append(
                replace(
                    part,
                    cells=renumbered[at],
                    measured=replace(measured, cells=renumbered[at], texts=texts),
                    missing=cells[part.missing],
                    unexpected=cells[part.unexpected],
                )
            )

    def dense(
        self, name: str, axes: Axes, catalog: Catalog, empty: float = np.nan, kind: type = float
    ) -> npt.NDArray[Any]:
        """Return one field of `Measured` as [S, R, C].

        Args:
            empty: Where nothing was measured.
            kind: Element type.
        """
        out: npt.NDArray[Any] = np.full((len(axes.steps), len(axes.ranks), len(catalog)), empty, dtype=kind)
        for part in self._parts:
            out[part.s, part.r, part.cells] = getattr(part.measured, name)
        return out

    def finish(self, axes: Axes, catalog: Catalog, index: SeriesIndex, scale: FloatArray | None = None) -> Differences:
        """Return everything as [S, R, C].

        Args:
            scale: [series] from `series_scale` of the first baseline; None: taken from this pair's baseline.
        """
        shape = (len(axes.steps), len(axes.ranks), len(catalog))

        def dense(name: str, empty: float = np.nan, kind: type = float) -> npt.NDArray[Any]:
            return _folded(self.dense(name, axes, catalog, empty, kind))

        absent = np.zeros(shape, dtype=np.int8)
        present = np.zeros(shape, dtype=bool)
        expected = dense("expected")
        order = self.dense("order", axes, catalog, -1, np.int32)
        for part in self._parts:
            order[part.s, part.r, part.missing] = part.missing_order
            present[part.s, part.r, part.cells] = True
            absent[part.s, part.r, part.missing] = MISSING
            absent[part.s, part.r, part.unexpected] = UNEXPECTED
        raw, number = dense("difference"), dense("number", False, bool)
        if scale is None:
            scale = series_scale(np.where(number, expected, np.nan), index)
        return Differences(
            steps=axes.steps,
            ranks=axes.ranks,
            keys=tuple(catalog.keys),
            index=index,
            difference=np.where(number, raw / scale[index.of_cell], raw),
            absolute=dense("absolute"),
            scale=scale,
            expected=expected,
            actual=dense("actual"),
            present=_folded(present),
            exact=dense("exact", False, bool),
            identical=dense("identical", False, bool),
            number=number,
            single=dense("single", False, bool),
            nonfinite=dense("nonfinite", 0, np.int8),
            reshaped=dense("reshaped", False, bool),
            retyped=dense("retyped", False, bool),
            absent=_folded(absent),
            order=_folded(order),
            texts={(part.s, part.r, cell): both for part in self._parts for cell, both in part.measured.texts.items()},
            assumed=dense("assumed"),
        )


def _folded(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Keep what is the same at all steps and ranks once: half of what is dense is, in runs of any length."""
    if not values.size:
        return values
    first = values[0, 0]
    # Comparing all of a large array takes longer than the memory is worth where its second row differs already.
    for some in (values[0, -1:], values[-1:, 0], values):
        if not ((some == first) | ((some != some) & (first != first))).all():
            return values
    return np.broadcast_to(first.copy(), values.shape)


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
        middle = float(np.median(values))
        scale[series] = middle or float(np.sqrt(np.mean(values**2))) or 1.0
    return scale


def cells_of(index: SeriesIndex, series: IntArray) -> BoolArray:
    """Return which cells, [C], belong to the given series."""
    return np.isin(index.of_cell, series)
