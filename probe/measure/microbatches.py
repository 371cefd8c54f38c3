"""Make two segments comparable whose steps are cut into different numbers of microbatches.

Accumulating four microbatches of one sample, or one of four, is the same step: its gradients, its parameters and the
sum of its losses agree, and nothing that belongs to a single microbatch does. This module must not know how values
differ or what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probe.measure.loss_scale import LOSS_SCALE, MICRO_LOSS, microbatches
from probe.point import STEP_CLOCK, Key, Kind
from probe.store.layout import SCALARS, StepRows

COUNT = "microbatches"
"""State: in how many microbatches the step was cut; what this module is told by, and no difference by itself."""


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
    left_out = sum(key.microbatch != STEP_CLOCK and key.kind is not Kind.LOSS for key in baseline.keys)
    # Sums are told in the baseline's microbatches, the unit in which its losses were calibrated.
    return Matched(_of_step(baseline, numbers[0]), _of_step(candidate, numbers[0]), numbers, left_out)


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
    taken = [*keep, *last.values()]
    keys = (*(rows.keys[row] for row in keep), *last)
    value = rows.value[taken].copy()
    scalars = {name: rows.scalars[name][taken].copy() for name in SCALARS}
    for place, key in enumerate(keys[len(keep) :], start=len(keep)):
        total, factors = sums.get(key.item, (float("nan"), float("nan")))
        value[place] = factors / unit if key.name == LOSS_SCALE else (total / factors if factors else float("nan"))
        for name in SCALARS:
            scalars[name][place] = float("nan")

    def kept(column: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(column[row] for row in taken)

    sketch, sample = rows.sketch[taken].copy(), rows.sample[taken].copy()
    sketch[len(keep) :] = sample[len(keep) :] = np.nan
    return replace(
        rows,
        keys=keys,
        order=rows.order[taken],
        dtype=kept(rows.dtype),
        shape=kept(rows.shape),
        numel=rows.numel[taken],
        nonfinite=rows.nonfinite[taken],
        value=value,
        scalars=scalars,
        sketch=sketch,
        sample=sample,
        hash=rows.hash[taken],
        text=kept(rows.text),
        where=kept(rows.where),
        tensors={},
    )
