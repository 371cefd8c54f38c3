"""Run a training script under `probe record` as a user would, for the tests of the recording side."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from probe.store.layout import StepRows
from probe.store.reader import Capture, open_capture

JOBS = Path(__file__).parent / "jobs"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def command(job: str, *arguments: str, ranks: int = 1) -> list[str]:
    """Write the command line of a job under tests/jobs, on one or several ranks."""
    script = [str(JOBS / job), *arguments]
    if ranks == 1:
        return [sys.executable, *script]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *script]


def run(words: Sequence[str], *, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and keep what it printed."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=300, env={**ENVIRONMENT, **env}, cwd=cwd, check=False
    )


def probe(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `probe ...`."""
    return run([sys.executable, "-m", "probe", *arguments], cwd=cwd, **env)


def record(output: Path, words: Sequence[str], *options: str, **env: str) -> Capture:
    """Record a command that is expected to end well, and open the capture."""
    done = probe("record", "-o", str(output), *options, "--", *words, **env)
    assert done.returncode == 0, done.stderr
    return open_capture(output)


def by_label(rows: StepRows) -> dict[str, int]:
    """Map each quantity's label to its row."""
    return {key.label: index for index, key in enumerate(rows.keys)}
