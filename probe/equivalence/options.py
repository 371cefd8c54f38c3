"""What a test asks of a check: the marker's arguments as one value, and the rows of the table that follow from them.

This module must not import torch: it is read before a test runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from probe.check import Check, default_checks
from probe.errors import PlanError, ProbeError
from probe.judge.tolerance import K, Tolerances
from probe.point import Kind
from probe.selection import nearest, split_kind

Allowed: TypeAlias = float | Mapping[str, float] | str | Path | Tolerances | None
"""A relative difference for everything, one for each selection (the rest is calibrated), a tolerance file, or None."""

_NAMES = ("tolerances", "steps", "seed", "k", "ranks")
_JUDGED = (Kind.FORWARD, Kind.BACKWARD, Kind.LOSS, Kind.GRAD, Kind.PARAM, Kind.EXPLICIT)

OWN = (
    Check(what="output", where="what the call returned", required=True, kinds=(Kind.FORWARD,), select=("(output)",)),
    Check(
        what="gradients of arguments",
        where="gradient of the loss at the call's arguments",
        required=True,
        kinds=(Kind.GRAD,),
        select=("(input)",),
    ),
)
"""Rows that a check has before the default ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of `@pytest.mark.probe`."""

    tolerances: Allowed = None
    steps: int = 1
    """Optimizer updates (calls, without an optimizer)."""
    seed: int = 0
    """Seeds the test and every call; rank r has seed + r."""
    k: float = K
    """Multiple of the spread that is allowed."""
    ranks: int = 1
    """Processes that run the test."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("seed", 0), ("ranks", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PlanError(f"Argument {name!r} of the marker 'probe' is {value!r}. Allowed: numbers from {least}.")
        if isinstance(self.k, bool) or not isinstance(self.k, (int, float)) or not 0 < self.k < math.inf:
            raise PlanError(f"Argument 'k' of the marker 'probe' is {self.k!r}. Allowed: numbers above 0; 3 is usual.")
        for what, value in declared(self.tolerances).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise PlanError(
                    f"Tolerance of {what!r} is {value!r}. Allowed: relative differences from 0, such as 1e-5."
                )
            split_kind(what)

    def checks(self) -> tuple[Check, ...]:
        """Return the rows of the table: declared tolerances first, then output and arguments, then the default ones."""
        rows = [
            Check(
                what="tolerances" if what == "*" else what,
                where="declared in the test",
                form="rel",
                required=True,
                kinds=_JUDGED,
                select=(what,),
                without=("*:before",),
                rel=float(value),
            )
            for what, value in declared(self.tolerances).items()
        ]
        return (*rows, *OWN, *default_checks())


def declared(tolerances: Allowed) -> dict[str, float]:
    """Return relative tolerances by selection; empty where they are calibrated or come from a file."""
    if isinstance(tolerances, Mapping):
        return dict(tolerances)
    if isinstance(tolerances, (int, float)) and not isinstance(tolerances, bool):
        return {"*": float(tolerances)}
    if tolerances is None or isinstance(tolerances, (str, Path, Tolerances)):
        return {}
    raise PlanError(
        f"Tolerances are {type(tolerances).__name__!r}. Allowed: a number, a mapping of selections to numbers, a "
        "tolerance file, or None to calibrate."
    )


def from_marker(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Options:
    """Read the arguments of the marker.

    Raises:
        ProbeError: An argument is unknown, has no name, or has a value that is not allowed.
    """
    if args:
        raise ProbeError(f"Marker 'probe' takes named arguments only, and got {args[0]!r}. Write probe(steps=2).")
    for name in kwargs:
        if name not in _NAMES:
            raise ProbeError(f"Marker 'probe' takes no argument {name!r}.{nearest(name, _NAMES)}")
    return Options(**kwargs)
