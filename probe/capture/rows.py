"""The rows of one step while they grow, and how they are closed when the step is over.

The training thread appends; the worker closes, which reads back what was reduced on a device. This module must not know
where a value comes from.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from probe.capture import summary
from probe.capture.kept import Copy
from probe.capture.transfer import Transfer
from probe.point import Key, Kind
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K, FullTensor, StepRows

SKIPPED = "skipped_updates"
"""State: whether the gradient scaler left an update out. Its scaled gradients overflowed, and that is no fault."""


class Rows:
    """The growing rows of one step. Arrays double when they are full."""

    def __init__(self, capacity: int) -> None:
        self.keys: list[Key] = []
        self.seen: dict[Key, int] = {}
        self.order: list[int] = []
        self.dtype: list[str] = []
        self.shape: list[tuple[int, ...]] = []
        self.text: list[str] = []
        self.where: list[str] = []
        self.hash: dict[int, tuple[int, int]] = {}
        self.transfer = Transfer()
        self.tensors: dict[Key, Copy | torch.Tensor] = {}
        """Kept whole; a copy from an accelerator is whole when `transfer` is."""
        self.value = np.full(capacity, np.nan)
        self.sums = np.full((capacity, 4), np.nan)
        """[Q, 4] sum, l2, sum |x|, max |x|."""
        self.counts = np.zeros((capacity, 2), np.int64)
        """[Q, 2] non-finite elements, elements."""
        self.sketch = np.full((capacity, SKETCH_K), np.nan, np.float32)
        self.sample = np.full((capacity, SAMPLES), np.nan, np.float32)

    def add(self, key: Key, order: int, dtype: str, shape: tuple[int, ...], where: str, text: str = "") -> int:
        row = len(self.keys)
        if row == len(self.value):
            self._grow()
        self.keys.append(key)
        self.seen[key] = row
        self.order.append(order)
        self.dtype.append(dtype)
        self.shape.append(shape)
        self.where.append(where)
        self.text.append(text)
        return row

    def fill(self, row: int, numbers: npt.NDArray[np.float64]) -> None:
        """Enter the flat row of a tensor, see `summary.DEVICE_ROW`; the value stands for a whole of one element."""
        self.sums[row] = numbers[:4]
        self.counts[row] = numbers[4:6]
        self.sketch[row] = numbers[6 : 6 + SKETCH_K]
        self.sample[row] = numbers[6 + SKETCH_K :]
        if numbers[5] == 1 and math.prod(self.shape[row]) == 1:
            self.value[row] = numbers[0]

    def repeat(self, source: int, target: int) -> None:
        """Enter another row's numbers; the samples depend on the name and are left to the caller."""
        for array in (self.value, self.sums, self.counts, self.sketch):
            array[target] = array[source]

    def forget(self, kind: Kind) -> None:
        """Drop the rows of a kind; the others keep their order."""
        keep = [i for i, key in enumerate(self.keys) if key.kind is not kind]
        if len(keep) == len(self.keys):
            return
        renumber = {old: new for new, old in enumerate(keep)}
        for name in ("keys", "order", "dtype", "shape", "text", "where"):
            column = getattr(self, name)
            setattr(self, name, [column[i] for i in keep])
        for array in (self.value, self.sums, self.counts, self.sketch, self.sample):
            array[: len(keep)] = array[keep]
            array[len(keep) :] = 0 if array.dtype == np.int64 else np.nan
        self.seen = {key: i for i, key in enumerate(self.keys)}
        self.hash = {renumber[i]: digest for i, digest in self.hash.items() if i in renumber}
        self.transfer.renumber(renumber)
        self.tensors = {key: tensor for key, tensor in self.tensors.items() if key.kind is not kind}

    def _grow(self) -> None:
        def doubled(array: npt.NDArray[Any], fill: float) -> npt.NDArray[Any]:
            return np.concatenate([array, np.full_like(array, fill)])

        self.value = doubled(self.value, np.nan)
        self.sums = doubled(self.sums, np.nan)
        self.counts = doubled(self.counts, 0)
        self.sketch = doubled(self.sketch, np.nan)
        self.sample = doubled(self.sample, np.nan)


def step_rows(rows: Rows, step: int, rank: int, world_size: int) -> StepRows:
    """Close the rows of a step. Runs on the worker: waits for what was reduced on a device."""
    rows.transfer.wait()
    for index, numbers in rows.transfer.rows:
        rows.fill(index, numbers.numpy())
    for index, tensor in rows.transfer.bits:
        rows.hash[index] = summary.fingerprint(tensor)
    count = len(rows.keys)
    total, l2, sum_abs, max_abs = rows.sums[:count].T
    numel = rows.counts[:count, 1]
    size = np.where(numel > 0, numel, 1)
    digest = np.zeros((count, 2), np.uint64)
    for index, halves in rows.hash.items():
        digest[index] = halves
    scalars = {
        "l2": l2,
        "mean": total / size,
        "mean_abs": sum_abs / size,
        "rms": l2 / np.sqrt(size),
        "max_abs": max_abs,
    }
    assert tuple(scalars) == SCALARS
    tensors = {
        key: tensor.whole()
        if isinstance(tensor, Copy)
        else FullTensor(bits=summary.host_bits(tensor), dtype=summary.dtype_name(tensor.dtype))
        for key, tensor in rows.tensors.items()
    }
    closed = StepRows(
        step=step,
        rank=rank,
        world_size=world_size,
        keys=tuple(rows.keys),
        order=np.asarray(rows.order, np.int32),
        dtype=tuple(rows.dtype),
        shape=tuple(rows.shape),
        numel=numel.copy(),
        nonfinite=rows.counts[:count, 0].copy(),
        value=rows.value[:count],
        scalars=scalars,
        sketch=rows.sketch[:count],
        sample=rows.sample[:count],
        hash=digest,
        text=tuple(rows.text),
        where=tuple(rows.where),
        tensors=tensors,
    )
    return without_overflow(closed)


def without_overflow(rows: StepRows) -> StepRows:
    """Leave out gradients that are not finite where the gradient scaler left the update out for that reason."""
    skipped = any(
        key.name == SKIPPED and value > 0
        for key, value in zip(rows.keys, rows.value, strict=True)
        if key.kind is Kind.STATE
    )
    overflowed = [
        key.kind in (Kind.BACKWARD, Kind.GRAD, Kind.GRAD_NORM) and count > 0
        for key, count in zip(rows.keys, rows.nonfinite, strict=True)
    ]
    if not skipped or not any(overflowed):
        return rows
    keep = np.flatnonzero(~np.array(overflowed))

    def kept(column: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(column[row] for row in keep)

    keys = kept(rows.keys)
    return replace(
        rows,
        keys=keys,
        order=rows.order[keep],
        dtype=kept(rows.dtype),
        shape=kept(rows.shape),
        numel=rows.numel[keep],
        nonfinite=rows.nonfinite[keep],
        value=rows.value[keep],
        scalars={name: column[keep] for name, column in rows.scalars.items()},
        sketch=rows.sketch[keep],
        sample=rows.sample[keep],
        hash=rows.hash[keep],
        text=kept(rows.text),
        where=kept(rows.where),
        tensors={key: tensor for key, tensor in rows.tensors.items() if key in set(keys)},
    )
