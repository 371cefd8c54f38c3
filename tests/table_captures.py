"""Captures that have the differences of real pull requests' tables, for the tests of those tables.

A quantity is described by what its row in the table needs: a number, a text, or the reductions of a tensor. What the
table does not speak of is the same in both arms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from synthetic import SyntheticCapture

from probe.point import Key
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K, StepRows


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One row of a segment."""

    key: Key
    value: float | None = None
    text: str = ""
    scalars: dict[str, float] | None = None
    """Reductions of a tensor; those that are not given are unknown."""
    sample: np.ndarray | None = None
    dtype: str = "float32"


def segment(step: int, rank: int, world_size: int, quantities: Iterable[Quantity]) -> StepRows:
    """Make the rows of one segment, in the order given."""
    found = list(quantities)
    count = len(found)
    sample = np.full((count, SAMPLES), np.nan, dtype=np.float32)
    for row, each in enumerate(found):
        if each.sample is not None:
            sample[row] = each.sample
    hashes = [_hash(each) for each in found]
    numel = [0 if each.text else 1 if each.value is not None else 10_000 for each in found]
    value = np.array([np.nan if each.value is None else each.value for each in found], dtype=np.float64)
    nothing: dict[str, float] = {}
    return StepRows(
        step=step,
        rank=rank,
        world_size=world_size,
        keys=tuple(each.key for each in found),
        order=np.arange(count, dtype=np.int32),
        dtype=tuple("str" if each.text else each.dtype for each in found),
        shape=tuple((10_000,) if each == 10_000 else () for each in numel),
        numel=np.array(numel, dtype=np.int64),
        nonfinite=np.where((np.array(numel) == 1) & ~np.isfinite(value), 1, 0).astype(np.int64),
        value=value,
        scalars={name: np.array([(each.scalars or nothing).get(name, np.nan) for each in found]) for name in SCALARS},
        sketch=np.full((count, SKETCH_K), np.nan, dtype=np.float32),
        sample=sample,
        hash=np.array(hashes, dtype=np.uint64).reshape(count, 2),
        text=tuple(each.text for each in found),
        where=("",) * count,
    )


def _hash(each: Quantity) -> tuple[int, int]:
    if each.sample is None:
        return 0, 0
    bits = xxhash.xxh3_128_intdigest(each.sample.astype(np.float32).tobytes())
    return bits >> 64, bits & (2**64 - 1)


def capture(
    name: str, steps: Sequence[int], ranks: int, made: Callable[[int, int], Iterable[Quantity]], *, code: str = ""
) -> SyntheticCapture:
    """Make a capture of `made(step, rank)`."""
    manifest: dict[str, Any] = {
        "config": {"command": ["python", "train.py"], "seed": 42, "steps": "", "plan": None, "perturb": ""},
        "provenance": {"code": {"hash": code or name, "files": {}}, "versions": {}, "device": "cpu"},
        "env": {},
        "created_utc": "2026-01-01T00:00:00Z",
    }
    return SyntheticCapture(
        path=Path(name),
        manifest=manifest,
        run_id=f"run-{name}",
        world_size=ranks,
        segments={
            (rank, step): segment(step, rank, ranks, made(step, rank)) for step in steps for rank in range(ranks)
        },
    )
