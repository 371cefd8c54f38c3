"""Read the tables of a packed step where they lie in the file, without asking HDF5 again.

Opening a packed file and looking at every header takes five times as long as reading and checking the tables of one
step. So once some steps of a file were read through HDF5, and every table was found sound, the places of all chunks are
remembered. Nothing is taken on trust: whoever reads here checks the digest of the tables, and asks HDF5 if it is
another. Compressed files are left to HDF5. This module must not know what the tables mean.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from h5py import h5d, h5z

from probe.store.guard import Segment

_SUM_NBYTES = 4
"""Of Fletcher-32, behind each chunk."""
_SPREAD = 1 << 20
"""Bytes between the first and the last chunk of a step that are read and not wanted."""


@dataclass(frozen=True, slots=True)
class _Table:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Of one step."""
    chunk: tuple[int, ...]
    """Of one step, too."""
    at: npt.NDArray[np.int64]
    """[S, C] where the chunks of each step lie."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.chunk) * self.dtype.itemsize


class Chunks:
    """Where the tables of all steps lie in a packed file."""

    def __init__(self, tables: dict[str, _Table]) -> None:
        self._tables = tables

    @classmethod
    def of(cls, file: Segment, tables: Iterable[tuple[str, str]]) -> Chunks | None:
        """Find the chunks of tables that were found sound in this open file; None where they are not plain.

        Args:
            file: The packed file.
            tables: Name and numpy type string of each; `S` for text.
        """
        found = {name: _find(file, name, code) for name, code in tables}
        whole = {name: table for name, table in found.items() if table is not None}
        return cls(whole) if len(whole) == len(found) else None

    def read(self, descriptor: int, s: int) -> dict[str, npt.NDArray[Any]]:
        """Read one step of all tables.

        Raises:
            ValueError: The file is shorter than it was.
        """
        ends = [(int(at), int(at) + table.nbytes) for table in self._tables.values() for at in table.at[s]]
        first, last = min((a for a, _ in ends), default=0), max((b for _, b in ends), default=0)
        near = last - first <= sum(b - a for a, b in ends) + _SPREAD
        around = _read(descriptor, first, last) if near else b""
        return {name: _step(table, s, descriptor, around, first) for name, table in self._tables.items()}


def _step(table: _Table, s: int, descriptor: int, around: bytes, first: int) -> npt.NDArray[Any]:
    pieces = [np.empty((0, *table.shape[1:]), table.dtype)]
    for at in map(int, table.at[s]):
        data, offset = (around, at - first) if around else (_read(descriptor, at, at + table.nbytes), 0)
        pieces.append(np.frombuffer(data, table.dtype, math.prod(table.chunk), offset).reshape(table.chunk))
    # Concatenating copies, for what is read where it lies may not be aligned.
    return np.concatenate(pieces)[: table.shape[0]]


def _read(descriptor: int, first: int, last: int) -> bytes:
    data = os.pread(descriptor, last - first, first)
    if len(data) != last - first:
        raise ValueError(f"{len(data)} bytes of {last - first} at {first}")
    return data


def _find(file: Segment, name: str, code: str) -> _Table | None:
    dataset = file.dataset(file.root, name.encode())
    shape = tuple(map(int, dataset.shape))
    dtype = np.dtype(f"S{dataset.get_type().get_size()}" if code == "S" else code)
    if not all(shape[1:]):
        return _Table(dtype, shape[1:], shape[1:], np.empty((shape[0], 0), np.int64))
    made = dataset.get_create_plist()
    filters = [made.get_filter(index)[0] for index in range(made.get_nfilters())]
    if made.get_layout() != h5d.CHUNKED or filters != [h5z.FILTER_FLETCHER32] or not hasattr(dataset, "chunk_iter"):
        return None
    chunk = tuple(map(int, made.get_chunk()))
    if chunk[0] != 1 or chunk[2:] != shape[2:]:
        return None
    at = np.full((shape[0], -(-shape[1] // chunk[1])), -1, np.int64)
    nbytes = math.prod(chunk) * dtype.itemsize + _SUM_NBYTES

    def note(info: Any) -> None:
        if info.size == nbytes and not info.filter_mask and info.byte_offset + nbytes <= file.size:
            at[info.chunk_offset[0], info.chunk_offset[1] // chunk[1]] = info.byte_offset

    dataset.chunk_iter(note)
    return None if (at < 0).any() else _Table(dtype, shape[1:], chunk[1:], at)
