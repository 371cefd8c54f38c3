"""Choose captures to delete, by age and by the room that all take, and delete them.

Only a folder whose `capture.json` says that it is a capture is looked at, and only if everything in it was written as
part of one: a note or a link that somebody put there keeps it. This module must not ask anybody anything.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probe.errors import CaptureError, listed
from probe.store.folder import foreign
from probe.store.layout import END_FILE, FORMAT_CAPTURE, MANIFEST_FILE, RANK_FOLDER
from probe.store.problems import read_json

STILL_S = 24 * 3600.0
"""A rank without an end that was written to within so many seconds may still be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A capture below the folder that is pruned."""

    path: Path
    nbytes: int
    age_s: float
    """Since its newest file was written."""
    kept_for: str = ""
    """Why it is not deleted, whatever its age; empty if it may be."""


def find_captures(folder: Path, now_s: float) -> list[Found]:
    """List the captures below a folder, oldest first. Links are not followed, and captures not looked into.

    Args:
        now_s: Seconds since 1970.

    Raises:
        CaptureError: There is no such folder.
    """
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise CaptureError(f"Folder {folder} {found}. Name the folder that holds captures.")
    captures = []
    for path, folders, files in os.walk(folder):
        folders.sort()
        if MANIFEST_FILE in files and _is_capture(Path(path)):
            folders.clear()
            captures.append(_look(Path(path), now_s))
    return sorted(captures, key=lambda each: (-each.age_s, each.path))


def _is_capture(path: Path) -> bool:
    try:
        return read_json(path / MANIFEST_FILE).get("format") == FORMAT_CAPTURE
    except CaptureError:
        return False


def _look(path: Path, now_s: float) -> Found:
    nbytes, newest = 0, 0.0
    for where, _, files in os.walk(path):
        for name in files:
            status = os.lstat(os.path.join(where, name))
            nbytes += status.st_size
            newest = max(newest, status.st_mtime)
    age_s = now_s - newest
    others = [str(entry.relative_to(path)) for entry in foreign(path)]
    why = f"it holds what is no part of a capture: {listed(others)}" if others else ""
    ranks = [entry for entry in path.iterdir() if RANK_FOLDER.fullmatch(entry.name)]
    if not why and age_s < STILL_S and not all((rank / END_FILE).exists() for rank in ranks):
        why = "it may still be recorded: a rank has no end and was written to within a day"
    return Found(path=path, nbytes=nbytes, age_s=age_s, kept_for=why)


def choose(captures: Sequence[Found], *, older_than_s: float | None, keep_nbytes: int | None) -> list[Found]:
    """Choose what to delete.

    Args:
        captures: From `find_captures`, oldest first.
        older_than_s: Delete what is older.
        keep_nbytes: Then delete the oldest until all that stay take no more than this.
    """
    chosen = []
    left = sum(each.nbytes for each in captures)
    for each in captures:
        old = older_than_s is not None and each.age_s > older_than_s
        large = keep_nbytes is not None and left > keep_nbytes
        if (old or large) and not each.kept_for:
            chosen.append(each)
            left -= each.nbytes
    return chosen


def delete(capture: Found) -> None:
    """Delete a capture, its manifest last: what a kill leaves is still a capture, and found the next time.

    Raises:
        CaptureError: It has changed since it was looked at, or cannot be deleted.
    """
    others = [str(entry.relative_to(capture.path)) for entry in foreign(capture.path)]
    if others:
        raise CaptureError(f"Capture {capture.path} is not deleted: it holds what is no part of one: {listed(others)}.")
    try:
        for entry in sorted(capture.path.iterdir()):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != MANIFEST_FILE:
                entry.unlink()
        (capture.path / MANIFEST_FILE).unlink()
        capture.path.rmdir()
    except OSError as error:
        raise CaptureError(f"Capture {capture.path} could not be deleted: {error.strerror}.") from error
