"""Record one workload with forty lines of hooks and `torch.save`, and with this package, in turn.

The workload and the forty lines are given by path: a folder with `job.py` and `peer_naive.py`. Both take eight steps of
the same model. Ratios are to the bare step measured in the same repeat; bytes are those on disk of one step.

    python benchmarks/peers.py ../shared/peers [--size small] [--repeats 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from overhead import ARMS, run

STEPS = "8"


def naive(folder: Path, size: str) -> tuple[float, float]:
    """Run the forty lines; returns their ratio to the bare step, and megabytes."""
    with tempfile.TemporaryDirectory() as out:
        words = [sys.executable, str(folder / "peer_naive.py"), "--size", size, "--steps", STEPS, "--out", out]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return float(told["ratio"]), float(told["MB"]) / int(STEPS)


def main() -> None:
    """Print one line for each way to record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", type=Path)
    parser.add_argument("--size", default="small")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    job = [str(arguments.peers / "job.py"), "--size", arguments.size, "--steps", STEPS]
    ratios: dict[str, list[float]] = {"hooks and torch.save": [], "summaries": [], "full": []}
    megabytes: dict[str, float] = {}
    for _ in range(arguments.repeats):
        ratio, megabytes["hooks and torch.save"] = naive(arguments.peers, arguments.size)
        ratios["hooks and torch.save"].append(ratio)
        bare = json.loads(run(job, None)[1].splitlines()[-1])["cpu_s_per_step"]
        for arm in ("summaries", "full"):
            _, output, nbytes = run(job, ARMS[arm])
            ratios[arm].append(json.loads(output.splitlines()[-1])["cpu_s_per_step"] / bare)
            megabytes[arm] = nbytes / 1e6 / int(STEPS)
    for way, found in ratios.items():
        spread = f"{statistics.median(found):.2f}x bare ({min(found):.2f} to {max(found):.2f})"
        print(f"{way:22s}{spread}, {megabytes[way]:.1f} MB a step")


if __name__ == "__main__":
    main()
