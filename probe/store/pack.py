"""Pack what a capture holds of each rank into one file.

A long run leaves many small files, which backups, object stores and shared file systems dislike. A packed file holds
the same bits: `probe.store.pack_steps` writes it and compares it with what it was made of before it gets its name; only
after that, and only on request, the segments are removed. Whatever kills it, every step can be read, and calling it
again goes on where it was. This module must not know how values are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from probe.store.folder import sync_folder
from probe.store.layout import packed_file, rank_folder, segment_file
from probe.store.pack_steps import Source, require_same, write_packed
from probe.store.reader import Capture


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRank:
    """What became of one rank."""

    rank: int
    steps: int
    before: int
    """Bytes of what was packed."""
    after: int
    """Bytes of the packed file."""
    removed: int
    """Segments that were removed."""
    merged: int
    """Packed files of some of the steps, made while recording, that were removed."""
    fresh: bool
    """Packed now, not by an earlier call."""


def pack(
    capture: Capture,
    *,
    compress: bool = False,
    remove: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Iterator[PackedRank]:
    """Pack a capture, rank by rank.

    Args:
        compress: Shuffle and deflate what gets smaller by it.
        remove: Remove each rank's segments once its packed file was compared with them.
        progress: Is told how many bytes were read since it was told last.

    Raises:
        CaptureError: A segment is damaged, the disk is full, or what was read back is not what was packed. Segments are
            then all there.
    """
    for rank in capture.ranks:
        target = capture.path / packed_file(rank)
        segments, packed = capture.segments(rank), capture.packed(rank)
        parts = [each for each in packed if each.path != target]
        held = {step for each in packed if each.path == target for step in each.steps}
        loose = sorted({*segments, *(step for each in parts for step in each.steps)})
        if not loose:
            continue
        files = [capture.path / rank_folder(rank) / segment_file(step) for step in segments]
        files += [each.path for each in parts]
        before = sum(file.stat().st_size for file in files)
        fresh = not held.issuperset(loose)
        source = Source(
            run_id=capture.run_id,
            rank=rank,
            world_size=capture.world_size,
            steps=capture.steps(rank) if fresh else tuple(loose),
            open_step=partial(capture.open_step, rank),
            nbytes=partial(capture.step_nbytes, rank),
        )
        if fresh:
            write_packed(source, target, compress=compress, progress=progress or (lambda nbytes: None))
        else:
            require_same(source, target)
        if remove:
            for file in files:
                file.unlink(missing_ok=True)
            sync_folder(capture.path / rank_folder(rank))
        yield PackedRank(
            rank=rank,
            steps=len(source.steps) if fresh else len(held),
            before=before,
            after=target.stat().st_size,
            removed=len(segments) if remove else 0,
            merged=len(parts) if remove else 0,
            fresh=fresh,
        )
