"""Reduce one tensor in host memory to a row of fixed size, without touching the run.

Everything here happens under `quiet` (no autograd, no autocast, no dispatch modes, no global RNG), or runs no operation
of torch at all. The compiled `_reduce` reads each element once, at 0.13 to 0.25 ns; where it was not built, torch does
the same in five passes over blocks that stay in cache, at about 1 ns. `probe.capture.device` does it on an accelerator.
This module must not know where a tensor came from.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch.utils._python_dispatch import _disable_current_modes

from probe import sketch as sketch_module
from probe.built import built
from probe.sketch import mix64
from probe.store.layout import SAMPLES, SKETCH_K

INTERFACE = 3
"""How the compiled reduction is called here; a build that is called in another way is not used."""


compiled = built("probe.capture._reduce", INTERFACE)
"""The compiled reduction; None where there was no C compiler when the package was installed, or the build is older."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that hold their data themselves; any other may be a wrapper."""

COMPILED_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
"""Types that the compiled reduction reads as they are, by its numbers for them."""

ROWS_PER_BLOCK = 512
"""Rows of k elements that are reduced at once. A block, 0.5 MB in fp32, stays in the second-level cache while
it is read five times; and sums in fp32 stay short, for blocks are added up in float64."""

DEVICE_ROW = 6 + SKETCH_K + SAMPLES
"""Length of the flat device row: sum, l2, sum |x|, max |x|, non-finite count, numel, sketch, samples."""

SMALL = 8192
"""Elements up to which numpy's lower cost per call outweighs torch's faster loops (measured; not critical)."""


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Give torch's name of an element type, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def row_signs(first: int, count: int) -> npt.NDArray[np.float32]:
    """Give the sketch's sign, -1 or 1, of rows `first` to `first + count` of k elements each. Shape [count]."""
    bits = mix64(np.arange(first, first + count, dtype=np.uint64)) >> np.uint64(63)
    signs: npt.NDArray[np.float32] = (1.0 - 2.0 * bits.astype(np.float32)).astype(np.float32)
    return signs


@functools.lru_cache(maxsize=256)
def row_weights(rows: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Signs and ones, [2, rows]: one matrix product gives the sketch and the column sums."""
    signs = torch.from_numpy(np.stack([row_signs(0, rows), np.ones(rows, np.float32)]))
    return signs.to(device=device, dtype=dtype)


@functools.lru_cache(maxsize=4096)
def last_sign(row: int) -> float:
    return float(row_signs(row, 1)[0])


sample_index = functools.lru_cache(maxsize=65536)(sketch_module.sample_index)
"""Flat positions whose values are kept, from the name and the size alone; asked for at every tap, so remembered."""


class quiet:
    """Compute without autograd, autocast and dispatch modes: `with quiet():`, at every tap.

    Selective checkpointing is a dispatch mode: an operation it sees in the forward pass and not in the recompute
    corrupts the user's backward. Autocast would turn the sketch's matrix product into bf16.
    """

    __slots__ = ("_autocast", "_grad", "_modes")

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        self._modes: Any = None
        if self._grad:
            torch._C._set_grad_enabled(False)
        for device in self._autocast:
            torch.set_autocast_enabled(device, False)
        if torch._C._len_torch_dispatch_stack():
            self._modes = _disable_current_modes()
            self._modes.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._modes is not None:
            self._modes.__exit__(*raised)
        if self._grad:
            torch._C._set_grad_enabled(True)
        for device in self._autocast:
            torch.set_autocast_enabled(device, True)


class Scratch:
    """Reusable work space, so that a tap allocates nothing that the size of the tensor decides."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}

    def take(self, use: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Give a flat buffer of `like.numel()` elements on its device; contents are undefined."""
        return self.room(use, like.numel(), dtype, like.device)

    def room(self, use: str, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give a flat buffer; contents are undefined."""
        slot = (use, device, dtype)
        buffer = self._buffers.get(slot)
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=dtype, device=device)
            self._buffers[slot] = buffer
        return buffer[:numel]

    def block(self, like: torch.Tensor) -> torch.Tensor:
        """Give a flat buffer for one block and what is left after the last whole row."""
        slot = ("block", like.device, like.dtype)
        if slot not in self._buffers:
            size = (ROWS_PER_BLOCK * 3 // 2 + 2) * SKETCH_K
            self._buffers[slot] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._buffers[slot]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """View complex numbers as pairs of real ones, and undo lazy conjugation and negation."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def flat_numbers(tensor: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """View or convert a tensor as a flat contiguous fp32 (fp64 for fp64 and integers) vector, in logical order."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor.reshape(-1)
    wide = torch.float32 if tensor.dtype.is_floating_point else torch.float64
    out = scratch.take("convert", tensor, wide)
    out.view(tensor.shape).copy_(tensor)
    return out


class Matrices(Protocol):
    """The arrays whose rows the compiled reduction writes."""

    sums: npt.NDArray[np.float64]
    """[Q, 4] sum, l2, sum |x|, max |x|."""
    counts: npt.NDArray[np.int64]
    """[Q, 2] non-finite elements, elements."""
    sketch: npt.NDArray[np.float32]
    """[Q, K]"""
    sample: npt.NDArray[np.float32]
    """[Q, N]"""


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the compiled reduction can read a tensor where it lies; nothing asked here is an operation."""
    return (
        compiled is not None
        and type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.dtype in COMPILED_TYPES
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and tensor.numel() > 0
    )


def reduce_plain(tensor: torch.Tensor, name: str, rows: Matrices, row: int, copy: int) -> None:
    """Write the row of a tensor for which `is_plain` is true.

    Args:
        tensor: The tensor.
        name: Decides which values are sampled.
        rows: Get the numbers of `host_row`, in the given row.
        row: From 0.
        copy: Address of memory that gets the tensor's values, or 0.
    """
    kind, numel, matrices = (
        COMPILED_TYPES[tensor.dtype],
        tensor.numel(),
        (rows.sums, rows.counts, rows.sketch, rows.sample),
    )
    compiled.reduce(tensor.data_ptr(), numel, kind, copy, row, sample_index(name, numel), *matrices)


def samples_are(tensor: torch.Tensor, name: str, sample: npt.NDArray[np.float32]) -> bool:
    """Tell whether a tensor for which `is_plain` is true has the samples that its row has."""
    numel = tensor.numel()
    kind = COMPILED_TYPES[tensor.dtype]
    return bool(compiled.samples_are(tensor.data_ptr(), numel, kind, sample_index(name, numel), sample))


def host_row(
    tensor: torch.Tensor,
    name: str,
    scratch: Scratch,
    sketch: npt.NDArray[np.float32],
    sample: npt.NDArray[np.float32],
) -> tuple[float, float, float, float, int, int]:
    """Summarise a tensor in host memory: the same numbers as `device_row`, written in place.

    Without the compiled reduction, small tensors go through numpy, whose calls cost a microsecond less; large ones
    through torch, which keeps to the threads the user gave it.

    Args:
        tensor: Any strided tensor of numbers on the CPU; a complex one counts as twice as many real ones.
        name: Decides which values are sampled.
        scratch: Work space.
        sketch: [K], overwritten.
        sample: [N], overwritten as far as there are values.

    Returns:
        sum, l2, sum |x|, max |x|, number of non-finite elements, number of elements.
    """
    tensor = as_real(tensor.detach())
    numel = tensor.numel()
    if numel == 0:
        sketch[:] = 0.0
        return 0.0, 0.0, 0.0, 0.0, 0, 0
    index = sample_index(name, numel)
    if compiled is not None:
        if tensor.dtype not in COMPILED_TYPES:
            tensor = flat_numbers(tensor, scratch)
        flat = tensor.contiguous()
        sums, counts = np.empty(4), np.empty(2, np.int64)
        kind = COMPILED_TYPES[flat.dtype]
        compiled.reduce(flat.data_ptr(), numel, kind, 0, 0, index, sums, counts, sketch, sample)
        return *sums.tolist(), *counts.tolist()
    return _host_row_by_torch(flat_numbers(tensor, scratch), index, scratch, sketch, sample)


# Sums of infinities of both signs are NaN, and that is meant; a job that turns warnings into errors must not see one.
@np.errstate(invalid="ignore", over="ignore")
def _host_row_by_torch(
    flat: torch.Tensor,
    index: npt.NDArray[np.int64],
    scratch: Scratch,
    sketch: npt.NDArray[np.float32],
    sample: npt.NDArray[np.float32],
) -> tuple[float, float, float, float, int, int]:
    """Do as `host_row`, without the compiled reduction."""
    numel = flat.numel()
    values = flat.numpy()
    rows = numel // SKETCH_K
    if numel <= SMALL:
        total, l2, sum_abs, max_abs = _small_sums(flat, values, rows, sketch)
    else:
        total, l2, sum_abs, max_abs = _large_sums(flat, rows, scratch, sketch)
    body = rows * SKETCH_K
    if body < numel:
        rest = values[body:]
        sketch[: numel - body] += rest * last_sign(rows)
        total += float(rest.sum(dtype=np.float64))
    nonfinite = 0
    if not math.isfinite(sum_abs):
        nonfinite, max_abs = int(numel - np.isfinite(values).sum()), float(np.abs(values).max())
    sample[: index.size] = values[index]
    return total, l2, sum_abs, max_abs, nonfinite, numel


def _small_sums(
    flat: torch.Tensor, values: npt.NDArray[Any], rows: int, sketch: npt.NDArray[np.float32]
) -> tuple[float, float, float, float]:
    """Sketch the whole rows of k elements, and reduce: sum of the whole rows, l2, sum |x| and max |x| of all."""
    total = 0.0
    if rows:
        weights = row_weights(rows, flat.device, flat.dtype)
        signed = (weights @ flat[: rows * SKETCH_K].view(rows, SKETCH_K)).numpy()
        sketch[:] = signed[0]
        total = float(signed[1].sum(dtype=np.float64))
    else:
        sketch[:] = 0.0
    size = np.abs(values)
    return total, math.sqrt(float(np.dot(size, size))), float(size.sum(dtype=np.float64)), float(size.max())


def _large_sums(
    flat: torch.Tensor, rows: int, scratch: Scratch, sketch: npt.NDArray[np.float32]
) -> tuple[float, float, float, float]:
    """Do as `_small_sums`, in blocks that stay in the processor's cache: each element is fetched from memory once."""
    wide = np.zeros((2, SKETCH_K))
    squares = sum_abs = max_abs = 0.0
    weights = row_weights(rows, flat.device, flat.dtype)
    numel = flat.numel()
    absolute = scratch.block(flat)
    # Blocks of about equal size: a last one of a few rows would cost as many calls as a whole one.
    height = -(-rows // max(1, round(rows / ROWS_PER_BLOCK)))
    for first in range(0, rows, height):
        count = min(height, rows - first)
        begin, end = first * SKETCH_K, (first + count) * SKETCH_K
        wide += (weights[:, first : first + count] @ flat[begin:end].view(count, SKETCH_K)).numpy()
        part = flat[begin : numel if first + count == rows else end]
        size = torch.abs(part, out=absolute[: part.numel()])
        squares += torch.dot(part, part).item()
        sum_abs += size.sum().item()
        max_abs = max(max_abs, size.amax().item())  # of a NaN, the sum tells
    sketch[:] = wide[0]
    return float(wide[1].sum()), math.sqrt(squares) if squares >= 0 else squares, sum_abs, max_abs


def fingerprint_plain(tensor: torch.Tensor) -> tuple[int, int]:
    """Do as `fingerprint` for a tensor for which `is_plain` is true."""
    digest = xxhash.xxh3_128_intdigest((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    """Hash a tensor's bits in logical order: xxh3_128 as (high, low)."""
    bits = host_bits(tensor)
    digest = xxhash.xxh3_128_intdigest(bits.tobytes() if bits.nbytes < 4096 else bits.reshape(-1).view(np.uint8).data)
    return digest >> 64, digest & 0xFFFFFFFFFFFFFFFF


def host_bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Give a tensor's values as a contiguous numpy array on the host; dtypes numpy lacks come as unsigned integers."""
    host = tensor.detach().cpu().contiguous()
    if host.is_conj() or host.is_neg():
        host = host.resolve_conj().resolve_neg()
    try:
        bits: npt.NDArray[Any] = host.numpy()
    except TypeError:
        as_int = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}[host.element_size()]
        bits = host.view(as_int).numpy()
    return bits
