"""The cells that the plots are drawn from."""

from __future__ import annotations

import re

import numpy as np
import pytest
from report_cases import GRID, NAN

from probe.report.grid import CellGrid, encoded, largest


def test_a_family_is_the_largest_of_its_series_at_each_step() -> None:
    ratio, spread = GRID.of_family(1)
    np.testing.assert_array_equal(ratio, [0.5, 40.0, 3.0])
    np.testing.assert_array_equal(spread, [0.3, 0.3, NAN])


def test_a_column_of_nothing_has_no_largest() -> None:
    np.testing.assert_array_equal(largest(np.array([[1.0, NAN], [2.0, NAN]])), [2.0, NAN])
    np.testing.assert_array_equal(largest(np.empty((0, 2))), [NAN, NAN])


def test_codes_tell_not_judged_zero_and_ratios_apart() -> None:
    ratio = np.array([NAN, 0.0, 1e-9, 1e-8, 1.0, 1e8, np.inf])
    np.testing.assert_array_equal(encoded(ratio), [0, 1, 2, 2, 32768, 65535, 65535])


def test_codes_keep_a_ratio_to_a_thousandth() -> None:
    ratio = np.geomspace(1e-7, 1e7, 1001)
    again = 10.0 ** (-8 + 16 * (encoded(ratio).astype(float) - 2) / 65533)
    assert np.abs(again / ratio - 1).max() < 1e-3


def test_arrays_of_another_shape_are_refused() -> None:
    message = "CellGrid.ratio has shape (1, 2), and must have (1, 3) (series, steps)."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CellGrid(
            labels=("a",),
            steps=(1, 2, 3),
            families=("f",),
            family=np.zeros(1, dtype=np.intp),
            ratio=np.zeros((1, 2)),
            spread_ratio=np.zeros((1, 3)),
            rank=np.zeros((1, 3), dtype=np.int32),
        )
