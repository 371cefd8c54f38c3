"""Read the steps of a rank that were packed into one file.

A packed file holds what its segments held, bit by bit: the tables of a step come out as the segment had them, and are
checked against the digest that the segment had. Names are stored once for all steps. This module must not know how a
file is packed, nor what the tables mean.

Shapes: S steps, Q quantities of all steps, T, R and P the most texts, sketches and samples that one step has.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from h5py import h5d, h5s, h5t

from probe.store.guard import PACKED, Segment, Sort, open_segment
from probe.store.image import Texts, tables_digest, tensor_type
from probe.store.layout import TABLES, Table
from probe.store.packed_chunks import Chunks
from probe.store.rows import Tables

NAMES = tuple(table for table in TABLES if table.name in ("quantity", "kind", "name", "item", "microbatch", "call"))
"""Stored once for all steps, [Q]."""
LISTED = tuple(table for table in TABLES if table.axes == "Q" and table not in NAMES)
"""Texts that are stored where they differ; `NAME_row` [S, Q] says which one a row has."""
STEPPED = tuple(table for table in TABLES if table.axes.startswith("S"))
"""Stored for each step. Of [S, Q], a row that a step does not have is empty; of others, `stored` says how many there
are."""
COUNTED = ("text", "sketch", "sample")
"""Columns of `stored` [S, 3]."""


_SLABS = (
    ("row", "<i4"),
    ("stored", "<i4"),
    *((f"{table.name}_row", "<i4") for table in LISTED),
    *((table.name, table.code) for table in STEPPED),
)
"""Name and type of every table that has a part for each step."""
_FEW = 3
"""Steps that are read through HDF5 before the places of all others are looked up, which takes as long as two."""
KEPT = 64
"""Columns of texts that are remembered: a run has eight, and few others where its plan or its model changes."""


def step_group(step: int) -> bytes:
    """Name the group under `/tensors` that holds a step's tensors.

    >>> step_group(12)
    b'step00000012'
    """
    return b"step%08d" % step


@dataclass(frozen=True, slots=True)
class Stated:
    """What a packed file says of a step."""

    digest: str
    """What its tables must have."""
    created_utc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """What is the same for all steps of a packed file, and small."""

    steps: dict[int, Stated]
    names: Tables
    listed: dict[str, list[bytes]]


class Packed:
    """Packed steps of one rank. Holds no file open."""

    def __init__(
        self, path: Path, *, run_id: str, rank: int, world_size: int, sort: Sort = PACKED, steps: tuple[int, ...] = ()
    ) -> None:
        """Look at the steps, unless they are told; see `open_segment` for what is refused."""
        self.path = path
        self.sort = sort
        self._identity: dict[str, int | str] = {"run_id": run_id, "rank": rank, "world_size": world_size}
        self._state: tuple[int, ...] = ()
        self._index: Index | None = None
        self._chunks: Chunks | None = None
        self._reads = 0
        """Steps that HDF5 has read."""
        self._lock = threading.Lock()
        self.steps = steps
        if steps:
            return
        with open_segment(path, sort) as file:
            self.require_identity(file)
            self.steps = tuple(map(int, file.array(file.root, b"step", h5t.STD_I64LE, "<i8").tolist()))
            if list(self.steps) != sorted(set(self.steps)):
                raise file.refusal("dataset 'step'", "is not ascending")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what can be read again, and name the file so that a process elsewhere finds it."""
        return self.__dict__ | {
            "path": self.path.absolute(),
            "_index": None,
            "_chunks": None,
            "_state": (),
            "_lock": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def require_identity(self, file: Segment) -> None:
        """Refuse a file of another run, rank or world size."""
        for name, value in self._identity.items():
            found = file.text(file.root, name) if isinstance(value, str) else file.number(file.root, name)
            if found != value:
                raise file.refusal(f"attribute {name!r}", f"is {found!r} instead of {value!r}")

    def tables(self, file: Segment, step: int) -> Tables:
        """Read the tables of a step as its segment had them, without a step axis.

        Raises:
            CaptureFormatError: They do not have their digest, or the file is hostile.
        """
        index, stated = self._known(file), self.stated(file, step)
        s = list(index.steps).index(step)

        def slab(name: str, code: str, count: int | None = None) -> npt.NDArray[Any]:
            return _text_slab(file, name, s, count or 0) if code == "S" else _slab(file, name, code, s, count)

        try:
            tables = _put_together(index, step, slab)
        except _Contradiction as error:
            raise file.refusal(*error.args) from error
        if tables_digest(tables) != stated.digest:
            raise file.damage(f"the tables of step {step} do not have their digest")
        with self._lock:
            self._reads += 1
            if self._reads == _FEW:
                self._chunks = Chunks.of(file, _SLABS)
        return tables

    def known_tables(self, step: int) -> Tables | None:
        """Read the tables of a step as `tables` does, but without HDF5; None where it must be asked."""
        with self._lock:
            index, chunks, state = self._index, self._chunks, self._state
        if index is None or chunks is None or step not in index.steps:
            return None
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _state(os.fstat(descriptor)) != state:
                    return None
                read = chunks.read(descriptor, list(index.steps).index(step))
            finally:
                os.close(descriptor)
            tables = _put_together(index, step, lambda name, code, count=None: read[name][:count])
        except (OSError, ValueError):
            return None  # whoever asks HDF5 says what is wrong
        return tables if tables_digest(tables) == index.steps[step].digest else None

    def stated(self, file: Segment, step: int) -> Stated:
        """Return what the file says of a step."""
        steps = self._known(file).steps
        if step not in steps:
            raise file.refusal("dataset 'step'", f"lacks step {step}, which end.json names")
        return steps[step]

    def _known(self, file: Segment) -> Index:
        """Read what all steps share, once for as long as the file is the same."""
        state = _state(self.path.stat())
        with self._lock:
            if self._index is None or self._state != state:
                self._index, self._state, self._chunks, self._reads = _read_index(file), state, None, 0
            return self._index


class _Contradiction(ValueError):
    """What contradicts the rest, and how."""


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _put_together(index: Index, step: int, slab: Callable[..., npt.NDArray[Any]]) -> Tables:
    """Make the tables of a step from what all steps share and from its own part of each table, which `slab` reads."""
    rows = slab("row", "<i4")
    present = np.flatnonzero(rows >= 0)
    order = present[np.argsort(rows[present], kind="stable")]
    if not np.array_equal(rows[order], np.arange(len(order))):
        raise _Contradiction("dataset 'row'", f"does not number the rows of step {step}")
    tables: Tables = {}
    for name, column in index.names.items():
        tables[name] = column[order] if isinstance(column, np.ndarray) else _picked(column, order.tolist())
    try:
        for table in LISTED:
            which = slab(f"{table.name}_row", "<i4")[order]
            if which.size and which.min() < 0:
                raise IndexError(f"{table.name} has no text {which.min()}")
            tables[table.name] = _picked(index.listed[table.name], which.tolist())
    except IndexError as error:
        raise _Contradiction("its tables", f"contradict each other: {error}") from error
    stored = slab("stored", "<i4").tolist()
    for table in STEPPED:
        if table.name not in COUNTED:
            tables[table.name] = slab(table.name, table.code)[order]
            continue
        found = slab(table.name, table.code, stored[COUNTED.index(table.name)])
        tables[table.name] = Texts(found.tolist()) if table.code == "S" else found
    return tables


def _read_index(file: Segment) -> Index:
    names: Tables = {}
    for table in NAMES:
        names[table.name] = _shared(_texts(file, table.name)) if table.code == "S" else _numbers(file, table)
    lengths = {len(column) for column in names.values()}
    if len(lengths) != 1:
        raise file.refusal("its tables", f"contradict each other: names of {sorted(lengths)} quantities")
    steps = map(int, file.array(file.root, b"step", h5t.STD_I64LE, "<i8").tolist())
    digests, created = ([text.decode() for text in _texts(file, name)] for name in ("tables_xxh3_128", "created_utc"))
    return Index(
        steps={step: Stated(*said) for step, *said in zip(steps, digests, created, strict=True)},
        names=names,
        listed={table.name: _shared(_texts(file, table.name)) for table in LISTED},
    )


_KNOWN: OrderedDict[bytes, Texts] = OrderedDict()
"""Columns of texts, by their digests, those that were used last at the end."""
_KNOWN_LOCK = threading.Lock()


def _shared(texts: Texts) -> Texts:
    """Return the same object for the same texts: a run has many packed files, and their names are the same."""
    digest = xxhash.xxh3_128_digest(texts.joined)
    with _KNOWN_LOCK:
        known = _KNOWN.setdefault(digest, texts)
        _KNOWN.move_to_end(digest)
        if len(_KNOWN) > KEPT:
            _KNOWN.popitem(last=False)
    return known


def _texts(file: Segment, name: str) -> Texts:
    return file.texts(file.root, name.encode())[0]


def _numbers(file: Segment, table: Table) -> npt.NDArray[Any]:
    return file.array(file.root, table.name.encode(), tensor_type("", table.code), table.code)


def _picked(texts: list[bytes], which: list[int]) -> Texts:
    return Texts([texts[at] for at in which])


def _slab(file: Segment, name: str, code: str, s: int, count: int | None = None) -> npt.NDArray[Any]:
    """Read one step of a table, or the first `count` rows of it."""
    kind = tensor_type("", code)
    dataset = file.typed(file.root, name.encode(), kind)
    return _read(file, name, dataset, np.dtype(code), kind, s, count)


def _text_slab(file: Segment, name: str, s: int, count: int) -> npt.NDArray[Any]:
    dataset = file.dataset(file.root, name.encode())
    kind = dataset.get_type()
    if kind.get_class() != h5t.STRING or kind.is_variable_str():
        raise file.refusal(f"dataset {name!r}", "is not text of fixed length")
    return _read(file, name, dataset, np.dtype(f"S{kind.get_size()}"), kind, s, count)


def _read(
    file: Segment,
    name: str,
    dataset: h5d.DatasetID,
    dtype: np.dtype[Any],
    kind: h5t.TypeID,
    s: int,
    count: int | None,
) -> npt.NDArray[Any]:
    shape = tuple(map(int, dataset.shape))
    if len(shape) < 2 or s >= shape[0] or (count is not None and not 0 <= count <= shape[1]):
        rows = "" if count is None else f" and {count} rows"
        raise file.refusal(f"dataset {name!r}", f"has shape {shape}, and step {s + 1}{rows} of it is wanted")
    wanted = (1, shape[1] if count is None else count, *shape[2:])
    array = np.empty(wanted[1:], dtype)
    if array.size:
        space = dataset.get_space()
        space.select_hyperslab((s, *(0 for _ in wanted[1:])), wanted)
        dataset.read(h5s.create_simple(wanted), space, array, mtype=kind)
    return array
