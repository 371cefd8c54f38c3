"""Kill a recorded run at random moments and check that every completed step can be read and is right.

    python benchmarks/kill.py [--kills 60] [--steps-per-file 3]

The same run, left alone, gives the expected values. A step counts as completed when its file has its name; beyond that
the script knows how many steps the training had finished when it was killed, and prints how far behind the disk was.
With `--steps-per-file` segments are folded all the time, and some of the kills find it half done.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from probe.store.reader import Capture, open_capture

JOB = Path(__file__).resolve().parent.parent / "tests" / "jobs" / "tiny.py"


def start(folder: Path, steps: int, per_file: int = 1) -> subprocess.Popen[str]:
    """Start a recorded run in a process group of its own."""
    words = [sys.executable, "-m", "probe", "record", "-o", str(folder), "--seed", "1"]
    words += ["--steps-per-file", str(per_file), "--"]
    # Steps of this job take 10 ms; a process that folds takes 200 ms to start.
    words += [sys.executable, str(JOB), "--steps", str(steps), "--sleep", "0.1" if per_file > 1 else "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True, env=environment
    )


def wrong_steps(capture: Capture, expected: Capture) -> list[int]:
    """List the steps whose rows differ from those of the run that was left alone."""
    wrong = []
    for step in capture.steps(0):
        rows, whole = capture.rows(0, step), expected.rows(0, step)
        same = rows.keys == whole.keys and np.array_equal(rows.sketch, whole.sketch, equal_nan=True)
        if not same:
            wrong.append(step)
    return wrong


def main() -> None:
    """Run the benchmark and exit 1 if a completed step was lost or wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60, help="longest run; a kill falls at a random step of it")
    parser.add_argument("--steps-per-file", type=int, default=1, help="fold so many steps into one file")
    options = parser.parse_args()
    rng = random.Random(0)
    bad, behind, whole_steps, folded, halfway = 0, [], 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        process = start(Path(folder) / "whole", options.steps)
        process.communicate()
        expected = open_capture(Path(folder) / "whole")
        for trial in range(options.kills):
            process = start(Path(folder) / str(trial), options.steps, options.steps_per_file)
            assert process.stdout is not None
            finished = 0
            for _ in range(rng.randint(1, options.steps - 5)):
                finished += bool(process.stdout.readline())
            time.sleep(rng.random() * 0.02)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            try:
                capture = open_capture(Path(folder) / str(trial))
            except Exception as error:
                print(f"kill {trial}: {finished} steps finished, nothing readable: {error}")
                behind.append(finished)
                continue
            steps = capture.steps(0)
            wrong = wrong_steps(capture, expected)
            ok = steps == tuple(range(1, len(steps) + 1)) and not wrong
            bad += not ok
            whole_steps += len(steps)
            several = {step for packed in capture.packed(0) for step in packed.steps}
            folded += len(several)
            halfway += bool(several.intersection(capture.segments(0)))
            halfway += any((capture.path / "rank00000").glob("packed*.tmp"))
            behind.append(finished - len(steps))
            if not ok:
                print(f"kill {trial}: steps {steps}, wrong {wrong}; {capture.problems}")
    print(
        f"{options.kills} kills, {whole_steps} steps on disk, {bad} runs with a lost or wrong step; "
        f"the disk was at most {max(behind)} steps behind the training"
    )
    if options.steps_per_file > 1:
        print(f"{folded} of the steps were in files of several; {halfway} kills found one half made or half cleared")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
