"""Measure what recording costs, against the bare run of the same script in the same interleaved session.

    python benchmarks/overhead.py JOB.py [ARGS...] [--repeats 5]
    python benchmarks/overhead.py examples/minimax_h3/train.py --steps {steps}

The job prints, as its last line, a JSON object with `cpu_s_per_step` (process CPU seconds of a step after warm-up), and
may print `parameters` (a hash of the final parameters), which must not change. A job that does not is run with two
numbers in the place of `{steps}`, and a step costs what the longer run took more. The arms are: bare; off (the recorder
installed and no step wanted); summaries (the default plan); full (every module output and gradient kept whole).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PROBE = [sys.executable, "-m", "probe", "record"]
ARMS: dict[str, list[str] | None] = {
    "bare": None,
    "off": ["--steps", "1000000"],
    "summaries": [],
    "full": ["--full", "forward/*", "--full", "backward/*", "--full", "grad/*"],
}


STEPS, LENGTHS = "{steps}", (4, 24)
"""What stands for the number of steps, and the two numbers that are put in its place."""


def once(job: list[str], options: list[str] | None) -> tuple[float, str, int]:
    """Run one arm once. Returns CPU seconds per step, the parameters' hash, and the capture's bytes."""
    if STEPS not in job:
        _, output, nbytes = run(job, options)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        result = json.loads(lines[-1]) if lines else {}
        if "cpu_s_per_step" not in result:
            sys.exit(f"The job printed no JSON line with 'cpu_s_per_step'. Put {STEPS} where it takes its steps.")
        return float(result["cpu_s_per_step"]), str(result.get("parameters", "")), nbytes
    (short, _, _), (long, output, nbytes) = (
        run([str(steps) if word == STEPS else word for word in job], options) for steps in LENGTHS
    )
    return (long - short) / (LENGTHS[1] - LENGTHS[0]), output, nbytes


def run(job: list[str], options: list[str] | None) -> tuple[float, str, int]:
    """Run the job to its end. Returns CPU seconds, what it printed, and the capture's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *job]
        if options is not None:
            command = [*PROBE, "-o", f"{folder}/capture", *options, "--", *command]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode and options != ARMS["off"]:  # which records nothing, and says so
            sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}")
        nbytes = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout, nbytes


def main() -> None:
    """Run the arms interleaved and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("job", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    arms = options.arms.split(",")
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    hashes: set[str] = set()
    nbytes: dict[str, int] = {}
    for repeat in range(options.repeats):
        for arm in arms:
            took, parameters, nbytes[arm] = once(options.job, ARMS[arm])
            seconds[arm].append(took)
            hashes.add(parameters)
        print(f"repeat {repeat + 1} of {options.repeats} done", file=sys.stderr)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{' '.join(options.job)}; {machine}")
    for arm in arms:
        ratios = [s / b for s, b in zip(seconds[arm], seconds["bare"], strict=True)]
        times = f"{statistics.median(seconds[arm]) * 1e3:8.1f} ms CPU a step"
        spread = f"{statistics.median(ratios):.2f}x bare ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{arm:10s} {times}, {spread}, {nbytes[arm] / 1e6:.1f} MB")
    told = "what it printed" if STEPS in options.job else "final parameters"
    print(f"{told}: " + ("the same in all runs" if len(hashes) == 1 else f"DIFFERENT {sorted(hashes)}"))
    sys.exit(len(hashes) != 1)


if __name__ == "__main__":
    main()
