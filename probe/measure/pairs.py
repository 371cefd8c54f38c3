"""Measure all pairs of several runs, in this process or spread over others.

What is to be read is cut into pieces, each a few ranks or a few steps of every run. A piece is read and measured by
itself, so it can be handed to any executor of the `concurrent.futures` interface: local processes, or the executor of a
Dask client whose workers see the captures under the same path. Put together, the pieces are the same to the last bit
and in the same order as if one process had read all. This module must not know tolerances or verdicts.

Shapes: S steps, R ranks, C cells, Q rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from probe.measure.differences import Axes, Block, Collector, Differences, joined, walk
from probe.measure.distance import measure_sides
from probe.measure.loss_scale import agreed_scales, as_backward_got, divisors, microbatches
from probe.measure.microbatches import matched
from probe.measure.series import Alignment, CaptureLike, Catalog, FloatArray, SeriesIndex, View
from probe.measure.shared import Recent, Shared
from probe.measure.side import Side
from probe.point import Key
from probe.store.layout import StepRows

if TYPE_CHECKING:
    from concurrent.futures import Executor

Result = TypeVar("Result")
Pair = tuple[int, int]
"""Numbers of two runs."""
Place = tuple[int, int]
"""Indices of a step and a rank among all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairsMeasured:
    """All pairs of runs: baselines first, then candidates."""

    pairs: dict[Pair, Differences]
    keys: tuple[Key, ...]
    scales: dict[float, int]
    """Factor by which a candidate scaled its loss, and in how many microbatches."""
    cuts: dict[tuple[int, int], int]
    """Microbatches per step of the arms where they differ, and how many values are not compared for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What is measured."""

    captures: tuple[CaptureLike, ...]
    baselines: int
    """So many of the captures are baselines; the others are candidates."""
    axes: Axes
    loss_tolerances: Mapping[int, float]
    """Relative difference at which two losses agree, by step."""

    @property
    def pairs(self) -> list[Pair]:
        """All pairs of captures."""
        return list(itertools.combinations(range(len(self.captures)), 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How the work is spread."""

    start: Callable[[], AbstractContextManager[Executor]]
    """Starts the workers, and lets them go when the work is done: idle ones would keep the memory that they used."""
    pieces: int
    """Into how many pieces; two or so for each worker even out their speeds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the segments: all that these steps and ranks have, by their indices."""

    steps: range
    ranks: range


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What was measured of one piece."""

    blocks: dict[Pair, Block]
    keys: tuple[Key, ...]
    """[C] in the order in which they were first seen here."""
    first: tuple[Place, ...]
    """[C] where each was first seen."""
    scales: tuple[tuple[Place, float], ...]
    """Where a candidate scaled its loss, and by which factor, once for each microbatch."""
    cuts: tuple[tuple[Place, tuple[int, int], int], ...]
    """Where the arms have different numbers of microbatches, which, and how many values are not compared for it."""


def measure_pairs(
    runs: Runs, spread: Spread | None = None, progress: Callable[[float], None] | None = None
) -> PairsMeasured:
    """Measure all pairs of runs.

    Args:
        spread: Where to do it; None: here, without pickling anything.
        progress: Is told which part of the work is done, from 0 to 1.
    """
    axes = runs.axes
    pieces = _cut(runs, 1 if spread is None else spread.pieces)
    if spread is None:
        found = [measure_piece(runs, pieces[0])]
    else:
        found = spread_calls(spread, measure_piece, [(runs, piece) for piece in pieces], progress)
    keys = _in_order(found)
    number = {key: cell for cell, key in enumerate(keys)}
    cells = [np.array([number[key] for key in one.keys], dtype=np.intp) for one in found]
    shape = (len(axes.steps), len(axes.ranks), len(keys))
    index = SeriesIndex(keys)
    unit: FloatArray | None = None  # Numbers are told in the scale of the first baseline, which is in the first pair.
    pairs: dict[Pair, Differences] = {}
    shared = Shared()
    for pair in runs.pairs:
        parts = [(one.blocks.pop(pair), p.steps, p.ranks, at) for one, p, at in zip(found, pieces, cells, strict=True)]
        block = joined(parts, shape, shared)
        pairs[pair] = replace(block, fields=shared.fields(block.fields)).finish(axes, keys, index, unit)
        unit = pairs[pair].scale
    scales: dict[float, int] = {}
    for _, scale in sorted((each for one in found for each in one.scales), key=_place):
        scales[scale] = scales.get(scale, 0) + 1
    cuts: dict[tuple[int, int], int] = {}
    for _, numbers, left_out in sorted((each for one in found for each in one.cuts), key=_place):
        cuts[numbers] = cuts.get(numbers, 0) + left_out
    return PairsMeasured(pairs=pairs, keys=keys, scales=scales, cuts=cuts)


def _place(found: tuple[Any, ...]) -> Place:
    return found[0]  # type: ignore[no-any-return]


def spread_calls(
    spread: Spread,
    call: Callable[..., Result],
    arguments: Sequence[tuple[Any, ...]],
    progress: Callable[[float], None] | None,
) -> list[Result]:
    """Make calls elsewhere, and return their results in order."""
    from concurrent.futures import as_completed

    with spread.start() as executor:
        futures = [executor.submit(call, *each) for each in arguments]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()  # The first error ends the wait.
                if progress is not None:
                    progress(done / len(futures))
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()


def _cut(runs: Runs, count: int) -> list[Piece]:
    """Cut the work by ranks, and by steps where what one rank shows is made of others' segments, or ranks are few."""
    axes = runs.axes
    steps, ranks = range(len(axes.steps)), range(len(axes.ranks))
    if count < 2:
        return [Piece(steps, ranks)]
    # All are asked: what they found is sent along with them.
    across = [isinstance(capture, View) and capture.across_ranks(axes.steps[0]) for capture in runs.captures]
    by_step = any(across) or len(ranks) < min(count, len(steps))
    lines = steps if by_step else ranks
    count = min(count, len(lines))
    parts = [lines[at * len(lines) // count : (at + 1) * len(lines) // count] for at in range(count)]
    return [Piece(part, ranks) if by_step else Piece(steps, part) for part in parts]


def measure_piece(runs: Runs, piece: Piece) -> _Found:
    """Read some segments of all runs side by side and measure all pairs of them."""
    axes = runs.axes.part(piece.steps, piece.ranks)
    catalog = Catalog()
    recent = Recent()
    collectors = {pair: Collector(recent) for pair in runs.pairs}
    first: list[Place] = []
    scales: list[tuple[Place, float]] = []
    cuts: list[tuple[Place, tuple[int, int], int]] = []
    for stop in walk(runs.captures, axes):
        place = (piece.steps[stop.s], piece.ranks[stop.r])
        sides = [Side(as_backward_got(each)) for each in stop.rows]
        for (one, two), collector in collectors.items():
            both = matched(stop.rows[one], stop.rows[two])
            expected, actual = sides[one], sides[two]
            if both.numbers is not None:
                expected, actual = Side(as_backward_got(both.baseline)), Side(as_backward_got(both.candidate))
                if one == 0 and two >= runs.baselines:
                    cuts.append((place, both.numbers, both.left_out))
            aligned = catalog.align(expected.rows.keys, actual.rows.keys)
            divisor = None
            if one < runs.baselines <= two:
                agreed = agreed_scales(both.baseline, both.candidate, runs.loss_tolerances[stop.step])
                divisor = _divisor(aligned, agreed, expected.rows, actual.rows)
                if one == 0:
                    scales += [(place, scale) for scale in agreed.values()]
            measured = measure_sides(expected, actual, aligned, divisor)
            collector.add(stop.s, stop.r, measured, aligned, expected.rows)
        first += [place] * (len(catalog) - len(first))
    shared, blocks = Shared(), {}
    for pair in runs.pairs:
        block = collectors.pop(pair).block(axes, catalog, shared)
        blocks[pair] = replace(block, fields=shared.fields(block.fields))
    return _Found(
        blocks=blocks,
        keys=tuple(catalog.keys),
        first=tuple(first),
        scales=tuple(scales),
        cuts=tuple(cuts),
    )


def _divisor(aligned: Alignment, scales: dict[int, float], one: StepRows, two: StepRows) -> FloatArray | None:
    if not scales:
        return None
    return divisors(aligned, scales, (microbatches(one.keys), microbatches(two.keys)))


def _in_order(found: Sequence[_Found]) -> tuple[Key, ...]:
    """List all keys in the order in which one walk over everything would have met them."""
    met = sorted((place, cell, at) for at, one in enumerate(found) for cell, place in enumerate(one.first))
    return tuple(dict.fromkeys(found[at].keys[cell] for _, cell, at in met))
