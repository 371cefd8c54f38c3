"""Number the quantities of several captures, so that they can be judged with whole-array arithmetic.

A capture names every row by a `Key`; judging wants dense arrays. This module gives each key a cell number, tells which
cells share a tolerance (a series: the same key in every microbatch), and pairs the rows of two segments. It must not
know how values differ or what is allowed.

Shapes: Q rows of a segment, C cells, S steps, R ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from probe.point import STEP_CLOCK, Key, Kind
from probe.store.layout import StepRows

IntArray = npt.NDArray[np.intp]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

CLIPPED = "clipped"
"""Item of a gradient as the optimizer got it."""
BEFORE = "before"
"""Item of a parameter ahead of the first recorded step."""


class CaptureLike(Protocol):
    """What judging needs of a capture; `probe.store.reader.Capture` is one."""

    @property
    def path(self) -> Path: ...
    @property
    def manifest(self) -> Mapping[str, Any]: ...
    @property
    def run_id(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def problems(self) -> tuple[str, ...]: ...
    def steps(self, rank: int) -> tuple[int, ...]: ...
    def rows(self, rank: int, step: int) -> StepRows: ...
    def names(self, rank: int) -> tuple[tuple[Key, ...], tuple[str, ...]]:
        """Keys of a rank's first step, and their texts."""


class View:
    """A capture seen through another: it says all that the capture says, until a subclass changes the rows."""

    def __init__(self, capture: CaptureLike) -> None:
        self._capture = capture

    @property
    def path(self) -> Path:
        return self._capture.path

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self._capture.manifest

    @property
    def run_id(self) -> str:
        return self._capture.run_id

    @property
    def world_size(self) -> int:
        return self._capture.world_size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._capture.ranks

    @property
    def problems(self) -> tuple[str, ...]:
        return self._capture.problems

    def steps(self, rank: int) -> tuple[int, ...]:
        return self._capture.steps(rank)

    def rows(self, rank: int, step: int) -> StepRows:
        return self._capture.rows(rank, step)

    def names(self, rank: int) -> tuple[tuple[Key, ...], tuple[str, ...]]:
        """Keys of a rank's first step, and their texts, as the subclass shows them."""
        return names_in(self, rank)

    def across_ranks(self, step: int) -> bool:
        """Tell whether what one rank shows is made of other ranks' segments too, as seen at this step."""
        return isinstance(self._capture, View) and self._capture.across_ranks(step)


def names_in(capture: CaptureLike, rank: int) -> tuple[tuple[Key, ...], tuple[str, ...]]:
    """Read the keys of a rank's first step, and their texts."""
    rows = capture.rows(rank, capture.steps(rank)[0])
    return rows.keys, rows.text


def perturbation(capture: CaptureLike) -> str:
    """Return how the run was perturbed on purpose, e.g. `ulp:3`, or an empty text."""
    return str(capture.manifest.get("config", {}).get("perturb") or "")


_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")


def sibling_name(key: Key) -> tuple[str, str, str]:
    """Return what layers of one kind have in common: kind, path without layer indices, item.

    >>> sibling_name(Key(kind=Kind.FORWARD, name="blocks.3.attn"))
    ('forward', 'blocks.*.attn', '')
    """
    return key.kind.value, _INDEX.sub("*", key.name), key.item


@dataclass(frozen=True, eq=False)
class Alignment:
    """Which rows of a baseline's segment belong to which rows of a candidate's. Two are equal if they are the same."""

    cells: IntArray
    """[Q] cell number of each pair."""
    keys: tuple[Key, ...]
    """[Q] key of each pair."""
    baseline: IntArray | slice
    """[Q] row in the baseline's segment."""
    candidate: IntArray | slice
    """[Q] row in the candidate's segment."""
    missing: IntArray
    """Cells in the baseline only."""
    missing_rows: IntArray
    """Their rows in the baseline's segment."""
    unexpected: IntArray
    """Cells in the candidate only."""
    stand_ins: IntArray
    """Pairs in which the baseline's unclipped gradient stands in for a clipped one."""

    @cached_property
    def place(self) -> slice | IntArray:
        """The cells as an index: a slice, which is copied in a tenth of the time, where they follow one another."""
        count = len(self.cells)
        first = int(self.cells[0]) if count else 0
        return (
            slice(first, first + count) if np.array_equal(self.cells, np.arange(first, first + count)) else self.cells
        )

    def covers(self, cells: int) -> bool:
        """Tell whether all of so many cells are paired."""
        return isinstance(self.place, slice) and self.place == slice(0, cells)


class Catalog:
    """Numbers for keys, handed out in the order in which they are first seen."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._cell: dict[Key, int] = {}
        self._known: list[tuple[tuple[Key, ...], IntArray]] = []
        self._aligned: list[tuple[tuple[Key, ...], tuple[Key, ...], Alignment]] = []

    def __len__(self) -> int:
        return len(self.keys)

    def cell(self, key: Key) -> int:
        """Return the number of a key, new if it was not seen yet."""
        number = self._cell.get(key)
        if number is None:
            number = self._cell[key] = len(self.keys)
            self.keys.append(key)
        return number

    def cells(self, keys: tuple[Key, ...]) -> IntArray:
        """Return the numbers of a segment's keys, [Q]."""
        # Nearly all segments of a run have the same keys: comparing tuples costs a fraction of 2,000 look-ups.
        for known, cells in self._known:
            if known is keys or known == keys:
                return cells
        cells = np.array([self.cell(key) for key in keys], dtype=np.intp)
        self._known.insert(0, (keys, cells))
        del self._known[16:]
        return cells

    def align(self, baseline: tuple[Key, ...], candidate: tuple[Key, ...]) -> Alignment:
        """Pair the rows of two segments by key.

        A gradient recorded after clipping in one arm only is paired with the other arm's unclipped gradient: the
        recorder leaves the second row out when clipping changed nothing.
        """
        for one, two, alignment in self._aligned:
            if (one is baseline and two is candidate) or (one == baseline and two == candidate):
                return alignment
        alignment = self._align(baseline, candidate)
        self._aligned.insert(0, (baseline, candidate, alignment))
        del self._aligned[32:]
        return alignment

    def _align(self, baseline: tuple[Key, ...], candidate: tuple[Key, ...]) -> Alignment:
        nothing = np.empty(0, dtype=np.intp)
        if baseline == candidate:
            return Alignment(
                self.cells(baseline), baseline, slice(None), slice(None), nothing, nothing, nothing, nothing
            )
        of_baseline = {key: row for row, key in enumerate(baseline)}
        of_candidate = {key: row for row, key in enumerate(candidate)}
        cells, left, right, missing, missing_rows, unexpected, stand_ins = [], [], [], [], [], [], []
        for key, row in of_baseline.items():
            other = of_candidate.get(key, of_candidate.get(unclipped(key)))
            if other is None:
                missing.append(self.cell(key))
                missing_rows.append(row)
            else:
                cells.append(self.cell(key))
                left.append(row)
                right.append(other)
        for key, row in of_candidate.items():
            if key in of_baseline:
                continue
            stand_in = of_baseline.get(unclipped(key))
            if stand_in is None:
                unexpected.append(self.cell(key))
            else:
                stand_ins.append(len(cells))
                cells.append(self.cell(key))
                left.append(stand_in)
                right.append(row)
        keys = tuple(self.keys[cell] for cell in cells)
        arrays = (left, right, missing, missing_rows, unexpected, stand_ins)
        return Alignment(np.array(cells, dtype=np.intp), keys, *(np.array(x, dtype=np.intp) for x in arrays))


def unclipped(key: Key) -> Key:
    """Return the key of the gradient before clipping, or the key itself if it is no clipped gradient."""
    return replace(key, item="") if key.kind is Kind.GRAD and key.item == CLIPPED else key


class SeriesIndex:
    """Which series each cell belongs to, and how series relate."""

    def __init__(self, keys: Sequence[Key]) -> None:
        number: dict[Key, int] = {}
        of_cell = []
        for key in keys:
            series = key if key.microbatch == STEP_CLOCK else key.series
            of_cell.append(number.setdefault(series, len(number)))
        self.keys: tuple[Key, ...] = tuple(number)
        """One key for each series."""
        self.of_cell: IntArray = np.array(of_cell, dtype=np.intp)
        """[C] series of each cell."""
        self.labels: tuple[str, ...] = tuple(key.label for key in self.keys)
        groups: dict[tuple[str, str, str], int] = {}
        self.group: IntArray = np.array(
            [groups.setdefault(sibling_name(key), len(groups)) for key in self.keys], dtype=np.intp
        )
        """[series] number of the sibling group."""

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, cells: IntArray) -> SeriesIndex:
        """Return an index of some cells, by which series have the same numbers."""
        part = copy(self)
        part.of_cell = self.of_cell[cells]
        return part

    def largest(self, values: FloatArray) -> FloatArray:
        """Fold [S, R, C] into [S, series] by the maximum over ranks and microbatches, ignoring NaN; NaN where empty."""
        over_ranks = np.fmax.reduce(values, axis=1, initial=np.nan)
        return _fold(over_ranks, self.of_cell, len(self))

    def largest_sibling(self, values: FloatArray) -> FloatArray:
        """Give each series the largest value of its sibling group, [S, series] to [S, series], ignoring NaN."""
        groups = _fold(values, self.group, int(self.group.max(initial=-1)) + 1)
        return np.asarray(groups[:, self.group], dtype=np.float64)


def _fold(values: FloatArray, group: IntArray, groups: int) -> FloatArray:
    """Fold columns [S, N] into [S, groups] by the maximum, ignoring NaN; NaN where a group has nothing."""
    folded = np.full((groups, values.shape[0]), np.nan)
    np.fmax.at(folded, group, values.T)
    return np.ascontiguousarray(folded.T)


def common_steps(captures: Sequence[CaptureLike], rank: int) -> tuple[int, ...]:
    """Return the steps that every capture has on this rank, ascending."""
    shared = set(captures[0].steps(rank))
    for capture in captures[1:]:
        shared &= set(capture.steps(rank)) if rank in capture.ranks else set()
    return tuple(sorted(shared))
