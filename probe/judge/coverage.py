"""Count what could be matched at all: the cells of both arms, and the quantities that only one of them has.

This module must not know what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from probe.judge.comparison import Coverage
from probe.measure.differences import MISSING, UNEXPECTED, Differences
from probe.measure.series import BoolArray


def count_coverage(of_candidates: Sequence[Differences]) -> Coverage:
    """Count for the candidate that matches least; name what any of them lacks, adds or changes.

    Args:
        of_candidates: One for each candidate, over the same cells.
    """
    least = min(of_candidates, key=lambda d: int(_matched(d).sum()))
    keys = least.keys

    def labels(name: str) -> tuple[str, ...]:
        cells = np.any([_flags(d)[name].any(axis=(0, 1)) for d in of_candidates], axis=0)
        return tuple(dict.fromkeys(keys[int(cell)].label for cell in np.flatnonzero(cells)))

    flags = _flags(least)
    return Coverage(
        matched=int(_matched(least).sum()),
        missing=labels("missing"),
        unexpected=labels("unexpected"),
        reshaped=labels("reshaped"),
        retyped=labels("retyped"),
        missing_cells=int(flags["missing"].sum()),
        unexpected_cells=int(flags["unexpected"].sum()),
        reshaped_cells=int(flags["reshaped"].sum()),
    )


def _matched(d: Differences) -> BoolArray:
    return np.asarray(d.present & ~d.reshaped, dtype=np.bool_)


def _flags(d: Differences) -> dict[str, BoolArray]:
    return {
        "missing": np.asarray(d.absent == MISSING, dtype=np.bool_),
        "unexpected": np.asarray(d.absent == UNEXPECTED, dtype=np.bool_),
        "reshaped": np.asarray(d.present & d.reshaped, dtype=np.bool_),
        "retyped": d.retyped,
    }
