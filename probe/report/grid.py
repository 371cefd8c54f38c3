"""Every judged cell of a comparison, worst over ranks: what the plots of the HTML page are drawn from.

`probe.judge.comparison.Comparison` has one row per check; a heat map needs one number per series and step. It is kept
apart so that reports which need no plots need no arrays. This module must not know how the numbers are drawn.

Shapes: Q series in the baseline's execution order, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from probe.check import Check
    from probe.judge.cells import Judgement

NOT_JUDGED = 0
ZERO = 1
_FIRST = 2
_LOG10_LEAST, _LOG10_MOST = -8.0, 8.0
_LARGEST_WITHIN = 32768
"""Code of the largest ratio that is read back as 1 or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellGrid:
    """Hold difference / tolerance of each series and step."""

    labels: tuple[str, ...]
    """[Q] labels of the series, as in `probe.point.Key.label`."""
    steps: tuple[int, ...]
    """[S] ascending."""
    families: tuple[str, ...]
    """Names of the checks, in the order of the table."""
    family: npt.NDArray[np.intp]
    """[Q] index of each series in `families`."""
    ratio: npt.NDArray[np.float64]
    """[Q, S] largest difference / tolerance over ranks and microbatches; infinite where an exact kind is not equal or
    a value is not finite; NaN where nothing was judged."""
    spread_ratio: npt.NDArray[np.float64]
    """[Q, S] largest spread / tolerance: how near to its tolerance the unmodified code comes by itself; NaN where not
    known."""
    rank: npt.NDArray[np.int32]
    """[Q, S] rank of `ratio`; -1 where nothing was judged."""

    def __post_init__(self) -> None:
        shape = (len(self.labels), len(self.steps))
        for name in ("ratio", "spread_ratio", "rank"):
            found = getattr(self, name).shape
            if found != shape:
                raise ValueError(f"CellGrid.{name} has shape {found}, and must have {shape} (series, steps).")
        if self.family.shape != shape[:1]:
            raise ValueError(f"CellGrid.family has shape {self.family.shape}, and must have {shape[:1]} (series).")

    def of_family(self, number: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return a family's largest ratio and spread ratio at each step, [S] each; NaN where nothing was judged."""
        rows = self.family == number
        return largest(self.ratio[rows]), largest(self.spread_ratio[rows])


def grid_of(judgements: Sequence[Judgement], checks: Sequence[Check]) -> CellGrid:
    """Fold the judgements of all candidates into one grid: what repeats in every candidate counts.

    Series that were never judged are left out. The order is that of execution in the first step that has the series.
    """
    first = judgements[0]
    index, steps, ranks = first.differences.index, first.differences.steps, first.differences.ranks
    # One [S, series] array for each rank, so that the rank of the largest is known.
    by_rank = np.stack(
        [
            np.fmin.reduce([index.largest(_excess(each)[:, r : r + 1]) for each in judgements], axis=0)
            for r in range(len(ranks))
        ]
    )
    known = ~np.isnan(by_rank)
    worst = np.where(known, by_rank, -1.0).argmax(axis=0)
    ratio = np.fmax.reduce(by_rank, axis=0)
    with np.errstate(all="ignore"):
        own = np.where(np.isnan(first.excess) | first.exact, np.nan, first.spread / first.tolerance)
    order = np.where(first.differences.order < 0, np.nan, first.differences.order.astype(np.float64))
    execution = -index.largest(-order)
    began = np.where(np.isnan(execution).all(axis=0), len(steps), np.argmin(np.isnan(execution), axis=0))
    position = np.append(execution, np.full((1, len(index)), np.inf), axis=0)[began, np.arange(len(index))]
    rows = np.lexsort((position, began))
    rows = rows[(~np.isnan(ratio)).any(axis=0)[rows]]
    families = tuple(check.what for check in checks)
    return CellGrid(
        labels=tuple(index.labels[row] for row in rows),
        steps=steps,
        families=families,
        family=np.asarray(first.check.max(axis=0)[rows]),
        ratio=np.ascontiguousarray(ratio.T[rows]),
        spread_ratio=np.ascontiguousarray(index.largest(own).T[rows]),
        rank=np.where(known.any(axis=0), np.array(ranks)[worst], -1).T[rows].astype(np.int32),
    )


def _excess(judgement: Judgement) -> npt.NDArray[np.float64]:
    """Return difference / tolerance, infinite also where a value is not finite or a required one is missing."""
    return np.where(judgement.poisoned | judgement.lost, np.inf, judgement.excess)


def largest(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest number of each column, NaN where a column has none."""
    if not len(values):
        return np.full(values.shape[1:], np.nan)
    return np.asarray(np.fmax.reduce(values, axis=0))


def encoded(ratio: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Write ratios as 16-bit codes: 0 not judged, 1 zero, then 1e-8 to 1e8 in equal steps of the logarithm (0.06 %).

    Larger and infinite ratios get the last code, smaller ones the first.
    """
    codes = np.full(ratio.shape, NOT_JUDGED, dtype=np.uint16)
    codes[ratio == 0] = ZERO
    positive = ratio > 0
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log10(ratio[positive]), _LOG10_LEAST, _LOG10_MOST)
    share = (logs - _LOG10_LEAST) / (_LOG10_MOST - _LOG10_LEAST)
    rounded = _FIRST + np.rint(share * (65535 - _FIRST)).astype(np.int64)
    # Rounding must not carry a ratio across the tolerance: 1 is the only border that means something.
    codes[positive] = np.where(
        ratio[positive] > 1, np.maximum(rounded, _LARGEST_WITHIN + 1), np.minimum(rounded, _LARGEST_WITHIN)
    )
    return codes
