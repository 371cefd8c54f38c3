"""One step of one rank in an open file: in a segment of its own, or in a packed file.

This module must not know rows, nor where files lie in a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from probe.errors import CaptureFormatError
from probe.store.guard import Segment
from probe.store.image import tables_digest, tensor_type
from probe.store.layout import TABLES, TABLES_HASH
from probe.store.packed import Packed, step_group
from probe.store.rows import Tables
from probe.store.tensors import Whole


@dataclass(frozen=True, slots=True)
class StepFile:
    """An open file, and which step of it is meant."""

    file: Segment
    step: int
    packed: Packed | None = None
    """What is known of a packed file; None: a segment."""

    def tables(self) -> Tables:
        """Read all tables without a step axis, and check them against their digest."""
        return segment_tables(self.file) if self.packed is None else self.packed.tables(self.file, self.step)

    def tables_digest(self) -> str:
        """Return the digest that the tables must have."""
        if self.packed is None:
            return self.file.text(self.file.root, TABLES_HASH)
        return self.packed.stated(self.file, self.step).digest

    def created_utc(self) -> str:
        """Return when the step was written."""
        if self.packed is None:
            return self.file.text(self.file.root, "created_utc")
        return self.packed.stated(self.file, self.step).created_utc

    def tensor(self, link: bytes) -> Whole:
        """Find a tensor kept whole by its link name, from the table `tensor`."""
        return self.tensors([link])[0]

    def tensors(self, links: Sequence[bytes]) -> list[Whole]:
        """Find several of them."""
        if not links:
            return []
        group = self.file.group(self.file.root, b"tensors")
        if self.packed is not None:
            group = self.file.group(group, step_group(self.step))
        return [Whole(self.file, group, link) for link in links]


def segment_tables(segment: Segment) -> Tables:
    """Read the tables of a segment, check them against their digest, and drop the step axis."""
    tables: Tables = {}
    lengths = {"S": 1, "2": 2}
    for table in TABLES:
        name = table.name.encode()
        if table.code == "S":
            tables[table.name], shape = segment.texts(segment.root, name)
        else:
            tables[table.name] = segment.array(segment.root, name, tensor_type("", table.code), table.code)
            shape = tables[table.name].shape
        if len(shape) != len(table.axes) or any(
            lengths.setdefault(axis, length) != length for axis, length in zip(table.axes, shape, strict=True)
        ):
            expected = ", ".join(str(lengths.get(axis, axis)) for axis in table.axes)
            raise segment.refusal(f"dataset {table.name!r}", f"has shape {shape} instead of ({expected})")
    if tables_digest(tables) != segment.text(segment.root, TABLES_HASH):
        raise segment.damage("its tables do not have their digest")
    for table in TABLES:
        if table.axes.startswith("S") and table.code != "S":
            tables[table.name] = tables[table.name][0]
    return tables


def require_segment(segment: Segment, identity: dict[str, int | str]) -> None:
    """Refuse a segment of another run, rank or step."""
    run_id = segment.text(segment.root, "run_id")
    if run_id != identity["run_id"]:
        raise CaptureFormatError(
            f"Segment {segment.path} is of run {run_id!r}, and the capture is of run {identity['run_id']!r}. "
            "Put it back where it belongs, or record again with --force."
        )
    for name, value in identity.items():
        if name != "run_id":
            found = segment.number(segment.root, name)
            if found != value:
                raise segment.refusal(f"attribute {name!r}", f"is {found} instead of {value}")
