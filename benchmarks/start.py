"""Measure how long commands take to start, against `python -c pass` in the same interleaved session.

    python benchmarks/start.py [--repeats 5] [BASE... CAND]

Without captures small ones are made (300 quantities, 3 steps, 2 ranks). Wall time is what a person waits. CPU time is
what is left of it when the machine does nothing else, so it can be read on a busy one too."""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from made_captures import machine, make

PROBE = [sys.executable, "-m", "probe"]


def once(command: list[str]) -> tuple[float, float]:
    """Run a command with its output piped; return wall and CPU seconds."""
    # Compiled modules are kept, as in any installation.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if b"Traceback" in done.stderr or done.returncode not in (0, 1, 2):
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr.decode()}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the commands interleaved and print what each takes beyond Python itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("captures", nargs="*", type=Path, help="the last one is the candidate")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        captures = options.captures or [Path(folder) / name for name in ("base-0", "base-1", "cand-0")]
        for seed, capture in enumerate([] if options.captures else captures):
            make(capture, quantities=300, steps=3, ranks=2, noise=1e-7, seed=seed, code=capture.name[:4])
        *baselines, candidate = map(str, captures)
        diff = [*PROBE, "diff", *baselines, "--candidate", candidate]
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "probe --help": [*PROBE, "--help"],
            "probe diff": diff,
            "probe diff --json": [*diff, "--json"],
            "probe show": [*PROBE, "show", candidate],
            "probe show --json": [*PROBE, "show", candidate, "--json"],
        }
        for command in commands.values():
            once(command)  # compiles modules, fills the page cache
        took: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(options.repeats):
            for name, command in commands.items():
                took[name].append(once(command))
    print(f"{machine()}; median (least to most) of {options.repeats} interleaved repeats, seconds")
    for name, times in took.items():
        wall, cpu = ([each[kind] for each in times] for kind in (0, 1))
        print(f"{name:18s} wall {_spread(wall)}   CPU {_spread(cpu)}")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
