"""Read a capture: what is in it, the rows of a step, and tensors kept whole.

Opening looks at file names and the JSON files alone, so that a capture of thousands of segments opens at once and one
that is damaged still says what it holds. What cannot be trusted is an error, never a value: the tables of a segment
and every tensor are checked against their digests. This module must not know how values are compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from probe.errors import CaptureError, CaptureFormatError, listed
from probe.point import Key
from probe.store.dtypes import BITS, widen
from probe.store.guard import AGAIN, Segment, open_segment
from probe.store.image import PIECE, tables_digest, tensor_type
from probe.store.layout import (
    FORMAT_CAPTURE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    RANK_FOLDER,
    SEGMENT_FILE,
    TABLES,
    TABLES_HASH,
    FullTensor,
    StepRows,
    rank_folder,
    segment_file,
)
from probe.store.problems import find_problems, read_json, steps_in_words
from probe.store.rows import Decoder, Tables, encode
from probe.store.twins import Twins

_DECODER = Decoder()
"""One for all captures: runs of one job share their names, and what is the same object is compared at once."""


def open_capture(path: Path | str) -> Capture:
    """Open a capture for reading.

    Args:
        path: Its folder.

    Raises:
        CaptureError: There is no such folder.
        CaptureFormatError: The folder holds no capture, or one of a newer version.
    """
    path = Path(path)
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise CaptureError(f"Capture {path} {found}. Name the folder that `probe record -o` made.")
    return Capture(path)


class Capture:
    """One recorded run. Holds no file open, and may be sent to another process."""

    path: Path
    manifest: dict[str, Any]
    """What `capture.json` says."""
    run_id: str
    world_size: int
    ranks: tuple[int, ...]
    """Ranks that have a folder, ascending."""
    problems: tuple[str, ...]
    """What is missing or went wrong, one clause each; empty for a capture that is whole."""

    def __init__(self, path: Path) -> None:
        """Look at the folder; see `open_capture`."""
        self.path = path
        self.manifest = _manifest(path)
        self.run_id = self.manifest["run_id"]
        self.world_size = self.manifest["world_size"]
        self._steps = _segments(path)
        self.ranks = tuple(sorted(self._steps))
        self.problems = tuple(find_problems(path, self.manifest, self._steps))
        self._twins = Twins()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was learned, and name the folder so that a process elsewhere finds it."""
        return self.__dict__ | {"path": self.path.absolute(), "_twins": Twins()}

    def steps(self, rank: int) -> tuple[int, ...]:
        """List the steps that a rank recorded, ascending."""
        if rank not in self._steps:
            raise CaptureError(f"Capture {self.path} has no rank {rank}; it has {listed(self.ranks) or 'none'}.")
        return self._steps[rank]

    @property
    def nbytes(self) -> int:
        """Size of all segments."""
        return sum(self._segment(rank, step).stat().st_size for rank in self.ranks for step in self._steps[rank])

    def rows(self, rank: int, step: int) -> StepRows:
        """Read the rows of one step, without its tensors.

        Raises:
            CaptureError: The step was not recorded.
            CaptureFormatError: The segment is damaged, hostile, of another run or of a newer version.
        """
        path = self._segment(rank, step)
        known = self._twins.tables(path, self._identity(rank, step))
        if known is not None:
            # Tables that contradict each other are decoded again below, for the error message.
            with suppress(ValueError, KeyError, IndexError):
                return _DECODER.rows(known, step=step, rank=rank, world_size=self.world_size)
        with open_segment(path) as segment:
            self._require_identity(segment, rank, step)
            tables = _tables(segment)
            self._twins.learn(segment)
            try:
                return _DECODER.rows(tables, step=step, rank=rank, world_size=self.world_size)
            except (ValueError, KeyError, IndexError) as error:
                raise segment.refusal("its tables", f"contradict each other: {error}") from error

    def tensor_keys(self, rank: int, step: int) -> tuple[Key, ...]:
        """List the quantities of a step whose tensors are kept whole, in order of first execution."""
        with open_segment(self._segment(rank, step)) as segment:
            self._require_identity(segment, rank, step)
            return tuple(self._links(segment))

    def tensor(self, rank: int, step: int, key: Key) -> FullTensor:
        """Read a whole tensor.

        Raises:
            CaptureError: The step, or the tensor, was not kept.
            CaptureFormatError: The segment is damaged, or the tensor's bits do not have their digest.
        """
        with open_segment(self._segment(rank, step)) as segment:
            self._require_identity(segment, rank, step)
            return _tensor(segment, self._link(segment, key))

    def tensor_blocks(self, rank: int, step: int, key: Key, nbytes: int = 1 << 20) -> Iterator[npt.NDArray[Any]]:
        """Read a tensor piece by piece, in C order.

        Args:
            rank: Rank.
            step: Step.
            key: One of `tensor_keys`.
            nbytes: Size of a piece; the last one may be smaller.

        Yields:
            1-d arrays of bits, each in memory of its own.

        Raises:
            CaptureFormatError: As `tensor` does; that the digest is wrong shows only after the last piece.
        """
        with open_segment(self._segment(rank, step)) as segment:
            self._require_identity(segment, rank, step)
            yield from _blocks(segment, self._link(segment, key), nbytes)

    def _segment(self, rank: int, step: int) -> Path:
        steps = self.steps(rank)
        if step not in steps:
            has = steps_in_words(steps)
            raise CaptureError(f"Rank {rank} of capture {self.path} has no step {step}; it has {has}.")
        return self.path / rank_folder(rank) / segment_file(step)

    def _require_identity(self, segment: Segment, rank: int, step: int) -> None:
        run_id = segment.text(segment.root, "run_id")
        if run_id != self.run_id:
            raise CaptureFormatError(
                f"Segment {segment.path} is of run {run_id!r}, and the capture is of run {self.run_id!r}. "
                "Put it back where it belongs, or record again with --force."
            )
        for name, value in self._identity(rank, step).items():
            if name == "run_id":
                continue
            found = segment.number(segment.root, name)
            if found != value:
                raise segment.refusal(f"attribute {name!r}", f"is {found} instead of {value}")

    def _identity(self, rank: int, step: int) -> dict[str, int | str]:
        return {
            "run_id": self.run_id,
            "rank": rank,
            "world_size": self.world_size,
            "first_step": step,
            "last_step": step,
        }

    def _links(self, segment: Segment) -> dict[Key, bytes]:
        tables = _tables(segment)
        if not any(tables["tensor"]):
            return {}
        try:
            keys = _DECODER.keys(tables)
        except (ValueError, KeyError) as error:
            raise segment.refusal("its tables", f"contradict each other: {error}") from error
        return {key: link for key, link in zip(keys, tables["tensor"], strict=True) if link}

    def _link(self, segment: Segment, key: Key) -> bytes:
        links = self._links(segment)
        if key not in links:
            kept = listed(repr(each.label) for each in links) or "none"
            raise CaptureError(f"Segment {segment.path} keeps no whole tensor of {key.label!r}; it keeps {kept}.")
        return links[key]


def load(file: Path | str, name: str) -> npt.NDArray[Any]:
    """Read a tensor kept whole from a segment, as values.

    Args:
        file: The segment.
        name: The quantity's label, as `/quantity` has it, e.g. `forward/blocks.3.attn`.

    Returns:
        The tensor in its shape: bf16 and fp8 widened to float32, any other type as it is.

    Raises:
        CaptureError: There is no such tensor.
        CaptureFormatError: The segment is damaged, hostile or of a newer version.
    """
    with open_segment(Path(file)) as segment:
        tables = _tables(segment)
        links = {label: link for label, link in zip(tables["quantity"], tables["tensor"], strict=True) if link}
        link = links.get(encode(name))
        if link is None:
            kept = listed(repr(label.decode()) for label in links) or "none"
            raise CaptureError(f"Segment {file} keeps no whole tensor of {name!r}; it keeps {kept}.")
        tensor = _tensor(segment, link)
    return widen(tensor.bits, tensor.dtype)


def _tables(segment: Segment) -> Tables:
    """Read all tables, check them against their digest, and drop the step axis."""
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
        raise CaptureFormatError(f"Segment {segment.path} is damaged: its tables do not have their digest. {AGAIN}.")
    for table in TABLES:
        if table.axes.startswith("S") and table.code != "S":
            tables[table.name] = tables[table.name][0]
    return tables


def _dataset(segment: Segment, link: bytes) -> tuple[Any, str]:
    group = segment.group(segment.root, b"tensors")
    dtype = segment.text(segment.dataset(group, link), "probe_dtype")
    if dtype not in BITS:
        raise segment.refusal(f"dataset {link.decode()!r}", f"has dtype {dtype!r}, which version 1 does not have")
    return segment.typed(group, link, tensor_type(dtype, BITS[dtype])), dtype


def _tensor(segment: Segment, link: bytes) -> FullTensor:
    dataset, dtype = _dataset(segment, link)
    bits = np.empty(dataset.shape, dtype=BITS[dtype])
    for _ in _pieces(segment, link, dataset, bits.reshape(-1).view(np.uint8).data, PIECE):
        pass
    return FullTensor(bits=bits, dtype=dtype)


def _blocks(segment: Segment, link: bytes, nbytes: int) -> Iterator[npt.NDArray[Any]]:
    dataset, dtype = _dataset(segment, link)
    item = np.dtype(BITS[dtype]).itemsize
    for piece in _pieces(segment, link, dataset, None, max(1, nbytes // item) * item):
        yield np.frombuffer(piece, dtype=BITS[dtype])


def _pieces(
    segment: Segment, link: bytes, dataset: Any, into: memoryview | None, nbytes: int
) -> Iterator[memoryview | bytearray]:
    """Read contiguous data directly: HDF5 has said where it lies, and the guard that it lies inside the file."""
    total = int(np.prod(dataset.shape, dtype=np.int64)) * dataset.get_type().get_size()
    digest = xxhash.xxh3_128()
    with open(segment.path, "rb", buffering=0) as file:
        if total:
            file.seek(dataset.get_offset())
        for start in range(0, total, nbytes):
            length = min(nbytes, total - start)
            piece = bytearray(length) if into is None else into[start : start + length]
            if file.readinto(piece) != length:
                raise CaptureFormatError(f"Segment {segment.path} is truncated. {AGAIN}.")
            digest.update(piece)
            yield piece
    if digest.hexdigest() != segment.text(dataset, "xxh3_128"):
        raise CaptureFormatError(
            f"Segment {segment.path} is damaged: tensor {link.decode()!r} does not have its digest. {AGAIN}."
        )


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    if not file.exists():
        raise CaptureFormatError(
            f"Folder {path} is no capture: {MANIFEST_FILE} is missing. Name the folder that `probe record -o` made; "
            "if this is it, the run ended before anything was recorded."
        )
    manifest = read_json(file)
    if manifest.get("format") != FORMAT_CAPTURE:
        raise CaptureFormatError(f"Folder {path} is no capture: {MANIFEST_FILE} has another format.")
    version, run_id, world_size = (manifest.get(name) for name in ("version", "run_id", "world_size"))
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CaptureFormatError(
            f"Capture {path} has format version {version}, and this probe reads up to {FORMAT_VERSION}. "
            "Install a newer trainprobe."
        )
    if version != FORMAT_VERSION or not isinstance(run_id, str) or not isinstance(world_size, int) or world_size < 1:
        raise CaptureFormatError(
            f"File {file} is damaged: version {version!r}, run_id {run_id!r}, world_size {world_size!r}. "
            "Record the run again."
        )
    return manifest


def _segments(path: Path) -> dict[int, tuple[int, ...]]:
    """List the steps of each rank by file names; what has another name is no part of the capture."""
    ranks: dict[int, tuple[int, ...]] = {}
    with os.scandir(path) as folders:
        for folder in folders:
            rank = RANK_FOLDER.fullmatch(folder.name)
            if rank and folder.is_dir():
                steps = (SEGMENT_FILE.fullmatch(name) for name in os.listdir(folder))
                ranks[int(rank[1])] = tuple(sorted(int(step[1]) for step in steps if step))
    return ranks
