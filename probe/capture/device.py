"""Reduce one tensor on an accelerator to the row that `probe.capture.summary` makes of one in host memory.

Nothing is read back here, and nothing waits. It has been run on no accelerator yet; every operation is one that torch
has for all devices, and the tests run them on the CPU. This module must not know where a tensor came from.
"""

from __future__ import annotations

import functools
import math

import torch

from probe.capture.summary import Scratch, as_real, flat_numbers, last_sign, row_signs, sample_index
from probe.store.layout import SAMPLES, SKETCH_K

ROWS_PER_BLOCK = 16384
"""Rows of k elements that are reduced at once, 16 MB in fp32: many, for a launch costs more than a read; and not all,
for the products take as much of the device's memory."""


@functools.lru_cache(maxsize=8192)
def signs_on(first: int, rows: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Give the signs of rows of k elements, [rows, 1], on a device."""
    return torch.from_numpy(row_signs(first, rows)[:, None]).to(device=device, dtype=dtype)


@functools.lru_cache(maxsize=4096)
def _count(numel: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([float(numel)], dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=256)
def _nothing(count: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), math.nan, dtype=torch.float64, device=device)


@functools.lru_cache(maxsize=65536)
def _sample_index_on(name: str, numel: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(sample_index(name, numel)).to(device)


def device_row(tensor: torch.Tensor, name: str, scratch: Scratch) -> torch.Tensor:
    """Summarise a tensor on an accelerator without reading anything back. Returns float64 [DEVICE_ROW] on its device.

    Args:
        tensor: Any strided tensor of numbers; an empty one gives zeros.
        name: Decides which values are sampled.
        scratch: Work space.

    Source: the project's statistics study, sections 5 and 8: S_j = sum over i = j (mod k) of sign(i // k) x_i, one
    sign per row of k elements; linear, deterministic, at the speed of one read; relative sd of the norm of a
    difference 4.5 %."""
    tensor = as_real(tensor.detach())
    numel, device = tensor.numel(), tensor.device
    if numel == 0:
        return torch.cat([torch.zeros(6 + SKETCH_K, dtype=torch.float64, device=device), _nothing(SAMPLES, device)])
    flat = flat_numbers(tensor, scratch)
    rows = numel // SKETCH_K
    # Each operation from here on is a launch, which is what a tap costs there. None is a matrix product: under TF32,
    # which many jobs allow, it would round the elements to eleven bits.
    sketch = torch.zeros(SKETCH_K, dtype=torch.float64, device=device)
    for first in range(0, rows, ROWS_PER_BLOCK):
        count = min(ROWS_PER_BLOCK, rows - first)
        block = flat[first * SKETCH_K : (first + count) * SKETCH_K].view(count, SKETCH_K)
        sketch += (signs_on(first, count, device, flat.dtype) * block).sum(0, dtype=torch.float64)
    rest = flat[rows * SKETCH_K :]
    if rest.numel():
        sketch[: rest.numel()].add_(rest, alpha=last_sign(rows))
    norm, index = torch.linalg.vector_norm, _sample_index_on(name, numel, device)
    norms = [norm(flat, order).view(1) for order in (2, 1, math.inf)]
    taken = torch.cat([*norms, flat.index_select(0, index)]).double()
    nonfinite = (flat * 0).isnan().sum(dtype=torch.float64)
    return torch.cat(
        [
            flat.sum(dtype=torch.float64).view(1),
            taken[:3],
            nonfinite.view(1),
            _count(numel, device),
            sketch,
            taken[3:],
            _nothing(SAMPLES - index.numel(), device),
        ]
    )
