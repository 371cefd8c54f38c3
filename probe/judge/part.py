"""Take some cells of a judgement, so that a row of the table looks at its own and not at all of them.

A comparison has two dozen checks and each of them asks two dozen questions. This module must not know what they are.

Shapes: S steps, R ranks, C cells.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.judge.cells import Judgement
from probe.measure.series import IntArray


def part_of(judgement: Judgement, cells: IntArray) -> Judgement:
    """Return a judgement of some cells, given in ascending order. What one cell is called by is left out."""
    d = judgement.differences
    shape = d.present.shape

    def taken(of: Any) -> dict[str, Any]:
        columns = {each.name: getattr(of, each.name) for each in fields(of)}
        return {name: _taken(one, cells) for name, one in columns.items() if getattr(one, "shape", None) == shape}

    differences = replace(
        d, **{"number_cells": cells[:0], "numbers": d.numbers[:, :, :0]} | taken(d), index=d.index.part(cells), texts={}
    )
    return replace(judgement, **taken(judgement) | {"differences": differences})


def _taken(values: npt.NDArray[Any], cells: IntArray) -> npt.NDArray[Any]:
    """Take columns of [S, R, C]; once for all steps or ranks where they are the same in memory."""
    shape = (*values.shape[:2], len(cells))
    of_steps = slice(None) if values.strides[0] else slice(0, 1)
    of_ranks = slice(None) if values.strides[1] else slice(0, 1)
    return np.broadcast_to(values[of_steps, of_ranks].take(cells, axis=2), shape)
