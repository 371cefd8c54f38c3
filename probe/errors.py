"""The exceptions of the package and the exit status each one means.

They are one small tree so that an edge (the CLI, the pytest plugin) can tell "the question could not be answered"
from "answered: different". This module knows nothing about what raised them.
"""

from __future__ import annotations

from collections.abc import Iterable


class ProbeError(Exception):
    """Say that the question could not be answered. The CLI exits with status 2."""


class CaptureError(ProbeError):
    """Say that a capture cannot be recorded, written or read."""


class CaptureFormatError(CaptureError):
    """Say that a file is no capture, is truncated or damaged, or has a newer format."""


class PlanError(ProbeError):
    """Say that a plan file is wrong: which key, what was found, what is allowed."""


class ToleranceError(ProbeError):
    """Say that tolerances are negative, unreadable, or were calibrated for another job."""


class IncomparableError(ProbeError):
    """Say that two captures share nothing that could be compared."""


class NotEquivalentError(AssertionError):
    """Say that a comparison was made and that the candidate differs. The CLI exits with status 1."""


def listed(names: Iterable[object], *, most: int = 10) -> str:
    """Join names for a message, sorted and cut at `most`.

    >>> listed(["b", "a"])
    'a, b'
    >>> listed(range(13), most=3)
    '0, 1, 10 and 10 more'
    """
    texts = sorted(str(name) for name in names)
    shown = ", ".join(texts[:most])
    return shown if len(texts) <= most else f"{shown} and {len(texts) - most} more"
