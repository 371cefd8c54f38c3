"""Recognise a loss that was scaled on purpose, so that scaling alone is no difference.

A sound branch may multiply the loss by a factor and divide the gradients by it later (fp16 loss scaling), or write
`sum() * (1 / n)` where the baseline writes `mean()`. The recorder keeps the loss before scalar factors, and the factor
itself. This module turns them into what backward got, and finds the factor between two arms. It must not know
tolerances beyond the number it is given.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from probe.measure.series import CLIPPED, Alignment, FloatArray
from probe.point import STEP_CLOCK, Key, Kind
from probe.reduction import COUNT, SUM_SQUARES
from probe.store.layout import StepRows

MICRO_LOSS = "micro_loss"
LOSS_SCALE = "loss_scale"


def as_backward_got(rows: StepRows) -> StepRows:
    """Multiply each microbatch's loss by its factor: the judged loss is what backward started from."""
    found = _losses(rows)
    if all(factor == 1.0 for _, factor, _ in found.values()):
        return rows
    value = rows.value.copy()
    for row, factor, _ in found.values():
        value[row] *= factor
    return replace(rows, value=value)


def agreed_scales(baseline: StepRows, candidate: StepRows, allowed: float) -> dict[int, float]:
    """Find by which factor the candidate scaled each microbatch's loss relative to the baseline.

    With v the loss without factors and f its factor, backward got v * f. If that agrees, the factor is 1. Else the
    factors f_c / f_b, f_c and 1 / f_b are tried, which are the ways in which one arm alone can have scaled.

    Args:
        baseline: Rows as recorded (not `as_backward_got`).
        candidate: Likewise.
        allowed: Largest relative difference at which two losses agree.

    Returns:
        Factor of each microbatch whose losses agree with a factor other than 1; empty when none does.
    """
    expected, actual = _losses(baseline), _losses(candidate)
    scales = {}
    for microbatch in sorted(expected.keys() & actual.keys()):
        _, factor_b, value_b = expected[microbatch]
        _, factor_c, value_c = actual[microbatch]
        got_b, got_c = value_b * factor_b, value_c * factor_c
        if _agree(got_b, got_c, allowed) or factor_b == 0 or factor_c == 0:
            continue
        for scale in (factor_c / factor_b, factor_c, 1 / factor_b):
            if scale != 1 and _agree(got_b, got_c / scale, allowed):
                scales[microbatch] = scale
                break
    return scales


def divisors(pairs: Alignment, scales: dict[int, float], microbatches: tuple[int, int]) -> FloatArray:
    """Return by what each paired row of the candidate is to be divided, [Q].

    Gradients of outputs are divided by their microbatch's factor; parameters' gradients before clipping are divided
    when all microbatches of both arms agree on one factor. After clipping, the norm and the parameters are never
    divided: by then a sound branch has undone its scale.

    Args:
        scales: From `agreed_scales`.
        microbatches: Numbers of microbatches in the step, baseline and candidate.
    """
    divisor = np.ones(len(pairs.cells))
    factors = set(scales.values())
    common = factors.pop() if len(factors) == 1 else 1.0
    if microbatches[0] != microbatches[1] or len(scales) != microbatches[0]:
        common = 1.0
    for row, key in enumerate(pairs.keys):
        if key.item.endswith(f"({COUNT})"):
            continue
        if key.kind is Kind.LOSS and key.microbatch == STEP_CLOCK:
            divisor[row] = common
        elif key.kind is Kind.BACKWARD or (key.kind is Kind.LOSS and key.name == MICRO_LOSS):
            divisor[row] = scales.get(key.microbatch, 1.0)
        elif key.kind is Kind.GRAD and key.item != CLIPPED:
            divisor[row] = common**2 if key.item.endswith(f"({SUM_SQUARES})") else common
    return divisor


def microbatches(keys: tuple[Key, ...]) -> int:
    """Count the microbatches of a segment that have a loss."""
    return len({key.microbatch for key in (keys[row] for row in _loss_rows(keys)) if key.microbatch != STEP_CLOCK})


def _losses(rows: StepRows) -> dict[int, tuple[int, float, float]]:
    """Map each microbatch to the row of its loss, its factor, its value without the factor."""
    factors, found = {}, {}
    for row in _loss_rows(rows.keys):
        key = rows.keys[row]
        if key.name == LOSS_SCALE:
            factors[key.microbatch] = float(rows.value[row])
        elif key.name == MICRO_LOSS:
            found[key.microbatch] = (row, float(rows.value[row]))
    return {mb: (row, factors.get(mb, 1.0), value) for mb, (row, value) in found.items()}


_KNOWN: list[tuple[tuple[Key, ...], tuple[int, ...]]] = []


def _loss_rows(keys: tuple[Key, ...]) -> tuple[int, ...]:
    """Return the rows that are losses or their factors; remembered, for segments of a run mostly have the same keys."""
    for known, found in _KNOWN:
        if known is keys or known == keys:
            return found
    # A number that a check makes of losses (`micro_loss(mean over ranks)`) is no loss of a microbatch.
    found = tuple(row for row, key in enumerate(keys) if key.kind is Kind.LOSS and "(" not in key.item)
    _KNOWN.insert(0, (keys, found))
    del _KNOWN[16:]
    return found


def _agree(expected: float, actual: float, allowed: float) -> bool:
    return abs(actual - expected) <= allowed * abs(expected)
