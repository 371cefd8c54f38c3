"""Copy a tensor kept whole into a packed file, compressed where that makes it smaller.

Deflate made by isal at level 1 is ordinary zlib data, which every HDF5 reader has, at nine times the speed of the one
in HDF5 and the same ratio (the project's storage study, section 3.2); without isal, zlib makes it. This module must not
know which quantity a tensor is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import xxhash
from h5py import h5d, h5p, h5s

from probe.store.disk import PIECE
from probe.store.dtypes import BITS
from probe.store.image import tensor_type, text_type
from probe.store.tensors import Whole

CHUNK = 1 << 20
"""Bytes of a chunk, at most."""
_PLAIN = 3
"""Filter mask of a chunk that skipped both filters."""


def add_tensor(group: h5py.Group, link: bytes, tensor: Whole, compress: bool) -> None:
    """Copy a tensor, checking the digest that its source has.

    Raises:
        CaptureFormatError: The source does not have its digest.
    """
    kind = tensor_type(tensor.dtype, BITS[tensor.dtype])
    space = h5s.create_simple(tensor.shape) if tensor.shape else h5s.create(h5s.SCALAR)
    made = h5p.create(h5p.DATASET_CREATE)
    made.set_fill_time(h5d.FILL_TIME_NEVER)
    chunk = _chunk(tensor.shape, tensor.item) if compress and tensor.nbytes > 4096 else None
    if chunk is None:
        made.set_layout(h5d.CONTIGUOUS)
        made.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    else:
        made.set_chunk(chunk)
        if tensor.item > 1:
            made.set_shuffle()
        made.set_deflate(1)
    dataset = h5d.create(group.id, link, kind, space, made)
    digest = xxhash.xxh3_128()
    with tensor.reader() as reader:
        if chunk is None:
            _copy(dataset, tensor, kind, reader.fill, digest)
        else:
            _copy_chunks(dataset, tensor, chunk, reader.fill, digest)
    tensor.check(digest)
    for name, value in (("probe_dtype", tensor.dtype), ("xxh3_128", tensor.digest)):
        attribute = text_type(len(value))
        h5py.h5a.create(dataset, name.encode(), attribute, h5s.create(h5s.SCALAR)).write(
            np.array(value.encode(), dtype=f"S{len(value)}"), mtype=attribute
        )


def _copy(
    dataset: h5d.DatasetID, tensor: Whole, kind: Any, fill: Callable[[memoryview], None], digest: xxhash.xxh3_128
) -> None:
    """Copy in runs along the first axis that has enough of them."""
    if not tensor.nbytes:
        return
    run = _chunk(tensor.shape, tensor.item, PIECE) or ()
    axis = _axis(tensor.shape, run)
    space = dataset.get_space()
    for start, count in _runs(tensor.shape, run, axis):
        bits = np.empty(math.prod(count), dtype=BITS[tensor.dtype])
        view = bits.view(np.uint8).data
        fill(view)
        digest.update(view)
        if tensor.shape:
            space.select_hyperslab(start, count)
        dataset.write(h5s.create_simple(count) if tensor.shape else h5s.ALL, space, bits.reshape(count), mtype=kind)


def _copy_chunks(
    dataset: h5d.DatasetID,
    tensor: Whole,
    chunk: tuple[int, ...],
    fill: Callable[[memoryview], None],
    digest: xxhash.xxh3_128,
) -> None:
    deflate = _deflate()
    whole = np.zeros(math.prod(chunk) * tensor.item, np.uint8)
    for start, count in _runs(tensor.shape, chunk, _axis(tensor.shape, chunk)):
        used = math.prod(count) * tensor.item
        whole[used:] = 0
        fill(whole[:used].data)
        digest.update(whole[:used].data)
        shuffled = whole.reshape(-1, tensor.item).T if tensor.item > 1 else whole
        packed = deflate(np.ascontiguousarray(shuffled).data)
        smaller = len(packed) < len(whole)
        plain = _PLAIN if tensor.item > 1 else 1
        dataset.write_direct_chunk(start, packed if smaller else whole.tobytes(), 0 if smaller else plain)


def _deflate() -> Callable[[Any], bytes]:
    try:
        from isal import isal_zlib
    except ImportError:
        import zlib

        return lambda data: zlib.compress(data, 1)
    return lambda data: bytes(isal_zlib.compress(data, 1))


def _chunk(shape: tuple[int, ...], item: int, most: int = CHUNK) -> tuple[int, ...] | None:
    """Choose the shape of chunks that are runs of elements in C order: whole along the last axes, one along the first.

    >>> _chunk((3, 1024, 512), 4)
    (1, 512, 512)
    """
    chunk: list[int] = []
    room = most // item
    for length in reversed(shape):
        part = max(1, min(length, room))
        chunk.insert(0, part)
        room = room // part if part == length else 0
    return tuple(chunk) if chunk else None


def _axis(shape: tuple[int, ...], chunk: tuple[int, ...]) -> int:
    """Return the axis along which chunks follow each other: the last along which they are not whole."""
    return max((at for at, (length, part) in enumerate(zip(shape, chunk, strict=True)) if part < length), default=0)


def _runs(shape: tuple[int, ...], chunk: tuple[int, ...], axis: int) -> Any:
    """List start and extent of all chunks in C order."""
    if not shape:
        yield (), ()
        return
    rest = shape[axis + 1 :]
    for before in itertools.product(*(range(length) for length in shape[:axis])):
        for first in range(0, shape[axis], chunk[axis]):
            count = min(chunk[axis], shape[axis] - first)
            yield (*before, first, *(0 for _ in rest)), (*(1 for _ in before), count, *rest)
