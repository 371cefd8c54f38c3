"""What measuring asks of a segment again for each segment that it is measured against.

With three baselines and a candidate each segment is in three pairs. This module must not know how far values are apart.

Shapes: Q rows of the segment.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from probe.measure.series import BoolArray, FloatArray
from probe.store.layout import StepRows


class Side:
    """One segment, and what was asked of it before. Arrays are [Q]."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows

    @cached_property
    def magnitude(self) -> FloatArray:
        """What stands for a value in a table: the number itself, or the l2 norm of a tensor."""
        return np.where(self.number, self.rows.value, self.rows.scalars["l2"])

    @cached_property
    def number(self) -> BoolArray:
        """Has one element."""
        return np.asarray(self.rows.numel == 1)

    @cached_property
    def empty(self) -> BoolArray:
        """Has no element."""
        return np.asarray(self.rows.numel == 0)

    @cached_property
    def hashed(self) -> BoolArray:
        """Has a fingerprint of its bits."""
        return np.asarray((self.rows.hash[:, 0] | self.rows.hash[:, 1]) != 0)

    @cached_property
    def root_size(self) -> FloatArray:
        """Square root of the number of elements."""
        return np.sqrt(self.rows.numel)

    @cached_property
    def nonfinite(self) -> BoolArray | None:
        """Holds NaN or infinity; None if nothing does."""
        found = self.rows.nonfinite > 0
        return found if found.any() else None
