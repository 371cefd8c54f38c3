"""Read tensors kept whole, in C order and piece by piece, from segments and packed files alike.

Contiguous data is read directly: HDF5 has said where it lies, and the guard that it lies inside the file. Where that is
known, the tensor can be read without HDF5, by any process: its digest tells whether it still lies there. Chunks go
through HDF5. This module must not know which quantity a tensor is.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from h5py import h5g, h5s

from probe.store.dtypes import BITS
from probe.store.guard import Segment, Sort
from probe.store.image import tensor_type
from probe.store.layout import FullTensor

_BLOCK = 1 << 20
"""Bytes that are read and hashed at once, while they are in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A tensor that lies in one piece: all that reading it takes."""

    path: Path
    sort: Sort
    """Of the file."""
    name: str
    """What messages call the tensor."""
    dtype: str
    """torch's name of the element type."""
    shape: tuple[int, ...]
    digest: str
    """What the file says that the bits have."""
    offset: int

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return np.dtype(BITS[self.dtype]).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.item

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Start reading."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield Reader(self, descriptor)
        finally:
            os.close(descriptor)

    def check(self, digest: xxhash.xxh3_128) -> None:
        """Refuse bits that do not have the digest that the file gives."""
        if digest.hexdigest() != self.digest:
            raise self.sort.damage(self.path, f"tensor {self.name!r} does not have its digest")


class Whole:
    """A tensor in an open file, read from its start to its end."""

    def __init__(self, file: Segment, group: h5g.GroupID, link: bytes) -> None:
        """Find it; see `probe.store.guard` for what is refused."""
        self._file = file
        name = link.decode("utf-8", "replace")
        self._dataset = file.dataset(group, link)
        dtype = file.text(self._dataset, "probe_dtype")
        if dtype not in BITS:
            raise file.refusal(f"dataset {name!r}", f"has dtype {dtype!r}, which version 1 does not have")
        self._kind = tensor_type(dtype, BITS[dtype])
        file.require_type(self._dataset, link, self._kind)
        self.dtype = dtype
        """torch's name of the element type."""
        self.shape: tuple[int, ...] = tuple(map(int, self._dataset.shape))
        self.item = np.dtype(BITS[dtype]).itemsize
        """Bytes of an element."""
        self.nbytes = math.prod(self.shape) * self.item
        self.digest = file.text(self._dataset, "xxh3_128")
        """What the file says that the bits have."""
        offset = self._dataset.get_offset() if self.nbytes else 0
        self.contiguous = offset is not None
        """It lies in one piece, at `placed`; else in chunks."""
        self.placed = Placed(
            path=file.path,
            sort=file.sort,
            name=name,
            dtype=dtype,
            shape=self.shape,
            digest=self.digest,
            offset=offset or 0,
        )

    @contextmanager
    def reader(self) -> Iterator[Reader | ChunkReader]:
        """Start reading."""
        if self.contiguous:
            with self.placed.reader() as reader:
                yield reader
        else:
            yield ChunkReader(self)

    def read(self) -> FullTensor:
        """Read all of it into memory, and check its digest."""
        bits = np.empty(self.shape, dtype=BITS[self.dtype])
        view = bits.reshape(-1).view(np.uint8).data
        digest = xxhash.xxh3_128()
        with self.reader() as reader:
            for start in range(0, self.nbytes, _BLOCK):
                reader.fill(view[start : start + _BLOCK])
                digest.update(view[start : start + _BLOCK])
        self.check(digest)
        return FullTensor(bits=bits, dtype=self.dtype)

    def verify(self) -> None:
        """Read all of it, and check its digest."""
        digest, buffer = xxhash.xxh3_128(), np.empty(min(_BLOCK, self.nbytes), np.uint8)
        with self.reader() as reader:
            for start in range(0, self.nbytes, _BLOCK):
                view = buffer.data[: self.nbytes - start]
                reader.fill(view)
                digest.update(view)
        self.check(digest)

    def check(self, digest: xxhash.xxh3_128) -> None:
        """Refuse bits that do not have the digest that the file gives."""
        self.placed.check(digest)


class Reader:
    """Where reading a contiguous tensor is."""

    def __init__(self, tensor: Placed, descriptor: int) -> None:
        self._tensor = tensor
        self._descriptor = descriptor
        self._offset = tensor.offset

    def fill(self, view: memoryview) -> None:
        """Read the next bytes, as many as fit.

        Raises:
            CaptureFormatError: The file ends before them.
        """
        while len(view):
            done = os.preadv(self._descriptor, [view], self._offset)
            if not done:
                raise self._tensor.sort.truncated(self._tensor.path)
            self._offset += done
            view = view[done:]


class ChunkReader:
    """Where reading a tensor in chunks is."""

    def __init__(self, tensor: Whole) -> None:
        self._tensor = tensor
        self._chunks = _chunks(tensor)
        self._left = memoryview(b"")

    def fill(self, view: memoryview) -> None:
        """Read the next bytes, as many as fit.

        Raises:
            CaptureFormatError: The chunks end before them.
        """
        while len(view):
            if not len(self._left):
                self._left = next(self._chunks, self._left)
            done = min(len(view), len(self._left))
            view[:done], self._left = self._left[:done], self._left[done:]
            if not done:
                raise self._tensor.placed.sort.truncated(self._tensor.placed.path)
            view = view[done:]


def _chunks(tensor: Whole) -> Iterator[memoryview]:
    """Read the chunks of a tensor in C order, without what pads them.

    A chunk that is no run of consecutive elements is read as the rows of such runs.
    """
    dataset: Any = tensor._dataset
    shape, chunk = tensor.shape, tuple(map(int, dataset.get_create_plist().get_chunk()))
    # The axis along which chunks follow each other: behind it they are whole, before it one element is taken at a time.
    axis = max((at for at, (length, part) in enumerate(zip(shape, chunk, strict=True)) if part < length), default=0)
    space = dataset.get_space()
    for before in itertools.product(*(range(length) for length in shape[:axis])):
        for start in range(0, shape[axis], chunk[axis]):
            count = min(chunk[axis], shape[axis] - start)
            selected = (*(1 for _ in before), count, *shape[axis + 1 :])
            bits = np.empty(math.prod(selected), dtype=BITS[tensor.dtype])
            space.select_hyperslab((*before, start, *(0 for _ in shape[axis + 1 :])), selected)
            dataset.read(h5s.create_simple(selected), space, bits.reshape(selected), mtype=tensor._kind)
            yield bits.view(np.uint8).data
