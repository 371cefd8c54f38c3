"""A capture that lives in memory: what one call of a check recorded.

It is read as a capture on disk is read, so that calibrating and judging need not know the difference. This module must
not know how values are taken or stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from probe.measure.series import names_in
from probe.point import Key
from probe.store.layout import StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCapture:
    """The rows of one run, by rank and step."""

    path: Path
    """What a report calls the run; nothing is there."""
    manifest: Mapping[str, Any]
    run_id: str
    world_size: int
    segments: Mapping[tuple[int, int], StepRows]
    """(rank, step) to rows."""
    problems: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that took part, ascending."""
        return tuple(sorted({rank for rank, _ in self.segments}))

    def steps(self, rank: int) -> tuple[int, ...]:
        """Steps of a rank, ascending."""
        return tuple(sorted(step for each, step in self.segments if each == rank))

    def rows(self, rank: int, step: int) -> StepRows:
        """Rows of one step of one rank."""
        return self.segments[rank, step]

    def names(self, rank: int) -> tuple[tuple[Key, ...], tuple[str, ...]]:
        """Keys of a rank's first step, and their texts."""
        return names_in(self, rank)

    def keys(self) -> set[Key]:
        """Keys of all rows."""
        return {key for rows in self.segments.values() for key in rows.keys}

    def without(self, dropped: set[Key]) -> MemoryCapture:
        """Return the capture without some quantities."""
        if not dropped:
            return self
        return replace(self, segments={place: _without(rows, dropped) for place, rows in self.segments.items()})


def _without(rows: StepRows, dropped: set[Key]) -> StepRows:
    kept = [row for row, key in enumerate(rows.keys) if key not in dropped]
    at = np.array(kept, dtype=np.intp)
    return replace(
        rows,
        keys=tuple(rows.keys[row] for row in kept),
        dtype=tuple(rows.dtype[row] for row in kept),
        shape=tuple(rows.shape[row] for row in kept),
        text=tuple(rows.text[row] for row in kept),
        where=tuple(rows.where[row] for row in kept),
        order=rows.order[at],
        numel=rows.numel[at],
        nonfinite=rows.nonfinite[at],
        value=rows.value[at],
        scalars={name: values[at] for name, values in rows.scalars.items()},
        sketch=rows.sketch[at],
        sample=rows.sample[at],
        hash=rows.hash[at],
        tensors={key: tensor for key, tensor in rows.tensors.items() if key not in dropped},
    )
