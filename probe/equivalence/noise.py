"""Allow for gradients that are nothing but rounding.

The gradient of a key projection's bias is zero on paper: softmax does not see what is added to all keys. What is
computed is the rounding of a sum that cancels, and another order of summation gives another such number, of another
size. One ulp moves it by more than its own norm, so three repeats say little about how large it may be. It must still
be there, be finite, and be small. This module must not know how a verdict is reached.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from probe.check import Check
from probe.judge.limits import SIBLING_SHARE
from probe.judge.tolerance import Tolerance, Tolerances
from probe.measure.series import sibling_name
from probe.point import Key, Kind

NOISE = 0.5
"""Spread from which a gradient counts as rounding: repeats one ulp apart that share less than the bulk of their norm.
Unrelated tensors of one size differ by 1.4 of their norm."""
SIZES = 10.0
"""Times the tolerance by which the size of such a gradient may grow in another order of work. Measured with
benchmarks/equivalence.py; a real gradient in its place is larger by thousands."""


def noise_of(tolerances: Tolerances) -> tuple[str, ...]:
    """List the gradients that are rounding, by label."""
    prefixes = (f"{Kind.GRAD.value}/", f"{Kind.BACKWARD.value}/")
    members = tolerances.members()
    return tuple(
        sorted(
            label
            for label, member in members.items()
            if label.startswith(prefixes) and max(member.spread, default=0.0) >= NOISE
        )
    )


def noise_check(labels: Iterable[str]) -> Check:
    """Give such gradients a row of their own, so that other rows say what they themselves can see."""
    return Check(
        what="gradients that are rounding",
        where="sums that cancel: present, finite and small is all that can be asked",
        required=True,
        kinds=(Kind.GRAD, Kind.BACKWARD),
        select=tuple(label.partition("#")[0] for label in labels),
    )


def allow_noise(tolerances: Tolerances, keys: Iterable[Key]) -> Tolerances:
    """Raise the floor of gradients that are rounding.

    Args:
        tolerances: As calibrated.
        keys: Quantities of the baseline.
    """
    of_label = {key.series.label: key for key in keys}
    members = tolerances.members()
    noise = [label for label in noise_of(tolerances) if label in of_label]
    if not noise:
        return tolerances
    raised = {label: tuple(SIZES * value for value in members[label].tolerance) for label in noise}
    groups: dict[tuple[str, str, str], tuple[float, ...]] = {}
    for label, floor in raised.items():
        group = sibling_name(of_label[label])
        groups[group] = tuple(map(max, floor, groups.get(group, floor)))

    def allowed(label: str, member: Tolerance) -> Tolerance:
        floor = raised.get(label, member.floor)
        siblings = groups.get(sibling_name(of_label[label])) if label in of_label else None
        own = tuple(map(max, member.tolerance, floor))
        if siblings is not None:
            own = tuple(max(value, other / SIBLING_SHARE) for value, other in zip(own, siblings, strict=True))
        return replace(member, floor=floor, tolerance=own)

    families = {
        what: {label: allowed(label, member) for label, member in family.items()}
        for what, family in tolerances.families.items()
    }
    return replace(tolerances, families=families)
