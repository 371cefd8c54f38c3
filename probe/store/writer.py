"""Make the folder of a capture and write its segments.

A segment appears under its name only when it is whole: it is written as `*.tmp`, synced, and renamed, so whatever
kills the run, every completed step can be read. Ranks write alone and hold no file open between steps. This module
must not know how a value was taken.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.errors import CaptureError, listed
from probe.point import Key
from probe.store.dtypes import BITS
from probe.store.image import Image, bits_digest, tables_digest, tensor_type
from probe.store.layout import (
    END_FILE,
    FORMAT_CAPTURE,
    FORMAT_MINOR,
    FORMAT_SEGMENT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    RANK_FOLDER,
    SCALARS,
    SEGMENT_FILE,
    TABLES,
    TABLES_HASH,
    UNFINISHED,
    StepRows,
    rank_folder,
    segment_file,
)

_LINK_NBYTES = 1024
"""Longest link name under `/tensors`: what tools can print in a line."""


def create_capture(path: Path, *, force: bool = False) -> None:
    """Make the folder of a new capture, before any rank runs.

    Args:
        path: Folder to make. An empty one is taken as it is.
        force: Remove a capture that is there.

    Raises:
        CaptureError: The folder holds something and `force` is off, or it holds something that is no part of a capture.
    """
    if path.exists() and not path.is_dir():
        raise CaptureError(f"Capture {path} cannot be made: a file of that name exists. Choose another folder.")
    try:
        path.mkdir(parents=True, exist_ok=True)
        present = sorted(path.iterdir())
    except OSError as error:
        raise CaptureError(f"Capture {path} cannot be made: {error.strerror}.") from error
    if not present:
        return
    folders = [entry for entry in present if RANK_FOLDER.fullmatch(entry.name)]
    steps = {
        entry.name for folder in folders for entry in folder.glob("step*.h5") if SEGMENT_FILE.fullmatch(entry.name)
    }
    if not force:
        raise CaptureError(
            f"Capture {path} exists: {_count(len(folders), 'rank')}, {_count(len(steps), 'step')}. "
            "Choose another folder, or replace it with --force."
        )
    foreign = [str(entry.relative_to(path)) for entry in _foreign(path)]
    if foreign:
        raise CaptureError(
            f"Capture {path} is not replaced: it holds what is no part of a capture: {listed(foreign)}. "
            "Move that away, or choose another folder."
        )
    for entry in present:
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write `capture.json`, whole or not at all.

    Args:
        path: Folder of the capture.
        manifest: What describes the run; must hold `run_id` (text) and `world_size` (a positive number). `format`,
            `version` and, where it is missing, `created_utc` are added.

    Raises:
        CaptureError: One of the two is missing, a value is no JSON, or the file cannot be written.
    """
    run_id, world_size = manifest.get("run_id"), manifest.get("world_size")
    if not isinstance(run_id, str) or not run_id:
        raise CaptureError(f"Manifest has run_id {run_id!r}; it must be a text that is not empty.")
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise CaptureError(f"Manifest has world_size {world_size!r}; it must be a number from 1.")
    whole = {
        "created_utc": _now(),
        **manifest,
        "format": FORMAT_CAPTURE,
        "version": FORMAT_VERSION,
    }
    _write_json(path / MANIFEST_FILE, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """What `end.json` says about one segment."""

    file: str
    step: int
    nbytes: int


class RankWriter:
    """Write one rank's segments. One per process, used by one thread."""

    RESERVE = 64 << 20
    """Bytes that a write must leave free on the disk, for the job's own checkpoints and logs."""

    def __init__(self, path: Path, *, run_id: str, rank: int, world_size: int) -> None:
        """Claim the rank's folder.

        Args:
            path: Folder of the capture; made where it does not exist.
            run_id: The same text in every rank of a run.
            rank: From 0.
            world_size: Number of ranks.

        Raises:
            CaptureError: Another process, or an earlier attempt, has claimed the rank.
        """
        if not 0 <= rank < world_size:
            raise CaptureError(f"Rank {rank} of world size {world_size} cannot be recorded: ranks count from 0.")
        self.path = path
        self.run_id = run_id
        self.rank = rank
        self.world_size = world_size
        self._folder = path / rank_folder(rank)
        self._process = os.getpid()
        self._segments: list[_Segment] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir()  # exclusive on every file system, NFS too
            _sync_folder(path)
        except FileExistsError as error:
            raise CaptureError(
                f"Rank {rank} of capture {path} is claimed already, by another process or an earlier attempt. "
                "Record into a new folder, or replace the capture with --force."
            ) from error
        except OSError as error:
            raise CaptureError(f"Folder {self._folder} cannot be made: {error.strerror}.") from error

    def write(self, rows: StepRows) -> int:
        """Write one step as a segment.

        Args:
            rows: What the step recorded.

        Returns:
            The size of the segment in bytes.

        Raises:
            CaptureError: The rows contradict each other, the disk is full, or the file cannot be written. Nothing of
                the segment is left; earlier ones are untouched.
        """
        target = self._folder / segment_file(rows.step)
        self._check(rows, target)
        unfinished = target.with_name(target.name + UNFINISHED)
        try:
            self._require_space(rows)
            nbytes = self._write_file(unfinished, rows)
            os.rename(unfinished, target)
            _sync_folder(self._folder)
        except BaseException as error:
            unfinished.unlink(missing_ok=True)
            if not isinstance(error, Exception):
                raise
            if isinstance(error, CaptureError):
                raise
            reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            raise CaptureError(
                f"Segment {target} could not be written: {reason}. The step is not recorded; "
                f"{_count(len(self._segments), 'earlier step')} of rank {self.rank} can be read."
            ) from error
        self._segments.append(_Segment(file=target.name, step=rows.step, nbytes=nbytes))
        return nbytes

    def close(self, *, error: str | None, dropped_steps: Sequence[int]) -> None:
        """Write `end.json`, which says that this rank ended in good order.

        Args:
            error: What ended recording early, or None.
            dropped_steps: Steps that should have been recorded and were not.
        """
        self._require_own_process()
        _write_json(
            self._folder / END_FILE,
            {
                "run_id": self.run_id,
                "rank": self.rank,
                "segments": [
                    {"file": each.file, "first_step": each.step, "last_step": each.step, "bytes": each.nbytes}
                    for each in self._segments
                ],
                "dropped_steps": sorted(int(step) for step in dropped_steps),
                "error": error,
            },
        )

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise CaptureError(
                f"Rank {self.rank} of capture {self.path} is claimed by process {self._process}, and a process forked "
                "from it may not write. Record in the training process alone."
            )

    def _check(self, rows: StepRows, target: Path) -> None:
        self._require_own_process()
        if (rows.rank, rows.world_size) != (self.rank, self.world_size):
            raise CaptureError(
                f"Step {rows.step} is of rank {rows.rank} of {rows.world_size}, and this writer is for rank "
                f"{self.rank} of {self.world_size}."
            )
        if not 0 <= rows.step < 10**8:
            raise CaptureError(f"Step {rows.step} cannot be stored: steps go from 0 to 99999999.")
        if any(each.step == rows.step for each in self._segments):
            raise CaptureError(f"Step {rows.step} of rank {self.rank} is written already: {target}.")
        count = len(rows.keys)
        lengths = {name: len(getattr(rows, name)) for name in _PER_ROW} | {n: len(a) for n, a in rows.scalars.items()}
        wrong = [f"{name} {length}" for name, length in lengths.items() if length != count]
        if wrong or set(rows.scalars) != set(SCALARS):
            raise CaptureError(
                f"Step {rows.step} has {count} keys and other numbers of rows: {listed(wrong)}; "
                f"scalars {listed(rows.scalars)}, expected {listed(SCALARS)}."
            )
        if len(set(rows.keys)) != count:
            raise CaptureError(f"Step {rows.step} has the same key twice: {listed(_doubles(rows.keys))}.")
        for key, tensor in rows.tensors.items():
            bits = BITS.get(tensor.dtype)
            if bits is None or tensor.bits.dtype != np.dtype(bits):
                raise CaptureError(
                    f"Tensor {key.label!r} has dtype {tensor.dtype!r} in bits of {tensor.bits.dtype}; "
                    f"the format holds {listed(BITS)}, in bits of their own size."
                )
        strangers = [key.label for key in rows.tensors if key not in set(rows.keys)]
        if strangers:
            raise CaptureError(f"Step {rows.step} has tensors without a row: {listed(strangers)}.")

    def _require_space(self, rows: StepRows) -> None:
        arrays = [rows.sketch, rows.sample, *(tensor.bits for tensor in rows.tensors.values())]
        need = sum(array.nbytes for array in arrays) + 1024 * len(rows.keys) + self.RESERVE
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        if free < need:
            raise CaptureError(
                f"Step {rows.step} of rank {self.rank} is not written to {self._folder}: it needs {need >> 20} MiB "
                f"(with {self.RESERVE >> 20} MiB kept free), and {free >> 20} MiB are free. Free space, or record less."
            )

    def _write_file(self, unfinished: Path, rows: StepRows) -> int:
        flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o666)
        try:
            image = Image(descriptor)
            try:
                links = _link_names(rows)
                tables = _tables(rows, links)
                root = image.file["/"].id
                _add_tables(image, root, rows, tables)
                self._add_attributes(image, root, rows, tables)
                _add_tensors(image, root, rows, links)
                nbytes = image.finish()
            finally:
                image.close()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return nbytes

    def _add_attributes(self, image: Image, root: Any, rows: StepRows, tables: dict[str, Any]) -> None:
        attributes: dict[str, int | str] = {
            "probe_format": FORMAT_SEGMENT,
            "probe_format_version": FORMAT_VERSION,
            "probe_format_minor": FORMAT_MINOR,
            "run_id": self.run_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "first_step": rows.step,
            "last_step": rows.step,
            "created_utc": _now(),
            TABLES_HASH: tables_digest(tables),
        }
        for name, value in attributes.items():
            image.add_attribute(root, name, value)


_PER_ROW = ("order", "dtype", "shape", "numel", "nonfinite", "value", "sketch", "sample", "hash", "text", "where")


def _tables(rows: StepRows, links: dict[Key, bytes]) -> dict[str, npt.NDArray[Any] | list[bytes]]:
    """Turn rows into what each table holds, without the step axis."""
    sketch_row, sketch = _stored(rows.sketch)
    sample_row, sample = _stored(rows.sample)
    return {
        "quantity": _labels(rows.keys),
        "kind": [key.kind.value.encode() for key in rows.keys],
        "name": [_encode(key.name) for key in rows.keys],
        "item": [_encode(key.item) for key in rows.keys],
        "microbatch": np.array([key.microbatch for key in rows.keys], dtype="<i4"),
        "call": np.array([key.call for key in rows.keys], dtype="<i4"),
        "dtype": [_encode(name) for name in rows.dtype],
        "shape": [",".join(map(str, shape)).encode() for shape in rows.shape],
        "where": [_encode(where) for where in rows.where],
        "tensor": [links.get(key, b"") for key in rows.keys],
        "text": [_encode(text) for text in rows.text],
        "order": rows.order,
        "numel": rows.numel,
        "nonfinite": rows.nonfinite,
        "value": rows.value,
        **rows.scalars,
        "hash": rows.hash,
        "sketch_row": sketch_row,
        "sketch": sketch,
        "sample_row": sample_row,
        "sample": sample,
    }


def _add_tables(image: Image, root: Any, rows: StepRows, tables: dict[str, Any]) -> None:
    for table in TABLES:
        data = tables[table.name]
        step_axis = (1,) if table.axes.startswith("S") else ()
        if isinstance(data, list):
            image.add_text(root, table.name.encode(), data, (*step_axis, len(data)))
        else:
            array = data.astype(table.code, copy=False)
            array = array.reshape((*step_axis, *array.shape))
            image.add_array(root, table.name.encode(), array, tensor_type("", table.code))


def _add_tensors(image: Image, root: Any, rows: StepRows, links: dict[Key, bytes]) -> None:
    if not links:
        return
    group = image.group(root, b"tensors")
    for key, link in links.items():
        tensor = rows.tensors[key]
        dataset = image.add_array(group, link, tensor.bits, tensor_type(tensor.dtype, BITS[tensor.dtype]))
        image.add_attribute(dataset, "probe_dtype", tensor.dtype)
        image.add_attribute(dataset, "xxh3_128", bits_digest(tensor.bits))


def _stored(vectors: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Leave out the vectors that are NaN throughout, and say where the others went."""
    present = ~np.isnan(vectors).all(axis=1)
    index = np.where(present, np.cumsum(present) - 1, -1).astype(np.int32)
    return index, vectors if present.all() else vectors[present]


def _encode(text: str) -> bytes:
    """Encode text that HDF5 can hold: it ends a text at NUL, and a lone surrogate is no UTF-8."""
    return text.replace("\0", "\u2400").encode("utf-8", "backslashreplace")


def _labels(keys: Sequence[Key]) -> list[bytes]:
    """Encode the keys' labels, unique: two keys may share a label, for it hides microbatch 0."""
    labels: dict[bytes, None] = {}
    for key in keys:
        label = first = _encode(key.label)
        again = 1
        while label in labels:
            again += 1
            label = first + b" (%d)" % again
        labels[label] = None
    return list(labels)


def _link_names(rows: StepRows) -> dict[Key, bytes]:
    """Name the dataset of each tensor kept whole: its label, percent-encoded where HDF5 or a terminal would stumble."""
    links: dict[Key, bytes] = {}
    if not rows.tensors:
        return links
    for key, label in zip(rows.keys, _labels(rows.keys), strict=True):
        if key not in rows.tensors:
            continue
        plain = b"".join(
            b"%%%02X" % byte if byte in b"%/\x7f" or byte < 0x20 or (byte == 0x2E and not at) else bytes((byte,))
            for at, byte in enumerate(label)
        )
        if len(plain) > _LINK_NBYTES:  # cut inside a character it would be no UTF-8; the number makes it unique
            end = b"~%d" % len(links)
            plain = plain[: _LINK_NBYTES - len(end)].decode("utf-8", "ignore").encode() + end
        links[key] = plain
    return links


def _doubles(keys: Sequence[Key]) -> set[str]:
    seen: set[Key] = set()
    return {key.label for key in keys if key in seen or seen.add(key)}  # type: ignore[func-returns-value]


def _foreign(path: Path) -> list[Path]:
    """List what is in a folder and was not written as part of a capture. Links are never followed."""
    foreign = []
    for entry in path.iterdir():
        if RANK_FOLDER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            foreign += [inner for inner in entry.iterdir() if not _is_own_file(inner, END_FILE)]
        elif not _is_own_file(entry, MANIFEST_FILE):
            foreign.append(entry)
    return foreign


def _is_own_file(entry: Path, json_file: str) -> bool:
    name = entry.name.removesuffix(UNFINISHED)
    known = name == json_file or (json_file == END_FILE and SEGMENT_FILE.fullmatch(name) is not None)
    return known and entry.is_file() and not entry.is_symlink()


def _write_json(target: Path, content: dict[str, Any]) -> None:
    unfinished = target.with_name(target.name + UNFINISHED)
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(unfinished, target)
        _sync_folder(target.parent)
    except (OSError, TypeError, ValueError) as error:
        unfinished.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CaptureError(f"File {target} could not be written: {reason}.") from error


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
