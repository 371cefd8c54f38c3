"""Rows of a step for the tests of the store, and the comparison of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from probe.point import Key, Kind
from probe.store.dtypes import BITS
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K, FullTensor, StepRows
from probe.store.writer import RankWriter, create_capture, write_manifest

RUN_ID = "0123456789abcdef0123456789abcdef"


def forward_keys(count: int) -> tuple[Key, ...]:
    return tuple(Key(kind=Kind.FORWARD, name=f"blocks.{at}.attn", microbatch=0) for at in range(count))


def make_rows(
    keys: Sequence[Key] | None = None,
    *,
    step: int = 1,
    rank: int = 0,
    world_size: int = 1,
    tensors: dict[Key, FullTensor] | None = None,
    seed: int = 0,
    **columns: Any,
) -> StepRows:
    """Fill every column with random numbers; a third of the rows have no sketch, another third no sample."""
    keys = forward_keys(9) if keys is None else tuple(keys)
    count = len(keys)
    random = np.random.default_rng(seed + 1000 * step + rank)
    sketch = random.standard_normal((count, SKETCH_K)).astype(np.float32)
    sample = random.standard_normal((count, SAMPLES)).astype(np.float32)
    sketch[::3] = np.nan
    sample[1::3] = np.nan
    filled: dict[str, Any] = {
        "order": random.permutation(count).astype(np.int32),
        "dtype": tuple(("bfloat16", "float32", "str")[at % 3] for at in range(count)),
        "shape": tuple(((2, 1024, 64), (7,), ())[at % 3] for at in range(count)),
        "numel": random.integers(0, 2**60, count),
        "nonfinite": random.integers(0, 9, count),
        "value": random.standard_normal(count),
        "scalars": {name: random.standard_normal(count) for name in SCALARS},
        "sketch": sketch,
        "sample": sample,
        "hash": random.integers(0, 2**64, (count, 2), dtype=np.uint64),
        "text": tuple(f"text {at}" if at % 3 == 2 else "" for at in range(count)),
        "where": tuple(f"train.py:{at}" for at in range(count)),
    }
    return StepRows(step=step, rank=rank, world_size=world_size, keys=keys, tensors=tensors or {}, **(filled | columns))


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> FullTensor:
    """Make a tensor of random bits, NaN payloads included."""
    kind = np.dtype(BITS[dtype])
    nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    return FullTensor(bits=raw.view(kind).reshape(shape), dtype=dtype)


def make_capture(path: Path, steps: Sequence[int] = (1,), *, closed: bool = True, **rows: Any) -> Path:
    """Record a capture of one rank."""
    create_capture(path)
    write_manifest(path, {"run_id": RUN_ID, "world_size": 1, "created_utc": "2026-01-01T00:00:00+00:00"})
    writer = RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
    for step in steps:
        writer.write(make_rows(step=step, **rows))
    if closed:
        writer.close(error=None, dropped_steps=[])
    return path


def as_comparable(rows: StepRows) -> dict[str, Any]:
    """Turn rows into plain objects that `==` compares bit by bit; tensors are left out, as the reader does."""
    return {each.name: _plain(getattr(rows, each.name)) for each in fields(rows) if each.name != "tensors"}


def _plain(found: Any) -> Any:
    if isinstance(found, np.ndarray):
        if found.dtype.kind == "f":  # a vector without a value is NaN, whatever its payload
            found = np.where(np.isnan(found), np.array(np.nan, dtype=found.dtype), found)
        return found.dtype.str, found.shape, found.tobytes()
    if isinstance(found, dict):
        return {name: _plain(each) for name, each in found.items()}
    return found
