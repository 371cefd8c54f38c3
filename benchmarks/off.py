"""Measure what the explicit API costs while recording is off, against calls of an empty function.

    python benchmarks/off.py [--calls 1000000] [--repeats 7]

Each repeat is one process per arm, in turn: it imports a module, then calls a function of it a million times. CPU time;
the ratio of the two arms' medians is printed with the spread of the pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

EMPTY = "def record(name, value, note=''):\n    pass\n"

ARM = """
import resource, sys
def seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
before = seconds()
import {module} as module
imported = seconds()
for _ in range({calls}):
    module.record("loss", 1.0)
print(imported - before, seconds() - imported)
"""


def measure(module: str, calls: int, folder: Path) -> tuple[float, float]:
    """Run one arm and return the CPU seconds of the import and of the calls."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PROBE")}
    root = Path(__file__).resolve().parent.parent
    environment["PYTHONPATH"] = f"{root}{os.pathsep}{folder}"
    words = [sys.executable, "-S", "-c", ARM.format(module=module, calls=calls)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    imported, called = map(float, done.stdout.split())
    return imported, called


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "empty.py").write_text(EMPTY)
        pairs = [
            (measure("empty", arguments.calls, folder), measure("probe", arguments.calls, folder))
            for _ in range(arguments.repeats)
        ]
    ratios = sorted(off[1] / empty[1] for empty, off in pairs)
    imports = statistics.median(off[0] - empty[0] for empty, off in pairs)
    total = sorted(sum(off) / sum(empty) for empty, off in pairs)
    print(f"{arguments.calls} calls of probe.record while off, against an empty function of a module:")
    print(f"  calls            {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"  import and calls {statistics.median(total):.2f}x ({total[0]:.2f} to {total[-1]:.2f})")
    print(f"  import alone     {imports * 1e3:.1f} ms more")


if __name__ == "__main__":
    main()
