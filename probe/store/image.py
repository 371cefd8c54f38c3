"""An HDF5 file put together in memory: HDF5 says where things lie, and never touches the disk.

HDF5 that does its own disk I/O takes the training process down with it when the disk is full (the project's storage
study, section 5.3). Here it writes its metadata into a `Journal`; the data goes to the offset that it chose, straight
from the arrays. As the files of a run are alike from step to step, a layout is kept, and for the next file only the
attributes that change are put into it. This module must not know what a segment means.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t

from probe.store.disk import Piece
from probe.store.headers import Patches
from probe.store.layout import PAGE

Kind: TypeAlias = tuple[str, str]
"""What an element is: torch's name of its type and the numpy type string of its bits, as for `tensor_type`."""

KEPT_LAYOUTS = 8
"""Layouts that are kept; most runs need one. Each is as large as the metadata of its file."""


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

    HDF5 reads back little of it, so reads may be slow.
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

    def final(self) -> list[tuple[int, bytes]]:
        """Return what was written and not overwritten, in ascending order, in pieces that do not overlap."""
        # Page by page: what is written may lie far apart, between data of any size.
        pages: dict[int, tuple[bytearray, bytearray]] = {}
        for offset, block in self.extents:
            at = offset
            while at < offset + len(block):
                content, written = pages.setdefault(at // PAGE, (bytearray(PAGE), bytearray(PAGE)))
                stop = min(offset + len(block), (at // PAGE + 1) * PAGE)
                inside = slice(at % PAGE, at % PAGE + stop - at)
                content[inside], written[inside] = block[at - offset : stop - offset], b"\1" * (stop - at)
                at = stop
        final: list[tuple[int, bytes]] = []
        for number, (content, written) in sorted(pages.items()):
            edges = np.flatnonzero(np.diff(np.frombuffer(written, np.int8), prepend=0, append=0)).tolist()
            for start, stop in zip(edges[::2], edges[1::2], strict=True):
                offset, block = number * PAGE + start, bytes(content[start:stop])
                if final and final[-1][0] + len(final[-1][1]) == offset:
                    offset, block = final[-1][0], final.pop()[1] + block
                final.append((offset, block))
        return final


class _Object(NamedTuple):
    """One call that makes a part of a file. Equal objects in the same order give an equal layout."""

    what: str
    """`group`, `array`, `name` or `attribute`."""
    owner: int
    """Number of the group or dataset that gets it."""
    name: bytes
    kind: Kind = ("", "")
    shape: tuple[int, ...] = ()
    value: bytes | None = None
    """Of an attribute that is the same in all files; of a second name the first. None: an attribute that changes."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where HDF5 put things."""

    offsets: tuple[int, ...]
    """Of each dataset's data."""
    metadata: list[tuple[int, bytes]]
    """Everything else."""
    size: int
    """Of the file."""
    patches: Patches | None
    """Where the attributes that change lie; None: that could not be found out."""


class Layouts:
    """Layouts of the files written before."""

    def __init__(self) -> None:
        self._kept: dict[tuple[_Object, ...], _Layout] = {}

    def of(self, objects: tuple[_Object, ...], values: Sequence[bytes]) -> _Layout:
        """Give the layout of a file of these objects, where attributes that change have values of these lengths.

        Where the layout cannot be used again, it holds the values given.
        """
        layout = self._kept.pop(objects, None)
        if layout is None:
            marks = [_mark(number, len(value)) for number, value in enumerate(values)]
            layout = _lay_out(objects, marks)
            try:
                patches = Patches(layout.metadata, marks)
            except ValueError:
                return _lay_out(objects, values)
            layout = _Layout(layout.offsets, layout.metadata, layout.size, patches)
        self._kept[objects] = layout
        if len(self._kept) > KEPT_LAYOUTS:
            del self._kept[next(iter(self._kept))]
        return layout


class Image:
    """One HDF5 file being put together. Groups and datasets are known by the numbers that adding them returns."""

    root = 0

    def __init__(self) -> None:
        self._objects: list[_Object] = []
        self._owners = 1
        self._arrays: list[npt.NDArray[Any]] = []
        self._values: list[bytes] = []
        """Of the attributes that change."""

    def add_group(self, parent: int, name: bytes) -> int:
        """Make a group."""
        self._objects.append(_Object("group", parent, name))
        return self._next()

    def add_array(self, parent: int, name: bytes, array: npt.NDArray[Any], kind: Kind) -> int:
        """Store an array, little endian, bit by bit. It must not change before the file is written.

        Args:
            parent: Group that gets the dataset.
            name: Link name.
            array: Any shape; 0-d and empty arrays too.
            kind: What its elements are.
        """
        self._objects.append(_Object("array", parent, name, kind, array.shape))
        self._arrays.append(array)
        return self._next()

    def add_name(self, group: int, existing: bytes, name: bytes) -> None:
        """Give a dataset of a group a second name in it."""
        self._objects.append(_Object("name", group, name, value=existing))

    def add_text(self, parent: int, name: bytes, texts: Sequence[bytes], shape: tuple[int, ...]) -> None:
        """Store UTF-8 texts, each as long as the longest."""
        kind = _text_kind(max(map(len, texts), default=0))
        self.add_array(parent, name, np.array(texts, dtype=kind[1]).reshape(shape), kind)

    def add_attribute(self, owner: int, name: str, value: int | str, *, changes: bool = False) -> None:
        """Store one number or text.

        Args:
            owner: Group or dataset that gets it.
            name: Of the attribute.
            value: An integer of 64 bits, or text.
            changes: It has another value in the next file.
        """
        if isinstance(value, int):
            kind, data = ("", "<i8"), value.to_bytes(8, "little", signed=True)
        else:
            data = value.encode() or b"\0"
            kind = _text_kind(len(data))
        self._objects.append(_Object("attribute", owner, name.encode(), kind, value=None if changes else data))
        if changes:
            self._values.append(data)

    def pieces(self, layouts: Layouts) -> tuple[list[Piece], int]:
        """Lay the file out.

        Returns:
            Offset and bytes of all that is in it, and its size in bytes. What lies between pieces is undefined.
        """
        layout = layouts.of(tuple(self._objects), self._values)
        metadata: Sequence[tuple[int, bytes | memoryview]] = layout.metadata
        if layout.patches is not None:
            metadata = layout.patches.apply(self._values)
        data = [(at, flat_bytes(a)) for at, a in zip(layout.offsets, self._arrays, strict=True) if a.size]
        return [*data, *((offset, memoryview(block)) for offset, block in metadata)], layout.size

    def _next(self) -> int:
        self._owners += 1
        return self._owners - 1


def _text_kind(nbytes: int) -> Kind:
    return "text", f"S{max(1, nbytes)}"


def _mark(number: int, nbytes: int) -> bytes:
    """Make bytes that a file has once, to find them again."""
    digest = xxhash.xxh3_128_hexdigest(b"attribute %d" % number)
    return (digest * (1 + nbytes // len(digest)))[:nbytes].encode()


def _lay_out(objects: Sequence[_Object], values: Sequence[bytes]) -> _Layout:
    """Let HDF5 lay out a file."""
    journal, changing = Journal(), iter(values)
    access, creation = h5p.create(h5p.FILE_ACCESS), h5p.create(h5p.FILE_CREATE)
    # v108 gives headers with checksums that every reader since 1.8 opens; HDF5's own default gives none.
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V110)
    access.set_alignment(65536, PAGE)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5fd.fileobj_driver, journal)
    # Attributes of the root beyond eight would move out of its header.
    creation.set_attr_phase_change(32, 0)
    contiguous, scalar, grouped = h5p.create(h5p.DATASET_CREATE), h5s.create(h5s.SCALAR), h5p.create(h5p.GROUP_CREATE)
    for properties in (creation, grouped, contiguous):
        properties.set_obj_track_times(False)
    contiguous.set_layout(h5d.CONTIGUOUS)
    contiguous.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    contiguous.set_fill_time(h5d.FILL_TIME_NEVER)
    offsets: list[int] = []
    file = h5f.create(b"segment in memory", h5f.ACC_TRUNC, fcpl=creation, fapl=access)
    try:
        owners: list[Any] = [h5g.open(file, b"/")]
        for what, owner, name, kind, shape, value in objects:
            if what == "group":
                owners.append(h5g.create(owners[owner], name, gcpl=grouped))
            elif what == "name":
                owners[owner].links.create_hard(name, owners[owner], value)
            elif what == "attribute":
                data = np.frombuffer(next(changing) if value is None else value, dtype=kind[1]).reshape(())
                hdf5 = _hdf5_type(kind)
                h5a.create(owners[owner], name, hdf5, scalar).write(data, mtype=hdf5)
            else:
                space = h5s.create_simple(shape) if shape else scalar
                owners.append(h5d.create(owners[owner], name, _hdf5_type(kind), space, contiguous))
                offsets.append(owners[-1].get_offset() or 0)
        owners.clear()
    finally:
        file.close()
    return _Layout(tuple(offsets), journal.final(), journal.size, None)


def _hdf5_type(kind: Kind) -> h5t.TypeID:
    return text_type(int(kind[1][1:])) if kind[0] == "text" else tensor_type(*kind)


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
