"""Record one workload with other tools, with forty lines of hooks and `torch.save`, and with this package, in turn.

    python benchmarks/peers.py FOLDER [--size small] [--repeats 5] [--python PYTHON]

FOLDER has `job.py`, and a script `peer_*.py` for each tool, which records the same model and prints a JSON object with
`cpu_ms_plain` (CPU time of a bare step), `cpu_ms_rec` (of recorded steps) and `MB`. PYTHON is the interpreter of an
environment that has the tools; what does not run there is named with its last words. Ratios are to the bare step of
the same process (the tools) or the same repeat (this package); megabytes are those on disk of one step.
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
from typing import Any

from made_captures import machine
from overhead import ARMS, run

STEPS = "8"
TOOLS: dict[str, list[str]] = {
    "hooks and torch.save": ["peer_naive.py", "--steps", STEPS],
    "msprobe, statistics": ["peer_msprobe.py", "record", "--task", "statistics"],
    "msprobe, tensors": ["peer_msprobe.py", "record", "--task", "tensor"],
    "SGLang dumper": ["peer_sglang_dumper.py", "record"],
    "torchlens": ["peer_torchlens.py"],
    "DebugMode with hashes": ["peer_debugmode.py"],
}
ONE_SIZE = {"DebugMode with hashes": "tiny"}
"""Scripts that know one size only, and take no argument for it."""


def once(python: str, folder: Path, words: list[str]) -> dict[str, Any] | str:
    """Run a tool's script; returns what it printed, or why it did not."""
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(
            [python, str(folder / words[0]), *words[1:]],
            cwd=elsewhere,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{") and "cpu_ms_rec" in line]
    if lines:
        told: dict[str, Any] = json.loads(lines[0])
        return told
    return ([line for line in done.stderr.splitlines() if line.strip()] or ["it printed nothing"])[-1]


def main() -> None:
    """Print one line for each way to record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="small")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    folder = options.folder.resolve()
    job = [str(folder / "job.py"), "--size", options.size, "--steps", STEPS]
    tools = {name: words for name, words in TOOLS.items() if ONE_SIZE.get(name, options.size) == options.size}
    ratios: dict[str, list[float]] = {}
    megabytes: dict[str, float] = {}
    failed: dict[str, str] = {}
    for repeat in range(options.repeats):
        for name, words in tools.items():
            if name in failed:
                continue
            told = once(options.python, folder, words if name in ONE_SIZE else [*words, "--size", options.size])
            if isinstance(told, str):
                failed[name] = told
                continue
            ratios.setdefault(name, []).append(statistics.median(told["cpu_ms_rec"]) / told["cpu_ms_plain"])
            megabytes[name] = told.get("MB", 0.0) / len(told["cpu_ms_rec"])
        bare = json.loads(run(job, None)[1].splitlines()[-1])["cpu_s_per_step"]
        for arm in ("summaries", "full"):
            _, output, nbytes = run(job, ARMS[arm])
            name = f"probe, {arm}"
            ratios.setdefault(name, []).append(json.loads(output.splitlines()[-1])["cpu_s_per_step"] / bare)
            megabytes[name] = nbytes / 1e6 / int(STEPS)
        print(f"repeat {repeat + 1} of {options.repeats}", file=sys.stderr)
    print(f"{machine()}; {options.size}, medians (least to most) of {options.repeats} interleaved repeats")
    for name, found in sorted(ratios.items(), key=lambda each: statistics.median(each[1])):
        spread = f"{statistics.median(found):6.2f}x bare ({min(found):.2f} to {max(found):.2f})"
        print(f"{name:24s}{spread}, {megabytes[name]:.1f} MB a step")
    for name, why in failed.items():
        print(f"{name:24s}did not run: {why}")


if __name__ == "__main__":
    main()
