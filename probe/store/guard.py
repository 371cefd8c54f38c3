"""Open a file of a capture that somebody else may have made, and hand out only what cannot harm.

An HDF5 file can make its reader open other files, load libraries, and reserve any amount of memory (the project's
storage study, section 5.6). A segment needs none of that, so it is refused: what is read must be reached by hard links
alone, lie contiguous inside the file, and have exactly the type that the format gives it. Nothing is read before that
is established. A packed file may have chunks too, of bounded size and expansion, through the filters that HDF5 itself
has. This module must not know what the tables mean.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t, h5z

from probe.errors import CaptureError, CaptureFormatError
from probe.store.image import Texts
from probe.store.layout import FORMAT_PACKED, FORMAT_SEGMENT, FORMAT_VERSION

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LAYOUTS = {h5d.COMPACT: "in the header", h5d.CHUNKED: "in chunks", h5d.VIRTUAL: "virtual, in other files"}
_CLASSES = {
    h5t.INTEGER: "integer",
    h5t.FLOAT: "floating point",
    h5t.STRING: "text",
    h5t.BITFIELD: "bit field",
    h5t.OPAQUE: "opaque",
    h5t.COMPOUND: "compound",
    h5t.REFERENCE: "reference",
    h5t.ENUM: "enumeration",
    h5t.VLEN: "variable length",
    h5t.ARRAY: "array",
}
_ATTRIBUTE_NBYTES = 65536
_FILTERS = {h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32}
_CHUNK_NBYTES = 16 << 20
"""Largest chunk: HDF5 holds a whole one in memory."""
_EXPANSION, _SLACK_NBYTES = 1100, 65536
"""Deflate makes at most 1,032 bytes of one, so what claims to hold more is a lie."""


@dataclass(frozen=True, slots=True)
class Sort:
    """A sort of file."""

    format: str
    """Its attribute `probe_format`."""
    name: str
    """What messages call it."""
    chunks: bool
    """Data may lie in chunks."""
    again: str
    """What to do about one that cannot be trusted."""

    def damage(self, path: Path, what: str) -> CaptureFormatError:
        """Make the error that says what does not have its digest."""
        return CaptureFormatError(f"{self.name} {path} is damaged: {what}. {self.again}.")

    def truncated(self, path: Path) -> CaptureFormatError:
        """Make the error that says that a file ends too early."""
        return CaptureFormatError(f"{self.name} {path} is truncated. {self.again}.")


AGAIN = "Record the run again, or delete the file to go on without the step"
SEGMENT = Sort(FORMAT_SEGMENT, "Segment", False, AGAIN)
PACKED = Sort(FORMAT_PACKED, "Packed file", True, "Pack its segments again if they are still there, or delete it")
FOLDED = replace(PACKED, again="Record the run again, or delete the file to go on without its steps")
"""A packed file that was made while its rank recorded: its segments are gone."""


@contextmanager
def open_segment(path: Path, sort: Sort = SEGMENT) -> Iterator[Segment]:
    """Open a segment, or a packed file, for reading.

    Raises:
        CaptureError: The file cannot be opened.
        CaptureFormatError: It is no segment, truncated, damaged, hostile, or of a newer version. Errors that HDF5
            raises while it is open become this too.
    """
    size = _regular_size(path, sort)
    file = None
    try:
        file = h5py.File(path, "r", locking=False)
        segment = Segment(path=path, size=size, root=h5g.open(file.id, b"/"), sort=sort)
        segment.require_version()
        yield segment
    except CaptureError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError, OverflowError) as error:
        cause = str(error.args[0] if error.args else error)  # str() of a KeyError is quoted
        if "locking flag" in cause:
            # HDF5 opens a file once per process, with one setting of locks.
            raise CaptureError(
                f"{sort.name} {path} is open in this process already, with file locks. Close it there, or open it with "
                "`h5py.File(path, locking=False)`."
            ) from error
        reason = "truncated" if "truncated" in cause else "damaged"
        raise CaptureFormatError(f"{sort.name} {path} is {reason}: {cause}. {sort.again}.") from error
    finally:
        if file is not None:
            file.close()


def _regular_size(path: Path, sort: Sort) -> int:
    """Look at a file before HDF5 does: a pipe would hang it, and a device would be read."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CaptureFormatError(f"{sort.name} {path} is no regular file. Remove it.")
        with open(path, "rb") as file:
            start = file.read(len(_SIGNATURE))
    except OSError as error:
        raise CaptureError(f"{sort.name} {path} cannot be read: {error.strerror}.") from error
    if start != _SIGNATURE:
        what = "empty" if not status.st_size else "no HDF5 file"
        raise CaptureFormatError(f"{sort.name} {path} is {what}. {sort.again}.")
    return status.st_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An open segment, or packed file."""

    path: Path
    size: int
    """Bytes of the file."""
    root: h5g.GroupID
    sort: Sort = SEGMENT
    _sound: dict[bytes, h5d.DatasetID] = field(default_factory=dict, init=False)
    """Datasets of `root` that were looked at already: that takes as long as reading a small one."""

    def refusal(self, what: str, why: str) -> CaptureFormatError:
        """Make the error that says what is not read, and why."""
        return CaptureFormatError(f"{self.sort.name} {self.path} is not read: {what} {why}. {self.sort.again}.")

    def damage(self, what: str) -> CaptureFormatError:
        """Make the error that says what does not have its digest."""
        return self.sort.damage(self.path, what)

    def require_version(self) -> None:
        """Refuse what is no such file, or has a newer major version."""
        names = {h5a.open(self.root, index=index).name for index in range(h5a.get_num_attrs(self.root))}
        if b"probe_format" not in names or self.text(self.root, "probe_format") != self.sort.format:
            raise CaptureFormatError(f"File {self.path} is no {self.sort.name.lower()} of a capture. Remove it.")
        version = self.number(self.root, "probe_format_version")
        if version > FORMAT_VERSION:
            raise CaptureFormatError(
                f"{self.sort.name} {self.path} has format version {version}, and this probe reads up to "
                f"{FORMAT_VERSION}. Install a newer trainprobe."
            )
        if version < 1:
            raise self.refusal("attribute 'probe_format_version'", f"is {version}, which no version ever was")

    def number(self, owner: h5g.GroupID | h5d.DatasetID, name: str) -> int:
        """Read an attribute that is one 64-bit integer."""
        return int(self._attribute(owner, name, h5t.INTEGER))

    def text(self, owner: h5g.GroupID | h5d.DatasetID, name: str) -> str:
        """Read an attribute that is one UTF-8 text of fixed length."""
        return bytes(self._attribute(owner, name, h5t.STRING)).decode()

    def _attribute(self, owner: h5g.GroupID | h5d.DatasetID, name: str, kind: int) -> Any:
        if not h5a.exists(owner, name.encode()):
            raise self.refusal(f"attribute {name!r}", "is missing")
        attribute = h5a.open(owner, name.encode())
        found = attribute.get_type()
        if found.get_class() != kind or (kind == h5t.STRING and found.is_variable_str()):
            raise self.refusal(f"attribute {name!r}", f"is {_type_name(found)}, not {_CLASSES[kind]} of fixed length")
        if attribute.shape != () or found.get_size() > _ATTRIBUTE_NBYTES:
            raise self.refusal(
                f"attribute {name!r}", f"has shape {attribute.shape} and {found.get_size()} bytes for each"
            )
        value = np.empty((), dtype="<i8" if kind == h5t.INTEGER else f"S{found.get_size()}")
        attribute.read(value, mtype=h5t.STD_I64LE if kind == h5t.INTEGER else found)
        return value[()]

    def _object(self, parent: h5g.GroupID, name: bytes, wanted: int) -> h5g.GroupID | h5d.DatasetID:
        what = f"{'dataset' if wanted == h5o.TYPE_DATASET else 'group'} {name.decode('utf-8', 'replace')!r}"
        if b"/" in name or name in (b"", b"."):
            raise self.refusal(what, "has a name that leads elsewhere")
        if not parent.links.exists(name):
            raise self.refusal(what, "is missing")
        link = parent.links.get_info(name).type
        if link != h5l.TYPE_HARD:
            kind = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "a link to another file"}.get(
                link, "a foreign link"
            )
            raise self.refusal(what, f"is {kind}")
        found = h5o.open(parent, name)
        expected = h5d.DatasetID if wanted == h5o.TYPE_DATASET else h5g.GroupID
        if not isinstance(found, expected):
            raise self.refusal(what, f"is a {type(found).__name__.removesuffix('ID').lower()}")
        return found

    def group(self, parent: h5g.GroupID, name: bytes) -> h5g.GroupID:
        """Open a group by hard link."""
        return self._object(parent, name, h5o.TYPE_GROUP)

    def dataset(self, parent: h5g.GroupID, name: bytes) -> h5d.DatasetID:
        """Open a dataset by hard link whose data lies inside this file: contiguous, or in chunks where they may be."""
        if parent is not self.root:
            return self._found_sound(parent, name)
        if name not in self._sound:
            self._sound[name] = self._found_sound(parent, name)
        return self._sound[name]

    def _found_sound(self, parent: h5g.GroupID, name: bytes) -> h5d.DatasetID:
        found = self._object(parent, name, h5o.TYPE_DATASET)
        what = f"dataset {name.decode('utf-8', 'replace')!r}"
        made = found.get_create_plist()
        if made.get_external_count():
            raise self.refusal(what, "keeps its data in another file")
        layout = made.get_layout()
        filters = [made.get_filter(index)[0] for index in range(made.get_nfilters())]
        chunked = self.sort.chunks and layout == h5d.CHUNKED and set(filters) <= _FILTERS
        if layout != h5d.CONTIGUOUS and not chunked:
            stored = _LAYOUTS.get(layout, f"in layout {layout}")
            stored += f" with filters {', '.join(map(str, filters))}" if filters else ""
            may = "lies contiguous, or in chunks with filters 1, 2 and 3" if self.sort.chunks else "lies contiguous"
            raise self.refusal(what, f"is stored {stored}, and a {self.sort.name.lower()}'s data {may}")
        item = found.get_type().get_size()
        nbytes = math.prod(map(int, found.shape)) * item
        if not nbytes:
            return found
        if chunked:
            chunk = math.prod(map(int, made.get_chunk())) * item
            if chunk > _CHUNK_NBYTES:
                raise self.refusal(what, f"has chunks of {chunk} bytes, and at most {_CHUNK_NBYTES} are read")
            if nbytes > _EXPANSION * found.get_storage_size() + _SLACK_NBYTES:
                raise self.refusal(what, f"has {nbytes} bytes of {found.get_storage_size()} that are stored")
            return found
        offset = found.get_offset()
        if offset is None:
            raise self.refusal(what, f"has shape {found.shape}, {nbytes} bytes, and no data")
        if offset + nbytes > self.size:
            raise self.refusal(what, f"has {nbytes} bytes from {offset}, and the file ends at {self.size}")
        return found

    def array(self, parent: h5g.GroupID, name: bytes, kind: h5t.TypeID, code: str) -> npt.NDArray[Any]:
        """Read a dataset that has exactly the given type, bit by bit.

        Args:
            parent: Group that holds it.
            name: Link name.
            kind: HDF5 type.
            code: numpy type string for the same bits.
        """
        found = self.typed(parent, name, kind)
        array = np.empty(found.shape, dtype=code)
        if array.size:
            found.read(h5s.ALL, h5s.ALL, array, mtype=kind)
        return array

    def typed(self, parent: h5g.GroupID, name: bytes, kind: h5t.TypeID) -> h5d.DatasetID:
        """Open a dataset that has exactly the given type."""
        found = self.dataset(parent, name)
        self.require_type(found, name, kind)
        return found

    def require_type(self, found: h5d.DatasetID, name: bytes, kind: h5t.TypeID) -> None:
        """Refuse a dataset that does not have exactly the given type."""
        have = found.get_type()
        if have != kind:
            what = f"dataset {name.decode('utf-8', 'replace')!r}"
            raise self.refusal(what, f"is {_type_name(have)}, not {_type_name(kind)}")

    def texts(self, parent: h5g.GroupID, name: bytes) -> tuple[Texts, tuple[int, ...]]:
        """Read a dataset of UTF-8 texts of fixed length.

        Returns:
            The texts in C order, and the dataset's shape.
        """
        found = self.dataset(parent, name)
        kind = found.get_type()
        if kind.get_class() != h5t.STRING or kind.is_variable_str():
            raise self.refusal(f"dataset {name.decode()!r}", f"is {_type_name(kind)}, not text of fixed length")
        array = np.empty(found.shape, dtype=f"S{kind.get_size()}")
        if array.size:
            found.read(h5s.ALL, h5s.ALL, array, mtype=kind)
        return Texts(array.reshape(-1).tolist()), found.shape


def _type_name(kind: h5t.TypeID) -> str:
    """Write a type in words that tell it from the others here."""
    if kind.get_class() == h5t.STRING and kind.is_variable_str():
        return "text of variable length"
    name = f"{_CLASSES.get(kind.get_class(), 'unknown')} of {kind.get_size()} bytes"
    if kind.get_class() in (h5t.INTEGER, h5t.FLOAT) and kind.get_order() == h5t.ORDER_BE:
        return f"big-endian {name}"
    if kind.get_class() == h5t.INTEGER and kind.get_sign() == h5t.SGN_NONE:
        return f"unsigned {name}"
    return name
