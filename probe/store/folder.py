"""Make the folder of a capture and the JSON files in it.

A file appears under its name only when it is whole: written as `*.tmp`, synced, renamed, and the folder synced.
Replacing a capture removes only what a capture is made of. This module must not know HDF5.
"""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from probe.errors import CaptureError, listed
from probe.store.layout import (
    END_FILE,
    FOLDED_FILE,
    FORMAT_CAPTURE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    NAMES_FILE,
    NOTE_FILE,
    NOTES_FOLDER,
    PACKED_FILE,
    PACKED_FOLDER,
    RANK_FOLDER,
    SEGMENT_FILE,
    UNFINISHED,
)


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
    folded = [entry for folder in folders for entry in folder.glob("packed*.h5") if FOLDED_FILE.fullmatch(entry.name)]
    if not force:
        of_several = f", {count(len(folded), 'file')} of several steps" if folded else ""
        raise CaptureError(
            f"Capture {path} exists: {count(len(folders), 'rank')}, {count(len(steps), 'step')}{of_several}. "
            "Choose another folder, or replace it with --force."
        )
    others = [str(entry.relative_to(path)) for entry in foreign(path)]
    if others:
        raise CaptureError(
            f"Capture {path} is not replaced: it holds what is no part of a capture: {listed(others)}. "
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
        "created_utc": now(),
        **manifest,
        "format": FORMAT_CAPTURE,
        "version": FORMAT_VERSION,
    }
    write_json(path / MANIFEST_FILE, whole)


def foreign(path: Path) -> list[Path]:
    """List what is in a folder and was not written as part of a capture. Links are never followed."""
    found = []
    for entry in path.iterdir():
        if RANK_FOLDER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
            found += [inner for inner in entry.iterdir() if not _is_own_file(inner, (END_FILE, NAMES_FILE))]
        elif entry.name == NOTES_FOLDER and entry.is_dir() and not entry.is_symlink():
            found += [inner for inner in entry.iterdir() if not NOTE_FILE.fullmatch(inner.name)]
        elif entry.name == PACKED_FOLDER and entry.is_dir() and not entry.is_symlink():
            found += [inner for inner in entry.iterdir() if not _is_packed(inner)]
        elif not _is_own_file(entry, (MANIFEST_FILE,)):
            found.append(entry)
    return found


def _is_packed(entry: Path) -> bool:
    named = PACKED_FILE.fullmatch(entry.name.removesuffix(UNFINISHED)) is not None
    return named and entry.is_file() and not entry.is_symlink()


def _is_own_file(entry: Path, json_files: tuple[str, ...]) -> bool:
    name = entry.name.removesuffix(UNFINISHED)
    steps = SEGMENT_FILE.fullmatch(name) or FOLDED_FILE.fullmatch(name)
    known = name in json_files or (END_FILE in json_files and steps is not None)
    return known and entry.is_file() and not entry.is_symlink()


def write_json(target: Path, content: dict[str, Any]) -> None:
    unfinished = target.with_name(target.name + UNFINISHED)
    try:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        with open(unfinished, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(unfinished, target)
        sync_folder(target.parent)
    except (OSError, TypeError, ValueError) as error:
        unfinished.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CaptureError(f"File {target} could not be written: {reason}.") from error


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
