"""Tolerances laid out for one comparison: what is allowed in every series at every step.

It also holds the rule that joins spread, floor and siblings, so that a tolerance that was edited by hand can be told
from one that was measured. This module must not know how runs are read or how the file looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from probe.judge.tolerance import Tolerances
from probe.measure.series import FloatArray, sibling_name, unclipped
from probe.point import Key

SIBLING_SHARE = 3.0
"""A tolerance is never under a third of its largest sibling's: noise is zero-inflated (an optimizer step whose sign
flips once in a hundred runs), and siblings show what a series does by luck not show. Source: the project's statistics
study, section 0c."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tolerances of one comparison, series by series and step by step. Arrays are [steps, series] where not said."""

    tolerance: FloatArray
    """What the verdict allows; NaN where nothing is known."""
    tight: FloatArray
    """By which the first divergence is found: max(k * own spread, floor); no siblings, no flipped signs."""
    spread: FloatArray
    flip: FloatArray
    """What one flipped sign of an optimizer update moves a parameter by; 0 for what is none."""
    judged: FloatArray
    """1 where the step is within the horizon, else 0."""
    control: FloatArray
    """[series]"""
    mark: tuple[str, ...]
    """[series]"""
    known: FloatArray
    """[series] 1 where the calibration has the series."""
    steps: tuple[int, ...]
    """Steps that were calibrated: what comes after the last one is not judged."""
    assumed: bool
    """The tolerances are assumed floors: the runs they come from were bit-identical, and none was perturbed."""


def with_siblings(own: FloatArray, largest_sibling: FloatArray) -> FloatArray:
    """Return the verdict's tolerance from a series' own, max(k * spread, floor), and the largest of its siblings'."""
    return np.fmax(own, largest_sibling / SIBLING_SHARE)


def lay_out(
    tolerances: Tolerances, keys: Sequence[Key], steps: Sequence[int], k: Sequence[float | None] = ()
) -> Limits:
    """Look up every series of a comparison at every step.

    A step between two calibrated ones has the later one's tolerance; a step after the last is not judged. A gradient
    after clipping that the calibration does not have, because the baseline's clipping changed nothing, has the
    unclipped gradient's tolerance.

    Args:
        keys: Series of the comparison.
        steps: Steps of the comparison.
        k: For each series another multiple of the spread, or None.
    """
    members = tolerances.members()
    calibrated = np.array(tolerances.steps)
    at = np.searchsorted(calibrated, np.array(steps, dtype=int))
    inside = at < len(calibrated)
    at = np.minimum(at, len(calibrated) - 1)
    shape = (len(steps), len(keys))
    spread, tolerance, tight = (np.full(shape, np.nan) for _ in range(3))
    flip = np.zeros(shape)
    judged, known, control = np.zeros(shape), np.zeros(len(keys)), np.full(len(keys), np.nan)
    marks = []
    for column, key in enumerate(keys):
        member = members.get(key.label) or members.get(unclipped(key).label)
        marks.append(member.mark if member else "")
        if member is None:
            continue
        wanted = k[column] if k else None
        factor = (wanted or tolerances.k) / tolerances.k
        own = np.array(member.spread)[at]
        floor = np.array(member.floor)[at]
        spread[:, column] = own
        tight[:, column] = np.maximum(tolerances.k * factor * own, floor)
        if member.flip:
            flip[:, column] = np.array(member.flip)[at]
        tolerance[:, column] = np.maximum(np.array(member.tolerance)[at] * factor, floor)
        judged[:, column] = inside & (np.array(steps) <= member.horizon)
        control[column], known[column] = member.control, 1.0
    return Limits(
        tolerance=tolerance,
        tight=tight,
        spread=spread,
        flip=flip,
        judged=judged,
        control=control,
        mark=tuple(marks),
        known=known,
        steps=tuple(tolerances.steps),
        assumed=tolerances.assumed,
    )


def edited(tolerances: Tolerances, keys: Mapping[str, Key]) -> tuple[str, ...]:
    """Return the labels of series whose tolerance is not what spread, floor and siblings make it.

    Args:
        keys: Series by label; those without a key have no known siblings and are judged by themselves.
    """
    members = tolerances.members()
    groups: dict[tuple[str, ...], FloatArray] = {}
    own = {}
    for label, member in members.items():
        own[label] = np.maximum(tolerances.k * np.array(member.spread), np.array(member.floor))
        if member.flip:
            own[label] = np.maximum(own[label], np.array(member.flip))
        group = _group(label, keys)
        groups[group] = np.maximum(groups[group], own[label]) if group in groups else own[label]
    changed = []
    for label, member in members.items():
        implied = with_siblings(own[label], groups[_group(label, keys)])
        # Three significant digits, rounded upward, in the file: up to 1 % on each side is rounding.
        if not np.allclose(np.array(member.tolerance), implied, rtol=0.011, atol=0.0):
            changed.append(label)
    return tuple(changed)


def _group(label: str, keys: Mapping[str, Key]) -> tuple[str, ...]:
    return sibling_name(keys[label]) if label in keys else (label,)
