"""What holds for every test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probe.store import twins


@pytest.fixture(autouse=True)
def nothing_learned() -> None:
    """What the captures of other tests taught must not decide how a test's own are read."""
    twins._known.clear()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system in memory, given its size."""
    mount = tmp_path / "small"

    def mounted(size: str) -> Path:
        mount.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mount)]
        try:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if made.returncode:
            pytest.skip(f"mounting a small file system needs root: {made.stderr.strip()}")
        return mount

    yield mounted
    if mount.is_mount():
        subprocess.run(["umount", str(mount)], check=True)
