"""Baselines that are kept with the tests: where they lie, how they are written and read.

`tests/captures/<file>.<test>/<name>` is a capture that any command of `probe` reads; `<name>.toml` beside it holds the
tolerances that were calibrated when it was recorded. Both are meant to be committed. This module must not know how a
value is taken.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.equivalence.memory import MemoryCapture
from probe.errors import CaptureError, ProbeError
from probe.judge import tolerance
from probe.judge.tolerance import Tolerances
from probe.store.folder import create_capture, write_manifest
from probe.store.layout import MANIFEST_FILE
from probe.store.reader import Capture, open_capture
from probe.store.writer import RankWriter

FOLDER = "captures"
"""Folder beside the test files that holds their baselines."""
NEIGHBOURS = 2
"""Perturbed captures that are kept beside a baseline, for a result that is red by little."""
LONGEST = 80
"""Characters of a test's name that stay in a folder's name."""


class NoBaselineError(CaptureError):
    """Say that a test compares with a baseline that is not stored."""


class RecordedError(ProbeError):
    """Say that a baseline was recorded just now, so that a person looks before the test is green."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The place of a stored baseline."""

    capture: Path

    @property
    def tolerances(self) -> Path:
        """File of its tolerances."""
        return self.capture.with_name(f"{self.capture.name}.toml")

    def missing(self) -> Path | None:
        """Return what is not stored of it: the capture, or its tolerances; None if all is there."""
        if not (self.capture / MANIFEST_FILE).is_file():
            return self.capture
        return None if self.tolerances.is_file() else self.tolerances

    def neighbour(self, number: int) -> Path:
        """Folder of the baseline with its parameters and inputs moved by one ulp."""
        return self.capture.with_name(f"{self.capture.name}.ulp-{number}")

    def load(self) -> tuple[Capture, Tolerances, list[Capture]]:
        """Read the capture, its tolerances, and the perturbed captures.

        Raises:
            ProbeError: One of them cannot be read.
        """
        neighbours = [self.neighbour(number) for number in range(1, NEIGHBOURS + 1)]
        return (
            open_capture(self.capture),
            tolerance.load(self.tolerances),
            [open_capture(path) for path in neighbours if (path / MANIFEST_FILE).is_file()],
        )

    def store(self, plain: MemoryCapture, perturbed: Sequence[MemoryCapture], tolerances: Tolerances) -> None:
        """Write the capture of all ranks, the first perturbed ones, and the tolerances, in place of what is there."""
        for number, capture in enumerate(perturbed[:NEIGHBOURS], 1):
            _write(self.neighbour(number), capture)
        _write(self.capture, plain)
        tolerance.save(tolerances, self.tolerances)


def _write(path: Path, capture: MemoryCapture) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    create_capture(partial, force=True)
    for rank in capture.ranks:
        writer = RankWriter(partial, run_id=capture.run_id, rank=rank, world_size=capture.world_size)
        for step in capture.steps(rank):
            writer.write(capture.rows(rank, step))
        writer.close(error=None, dropped_steps=[])
    write_manifest(partial, dict(capture.manifest))
    if path.exists():
        create_capture(path, force=True)  # empties it, and refuses where there is more than a capture
        path.rmdir()
    os.rename(partial, path)


def baseline_of(test_file: Path, test: str, name: str) -> Baseline:
    """Find the place of a test's baseline.

    Args:
        test_file: The test's file.
        test: Its name within the file, e.g. `TestBlock::test_fused[bf16]`.
        name: The check's name.
    """
    return Baseline(capture=test_file.parent / FOLDER / folder_of(test_file, test) / in_a_path(name))


def folder_of(test_file: Path, test: str) -> str:
    """Name the folder of a test's baselines.

    >>> folder_of(Path("tests/test_block.py"), "TestBlock::test_fused")
    'test_block.TestBlock.test_fused'
    """
    return f"{test_file.stem}.{in_a_path(test.replace('::', '.'))}"


def in_a_path(text: str) -> str:
    """Write any text with characters that every file system takes; what is changed gets a checksum, to stay unique.

    >>> in_a_path("fused"), in_a_path("fused[bf16]")
    ('fused', 'fused-bf16-0d5efa6f')
    """
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-.")
    if plain == text and len(text) <= LONGEST:
        return text
    return f"{plain[:LONGEST]}-{zlib.crc32(text.encode()):08x}"


def stale(of_files: Mapping[Path, Iterable[str]]) -> list[Path]:
    """List the folders of baselines whose test is gone.

    Args:
        of_files: Test files that were collected whole, with the names of their tests.

    Returns:
        Folders that belong to one of the files, or to a file that is gone, and to none of the tests; sorted.
    """
    found = []
    for folder in sorted({file.parent for file in of_files}):
        captures = folder / FOLDER
        if not captures.is_dir():
            continue
        used = {folder_of(file, test) for file, tests in of_files.items() if file.parent == folder for test in tests}
        collected = {file.stem for file in of_files if file.parent == folder}
        for entry in sorted(captures.iterdir()):
            stem = entry.name.partition(".")[0]
            gone = stem in collected or not (folder / f"{stem}.py").exists()
            if entry.is_dir() and "." in entry.name and gone and entry.name not in used:
                found.append(entry)
    return found


def made_elsewhere(manifest: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Say, in one sentence, that a baseline is from another version of torch or another device; empty if it is not.

    Args:
        manifest: Of the baseline.
        here: Versions and device of this process.
    """
    made = manifest.get("provenance", {})
    torch_then, torch_now = (str(each.get("versions", {}).get("torch", "?")) for each in (made, here))
    device_then, device_now = (str(each.get("device", "?")) for each in (made, here))
    differing = []
    if torch_then != torch_now:
        differing.append((f"with torch {torch_then}", f"torch {torch_now}"))
    if device_then != device_now:
        differing.append((f"on {device_then}", f"{device_now}"))
    if not differing:
        return ""
    then, now = (" ".join(each) for each in zip(*differing, strict=True))
    return f"The baseline was recorded {then}; this run has {now}."
