"""Read segments that lie in their files as one that was read before does, without asking HDF5 again.

A run's segments differ in their numbers and hardly ever in their layout, and those of another run of the job do not
either. Opening one with HDF5 and looking at every header takes six times as long as reading and checking its tables.
So the places where the tables and the attributes of a segment were found are remembered for as long as the process
lives, and a file of the same size is read at these places, whichever capture it is in. Nothing is taken on trust:
the identity that stands there must be the one that is wanted, and the tables must have the digest that stands there;
if not, or if anything else is unusual, the answer is None and HDF5 is asked. This module must not know what the
tables mean.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from probe.store.guard import Segment
from probe.store.image import Texts
from probe.store.layout import FORMAT_SEGMENT, FORMAT_VERSION, TABLES, TABLES_HASH
from probe.store.rows import LastingTexts

Tables = dict[str, Any]

KEPT = 32
"""Layouts that are learned of one capture: a run has a few, for its first step has more rows."""
REMEMBERED = 64
"""Layouts of all captures that are remembered; the oldest is forgotten first."""
_NEAR = 1 << 16
"""Bytes behind the last table, and at the end of the file, in which the attributes are looked for."""
_GAP = 1 << 13
"""Bytes that are read and not wanted rather than read past."""
_RUNS = 64
"""Most pieces that vectors are read in; beyond it they are read whole and moved."""
_VECTORS = {"sketch": "sketch_row", "sample": "sample_row"}
_CONSTANT: dict[str, int | str] = {"probe_format": FORMAT_SEGMENT, "probe_format_version": FORMAT_VERSION}
_TEXTS = ("probe_format", "run_id", TABLES_HASH)
_NUMBERS = ("probe_format_version", "rank", "world_size", "first_step", "last_step")


class _Place(NamedTuple):
    """Where something lies in the file."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class _Column(NamedTuple):
    """A table other than the vectors."""

    at: slice
    """Where it is in what is read."""
    shape: tuple[int, ...]
    """Without the step axis."""
    code: str
    """numpy type string, `S` and a length for text."""
    aligned: bool
    """It can be used where it is."""


class _Runs(NamedTuple):
    """Which rows have a vector, and which have none: where each run of them begins and ends."""

    full: list[tuple[int, int]]
    bare: list[tuple[int, int]]
    present: npt.NDArray[np.bool_]


@dataclass(slots=True, kw_only=True)
class _Layout:
    """What to read of a file, and what is where in it. Everything but the vectors is read into one piece of memory."""

    reads: list[tuple[int, slice]]
    """From which offset, and to where."""
    size: int
    """Bytes of that memory."""
    columns: dict[str, _Column]
    attributes: dict[str, slice]
    vectors: dict[str, tuple[_Place, int, int]]
    """Place, number and width of the stored vectors."""
    texts: dict[str, tuple[bytes, Texts]] = field(default_factory=dict)
    """What the bytes of each text table were last time, and the texts that they are."""
    runs: dict[str, tuple[bytes, _Runs]] = field(default_factory=dict)
    """What the index of each table of vectors was last time, and where it says that they belong."""


_known: list[tuple[int, _Layout]] = []
"""Size of a file, and a layout that one of that size had. Threads share it, so it is only added to and cut."""


class Twins:
    """Reads segments of one capture in the layouts that are known."""

    def __init__(self) -> None:
        self._learned = 0

    def learn(self, segment: Segment) -> None:
        """Remember where things lie in a segment that was read and found sound."""
        if self._learned >= KEPT:
            return  # a run whose layout never stays the same
        layout = _layout(segment)
        if layout is not None:
            self._learned += 1
            _known.append((segment.size, layout))
            del _known[:-REMEMBERED]

    def tables(self, path: Path, identity: dict[str, int | str]) -> Tables | None:
        """Read the tables of a segment without their step axis, `sketch` and `sample` spread over all rows.

        Args:
            identity: What the attributes must say: the run, the rank, the step.

        Returns:
            The tables, whose digest is right, or None where HDF5 must be asked. `sketch_row` and `sample_row` are None:
            the vectors lie in their rows.
        """
        try:
            status = os.stat(path)
            layouts = [layout for size, layout in _known if size == status.st_size]
            if not layouts or not stat.S_ISREG(status.st_mode):
                return None
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for layout in layouts:
                    tables = _read(descriptor, layout, identity)
                    if tables is not None:
                        return tables
            finally:
                os.close(descriptor)
        except (OSError, ValueError):
            pass  # whoever opens it with HDF5 says what is wrong
        return None


def _layout(segment: Segment) -> _Layout | None:
    tables = {}
    for table in TABLES:
        dataset = segment.dataset(segment.root, table.name.encode())
        item = dataset.get_type().get_size()
        code = f"S{item}" if table.code == "S" else table.code
        shape = tuple(map(int, dataset.shape))
        place = _Place(dataset.get_offset() or 0, item * math.prod(shape))
        tables[table.name] = (place, shape[1:] if table.axes.startswith("S") else shape, code)
    stored = [place for place, _, _ in tables.values() if place.nbytes]
    if not stored:
        return None
    attributes = _attributes(segment, stored)
    if attributes is None:
        return None
    wanted = sorted([*(tables[name][0] for name in tables if name not in _VECTORS), *attributes.values()])
    reads: list[tuple[int, slice]] = []
    used, end = 0, -_NEAR
    for place in (each for each in wanted if each.nbytes):
        if place.offset - end >= _GAP:
            reads.append((place.offset, slice(used, used)))
        offset, where = reads[-1]
        end = max(end, place.end)
        used = where.start + end - offset
        reads[-1] = (offset, slice(where.start, used))

    def at(place: _Place) -> slice:
        if not place.nbytes:
            return slice(0, 0)
        offset, where = next((o, w) for o, w in reversed(reads) if o <= place.offset)
        begin = where.start + place.offset - offset
        return slice(begin, begin + place.nbytes)

    columns = {
        name: _Column(
            at(place), shape, code, not code.startswith("S") and at(place).start % np.dtype(code).itemsize == 0
        )
        for name, (place, shape, code) in tables.items()
        if name not in _VECTORS
    }
    return _Layout(
        reads=reads,
        size=used,
        columns=columns,
        attributes={name: at(place) for name, place in attributes.items()},
        vectors={name: (place, shape[0], shape[1]) for name, (place, shape, _) in tables.items() if name in _VECTORS},
    )


def _attributes(segment: Segment, stored: list[_Place]) -> dict[str, _Place] | None:
    """Find where the attributes of `/` lie: before, between or behind the tables, or at the end of the file."""
    root = segment.root
    values: dict[str, int | str] = {name: segment.text(root, name) for name in _TEXTS}
    values |= {name: segment.number(root, name) for name in _NUMBERS}
    start, stop = min(place.offset for place in stored), max(place.end for place in stored)
    if stop - start > 2 * sum(place.nbytes for place in stored) + _NEAR:
        return None  # tensors between the tables
    stop = min(stop + _NEAR, segment.size)
    windows = [(0 if start <= _NEAR else start, stop)]
    if stop < segment.size:
        windows.append((max(stop, segment.size - _NEAR), segment.size))
    found: dict[str, list[_Place]] = {name: [] for name in values}
    with open(segment.path, "rb") as file:
        for begin, end in (gap for window in windows for gap in _gaps(stored, *window)):
            file.seek(begin)
            around = file.read(end - begin)
            for name, value in values.items():
                found[name] += [_Place(begin + at, nbytes) for at, nbytes in _messages(around, name, _plain(value))]
    if any(len(places) != 1 for places in found.values()):
        return None
    return {name: place for name, (place,) in found.items()}


def _gaps(stored: list[_Place], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """List what lies between the tables: what a table holds is no attribute."""
    for place in sorted(stored):
        if begin < place.offset < end:
            yield begin, place.offset
        begin = max(begin, place.end)
    if begin < end:
        yield begin, end


def _messages(around: bytes, name: str, data: bytes) -> Iterator[_Place]:
    """Find what is a scalar attribute of this name and value.

    Source: HDF5 File Format Specification 3.0, section IV.A.2.m, version 3 of the attribute message.
    """
    plain = name.encode() + b"\0"
    at = around.find(plain, 9)
    while at >= 0:
        version, _, name_size, type_size, space_size, _ = struct.unpack_from("<BBHHHB", around, at - 9)
        begin = at + name_size + type_size + space_size
        if version == 3 and name_size == len(plain) and around[begin : begin + len(data)] == data:
            yield _Place(begin, len(data))
        at = around.find(plain, at + 1)


def _read(descriptor: int, layout: _Layout, identity: dict[str, int | str]) -> Tables | None:
    """Read a file as if it had this layout; None if what is found does not fit."""
    content = np.empty(layout.size, np.uint8)
    for offset, where in layout.reads:
        if not _read_into(descriptor, [content[where]], offset):
            return None
    for name, value in (_CONSTANT | identity).items():
        if content[layout.attributes[name]].tobytes() != _plain(value):
            return None
    tables: Tables = {}
    hashed: dict[str, list[Any]] = {}
    for name, column in layout.columns.items():
        raw = content[column.at]
        if column.code.startswith("S"):
            tables[name] = texts = _texts(layout, name, raw.tobytes(), column.code)
            hashed[name] = [texts.joined]
        else:
            values = raw.view(column.code) if column.aligned else np.frombuffer(raw.tobytes(), column.code)
            tables[name] = values.reshape(column.shape)
            hashed[name] = [raw]
    for name, index in _VECTORS.items():
        spread = _vectors(descriptor, layout, name, tables[index])
        if spread is None:
            return None
        tables[name], hashed[name] = spread
    if _digest(hashed).encode() != content[layout.attributes[TABLES_HASH]].tobytes():
        return None
    for index in _VECTORS.values():
        tables[index] = None
    return tables


def _plain(value: int | str) -> bytes:
    return value.encode() if isinstance(value, str) else struct.pack("<q", value)


def _texts(layout: _Layout, name: str, plain: bytes, code: str) -> Texts:
    last = layout.texts.get(name)
    if last is None or last[0] != plain:
        last = layout.texts[name] = (plain, LastingTexts(np.frombuffer(plain, code).tolist() if plain else []))
    return last[1]


def _vectors(
    descriptor: int, layout: _Layout, name: str, index: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.float32], list[npt.NDArray[np.uint8]]] | None:
    """Read stored vectors straight into the rows that they belong to.

    Returns:
        All rows, NaN where there is no vector, and the bytes of the stored ones in their order; None where the index is
        odd.
    """
    place, stored, width = layout.vectors[name]
    plain = index.tobytes()
    last = layout.runs.get(name)
    if last is None or last[0] != plain:
        runs = _runs(index, stored)
        if runs is None:
            return None
        last = layout.runs[name] = (plain, runs)
    full, bare, present = last[1]
    rows = np.empty((len(index), width), np.float32)
    if len(full) <= _RUNS:
        pieces = [rows[begin:end].reshape(-1).view(np.uint8) for begin, end in full]
        if not _read_into(descriptor, pieces, place.offset):
            return None
        for begin, end in bare:
            rows[begin:end] = np.nan
        return rows, pieces
    whole = np.empty((stored, width), np.float32)
    if not _read_into(descriptor, [whole.reshape(-1).view(np.uint8)], place.offset):
        return None
    rows[~present] = np.nan
    rows[present] = whole
    return rows, [whole.reshape(-1).view(np.uint8)]


def _runs(index: npt.NDArray[np.int32], stored: int) -> _Runs | None:
    """Find which rows have a vector; None where the index does not name each of the stored ones once, in order."""
    present = index >= 0
    if np.count_nonzero(present) != stored or not np.array_equal(index[present], np.arange(stored)):
        return None
    padded = np.zeros(len(index) + 2, np.bool_)
    padded[1:-1] = present
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    full = list(zip(edges[::2], edges[1::2], strict=True))
    bare = list(zip([0, *edges[1::2]], [*edges[::2], len(index)], strict=True))
    return _Runs(full, [(begin, end) for begin, end in bare if begin < end], present)


def _read_into(descriptor: int, buffers: list[npt.NDArray[np.uint8]], offset: int) -> bool:
    wanted = sum(buffer.nbytes for buffer in buffers)
    return not wanted or os.preadv(descriptor, [buffer.data for buffer in buffers], offset) == wanted


def _digest(hashed: dict[str, list[Any]]) -> str:
    """Compute what `probe.store.image.tables_digest` does, of the bytes of tables in pieces."""
    digest = xxhash.xxh3_128()
    for name in sorted(hashed):
        digest.update(name.encode() + b"\0")
        for part in hashed[name]:
            digest.update(part)
    return digest.hexdigest()
