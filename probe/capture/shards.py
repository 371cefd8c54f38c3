"""Find out which part of a whole tensor this rank holds, and reduce it as what it is: a part.

The sketch of a part uses the signs and buckets of the whole's flat index, so that the sketches of all parts add up to
the whole's. Nothing here talks to another rank. Where a part is no range of the flat index (a second dimension is
sharded), its elements are placed among zeros, a few rows of the whole at a time: that costs the time of reading the
whole. This module must not know how parts are added up.

Shapes: K sketch buckets, N samples.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from probe.capture import device, summary
from probe.store import parts
from probe.store.layout import SKETCH_K

SPAN = 1 << 22
"""Elements of the whole that are laid out at once to place a part that is no range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a whole tensor, or a range of its flat index."""

    shape: tuple[int, ...]
    """Shape of the whole."""
    local: tuple[int, ...] = ()
    """Lengths of the box; of a range its number of elements."""
    offset: tuple[int, ...] | None = None
    """Where the box begins in each dimension; None: a range."""
    start: int = 0
    """Where a range begins in the flat index."""
    ranks: tuple[int, ...] = ()
    """Ranks that hold the whole between them."""

    @property
    def text(self) -> str:
        """What a row says of this part; see `probe.store.parts`."""
        if self.offset is None:
            return parts.flat_text(self.start, self.local[0], self.shape, self.ranks)
        return parts.box_text(self.offset, self.local, self.shape, self.ranks)

    @property
    def first(self) -> int | None:
        """Flat index of the first element if the part is a range of it, else None."""
        if self.offset is None:
            return self.start
        at = next((d for d, length in enumerate(self.local) if length != 1), len(self.shape))
        if self.local[at + 1 :] != self.shape[at + 1 :]:
            return None
        return int(np.ravel_multi_index(self.offset, self.shape)) if self.shape else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds of a tensor."""

    tensor: torch.Tensor
    """The local data."""
    part: Part | None = None
    """None: it is the whole."""
    text: str = ""
    """What the row says of a norm over a part, or why nothing can be reduced."""
    reducible: bool = True


def held(value: torch.Tensor) -> Held:
    """Take the local data of a tensor; for a distributed one, say which part it is. Starts no communication."""
    if type(value) in (torch.Tensor, nn.Parameter):
        return Held(tensor=value)
    distributed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if distributed is None or not isinstance(value, distributed):
        return Held(tensor=_waited(value))
    local = _waited(value._local_tensor)
    placements = tuple(value.placements)
    pending = [placement for placement in placements if placement.is_partial()]
    if pending:
        text = _norm_text(value, pending) if value.numel() == 1 else ""
        return Held(
            tensor=local, text=text or f"not reduced: {pending[0]} is pending across ranks", reducible=bool(text)
        )
    if all(placement.is_replicate() for placement in placements):
        return Held(tensor=local)
    part = _box(value.device_mesh, placements, tuple(value.shape))
    if part is None or part.local != tuple(local.shape):
        return Held(tensor=local, text=f"not reduced: placed as {list(placements)}", reducible=False)
    return Held(tensor=local, part=part)


def _waited(tensor: torch.Tensor) -> torch.Tensor:
    # What a collective still computes is awaited on its stream; the host goes on.
    wait = getattr(tensor, "wait", None)
    return wait() if callable(wait) else tensor


def _norm_text(value: Any, pending: list[Any]) -> str:
    powers = {float(getattr(placement, "norm_type", 0.0)) for placement in pending}
    power = powers.pop() if len(powers) == 1 else 0.0
    coordinate = value.device_mesh.get_coordinate()
    if not 0 < power < math.inf or coordinate is None:
        return ""
    index, count = 0, 1
    for dim, placement in enumerate(value.placements):
        if placement.is_partial():
            index = index * value.device_mesh.size(dim) + coordinate[dim]
            count *= value.device_mesh.size(dim)
    return parts.norm_text(index, count, power, _ranks(value.device_mesh))


@functools.lru_cache(maxsize=65536)
def _box(mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> Part | None:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if mesh.get_coordinate() is None:
        return None
    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Part(shape=shape, local=tuple(local), offset=tuple(offset), ranks=_ranks(mesh))


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(mesh.mesh.flatten().tolist())


def flat_parts(modules: Iterable[nn.Module]) -> dict[int, Part]:
    """Map the parameters that FSDP (the first, with `use_orig_params`) keeps in flat shards to their parts, by id."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    found: dict[int, Part] = {}
    for module in modules:
        handle = getattr(module, "_handle", None) if isinstance(module, fsdp) else None
        flat = getattr(handle, "flat_param", None)
        if handle is None or flat is None or flat._params is None or not handle.uses_sharded_strategy:
            continue
        ranks = tuple(torch.distributed.get_process_group_ranks(handle.process_group))
        for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
            start = info.intra_param_start_idx if info.in_shard else 0
            count = info.numel_in_shard if info.in_shard else 0
            found[id(parameter)] = Part(shape=tuple(shape), local=(count,), start=start, ranks=ranks)
    return found


def _pieces(flat: torch.Tensor, part: Part, scratch: summary.Scratch) -> Iterator[tuple[int, torch.Tensor]]:
    """Give (first flat index of the whole, elements from there on); what other ranks hold is zero."""
    first = part.first
    if first is not None:
        yield first, flat
        return
    assert part.offset is not None
    local = flat.view(part.local)
    inner = part.shape[1:]
    step = max(1, SPAN // math.prod(inner))
    for row in range(0, part.local[0], step):
        some = local[row : row + step]
        span = scratch.room("span", len(some) * math.prod(inner), flat.dtype, flat.device)
        span.zero_()
        box = span.view(len(some), *inner)
        for dim, (begin, length) in enumerate(zip(part.offset[1:], part.local[1:], strict=True), start=1):
            box = box.narrow(dim, begin, length)
        box.copy_(some)
        yield (part.offset[0] + row) * math.prod(inner), span


def _sketch(start: int, piece: torch.Tensor, scratch: summary.Scratch) -> torch.Tensor:
    """Sketch elements that begin anywhere in the flat index of the whole. Returns float64 [K]."""
    head = start % SKETCH_K
    rows = -(-(head + piece.numel()) // SKETCH_K)
    padded = scratch.room("padded", rows * SKETCH_K, piece.dtype, piece.device)
    padded[:head].zero_()
    padded[head : head + piece.numel()].copy_(piece)
    padded[head + piece.numel() :].zero_()
    signs = device.signs_on(start // SKETCH_K, rows, piece.device, piece.dtype)
    total = torch.zeros(SKETCH_K, dtype=torch.float64, device=piece.device)
    most = summary.ROWS_PER_BLOCK if piece.is_cpu else device.ROWS_PER_BLOCK
    for first in range(0, rows, most):
        count = min(most, rows - first)
        block = padded[first * SKETCH_K : (first + count) * SKETCH_K].view(count, SKETCH_K)
        total += (signs[first : first + count] * block).sum(0, dtype=torch.float64)
    return total


@functools.lru_cache(maxsize=65536)
def _sampled(name: str, part: Part, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Say which of the whole's samples lie in a part: their slots, and their places in the local flat index."""
    index = summary.sample_index(name, math.prod(part.shape))
    if part.offset is None:
        inside = (index >= part.start) & (index < part.start + part.local[0])
        local = index[inside] - part.start
    else:
        place = np.stack(np.unravel_index(index, part.shape)) if part.shape else np.zeros((0, len(index)), np.int64)
        shifted = place - np.array(part.offset, np.int64)[:, None]
        inside = np.all((shifted >= 0) & (shifted < np.array(part.local, np.int64)[:, None]), axis=0)
        local = np.ravel_multi_index(tuple(shifted[:, inside]), part.local) if inside.any() else np.zeros(0, np.int64)
    slots = torch.from_numpy(np.flatnonzero(inside))
    return slots.to(device), torch.from_numpy(np.asarray(local, np.int64)).to(device)


def part_row(tensor: torch.Tensor, name: str, part: Part, scratch: summary.Scratch) -> torch.Tensor:
    """Summarise a part as `probe.capture.device` does a whole. Returns float64 [DEVICE_ROW] on its device.

    Args:
        tensor: The local data; any shape with the part's number of elements.
        name: Decides which values are sampled.
        part: Where the data lie.
        scratch: Work space.
    """
    tensor = tensor.detach()
    row = torch.zeros(summary.DEVICE_ROW, dtype=torch.float64, device=tensor.device)
    row[6 + SKETCH_K :] = float("nan")
    row[5] = tensor.numel()
    if not tensor.numel():
        return row
    flat = summary.flat_numbers(tensor, scratch)
    for start, piece in _pieces(flat, part, scratch):
        row[6 : 6 + SKETCH_K] += _sketch(start, piece, scratch)
    slots, local = _sampled(name, part, tensor.device)
    row[6 + SKETCH_K + slots] = flat.index_select(0, local).double()
    size = scratch.take("abs", flat, flat.dtype)
    torch.abs(flat, out=size)
    row[0] = flat.sum(dtype=torch.float64)
    row[1] = torch.linalg.vector_norm(flat)
    row[2] = size.sum(dtype=torch.float64)
    row[3] = size.amax()
    row[4] = flat.numel() - torch.isfinite(flat).sum()
    return row
