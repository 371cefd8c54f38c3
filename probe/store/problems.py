"""Say what is missing from a capture, or went wrong while it was made.

It looks at file names and the JSON files alone, so that opening a capture of thousands of segments is quick. What it
says are findings: whether they matter is for whoever compares. This module must not open a segment.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from probe.errors import CaptureError, CaptureFormatError
from probe.store.layout import END_FILE, rank_folder

_JSON_NBYTES = 64 << 20
"""Most that is read of a JSON file: a manifest has kilobytes."""
_WORLD = 100_000
"""Ranks that folder names can number."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CaptureError: It cannot be read.
        CaptureFormatError: It is something else.
    """
    try:
        if not path.is_file():
            raise CaptureFormatError(f"File {path} is no regular file. Remove it.")
        if path.stat().st_size > _JSON_NBYTES:
            raise CaptureFormatError(f"File {path} has {path.stat().st_size} bytes; at most {_JSON_NBYTES} are read.")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CaptureError(f"File {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CaptureFormatError(f"File {path} is damaged: {error}. Record the run again.") from error
    if not isinstance(content, dict):
        raise CaptureFormatError(f"File {path} is damaged: it holds no JSON object. Record the run again.")
    return content


def find_problems(path: Path, manifest: Mapping[str, Any], steps: Mapping[int, tuple[int, ...]]) -> Iterator[str]:
    """Compare what a capture holds with what it should.

    Args:
        path: Its folder.
        manifest: What `capture.json` says.
        steps: The steps that each rank's folder has.

    Yields:
        One clause each, by rank.
    """
    world_size = manifest["world_size"]
    planned = _planned(manifest, steps)
    for rank in sorted(set(range(min(world_size, _WORLD))) - set(steps)):
        yield f"rank {rank} of {world_size} is missing"
    for rank, recorded in sorted(steps.items()):
        if rank >= world_size:
            yield f"rank {rank} is beyond the world size of {world_size}"
        end = path / rank_folder(rank) / END_FILE
        dropped: set[int] = set()
        listed_steps: set[int] = set()
        if end.exists():
            yield from _end_problems(end, rank, manifest["run_id"], dropped, listed_steps)
            until = max(planned | listed_steps, default=0)
        else:
            yield f"rank {rank} was not closed cleanly, " + (f"last step {recorded[-1]}" if recorded else "no step")
            until = max(recorded, default=0)
        gaps = {step for step in planned | listed_steps if step <= until} - set(recorded) - dropped
        if gaps:
            yield f"rank {rank} lacks {steps_in_words(gaps)}"
        elif not recorded and end.exists():
            yield f"rank {rank} recorded no step"


def _end_problems(file: Path, rank: int, run_id: str, dropped: set[int], listed_steps: set[int]) -> Iterator[str]:
    """Say what `end.json` tells; add the steps that it counts as dropped, and those that it lists as written."""
    try:
        end = read_json(file)
    except CaptureError as error:
        yield f"rank {rank} has an end that cannot be read: {error}"
        return
    if end.get("run_id") != run_id:
        yield f"rank {rank} has the end of another run, {end.get('run_id')!r}"
        return
    if end.get("error"):
        yield f"rank {rank} ended with an error: {end['error']}"
    dropped.update(_numbers(end.get("dropped_steps")))
    if dropped:
        yield f"rank {rank} dropped {steps_in_words(dropped)}"
    segments = end.get("segments")
    entries = segments if isinstance(segments, list) else []
    for entry in entries:
        if isinstance(entry, dict):
            # A file of several steps lists them; the range from first to last may have holes.
            listed_steps.update(_numbers([entry.get("first_step")]), _numbers(entry.get("steps")))


def _numbers(found: object) -> list[int]:
    return [step for step in found if isinstance(step, int)] if isinstance(found, list) else []


def _planned(manifest: Mapping[str, Any], steps: Mapping[int, tuple[int, ...]]) -> set[int]:
    """Say which steps every rank should have, up to the last that any has: a run may end before its plan does.

    A plan such as `1-5,10` is in the manifest; without one that can be read, no step may be left out in between.
    """
    recorded = {step for each in steps.values() for step in each}
    if not recorded:
        return set()
    last = max(recorded)
    config = manifest.get("config")
    plan = config.get("steps") if isinstance(config, dict) else None
    if not isinstance(plan, str):
        return set(range(min(recorded), last + 1))
    planned: set[int] = set()
    for part in plan.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            return recorded
        planned.update(range(int(low), min(int(high or low), last) + 1))
    return planned | recorded


def steps_in_words(steps: Iterable[int]) -> str:
    """Write steps in few words.

    >>> steps_in_words({1, 2, 3, 7})
    'steps 1-3, 7'
    """
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    words = ", ".join(f"{low}-{high}" if low < high else str(low) for low, high in runs[:10])
    more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
    one = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"{'step' if one else 'steps'} {words}{more}" if runs else "no step"
