"""Some cells of a judgement are judged as they are among all."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from synthetic import breaks
from test_compare import BASE, TOLERANCES, candidate

from probe.check import Check, default_checks
from probe.judge.compare import compare_cells
from probe.judge.part import part_of
from probe.judge.tolerance import Tolerances
from probe.point import Kind

DECLARED = Check(what="declared", where="", select=("forward/blocks.1*",), form="rel", rel=0.1)


@pytest.mark.parametrize("tolerances", [TOLERANCES, None], ids=["calibrated", "assumed"])
@pytest.mark.parametrize("checks", [default_checks(), (DECLARED, *default_checks())], ids=["default", "declared"])
def test_every_array_has_the_chosen_cells(tolerances: Tolerances | None, checks: tuple[Check, ...]) -> None:
    broken = candidate(fault=breaks(Kind.FORWARD, "blocks.1"))
    _, (judgement,) = compare_cells(BASE, [broken], tolerances, checks=checks)
    whole, cells = judgement.differences, np.array([0, 3, 4, len(judgement.differences.keys) - 1])
    part = part_of(judgement, cells)
    for each in fields(judgement):
        values = getattr(judgement, each.name)
        if getattr(values, "shape", None) == whole.present.shape:
            np.testing.assert_array_equal(getattr(part, each.name), values[:, :, cells], err_msg=each.name)
    for each in fields(whole):
        values = getattr(whole, each.name)
        if getattr(values, "shape", None) == whole.present.shape:
            np.testing.assert_array_equal(getattr(part.differences, each.name), values[:, :, cells], err_msg=each.name)
    np.testing.assert_array_equal(part.above, judgement.above[:, :, cells])
    np.testing.assert_array_equal(part.relative_tolerance, judgement.relative_tolerance[:, :, cells])
    assert [part.differences.index.keys[one] for one in part.differences.index.of_cell] == [
        whole.index.keys[one] for one in whole.index.of_cell[cells]
    ]
