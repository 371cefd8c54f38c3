"""Measure all pairs of several runs, in this process or spread over others.

What is to be read is cut into pieces, each a few ranks or a few steps of every run. A piece is read and measured by
itself, so it can be handed to any executor of the `concurrent.futures` interface: local processes, or the executor of a
Dask client whose workers see the captures under the same path. Put together, the pieces are the same to the last bit
and in the same order as if one process had read all. This module must not know tolerances or verdicts.

Shapes: S steps, R ranks, C cells, Q rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from dataclasses import dataclass

import numpy as np

from probe.measure.differences import Axes, Collector, Differences, places, walk
from probe.measure.distance import measure
from probe.measure.loss_scale import agreed_scales, as_backward_got, divisors, microbatches
from probe.measure.microbatches import matched
from probe.measure.series import Alignment, CaptureLike, Catalog, FloatArray, SeriesIndex, View
from probe.point import Key
from probe.store.layout import StepRows

Pair = tuple[int, int]
"""Numbers of two runs."""
Place = tuple[int, int]
"""Indices of a step and a rank."""


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

    executor: Executor
    pieces: int
    """Into how many pieces; two or so for each worker even out their speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """What was measured of some segments."""

    collectors: dict[Pair, Collector]
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
    pieces = list(_pieces(runs, spread, progress or (lambda part: None)))
    catalog, collectors = _joined(runs, pieces)
    index = SeriesIndex(catalog.keys)
    unit: FloatArray | None = None  # Numbers are told in the scale of the first baseline, which is in the first pair.
    pairs = {}
    for pair in runs.pairs:
        pairs[pair] = collectors.pop(pair).finish(runs.axes, catalog, index, unit)
        unit = pairs[pair].scale
    scales: dict[float, int] = {}
    for _, scale in sorted((each for piece in pieces for each in piece.scales), key=lambda each: each[0]):
        scales[scale] = scales.get(scale, 0) + 1
    cuts: dict[tuple[int, int], int] = {}
    for _, numbers, left_out in sorted((each for piece in pieces for each in piece.cuts), key=lambda each: each[0]):
        cuts[numbers] = cuts.get(numbers, 0) + left_out
    return PairsMeasured(pairs=pairs, keys=tuple(catalog.keys), scales=scales, cuts=cuts)


def _pieces(runs: Runs, spread: Spread | None, progress: Callable[[float], None]) -> Iterator[_Piece]:
    everything = places(runs.axes)
    if spread is None:
        yield measure_piece(runs, everything)
        return
    cut = [piece for piece in _cut(runs, everything, spread.pieces) if piece]
    futures = [spread.executor.submit(measure_piece, runs, piece) for piece in cut]
    try:
        for done, _ in enumerate(as_completed(futures), start=1):
            progress(done / len(futures))
        yield from (future.result() for future in futures)
    finally:
        for future in futures:
            future.cancel()


def _cut(runs: Runs, everything: Sequence[Place], count: int) -> list[list[Place]]:
    """Cut the work by ranks, and by steps where what one rank shows is made of others' segments, or ranks are few."""
    axes = runs.axes
    # All are asked: what they found is sent along with them.
    across = [isinstance(capture, View) and capture.across_ranks(axes.steps[0]) for capture in runs.captures]
    by_step = any(across) or len(axes.ranks) < count <= len(axes.steps)
    lines = len(axes.steps) if by_step else len(axes.ranks)
    count = min(count, lines)
    cut: list[list[Place]] = [[] for _ in range(count)]
    for place in everything:
        cut[(place[0] if by_step else place[1]) * count // lines].append(place)
    return cut


def measure_piece(runs: Runs, only: Sequence[Place]) -> _Piece:
    """Read some segments of all runs side by side and measure all pairs of them."""
    catalog = Catalog()
    collectors = {pair: Collector() for pair in runs.pairs}
    first: list[Place] = []
    scales: list[tuple[Place, float]] = []
    cuts: list[tuple[Place, tuple[int, int], int]] = []
    for stop in walk(runs.captures, runs.axes, only):
        place = (stop.s, stop.r)
        rows = [as_backward_got(each) for each in stop.rows]
        for (one, two), collector in collectors.items():
            both = matched(stop.rows[one], stop.rows[two])
            expected, actual = rows[one], rows[two]
            if both.numbers is not None:
                expected, actual = as_backward_got(both.baseline), as_backward_got(both.candidate)
                if one == 0 and two >= runs.baselines:
                    cuts.append((place, both.numbers, both.left_out))
            aligned = catalog.align(expected.keys, actual.keys)
            divisor = None
            if one < runs.baselines <= two:
                found = agreed_scales(both.baseline, both.candidate, runs.loss_tolerances[stop.step])
                divisor = _divisor(aligned, found, expected, actual)
                if one == 0:
                    scales += [(place, scale) for scale in found.values()]
            measured = measure(expected, actual, aligned, divisor)
            collector.add(stop.s, stop.r, measured, aligned, expected)
        first += [place] * (len(catalog) - len(first))
    return _Piece(
        collectors=collectors,
        keys=tuple(catalog.keys),
        first=tuple(first),
        scales=tuple(scales),
        cuts=tuple(cuts),
    )


def _divisor(aligned: Alignment, scales: dict[int, float], one: StepRows, two: StepRows) -> FloatArray | None:
    if not scales:
        return None
    return divisors(aligned, scales, (microbatches(one.keys), microbatches(two.keys)))


def _joined(runs: Runs, pieces: Sequence[_Piece]) -> tuple[Catalog, dict[Pair, Collector]]:
    """Number all cells in the order in which one walk over everything would have met them, and gather the pieces."""
    catalog = Catalog()
    met = sorted((place, cell, at) for at, piece in enumerate(pieces) for cell, place in enumerate(piece.first))
    for _, cell, at in met:
        catalog.cell(pieces[at].keys[cell])
    if len(pieces) == 1:
        return catalog, pieces[0].collectors
    collectors = {pair: Collector() for pair in runs.pairs}
    for piece in pieces:
        cells = np.array([catalog.cell(key) for key in piece.keys], dtype=np.intp)
        for pair, collector in collectors.items():
            collector.take(piece.collectors.pop(pair), cells)
    return catalog, collectors
