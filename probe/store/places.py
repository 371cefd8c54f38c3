"""Say in which file each step of each rank lies.

It goes by file names, and by the steps that packed files say they hold. A run that goes on folds segments into packed
files: segments are listed first, so that a step that is folded meanwhile is found twice and never missed, and
`look_again` finds what has gone. This module must not read what a step holds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from probe.errors import CaptureError
from probe.store.guard import FOLDED, PACKED, Sort
from probe.store.layout import (
    END_FILE,
    FOLDED_FILE,
    PACKED_FILE,
    PACKED_FOLDER,
    RANK_FOLDER,
    SEGMENT_FILE,
    rank_folder,
    segment_file,
)
from probe.store.packed import Packed
from probe.store.problems import read_json

_File = tuple[int, Path, Sort]
"""Rank, path and sort of a packed file."""
_Stated = dict[str, tuple[int, tuple[int, ...]]]
"""Bytes and steps of the packed files of a rank, as its `end.json` says."""


class Places:
    """Where the steps of a capture lie. Holds no file open."""

    steps: dict[int, tuple[int, ...]]
    """Of each rank that has a folder or a packed file, ascending."""
    problems: tuple[str, ...]
    """Which packed files cannot be read, one clause each."""

    def __init__(self, path: Path, *, run_id: str, world_size: int) -> None:
        """Look at the folder."""
        self._path, self._run_id, self._world_size = path, run_id, world_size
        self._segments = {rank: _segments(path, rank) for rank in _ranks(path)}
        self._packed, self.problems = self._open(_packed_files(path, self._segments))
        self._held = {rank: self._held_of(rank) for rank in sorted({*self._segments, *self._packed})}
        self.steps = {rank: tuple(sorted(held)) for rank, held in self._held.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Name the folder so that a process elsewhere finds it."""
        return self.__dict__ | {"_path": self._path.absolute()}

    def segments(self, rank: int) -> tuple[int, ...]:
        """List the steps of a rank that are there as segments."""
        return self._segments.get(rank, ())

    def packed(self, rank: int) -> tuple[Packed, ...]:
        """List the packed files of a rank: those made while it recorded, then the one that `probe pack` made."""
        return self._packed.get(rank, ())

    def holds(self, rank: int, step: int) -> bool:
        """Tell whether a rank recorded a step."""
        return step in self._held.get(rank, ())

    def packed_file_of(self, rank: int, step: int) -> Packed | None:
        """Return the packed file that a step is read from; None: its segment."""
        return self._held[rank][step]

    def file(self, rank: int, step: int) -> Path:
        """Return the file that a step is read from."""
        packed = self._held[rank][step]
        return self._path / rank_folder(rank) / segment_file(step) if packed is None else packed.path

    def look_again(self, rank: int) -> None:
        """Find where the steps of a rank lie now; what was recorded since the capture was opened is no part of it."""
        self._segments[rank] = _segments(self._path, rank)
        packed, _ = self._open(each for each in _packed_files(self._path, (rank,)) if each[0] == rank)
        self._packed[rank] = packed.get(rank, ())
        now = self._held_of(rank)
        self._held[rank] = {step: now.get(step, before) for step, before in self._held[rank].items()}

    def _held_of(self, rank: int) -> dict[int, Packed | None]:
        held: dict[int, Packed | None] = dict.fromkeys(self.segments(rank))
        for packed in self.packed(rank):
            for step in packed.steps:
                held.setdefault(step, packed)
        return held

    def _open(self, files: Iterable[_File]) -> tuple[dict[int, tuple[Packed, ...]], tuple[str, ...]]:
        """Find the steps of packed files, and say of each that cannot be read why.

        A rank of a long run has a hundred of them, and opening one takes a millisecond: what its `end.json` says of a
        file of the same size is taken instead, and found out when a step is read.
        """
        packed: dict[int, tuple[Packed, ...]] = {}
        stated: dict[int, _Stated] = {}
        problems = []
        for rank, file, sort in files:
            if sort is FOLDED and rank not in stated:
                stated[rank] = _stated(file.with_name(END_FILE), self._run_id)
            nbytes, steps = stated[rank].get(file.name, (-1, ())) if sort is FOLDED else (-1, ())
            try:
                found = Packed(
                    file,
                    run_id=self._run_id,
                    rank=rank,
                    world_size=self._world_size,
                    sort=sort,
                    steps=steps if nbytes == _size(file) else (),
                )
            except CaptureError as error:
                problems.append(f"rank {rank} has a packed file that cannot be read: {error}")
            else:
                packed[rank] = (*packed.get(rank, ()), found)
        return packed, tuple(problems)


def _ranks(path: Path) -> list[int]:
    """List the ranks that have a folder; what has another name is no part of the capture."""
    with os.scandir(path) as entries:
        folders = [entry.name for entry in entries if RANK_FOLDER.fullmatch(entry.name) and entry.is_dir()]
    return sorted(int(name.removeprefix("rank")) for name in folders)


def _segments(path: Path, rank: int) -> tuple[int, ...]:
    steps = (SEGMENT_FILE.fullmatch(name) for name in _names(path / rank_folder(rank)))
    return tuple(sorted(int(step[1]) for step in steps if step))


def _packed_files(path: Path, ranks: Iterable[int]) -> list[_File]:
    """List the packed files in the folders of ranks, and those beside the folders."""
    files = []
    for rank in ranks:
        folder = path / rank_folder(rank)
        files += [(rank, folder / name, FOLDED) for name in _names(folder) if FOLDED_FILE.fullmatch(name)]
    folder = path / PACKED_FOLDER
    made = ((PACKED_FILE.fullmatch(name), name) for name in _names(folder))
    return [*files, *((int(rank[1]), folder / name, PACKED) for rank, name in made if rank)]


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _stated(end: Path, run_id: str) -> _Stated:
    """Read what `end.json` says of packed files; of what is not as it should be, nothing."""
    with suppress(CaptureError):
        said = read_json(end)
        entries = said.get("segments")
        if said.get("run_id") == run_id and isinstance(entries, list):
            return {
                entry["file"]: (entry["bytes"], tuple(entry["steps"]))
                for entry in entries
                if isinstance(entry, dict) and isinstance(entry.get("file"), str) and _numbers(entry.get("steps"))
                if isinstance(entry.get("bytes"), int)
            }
    return {}


def _numbers(steps: object) -> bool:
    """Tell whether something is a list of steps, ascending."""
    return (
        isinstance(steps, list)
        and all(type(step) is int for step in steps)
        and all(one < two for one, two in itertools.pairwise(steps))
    )
