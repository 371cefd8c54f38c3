"""Measure what folding segments into a file of several steps takes of another core, and of memory.

    python benchmarks/fold.py [--steps 100] [--quantities 400 2000]

The child process is the one that `probe record --steps-per-file` starts; what it takes to start is measured apart."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from made_captures import machine, make

from probe.store.folding import child_command


def run(folder: Path, steps: int) -> tuple[float, float]:
    """Fold so many steps, or only start and end; return CPU seconds and the most memory in MB."""
    request = {
        "folder": str(folder / "rank00000"),
        "steps": list(range(1, steps + 1)),
        "run_id": json.loads((folder / "capture.json").read_text())["run_id"],
        "rank": 0,
        "world_size": 1,
    }
    child = subprocess.Popen(child_command(), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stderr is not None
    child.stdin.write(json.dumps(request).encode())
    child.stdin.close()
    said = child.stderr.read().decode()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"Folding failed: {said}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def main() -> None:
    """Fold captures made of random numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quantities", type=int, nargs="+", default=[400, 2000])
    options = parser.parse_args()
    print(machine())
    for quantities in options.quantities:
        with tempfile.TemporaryDirectory() as folder:
            capture = Path(folder) / "capture"
            make(capture, quantities=quantities, steps=options.steps + 1, ranks=1)
            # One step is folded first: all but nothing beside the start.
            last = Path(folder) / "one"
            make(last, quantities=quantities, steps=1, ranks=1)
            start, _ = run(last, 1)
            took, peak = run(capture, options.steps)
            each = (took - start) / (options.steps - 1) * 1e3
            print(f"{quantities} quantities: start and one step {start:.2f} s CPU, {each:.0f} ms a step, {peak:.0f} MB")


if __name__ == "__main__":
    main()
