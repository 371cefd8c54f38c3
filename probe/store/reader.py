"""Read a capture: what is in it, the rows of a step, and tensors kept whole.

Opening looks at file names and the JSON files alone, so that a capture of thousands of segments opens at once and one
that is damaged still says what it holds. What cannot be trusted is an error, never a value: the tables of a segment
and every tensor are checked against their digests. This module must not know how values are compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from probe.errors import CaptureError, CaptureFormatError, listed
from probe.point import Key, Kind
from probe.store.dtypes import BITS, widen
from probe.store.guard import AGAIN, Segment, open_segment
from probe.store.image import tables_digest, tensor_type
from probe.store.layout import (
    END_FILE,
    FORMAT_CAPTURE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    RANK_FOLDER,
    SCALARS,
    SEGMENT_FILE,
    TABLES,
    TABLES_HASH,
    FullTensor,
    StepRows,
    rank_folder,
    segment_file,
)

_JSON_NBYTES = 64 << 20
_KINDS = {kind.value: kind for kind in Kind}


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
        raise CaptureError(f"Capture {path} {found}; a capture is the folder that `probe record -o` made.")
    return Capture(path)


class Capture:
    """One recorded run. Holds no file open."""

    path: Path
    manifest: dict[str, Any]
    """What `capture.json` says."""
    run_id: str
    world_size: int
    ranks: tuple[int, ...]
    """Ranks that have a folder."""
    problems: tuple[str, ...]
    """What is missing or went wrong, one clause each; empty for a capture that is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _manifest(path)
        self.run_id = self.manifest["run_id"]
        self.world_size = self.manifest["world_size"]
        self._steps = _segments(path)
        self.ranks = tuple(sorted(self._steps))
        self.problems = tuple(_problems(self))
        self._decoded: dict[tuple[str, bytes], tuple[Any, ...]] = {}

    def steps(self, rank: int) -> tuple[int, ...]:
        """List the steps that a rank recorded."""
        if rank not in self._steps:
            raise CaptureError(f"Capture {self.path} has no rank {rank}; it has {listed(self.ranks) or 'none'}.")
        return self._steps[rank]

    def rows(self, rank: int, step: int) -> StepRows:
        """Read the rows of one step, without its tensors.

        Raises:
            CaptureError: The step was not recorded.
            CaptureFormatError: The segment is damaged, hostile, of another run or of a newer version.
        """
        with open_segment(self._segment(rank, step)) as segment:
            self._require_identity(segment, rank, step)
            tables = _tables(segment)
            try:
                return self._rows(tables, rank, step)
            except (ValueError, KeyError, IndexError, TypeError, UnicodeDecodeError) as error:
                raise segment.refuse("its tables", f"contradict each other: {error}") from error

    def tensor_keys(self, rank: int, step: int) -> tuple[Key, ...]:
        """List the quantities of a step whose tensors are kept whole, in order of first execution."""
        with open_segment(self._segment(rank, step)) as segment:
            self._require_identity(segment, rank, step)
            return tuple(self._links(segment))

    def tensor(self, rank: int, step: int, key: Key) -> FullTensor:
        """Read a whole tensor.

        Raises:
            CaptureError: The step, or the tensor, was not kept.
            CaptureFormatError: The segment is damaged, or the tensor's bits do not have its digest.
        """
        with open_segment(self._segment(rank, step)) as segment:
            self._require_identity(segment, rank, step)
            link = self._link(segment, key)
            return _tensor(segment, link)

    def tensor_blocks(self, rank: int, step: int, key: Key, nbytes: int = 1 << 20) -> Iterator[npt.NDArray[Any]]:
        """Read a tensor piece by piece, in C order.

        Args:
            rank: Rank.
            step: Step.
            key: One of `tensor_keys`.
            nbytes: Size of a piece; the last one may be smaller.

        Yields:
            1-d arrays of bits, each its own memory.

        Raises:
            CaptureFormatError: As `tensor` does; a wrong digest is known only after the last piece.
        """
        with open_segment(self._segment(rank, step)) as segment:
            self._require_identity(segment, rank, step)
            yield from _blocks(segment, self._link(segment, key), nbytes)

    def _segment(self, rank: int, step: int) -> Path:
        steps = self.steps(rank)
        if step not in steps:
            raise CaptureError(f"Rank {rank} of capture {self.path} has no step {step}; it has {_ranges(steps)}.")
        return self.path / rank_folder(rank) / segment_file(step)

    def _require_identity(self, segment: Segment, rank: int, step: int) -> None:
        run_id = segment.text(segment.root, "run_id")
        if run_id != self.run_id:
            raise CaptureFormatError(
                f"Segment {segment.path} is of run {run_id!r}, and the capture is of run {self.run_id!r}. "
                "Put it back where it belongs, or record again with --force."
            )
        found = {name: segment.number(segment.root, name) for name in ("rank", "world_size", "first_step", "last_step")}
        expected = {"rank": rank, "world_size": self.world_size, "first_step": step, "last_step": step}
        if found != expected:
            wrong = [
                f"{name} {found[name]} instead of {value}" for name, value in expected.items() if found[name] != value
            ]
            raise CaptureFormatError(f"Segment {segment.path} says {listed(wrong)}. {AGAIN}.")

    def _links(self, segment: Segment) -> dict[Key, bytes]:
        tables = _tables(segment)
        links = tables["tensor"][0]
        if not any(links):
            return {}
        return {key: link for key, link in zip(self._keys(tables), links, strict=True) if link}

    def _link(self, segment: Segment, key: Key) -> bytes:
        links = self._links(segment)
        if key not in links:
            kept = listed(each.label for each in links) or "none"
            raise CaptureError(f"Segment {segment.path} keeps no whole tensor of {key.label!r}; it keeps {kept}.")
        return links[key]

    def _decode(self, name: str, texts: list[bytes], convert: Any) -> tuple[Any, ...]:
        """Convert a column once: most steps of a run share it, and then the objects too."""
        known = (name, xxhash.xxh3_128_digest(b"\0".join(texts)) + len(texts).to_bytes(8, "little"))
        if known not in self._decoded:
            if len(self._decoded) >= 1024:
                self._decoded.clear()
            self._decoded[known] = tuple(convert(text.decode()) for text in texts)
        return self._decoded[known]

    def _keys(self, tables: dict[str, Any]) -> tuple[Key, ...]:
        columns = [tables[name] for name in ("kind", "name", "item", "microbatch", "call")]
        digest = xxhash.xxh3_128()
        for column in columns:
            digest.update(column.tobytes() if isinstance(column, np.ndarray) else b"\0".join([*column[0], b""]))
        known = ("keys", digest.digest())
        if known not in self._decoded:
            kinds, names, items = ([text.decode() for text in column[0]] for column in columns[:3])
            self._decoded[known] = tuple(
                Key(kind=_KINDS[kind], name=name, item=item, microbatch=microbatch, call=call)
                for kind, name, item, microbatch, call in zip(
                    kinds, names, items, columns[3].tolist(), columns[4].tolist(), strict=True
                )
            )
        return self._decoded[known]

    def _rows(self, tables: dict[str, Any], rank: int, step: int) -> StepRows:
        keys = self._keys(tables)
        return StepRows(
            step=step,
            rank=rank,
            world_size=self.world_size,
            keys=keys,
            order=tables["order"][0],
            dtype=self._decode("dtype", tables["dtype"][0], str),
            shape=self._decode("shape", tables["shape"][0], _shape),
            numel=tables["numel"][0],
            nonfinite=tables["nonfinite"][0],
            value=tables["value"][0],
            scalars={name: tables[name][0] for name in SCALARS},
            sketch=_spread(tables["sketch_row"][0], tables["sketch"][0]),
            sample=_spread(tables["sample_row"][0], tables["sample"][0]),
            hash=tables["hash"][0],
            text=self._decode("text", tables["text"][0], str),
            where=self._decode("where", tables["where"][0], str),
        )


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
        links = dict(zip(tables["quantity"][0], tables["tensor"][0], strict=True))
        link = links.get(name.encode("utf-8", "backslashreplace"), b"")
        if not link:
            kept = listed(label.decode() for label, each in links.items() if each) or "none"
            raise CaptureError(f"Segment {file} keeps no whole tensor of {name!r}; it keeps {kept}.")
        tensor = _tensor(segment, link)
    return widen(tensor.bits, tensor.dtype)


def _tables(segment: Segment) -> dict[str, Any]:
    """Read and check all tables: arrays, or (texts, shape)."""
    tables: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for table in TABLES:
        if table.code == "S":
            texts, shapes[table.name] = segment.texts(segment.root, table.name.encode())
            tables[table.name] = texts
        else:
            kind = tensor_type("", table.code)
            tables[table.name] = segment.array(segment.root, table.name.encode(), kind, table.code)
            shapes[table.name] = tables[table.name].shape
    lengths = {"S": 1, "2": 2}
    for table in TABLES:
        shape = shapes[table.name]
        if len(shape) != len(table.axes) or any(
            lengths.setdefault(axis, length) != length for axis, length in zip(table.axes, shape, strict=True)
        ):
            expected = ", ".join(f"{axis}={lengths[axis]}" if axis in lengths else axis for axis in table.axes)
            raise segment.refuse(f"dataset {table.name!r}", f"has shape {shape} instead of ({expected})")
    if tables_digest(tables) != segment.text(segment.root, TABLES_HASH):
        raise CaptureFormatError(f"Segment {segment.path} is damaged: its tables do not have their digest. {AGAIN}.")
    for table in TABLES:
        if table.code == "S":
            tables[table.name] = (tables[table.name], shapes[table.name])
    return tables


def _spread(index: npt.NDArray[np.int32], stored: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Put stored vectors back into the rows that they belong to."""
    if len(index) == len(stored) and np.array_equal(index, np.arange(len(index))):
        return stored
    present = index >= 0
    rows = np.full((len(index), stored.shape[1]), np.nan, dtype=np.float32)
    rows[present] = stored[index[present]]
    return rows


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(length) for length in text.split(",")) if text else ()


def _dataset(segment: Segment, link: bytes) -> tuple[Any, str]:
    group = segment.group(segment.root, b"tensors")
    dtype = segment.text(segment.dataset(group, link), "probe_dtype")
    if dtype not in BITS:
        raise segment.refuse(f"dataset {link.decode()!r}", f"has dtype {dtype!r}; the format holds {listed(BITS)}")
    return segment.typed(group, link, tensor_type(dtype, BITS[dtype])), dtype


def _tensor(segment: Segment, link: bytes) -> FullTensor:
    dataset, dtype = _dataset(segment, link)
    bits = np.empty(dataset.shape, dtype=BITS[dtype])
    flat, at = bits.reshape(-1), 0
    for block in _blocks(segment, link, 16 << 20):
        flat[at : at + len(block)] = block
        at += len(block)
    return FullTensor(bits=bits, dtype=dtype)


def _blocks(segment: Segment, link: bytes, nbytes: int) -> Iterator[npt.NDArray[Any]]:
    """Read contiguous data directly: HDF5 has said where it lies, and the guard that it lies inside the file."""
    dataset, dtype = _dataset(segment, link)
    count, item = int(np.prod(dataset.shape, dtype=np.int64)), np.dtype(BITS[dtype]).itemsize
    per_block = max(1, nbytes // item)
    digest = xxhash.xxh3_128()
    if count:
        offset = dataset.get_offset()
        with open(segment.path, "rb", buffering=0) as file:
            for start in range(0, count, per_block):
                block = np.empty(min(per_block, count - start), dtype=BITS[dtype])
                view = memoryview(block.view(np.uint8))
                if os.preadv(file.fileno(), [view], offset + start * item) != len(view):
                    raise CaptureFormatError(f"Segment {segment.path} is truncated. {AGAIN}.")
                digest.update(view)
                yield block
    if digest.hexdigest() != segment.text(dataset, "xxh3_128"):
        raise CaptureFormatError(
            f"Segment {segment.path} is damaged: tensor {link.decode()!r} does not have its digest. {AGAIN}."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise CaptureFormatError(f"File {path} is no regular file.")
        if path.stat().st_size > _JSON_NBYTES:
            raise CaptureFormatError(
                f"File {path} has {path.stat().st_size} bytes, and at most {_JSON_NBYTES} are read."
            )
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CaptureError(f"File {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CaptureFormatError(f"File {path} is no JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CaptureFormatError(f"File {path} holds no JSON object.")
    return content


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    if not file.exists():
        raise CaptureFormatError(
            f"Folder {path} is no capture: {MANIFEST_FILE} is missing. Name the folder that `probe record -o` made; "
            "if this is it, the run ended before anything was recorded."
        )
    manifest = _read_json(file)
    if manifest.get("format") != FORMAT_CAPTURE:
        raise CaptureFormatError(f"Folder {path} is no capture: format is {manifest.get('format')!r}.")
    version, run_id, world_size = (manifest.get(name) for name in ("version", "run_id", "world_size"))
    if not isinstance(version, int) or version < 1:
        raise CaptureFormatError(f"Folder {path} is no capture: version is {version!r}.")
    if version > FORMAT_VERSION:
        raise CaptureFormatError(
            f"Capture {path} has format version {version}, and this probe reads up to {FORMAT_VERSION}. "
            "Install a newer trainprobe."
        )
    if not isinstance(run_id, str) or not isinstance(world_size, int) or world_size < 1:
        raise CaptureFormatError(f"File {file} is damaged: run_id is {run_id!r} and world_size {world_size!r}.")
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


def _problems(capture: Capture) -> Iterator[str]:
    """Say what is missing, or was said to have gone wrong."""
    for rank in sorted(set(range(min(capture.world_size, 100_000))) - set(capture.ranks)):
        yield f"rank {rank} of {capture.world_size} is missing"
    for rank in capture.ranks:
        if rank >= capture.world_size:
            yield f"rank {rank} is beyond the world size of {capture.world_size}"
    planned = _planned(capture)
    for rank in capture.ranks:
        steps = capture.steps(rank)
        dropped: set[int] = set()
        end = capture.path / rank_folder(rank) / END_FILE
        if not end.exists():
            yield f"rank {rank} was not closed cleanly, " + (f"last step {steps[-1]}" if steps else "no step recorded")
        else:
            yield from _end_problems(capture, rank, end, dropped)
        gaps = {step for step in planned if not steps or step < steps[-1] or end.exists()} - set(steps) - dropped
        if gaps and steps:
            yield f"rank {rank} lacks {_ranges(gaps)}"
        elif gaps and end.exists():
            yield f"rank {rank} recorded no step"


def _end_problems(capture: Capture, rank: int, file: Path, dropped: set[int]) -> Iterator[str]:
    """Say what `end.json` tells; add the steps that it counts as dropped."""
    try:
        end = _read_json(file)
    except CaptureError as error:
        yield f"rank {rank} has an unreadable end: {error}"
        return
    if end.get("run_id") != capture.run_id:
        yield f"rank {rank} has the end of another run, {end.get('run_id')!r}"
        return
    if end.get("error"):
        yield f"rank {rank} ended with an error: {end['error']}"
    steps = end.get("dropped_steps")
    dropped.update(step for step in steps if isinstance(step, int)) if isinstance(steps, list) else None
    if dropped:
        yield f"rank {rank} dropped {_ranges(dropped)}"


def _planned(capture: Capture) -> set[int]:
    """Guess which steps every rank should have: those of the plan, or of any rank, up to the last one recorded."""
    recorded = {step for rank in capture.ranks for step in capture.steps(rank)}
    config = capture.manifest.get("config")
    plan = config.get("steps") if isinstance(config, dict) else None
    if not recorded or not isinstance(plan, str):
        return set(range(min(recorded), max(recorded) + 1)) if recorded else set()
    planned = set()
    for part in plan.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return recorded
        planned.update(range(int(first), min(int(last or first), max(recorded)) + 1))
    return {step for step in planned if step <= max(recorded)} | recorded


def _ranges(steps: set[int] | tuple[int, ...]) -> str:
    """Write steps in few words.

    >>> _ranges({1, 2, 3, 7})
    'steps 1-3, 7'
    """
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    words = ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in runs[:10])
    words += f" and {len(runs) - 10} more" if len(runs) > 10 else ""
    return f"step{'s' if len(steps) != 1 else ''} {words}" if runs else "no step"
