"""Make two segments comparable whose steps are cut into different numbers of microbatches.

Accumulating four microbatches of one sample, or one of four, is the same step: its gradients, its parameters and the
sum of its losses agree. What belongs to a single microbatch does not; but outputs of modules and their gradients, taken
over all microbatches, have the same elements in another arrangement, and so the same norm and the same means. A sketch
depends on the arrangement: their judged distance is that of the norms, which is never more than the distance of the
tensors (the reverse triangle inequality), so that the tolerance of the tensor holds for it. It sees a change of size
and none of direction. This module must not know how values differ or what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.measure.loss_scale import LOSS_SCALE, MICRO_LOSS, microbatches
from probe.point import STEP_CLOCK, Key, Kind
from probe.store.layout import SCALARS, StepRows

COUNT = "microbatches"
"""State: in how many microbatches the step was cut; what this module is told by, and no difference by itself."""


ELEMENTWISE = (Kind.FORWARD, Kind.BACKWARD, Kind.CALL, Kind.EXPLICIT)
"""Kinds whose tensors may hold a part of the step's samples in each microbatch."""


@dataclass(frozen=True, slots=True)
class Matched:
    """Two segments of one step, as they can be compared."""

    baseline: StepRows
    candidate: StepRows
    numbers: tuple[int, int] | None
    """Microbatches of the two steps where they differ, else None."""
    left_out: int
    """Values of single microbatches of the baseline that are not compared."""


def matched(baseline: StepRows, candidate: StepRows) -> Matched:
    """Leave out what belongs to single microbatches, and sum the losses, if the two steps have different numbers.

    Args:
        baseline: Rows as recorded, not `as_backward_got`.
        candidate: Likewise.
    """
    numbers = (microbatches(baseline.keys), microbatches(candidate.keys))
    if numbers[0] == numbers[1] or 0 in numbers:
        return Matched(baseline, candidate, None, 0)
    one, two = _gathered(baseline, numbers[0]), _gathered(candidate, numbers[1])
    # Where a microbatch holds more than its samples (padding, what it computes once), the elements are not the same.
    shared = {key for key, found in one.items() if key in two and found.numel == two[key].numel}
    single = [key for key in baseline.keys if key.microbatch != STEP_CLOCK and key.kind is not Kind.LOSS]
    left_out = sum(replace(key, microbatch=0) not in shared for key in single)
    # Sums are told in the baseline's microbatches, the unit in which its losses were calibrated.
    return Matched(
        _joined(_of_step(baseline, numbers[0]), _over_step(baseline, one, shared)),
        _joined(_of_step(candidate, numbers[0]), _over_step(candidate, two, shared)),
        numbers,
        left_out,
    )


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The rows of one quantity in all microbatches of a step."""

    rows: tuple[int, ...]
    numel: int


def _gathered(rows: StepRows, count: int) -> dict[Key, _Gathered]:
    """Gather the tensors that were taken in each of `count` microbatches, under their key in the first."""
    found: dict[Key, list[int]] = {}
    for row, key in enumerate(rows.keys):
        if key.kind in ELEMENTWISE and key.microbatch != STEP_CLOCK and np.isfinite(rows.scalars["l2"][row]):
            found.setdefault(replace(key, microbatch=0), []).append(row)
    return {
        key: _Gathered(tuple(taken), int(rows.numel[taken].sum()))
        for key, taken in found.items()
        if len(taken) == count and rows.numel[taken].sum() > 1
    }


def _over_step(rows: StepRows, found: dict[Key, _Gathered], shared: Collection[Key]) -> StepRows:
    """Reduce each shared quantity to one row: its norm and means over all microbatches; the sketch holds the norm."""
    keys = [key for key in found if key in shared]
    firsts = [found[key].rows[0] for key in keys]
    only = _taken(rows, firsts, keys=tuple(keys))
    numel = np.array([found[key].numel for key in keys], np.int64)

    def over(name: str, fold: Callable[[Any, Any], Any]) -> Any:
        values, sizes = rows.scalars[name], rows.numel
        return np.array([fold(values[list(found[key].rows)], sizes[list(found[key].rows)]) for key in keys], float)

    def average(values: Any, sizes: Any) -> Any:
        return (values * sizes).sum() / sizes.sum()

    l2 = over("l2", lambda values, _: np.sqrt(np.square(values).sum()))
    scalars = {
        "l2": l2,
        "mean": over("mean", average),
        "mean_abs": over("mean_abs", average),
        "rms": l2 / np.sqrt(numel),
        "max_abs": over("max_abs", lambda values, _: values.max()),
    }
    sketch = np.zeros_like(only.sketch)
    sketch[:, 0] = l2
    return replace(
        only,
        shape=tuple((int(size),) for size in numel),
        numel=numel,
        nonfinite=np.zeros(len(keys), only.nonfinite.dtype),  # a norm that is finite has none
        scalars={name: scalars[name] for name in SCALARS},
        sketch=sketch,
        sample=np.full_like(only.sample, np.nan),
        hash=np.zeros_like(only.hash),
    )


def _taken(rows: StepRows, taken: list[int], *, keys: tuple[Key, ...]) -> StepRows:
    def kept(column: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(column[row] for row in taken)

    return replace(
        rows,
        keys=keys,
        order=rows.order[taken],
        dtype=kept(rows.dtype),
        shape=kept(rows.shape),
        numel=rows.numel[taken].copy(),
        nonfinite=rows.nonfinite[taken].copy(),
        value=rows.value[taken].copy(),
        scalars={name: rows.scalars[name][taken].copy() for name in SCALARS},
        sketch=rows.sketch[taken].copy(),
        sample=rows.sample[taken].copy(),
        hash=rows.hash[taken].copy(),
        text=kept(rows.text),
        where=kept(rows.where),
        tensors={},
    )


def _joined(one: StepRows, two: StepRows) -> StepRows:
    def both(name: str) -> Any:
        return np.concatenate([getattr(one, name), getattr(two, name)])

    return replace(
        one,
        keys=one.keys + two.keys,
        dtype=one.dtype + two.dtype,
        shape=one.shape + two.shape,
        text=one.text + two.text,
        where=one.where + two.where,
        scalars={name: np.concatenate([one.scalars[name], two.scalars[name]]) for name in SCALARS},
        **{name: both(name) for name in ("order", "numel", "nonfinite", "value", "sketch", "sample", "hash")},
    )


def _of_step(rows: StepRows, unit: int) -> StepRows:
    """Keep what exists once per step, and one loss: the sum of loss times factor, divided by `unit`."""
    keep = [
        row
        for row, key in enumerate(rows.keys)
        if key.microbatch == STEP_CLOCK and not (key.kind is Kind.STATE and key.name == COUNT)
    ]
    sums: dict[str, tuple[float, float]] = {}
    last: dict[Key, int] = {}
    value_of = {key: float(rows.value[row]) for row, key in enumerate(rows.keys) if key.kind is Kind.LOSS}
    for row, key in enumerate(rows.keys):
        if key.kind is not Kind.LOSS:
            continue
        last[replace(key, microbatch=0)] = row
        if key.name == MICRO_LOSS:
            factor = value_of.get(replace(key, name=LOSS_SCALE), 1.0)
            total, factors = sums.get(key.item, (0.0, 0.0))
            sums[key.item] = total + value_of[key] * factor, factors + factor
    keys = (*(rows.keys[row] for row in keep), *last)
    taken = _taken(rows, [*keep, *last.values()], keys=keys)
    for place, key in enumerate(keys[len(keep) :], start=len(keep)):
        total, factors = sums.get(key.item, (float("nan"), float("nan")))
        value = total / factors if factors else float("nan")
        taken.value[place] = factors / unit if key.name == LOSS_SCALE else value
        for name in SCALARS:
            taken.scalars[name][place] = float("nan")
    taken.sketch[len(keep) :] = taken.sample[len(keep) :] = np.nan
    return taken
