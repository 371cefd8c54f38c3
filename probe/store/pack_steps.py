"""Write steps of one rank into one packed file, and read it back before it gets its name.

The file is written beside what it is made of, synced, read back and compared step by step; only then it is renamed.
One step is in memory at a time, and of its whole tensors a piece. This module must not know why the steps are packed,
nor remove anything that they were read from.

Shapes: see `probe.store.packed`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5s, h5t

from probe.errors import CaptureError
from probe.store.folder import now, sync_folder
from probe.store.guard import PACKED, open_segment
from probe.store.image import text_type
from probe.store.layout import FORMAT_MINOR, FORMAT_PACKED, FORMAT_VERSION, UNFINISHED
from probe.store.pack_tensors import add_tensor
from probe.store.packed import COUNTED, LISTED, NAMES, STEPPED, Packed
from probe.store.rows import Tables
from probe.store.sink import Sink
from probe.store.steps import StepFile

KEPT_NBYTES = 64 << 20
"""Tables that are kept from the first pass to the second, not read twice: those of 100 steps of 400 quantities."""
_ROWS = 256
"""Vectors of one chunk: 256 KiB of sketches."""
RESERVE = 64 << 20
"""Bytes that must stay free on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Steps of one rank, and where they are read from."""

    run_id: str
    rank: int
    world_size: int
    steps: tuple[int, ...]
    """Ascending."""
    open_step: Callable[[int], AbstractContextManager[StepFile]]
    nbytes: Callable[[int], int]
    """What a step takes of the file that holds it."""


def write_packed(
    source: Source, target: Path, *, compress: bool, progress: Callable[[int], None], reserve: int = RESERVE
) -> None:
    """Write a packed file, whole or not at all.

    Args:
        source: What it is made of.
        target: Its name; a file of that name is replaced.
        compress: Shuffle and deflate what gets smaller by it.
        progress: Is told after each step how many bytes it took where it was read.
        reserve: Bytes that it must leave free on the disk.

    Raises:
        CaptureError: A step is damaged, the disk is full, or what was read back is not what was packed.
    """
    unfinished = target.with_name(target.name + UNFINISHED)
    try:
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            sync_folder(target.parent.parent)
        _require_space(source, target.parent, reserve)
        with Sink(unfinished) as sink:
            with h5py.File(sink, "w", libver=("v110", "v110"), track_order=False) as file:
                digests = _fill(file, source, compress, sink, progress)
            sink.finish()
        require_same(source, unfinished, digests)
        os.rename(unfinished, target)
        sync_folder(target.parent)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CaptureError(
            f"Packed file {target} could not be written: {error.strerror or error}. The segments are all there."
        ) from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _require_space(source: Source, folder: Path, reserve: int) -> None:
    need = sum(map(source.nbytes, source.steps)) * 11 // 10 + reserve
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < need:
        raise CaptureError(
            f"Rank {source.rank} is not packed into {folder}: it needs up to {-(-need >> 20)} MiB, {reserve >> 20} MiB "
            f"of them to stay free, and {free >> 20} MiB are left. Free space, or move the capture to a larger disk."
        )


@dataclass(slots=True)
class _Plan:
    """What all steps of a rank share, gathered in a first pass over their tables."""

    names: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """Name of a quantity, a value for each of `NAMES`, to its column."""
    texts: dict[str, dict[bytes, int]] = field(default_factory=lambda: {table.name: {} for table in LISTED})
    """Texts of each of `LISTED`, numbered."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    """Most texts, sketches and samples of a step."""
    widths: dict[str, int] = field(default_factory=lambda: {"sketch": 1, "sample": 1, "text": 1})
    """Length of a sketch and of a sample, bytes of the longest text."""

    def add(self, tables: Tables) -> None:
        for names in zip(*(_listed(tables[table.name]) for table in NAMES), strict=True):
            self.names.setdefault(names, len(self.names))
        for column, known in self.texts.items():
            for text in tables[column]:
                known.setdefault(text, len(known))
        for name in COUNTED:
            self.counts[name] = max(self.counts[name], len(tables[name]))
        for name in ("sketch", "sample"):
            self.widths[name] = max(self.widths[name], tables[name].shape[1])
        self.widths["text"] = max([self.widths["text"], *map(len, tables["text"])])


def _listed(column: npt.NDArray[Any] | list[bytes]) -> list[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else column


def _fill(
    file: h5py.File, source: Source, compress: bool, sink: Sink, progress: Callable[[int], None]
) -> dict[int, str]:
    """Fill a packed file, and return the digest of each step's tables."""
    steps = source.steps
    plan = _Plan()
    digests, created = [], []
    kept: dict[int, Tables] = {}
    room = KEPT_NBYTES
    for step in steps:
        with source.open_step(step) as opened:
            tables = opened.tables()
            plan.add(tables)
            room -= _nbytes(tables)
            if room >= 0 and not any(tables["tensor"]):
                kept[step] = tables
            digests.append(opened.tables_digest().encode())
            created.append(opened.created_utc().encode())
    attributes: dict[str, int | str] = {
        "probe_format": FORMAT_PACKED,
        "probe_format_version": FORMAT_VERSION,
        "probe_format_minor": FORMAT_MINOR,
        "run_id": source.run_id,
        "rank": source.rank,
        "world_size": source.world_size,
        "created_utc": now(),
    }
    for name, value in attributes.items():
        kind = h5py.string_dtype("utf-8", len(value.encode())) if isinstance(value, str) else np.dtype("<i8")
        file.attrs.create(name, value.encode() if isinstance(value, str) else value, dtype=kind)
    datasets = _lay_out(file, plan, steps, digests, created, compress)
    for s, step in enumerate(steps):
        if step in kept:
            _write_step(datasets, plan, s, kept.pop(step))
        else:
            with source.open_step(step) as opened:
                tables = opened.tables()
                _write_step(datasets, plan, s, tables)
                _write_tensors(file, opened, [link for link in tables["tensor"] if link], compress)
        sink.require_sound()
        progress(source.nbytes(step))
    return {step: digest.decode() for step, digest in zip(steps, digests, strict=True)}


def _nbytes(tables: Tables) -> int:
    return sum(each.nbytes if isinstance(each, np.ndarray) else 64 * len(each) for each in tables.values())


def _write_tensors(file: h5py.File, opened: StepFile, links: list[bytes], compress: bool) -> None:
    if not links:
        return
    group = file.require_group("tensors").create_group(f"step{opened.step:08d}")
    stored: dict[tuple[Any, ...], bytes] = {}
    for link in links:
        tensor = opened.tensor(link)
        same = stored.setdefault((tensor.digest, tensor.dtype, tensor.shape), link)
        if same is link:
            add_tensor(group, link, tensor, compress)
        else:
            group.id.links.create_hard(link, group.id, same)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A dataset that has a row for each step."""

    dataset: h5d.DatasetID
    kind: h5t.TypeID
    shape: tuple[int, ...]
    """Of one step."""
    dtype: np.dtype[Any]
    empty: Any

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> _Column:
        kind = dataset.id.get_type()
        return cls(dataset=dataset.id, kind=kind, shape=dataset.shape[1:], dtype=dataset.dtype, empty=dataset.fillvalue)

    def put(self, s: int, at: Any, values: Any) -> None:
        """Write one step, empty but for the rows `at`. h5py's own assignment takes four times as long."""
        if not all(self.shape):
            return
        whole = np.full((1, *self.shape), self.empty, dtype=self.dtype)
        whole[0, at] = values
        space = self.dataset.get_space()
        space.select_hyperslab((s, *(0 for _ in self.shape)), whole.shape)
        self.dataset.write(h5s.create_simple(whole.shape), space, whole, mtype=self.kind)


def _lay_out(
    file: h5py.File,
    plan: _Plan,
    steps: tuple[int, ...],
    digests: list[bytes],
    created: list[bytes],
    compress: bool,
) -> dict[str, _Column]:
    """Make all datasets, and fill those that are the same for all steps."""
    count, quantities = len(steps), len(plan.names)
    file.create_dataset("step", data=np.array(steps, dtype="<i8"))
    _add_texts(file, "tables_xxh3_128", digests)
    _add_texts(file, "created_utc", created)
    columns = list(zip(*plan.names, strict=True)) or [()] * len(NAMES)
    for table, column in zip(NAMES, columns, strict=True):
        if table.code == "S":
            _add_texts(file, table.name, list(column))
        else:
            file.create_dataset(table.name, data=np.array(column, dtype=table.code))
    for table in LISTED:
        _add_texts(file, table.name, list(plan.texts[table.name]))
    made: dict[str, h5py.Dataset] = {}

    def add(name: str, shape: tuple[int, ...], kind: Any, chunk: tuple[int, ...], empty: Any) -> None:
        filters: dict[str, Any] = {"fletcher32": True}
        if compress and name not in ("sketch", "sample"):  # noise does not get smaller
            filters |= {"shuffle": True, "compression": "gzip", "compression_opts": 1}
        if not all(shape):
            made[name] = file.create_dataset(name, shape, kind)
        else:
            made[name] = file.create_dataset(name, shape, kind, chunks=chunk, fillvalue=empty, **filters)

    add("stored", (count, 3), "<i4", (1, 3), 0)
    for name in ("row", *(f"{table.name}_row" for table in LISTED)):
        add(name, (count, quantities), "<i4", (1, quantities), -1)
    for table in STEPPED:
        if table.name in COUNTED:
            rows, width = plan.counts[table.name], plan.widths[table.name]
            if table.code == "S":
                add(table.name, (count, rows), h5py.string_dtype("utf-8", width), (1, _even(rows, 16)), b"")
            else:
                add(table.name, (count, rows, width), table.code, (1, _even(rows, _ROWS), width), np.nan)
        else:
            tail = tuple(int(axis) for axis in table.axes[2:])
            empty = np.nan if table.code == "<f8" else -1 if table.code == "<i4" else 0
            add(table.name, (count, quantities, *tail), table.code, (1, quantities, *tail), empty)
    _name_axes(file, made)
    return {name: _Column.of(dataset) for name, dataset in made.items()}


def _even(rows: int, most: int) -> int:
    """Return the rows of chunks of about the same size: what the last one lacks is stored too.

    >>> _even(337, 256)
    169
    """
    return -(-rows // max(1, -(-rows // most)))


def _add_texts(file: h5py.File, name: str, texts: list[bytes]) -> None:
    width = max(map(len, texts), default=0)
    space = h5py.h5s.create_simple((len(texts),))
    kind = text_type(width)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, space)
    if texts:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(texts, dtype=f"S{max(1, width)}"), mtype=kind)


def _name_axes(file: h5py.File, made: dict[str, h5py.Dataset]) -> None:
    """Name the axes, so that tools such as xarray align the tables by step and quantity. All of a table, or none."""
    axes: dict[str, tuple[str, ...]] = {"hash": ("hash_half",), "stored": ("stored_kind",), "text": ("text_i",)}
    axes |= {"sketch": ("sketch_i", "sketch_k"), "sample": ("sample_i", "sample_n")}
    for name in ("step", "quantity"):
        file[name].make_scale(name)
    for name, dataset in made.items():
        behind = () if name in COUNTED or name == "stored" else ("quantity",)
        for at, axis in enumerate(("step", *behind, *axes.get(name, ()))):
            if axis not in file:
                file.create_dataset(axis, data=np.arange(dataset.shape[at], dtype="<i4")).make_scale(axis)
            dataset.dims[at].attach_scale(file[axis])
    of_axis = {"step": ("tables_xxh3_128", "created_utc"), "quantity": tuple(each.name for each in NAMES[1:])}
    for axis, names in of_axis.items():
        for name in names:
            file[name].dims[0].attach_scale(file[axis])


def _write_step(columns: dict[str, _Column], plan: _Plan, s: int, tables: Tables) -> None:
    found = [plan.names[name] for name in zip(*(_listed(tables[table.name]) for table in NAMES), strict=True)]
    at = np.array(found, dtype=np.intp)
    columns["row"].put(s, at, np.arange(len(at), dtype=np.int32))
    for table in LISTED:
        columns[f"{table.name}_row"].put(s, at, [plan.texts[table.name][text] for text in tables[table.name]])
    for table in STEPPED:
        values, column = tables[table.name], columns[table.name]
        if table.name not in COUNTED:
            column.put(s, at, values)
        elif len(values):
            column.put(s, slice(len(values)), np.array(values, dtype=column.dtype) if table.code == "S" else values)
    columns["stored"].put(s, slice(len(COUNTED)), [len(tables[name]) for name in COUNTED])


def require_same(source: Source, path: Path, digests: Mapping[int, str] | None = None) -> None:
    """Read a packed file back, and compare every step with what it was made of.

    Equal digests over what was read on both sides are equal bits.

    Args:
        source: What it was made of.
        path: The packed file.
        digests: What the tables of each step had, where they were read just now.

    Raises:
        CaptureError: It is damaged, or does not hold what it was made of.
    """
    packed = Packed(path, run_id=source.run_id, rank=source.rank, world_size=source.world_size)
    if not set(source.steps) <= set(packed.steps):
        raise CaptureError(f"Packed file {path} lacks steps of rank {source.rank}. Its segments are kept.")
    with open_segment(path, PACKED) as file:
        for step in source.steps:
            copy = StepFile(file, step, packed)
            tables = copy.tables()
            if digests is not None and not any(tables["tensor"]):
                same = digests[step] == copy.tables_digest()
            else:
                same = _same_tensors(source, step, copy, tables)
            if not same:
                raise CaptureError(
                    f"Packed file {path} does not hold what step {step} of rank {source.rank} does. The segments are "
                    "kept; remove the packed file and pack again."
                )


def _same_tensors(source: Source, step: int, copy: StepFile, tables: Tables) -> bool:
    """Tell whether a copy, whose bits are read again, has the digests of what it was made of."""
    with source.open_step(step) as original:
        same = original.tables_digest() == copy.tables_digest()
        for link in (link for link in tables["tensor"] if link) if same else ():
            one, two = original.tensor(link), copy.tensor(link)
            same = same and (one.dtype, one.shape, one.digest) == (two.dtype, two.shape, two.digest)
            two.verify()
    return same
