"""Write one rank's segments.

A segment appears under its name only when it is whole: it is written as `*.tmp`, synced, and renamed, so whatever
kills the run, every completed step can be read. Ranks write alone and hold no file open between steps. This module
must not know how a value was taken.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.errors import CaptureError
from probe.store import disk
from probe.store.dtypes import BITS
from probe.store.folder import count, create_capture, now, sync_folder, write_json, write_manifest
from probe.store.image import Image, Layouts, bits_digest, tables_digest
from probe.store.layout import (
    END_FILE,
    FORMAT_MINOR,
    FORMAT_SEGMENT,
    FORMAT_VERSION,
    TABLES,
    TABLES_HASH,
    UNFINISHED,
    Folded,
    StepRows,
    rank_folder,
    segment_file,
)
from probe.store.rows import Encoder, require_consistent

__all__ = ["RankWriter", "create_capture", "write_manifest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What `end.json` says about one segment."""

    file: str
    step: int
    nbytes: int


class RankWriter:
    """Write one rank's segments. One per process, used by one thread."""

    RESERVE = 64 << 20
    """Bytes that a segment must leave free on the disk, for the job's own checkpoints and logs."""

    def __init__(self, path: Path, *, run_id: str, rank: int, world_size: int) -> None:
        """Claim the rank's folder.

        Args:
            path: Folder of the capture; made where it does not exist.
            run_id: The same text in every rank of a run.
            rank: From 0.
            world_size: Number of ranks.

        Raises:
            CaptureError: Another process, or an earlier attempt, has claimed the rank, or the folder cannot be made.
        """
        if not 0 <= rank < world_size:
            raise CaptureError(f"Rank {rank} of world size {world_size} cannot be recorded; ranks count from 0.")
        self.path = path
        self.run_id = run_id
        self.rank = rank
        self.world_size = world_size
        self._folder = path / rank_folder(rank)
        self._process = os.getpid()
        self._written: list[_Written] = []
        self._encoder = Encoder()
        self._layouts = Layouts()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir()  # exclusive on every file system, NFS too
            sync_folder(path)
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
        self._require_writable(rows, target)
        unfinished = target.with_name(target.name + UNFINISHED)
        try:
            self._require_space(rows)
            nbytes = self._write_file(unfinished, rows)
            os.rename(unfinished, target)
            sync_folder(self._folder)
        except CaptureError:
            unfinished.unlink(missing_ok=True)
            raise
        except Exception as error:
            unfinished.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            raise CaptureError(
                f"Segment {target} could not be written: {reason}. Step {rows.step} is not recorded; "
                f"{count(len(self._written), 'earlier step')} of rank {self.rank} can be read."
            ) from error
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        self._written.append(_Written(file=target.name, step=rows.step, nbytes=nbytes))
        return nbytes

    def close(self, *, error: str | None, dropped_steps: Sequence[int], folded: Sequence[Folded] = ()) -> None:
        """Write `end.json`, which says that this rank ended in good order.

        Args:
            error: What ended recording early, or None.
            dropped_steps: Steps that should have been recorded and were not.
            folded: Files that hold steps in place of their segments.

        Raises:
            CaptureError: The file cannot be written.
        """
        self._require_own_process()
        gone = {step for each in folded for step in each.steps}
        write_json(
            self._folder / END_FILE,
            {
                "run_id": self.run_id,
                "rank": self.rank,
                "segments": [
                    *(
                        {
                            "file": each.file,
                            "first_step": each.steps[0],
                            "last_step": each.steps[-1],
                            "bytes": each.nbytes,
                            "steps": list(each.steps),
                        }
                        for each in folded
                    ),
                    *(
                        {"file": each.file, "first_step": each.step, "last_step": each.step, "bytes": each.nbytes}
                        for each in self._written
                        if each.step not in gone
                    ),
                ],
                "dropped_steps": sorted(int(step) for step in dropped_steps),
                "error": error,
            },
        )

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise CaptureError(
                f"Rank {self.rank} of capture {self.path} is claimed by process {self._process}, and a process forked "
                "from it must not write. Record in the training process alone."
            )

    def _require_writable(self, rows: StepRows, target: Path) -> None:
        self._require_own_process()
        if (rows.rank, rows.world_size) != (self.rank, self.world_size):
            raise CaptureError(
                f"Step {rows.step} is of rank {rows.rank} of {rows.world_size}, and this writer is for rank "
                f"{self.rank} of {self.world_size}."
            )
        if not 0 <= rows.step < 10**8:
            raise CaptureError(f"Step {rows.step} cannot be stored; steps go from 0 to 99999999.")
        if any(each.step == rows.step for each in self._written):
            raise CaptureError(f"Step {rows.step} of rank {self.rank} is written already: {target}.")
        require_consistent(rows)

    def _require_space(self, rows: StepRows) -> None:
        arrays = [rows.sketch, rows.sample, *(tensor.bits for tensor in rows.tensors.values())]
        need = sum(array.nbytes for array in arrays) + 1024 * len(rows.keys) + self.RESERVE
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize
        if free < need:
            raise CaptureError(
                f"Step {rows.step} of rank {self.rank} is not written to {self._folder}: it needs "
                f"{-(-need >> 20)} MiB, {self.RESERVE >> 20} MiB of them to stay free, and {free >> 20} MiB are left. "
                "Free space, or record fewer tensors."
            )

    def _write_file(self, unfinished: Path, rows: StepRows) -> int:
        image = Image()
        self._fill(image, rows)
        pieces, nbytes = image.pieces(self._layouts)
        disk.write(unfinished, pieces, nbytes)
        return nbytes

    def _fill(self, image: Image, rows: StepRows) -> None:
        links = self._encoder.links(rows)
        tables = self._encoder.tables(rows, links)
        attributes: dict[str, int | str] = {
            "probe_format": FORMAT_SEGMENT,
            "probe_format_version": FORMAT_VERSION,
            "probe_format_minor": FORMAT_MINOR,
            "run_id": self.run_id,
            "rank": self.rank,
            "world_size": self.world_size,
        }
        for table in TABLES:
            data: Any = tables[table.name]
            step_axis = (1,) if table.axes.startswith("S") else ()
            if table.code == "S":
                image.add_text(image.root, table.name.encode(), data, (*step_axis, len(data)))
            else:
                # the digest is over what is stored, not over what was given
                array = tables[table.name] = data.astype(table.code, copy=False)
                array = array.reshape((*step_axis, *array.shape))
                image.add_array(image.root, table.name.encode(), array, ("", table.code))
        for name, value in attributes.items():
            image.add_attribute(image.root, name, value)
        changing: dict[str, int | str] = {
            "first_step": rows.step,
            "last_step": rows.step,
            "created_utc": now(),
            TABLES_HASH: tables_digest(tables),
        }
        for name, value in changing.items():
            image.add_attribute(image.root, name, value, changes=True)
        if not links:
            return
        group = image.add_group(image.root, b"tensors")
        stored: dict[tuple[Any, ...], bytes] = {}
        for key, link in links.items():
            tensor = rows.tensors[key]
            digest = bits_digest(tensor.bits)
            # A module often returns what its last child returned: one dataset, and a name for each.
            same = stored.setdefault((tensor.dtype, tensor.bits.shape, digest), link)
            if same is not link:
                image.add_name(group, same, link)
                continue
            dataset = image.add_array(group, link, tensor.bits, (tensor.dtype, BITS[tensor.dtype]))
            image.add_attribute(dataset, "probe_dtype", tensor.dtype)
            image.add_attribute(dataset, "xxh3_128", digest, changes=True)
