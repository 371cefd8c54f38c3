"""The layout of a segment, made in memory by HDF5 and written by plain system calls.

HDF5 that does its own disk I/O takes the training process down with it when the disk is full (the project's storage
study, section 5.3). Here HDF5 only decides where things lie: it writes its metadata into a `Journal`, while the data
goes to the offset it chose, straight from the arrays. This module must not know what a segment means.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import xxhash
from h5py import h5a, h5d, h5g, h5p, h5s, h5t

PIECE = 16 << 20
"""Bytes of one pwrite. Source: the project's storage study, section 3.1."""
HASHED_PIECE = 1 << 20
"""The same where bits are hashed on the way: what was just read for the digest is still in the cache for the write."""


@cache
def text_type(nbytes: int) -> h5t.TypeID:
    """Make the HDF5 type of UTF-8 text of fixed length, padded with NUL.

    HDF5 reads it four times faster than variable length (8 text tables of 2,000 rows: 2-3 CPU-ms against 8-12), keeps
    no part of it where no checksum covers it, and needs no pointers from the file.
    """
    kind = h5t.C_S1.copy()
    kind.set_size(max(1, nbytes))
    kind.set_cset(h5t.CSET_UTF8)
    kind.set_strpad(h5t.STR_NULLPAD)
    return kind


@cache
def tensor_type(dtype: str, bits: str) -> h5t.TypeID:
    """Make the HDF5 type that an element type is stored as.

    bf16 and fp8-e5m2 become floating-point types, equal to HDF5 2.0's predefined ones and readable since 1.8. The
    other fp8 types stay bytes: HDF5's e4m3 would show 14 of 256 codes wrongly.

    Args:
        dtype: torch's name of the element type.
        bits: numpy type string of its bits.

    Source: the project's storage study, section 1.
    """
    if dtype == "bfloat16":
        kind = h5t.IEEE_F16LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_ebias(127)
        return kind
    if dtype == "float8_e5m2":
        kind = h5t.IEEE_F16LE.copy()
        kind.set_fields(7, 2, 5, 0, 2)
        kind.set_precision(8)
        kind.set_size(1)
        kind.set_ebias(15)
        return kind
    if dtype in ("complex64", "complex128"):  # spelled out, so that no newer library picks its own complex type
        part = h5t.IEEE_F32LE if dtype == "complex64" else h5t.IEEE_F64LE
        kind = h5t.create(h5t.COMPOUND, 2 * part.get_size())
        kind.insert(b"r", 0, part)
        kind.insert(b"i", part.get_size(), part)
        return kind
    return h5t.py_create(np.dtype(bits), logical=True)


class Journal(io.RawIOBase):
    """A file in memory that remembers what HDF5 wrote, in order, and nothing else.

    Only these byte ranges may reach the disk: whole pages would overwrite data that lies between them. HDF5 reads
    back little of it, so reads may be slow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.extents: list[tuple[int, bytes]] = []
        """Offset and bytes of every write, oldest first."""
        self.size = 0
        self._position = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        self.size = self._position if size is None else size
        return self.size

    def write(self, data: Any) -> int:
        block = bytes(data)
        last = self.extents[-1] if self.extents else (0, b"")
        if last[0] == self._position and len(last[1]) == len(block):
            self.extents[-1] = (self._position, block)  # HDF5 likes to write the superblock twice
        else:
            self.extents.append((self._position, block))
        self._position += len(block)
        self.size = max(self.size, self._position)
        return len(block)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start = self._position
        count = max(0, min(len(view), self.size - start))
        view[:count] = bytes(count)
        for offset, block in self.extents:
            low, high = max(start, offset), min(start + count, offset + len(block))
            if low < high:
                view[low - start : high - start] = block[low - offset : high - offset]
        self._position = start + count
        return count


class Image:
    """One HDF5 file being laid out in memory, its data written to a descriptor as it comes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._journal = Journal()
        # v108 gives headers with checksums that every reader since 1.8 opens; HDF5's own default gives none.
        self.file = h5py.File(
            self._journal,
            "w",
            libver=("v108", "v110"),
            alignment_threshold=65536,
            alignment_interval=4096,
        )
        self.root: h5g.GroupID = h5g.open(self.file.id, b"/")
        self._scalar = h5s.create(h5s.SCALAR)
        self._contiguous = h5p.create(h5p.DATASET_CREATE)
        self._contiguous.set_layout(h5d.CONTIGUOUS)
        self._contiguous.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._contiguous.set_fill_time(h5d.FILL_TIME_NEVER)
        self._contiguous.set_obj_track_times(False)

    def close(self) -> None:
        """Let HDF5 go. What it would still write goes nowhere but memory."""
        self.file.close()

    def finish(self) -> int:
        """Write HDF5's metadata and give the file its length.

        Returns:
            The size of the file in bytes.
        """
        self.close()
        for offset, block in self._journal.extents:
            self._write(memoryview(block), offset)
        os.ftruncate(self._descriptor, self._journal.size)
        return self._journal.size

    def add_group(self, parent: h5g.GroupID, name: bytes) -> h5g.GroupID:
        """Make a group."""
        return h5g.create(parent, name)

    def add_array(
        self,
        parent: h5g.GroupID,
        name: bytes,
        array: npt.NDArray[Any],
        kind: h5t.TypeID,
        digest: xxhash.xxh3_128 | None = None,
    ) -> h5d.DatasetID:
        """Store an array, little endian, bit by bit.

        Args:
            parent: Group that gets the dataset.
            name: Link name.
            array: Any shape; 0-d and empty arrays too.
            kind: HDF5 type of the same size as the array's elements.
            digest: Is given the bits while they are in the cache for writing; None: nobody wants one.
        """
        space = h5s.create_simple(array.shape) if array.shape else h5s.create(h5s.SCALAR)
        dataset = h5d.create(parent, name, kind, space, self._contiguous)
        if array.size:
            self._write(flat_bytes(array), dataset.get_offset(), digest)
        return dataset

    def add_name(self, group: h5g.GroupID, existing: bytes, name: bytes) -> None:
        """Give a dataset of a group a second name in it."""
        group.links.create_hard(name, group, existing)

    def add_text(self, parent: h5g.GroupID, name: bytes, texts: Sequence[bytes], shape: tuple[int, ...]) -> None:
        """Store UTF-8 texts, each as long as the longest."""
        longest = max(map(len, texts), default=0)
        fixed = np.array(texts, dtype=f"S{max(1, longest)}").reshape(shape)
        self.add_array(parent, name, fixed, text_type(longest))

    def add_attribute(self, owner: h5g.GroupID | h5d.DatasetID, name: str, value: int | str) -> None:
        """Store one number or text."""
        if isinstance(value, int):
            kind, data = h5t.STD_I64LE, np.array(value, dtype="<i8")
        else:
            encoded = value.encode()
            kind, data = text_type(len(encoded)), np.array(encoded, dtype=f"S{max(1, len(encoded))}")
        h5a.create(owner, name.encode(), kind, self._scalar).write(data, mtype=kind)

    def _write(self, view: memoryview, offset: int, digest: xxhash.xxh3_128 | None = None) -> None:
        begun = offset
        while len(view):
            if offset - begun >= PIECE:
                self._begin_writeback(begun, offset)
                begun = offset
            piece = view[: PIECE if digest is None else HASHED_PIECE]
            if digest is not None:
                digest.update(piece)
            while len(piece):
                done = os.pwrite(self._descriptor, piece, offset)
                piece, view, offset = piece[done:], view[done:], offset + done

    def _begin_writeback(self, start: int, stop: int) -> None:
        """Let the disk begin, instead of waiting for the sync: Linux writes what it is told that it may forget.

        Measured with benchmarks/write.py: 1.2 times as fast as plain writes and a sync, against 0.9 without.
        """
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


def flat_bytes(array: npt.NDArray[Any]) -> memoryview:
    """View the elements of an array as bytes, little endian and in C order, without a copy where that is possible."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def bits_digest(array: npt.NDArray[Any]) -> str:
    """Compute the 32 hex digits of xxh3_128 over an array's bits, little endian and in C order."""
    return xxhash.xxh3_128_hexdigest(flat_bytes(array))


class Texts(list[bytes]):
    """The UTF-8 texts of a table."""

    @cached_property
    def joined(self) -> bytes:
        """Every text and a NUL byte: what a digest is over. The texts must not change afterwards."""
        return b"\0".join([*self, b""])


def tables_digest(tables: Mapping[str, npt.NDArray[Any] | Sequence[bytes]]) -> str:
    """Compute the digest that covers a segment's tables.

    It is xxh3_128 over the tables in alphabetical order: the name and a NUL byte; then the elements, little endian and
    in C order, or every text followed by a NUL byte.

    Args:
        tables: Arrays, or the UTF-8 texts of a text table.
    """
    digest = xxhash.xxh3_128()
    for name in sorted(tables):
        digest.update(name.encode() + b"\0")
        table = tables[name]
        if isinstance(table, np.ndarray):
            digest.update(flat_bytes(table))
        else:
            digest.update(table.joined if isinstance(table, Texts) else Texts(table).joined)
    return digest.hexdigest()
