"""Measure how fast whole tensors are written, against plain writes and a sync of the same bytes.

    python benchmarks/write.py [--megabytes 480] [--tensors 3] [--repeats 7] [--folder DIR]

Each repeat writes one segment with the recorder's writer, and the same arrays into a plain file with 16 MiB writes, an
fsync, a rename and a sync of the folder; in turn, so that both meet the same disk. Each is deleted at once."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from made_captures import keys_of, machine, rows_with

from probe.store.disk import aligned
from probe.store.layout import FullTensor
from probe.store.writer import RankWriter

PIECE = 16 << 20


def plain(folder: Path, arrays: list[np.ndarray]) -> None:
    """Write arrays one after the other, as safely as the writer does."""
    unfinished = folder / "plain.tmp"
    descriptor = os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for array in arrays:
        view = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(view), PIECE):
            os.write(descriptor, view[start : start + PIECE])
    os.fsync(descriptor)
    os.close(descriptor)
    os.rename(unfinished, folder / "plain")
    inside = os.open(folder, os.O_RDONLY)
    os.fsync(inside)
    os.close(inside)


def copy_of(array: np.ndarray) -> np.ndarray:
    """Copy an array into memory like that which the recorder copies into."""
    copy = aligned(array.nbytes)[: array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return wall and CPU seconds of a call."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Write in turn and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=480)
    parser.add_argument("--tensors", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    elements = int(options.megabytes * 1e6 / 2 / options.tensors)
    random = np.random.default_rng(0)
    arrays = [copy_of(random.integers(0, 2**16, elements, dtype=np.uint16)) for _ in range(options.tensors)]
    kept = keys_of(options.tensors + 5)[-options.tensors :]
    tensors = {key: FullTensor(bits=bits, dtype="bfloat16") for key, bits in zip(kept, arrays, strict=True)}
    took: dict[str, list[tuple[float, float]]] = {"plain": [], "probe": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        writer = RankWriter(folder, run_id="benchmark", rank=0, world_size=1)
        for repeat in range(options.repeats + 1):
            rows = rows_with(tensors, step=repeat + 1)
            one = timed(lambda: plain(folder, arrays))
            two = timed(lambda rows=rows: writer.write(rows))
            size = (folder / "rank00000" / f"step{repeat + 1:08d}.h5").stat().st_size
            (folder / "plain").unlink()
            (folder / "rank00000" / f"step{repeat + 1:08d}.h5").unlink()
            if repeat:
                took["plain"].append(one)
                took["probe"].append(two)
            print(f"repeat {repeat} of {options.repeats}", file=sys.stderr)
    print(f"{machine()}; {options.tensors} tensors, {options.megabytes:g} MB, segment {size / 1e6:.1f} MB")
    for name, times in took.items():
        wall, cpu = ([each[kind] for each in times] for kind in (0, 1))
        print(f"{name}: {options.megabytes / statistics.median(wall):.0f} MB/s, CPU {statistics.median(cpu):.2f} s")
    ratios = [p[0] / q[0] for p, q in zip(took["plain"], took["probe"], strict=True)]
    print(
        f"probe writes at {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of the speed of "
        f"plain writes and fsync; medians of {options.repeats} interleaved repeats"
    )


if __name__ == "__main__":
    main()
