"""Fold segments of one rank into one packed file of several steps, while the run goes on.

A run of ten thousand steps would leave as many small files on each rank. The file is written, synced and compared with
the segments before it gets its name, and only then the segments are removed: a reader finds each step at every moment,
and so does whoever comes after a kill. It runs as a process of its own (`main`), niced: folding takes as much of the
interpreter as recording does, and HDF5 under a training thread would stop it. This module must not know the
capture, whose other ranks are none of its business, nor import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probe.errors import CaptureError, ProbeError
from probe.store.folder import sync_folder
from probe.store.guard import open_segment
from probe.store.layout import folded_file, segment_file
from probe.store.pack_steps import RESERVE, Source, write_packed
from probe.store.steps import StepFile, require_segment

NICER = 10
"""Training goes first where they share a core."""


def fold(
    folder: Path,
    steps: tuple[int, ...],
    *,
    run_id: str,
    rank: int,
    world_size: int,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Fold segments into one file, and remove them.

    Args:
        folder: Folder of the rank.
        steps: Steps that have segments there, ascending.
        run_id: As in the segments.
        rank: From 0.
        world_size: Number of ranks.
        progress: Is called after each step; what it raises ends the folding, and the segments stay.

    Returns:
        The file.

    Raises:
        CaptureError: A segment is damaged or missing, the disk is full, or what was read back is not what was written.
            The segments are all there.
    """
    target = folder / folded_file(steps[0])
    if target.exists():
        raise CaptureError(f"Packed file {target} exists already. The segments are kept.")

    @contextmanager
    def open_step(step: int) -> Iterator[StepFile]:
        with open_segment(folder / segment_file(step)) as segment:
            identity: dict[str, int | str] = {"run_id": run_id, "rank": rank, "world_size": world_size}
            require_segment(segment, identity | {"first_step": step, "last_step": step})
            yield StepFile(segment, step)

    def nbytes(step: int) -> int:
        return (folder / segment_file(step)).stat().st_size

    source = Source(
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        steps=steps,
        open_step=open_step,
        nbytes=nbytes,
    )
    try:
        # Recording goes on meanwhile, and must not be what meets the full disk: as many steps again have room.
        reserve = RESERVE + sum(map(nbytes, steps))
    except OSError as error:
        raise CaptureError(f"Segments in {folder} cannot be folded: {error.strerror}.") from error
    write_packed(source, target, compress=False, progress=progress or (lambda nbytes: None), reserve=reserve)
    for step in steps:
        (folder / segment_file(step)).unlink(missing_ok=True)
    sync_folder(folder)
    return target


def main() -> None:
    """Fold what a JSON object on stdin names; what is wrong is said on stderr, with exit status 2."""
    # An interrupt is for the training, which ends in good order and waits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICER)
    parent = os.getppid()
    request: dict[str, Any] = json.load(sys.stdin)

    def go_on(_nbytes: int) -> None:
        if os.getppid() != parent:
            raise CaptureError("The process that recorded has ended. The segments are kept.")

    try:
        fold(
            Path(request["folder"]),
            tuple(request["steps"]),
            run_id=request["run_id"],
            rank=request["rank"],
            world_size=request["world_size"],
            progress=go_on,
        )
    except (ProbeError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
