"""The whole story in a few minutes on two CPU cores: noise measured, a good branch passed, a bad one caught.

Three runs of the unmodified job are recorded and turned into tolerances; the optimized branch is compared with them
and must pass; the same branch with a planted fault is compared and must fail, at the attention of block 2 and nowhere
before. Everything goes through the `probe` command line, as it would for a user. The demo leaves with status 0 where
both verdicts are the expected ones, and with 1 where one is not.

    python examples/minimax_h3/demo.py
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CHECKPOINT = HERE / "data" / "tiny"
CAPTURES = ROOT / "captures" / "demo"
TOLERANCES = CAPTURES / "h3.toml"
SAMPLES = 8
RANKS = 2
STEPS = 5
EQUIVALENT, DIFFERENT, UNDECIDED = 0, 1, 2
"""What `probe diff` exits with."""
FAULT = re.compile(r"(^|\.)blocks\.2\.attn(\.|$)")
"""Where the planted fault may be found first: the attention of block 2, or a layer inside."""
NOT_THE_FAULT = re.compile(r"(^|\.)token_refiner\.")
LOG_TAIL = 30

SETTINGS = {
    "ACCELERATE_USE_CPU": "true",
    "DIFFSYNTH_SKIP_DOWNLOAD": "True",
    "GOMP_SPINCOUNT": "0",
    "OMP_NUM_THREADS": "1",
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    "TOKENIZERS_PARALLELISM": "false",
}
"""Two ranks on two cores: without these, threads of one rank spin on the core of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One branch of the demo and what must be found about it."""

    branch: str
    """Name of the file beside this one."""
    run_ids: tuple[int, int]
    """Noise of its run, and of the second one that an undecided comparison asks for."""
    exit: int
    """Status that `probe diff` must leave with."""


EXPECTATIONS = (
    Expectation(branch="optimized", run_ids=(3, 7), exit=EQUIVALENT),
    Expectation(branch="faulty", run_ids=(4, 8), exit=DIFFERENT),
)
BASELINE_IDS = (0, 1, 2)
MORE_BASELINE_IDS = (5, 6)


class Demo:
    """Run the stages one after the other and say how long each took."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.baselines: list[Path] = []

    def stage(
        self, title: str, command: list[str], allowed: tuple[int, ...] = (0,)
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with its output in a log; leave with the log's end where it fails.

        Args:
            title: What the stage is called in the one line about it.
            command: Program and arguments.
            allowed: Statuses with which the demo goes on.
        """
        print(f"[{time.monotonic() - self.started:5.0f} s] {title} ...", flush=True)
        began = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, **SETTINGS}
        )
        log = CAPTURES / "logs" / f"{re.sub('[^a-z0-9]+', '-', title.lower())}.txt"
        log.write_text(f"$ {' '.join(command)}\n{done.stdout}\n{done.stderr}")
        if done.returncode not in allowed:
            print("\n".join(log.read_text().splitlines()[-LOG_TAIL:]), file=sys.stderr)
            sys.exit(f"The stage {title!r} exited with status {done.returncode}; its whole output is in {log}.")
        print(f"[{time.monotonic() - self.started:5.0f} s] {title}: {time.monotonic() - began:.0f} s", flush=True)
        return done

    def record(self, name: str, run_id: int, *more: str) -> Path:
        """Record one training run and return its capture."""
        capture = CAPTURES / name
        command = probe(
            "record", "-o", str(capture), "--seed", "42", "--steps", f"1-{STEPS}", "--", *training(run_id, *more)
        )
        self.stage(f"record {name}", command)
        return capture

    def record_baselines(self, run_ids: tuple[int, ...]) -> None:
        """Record that many more runs of the unmodified job."""
        for run_id in run_ids:
            self.baselines.append(self.record(f"base-{len(self.baselines)}", run_id))

    def calibrate(self, title: str) -> None:
        """Turn all baselines so far into tolerances."""
        self.stage(title, probe("calibrate", *map(str, self.baselines), "-o", str(TOLERANCES), "--force"))

    def compare(self, expectation: Expectation) -> dict[str, Any]:
        """Record a branch and compare it; once more with more runs where the first comparison could not tell.

        Returns:
            The JSON object of the last `probe diff`.
        """
        branch = expectation.branch
        candidates = [self.record(f"{branch}-0", expectation.run_ids[0], "--branch", branch)]
        result = self.diff(branch, candidates)
        if result["verdict"] == "inconclusive":
            if len(self.baselines) == len(BASELINE_IDS):
                self.record_baselines(MORE_BASELINE_IDS)
                self.calibrate("calibrate again")
            candidates.append(self.record(f"{branch}-1", expectation.run_ids[1], "--branch", branch))
            result = self.diff(f"{branch} again", candidates)
        return result

    def diff(self, title: str, candidates: list[Path]) -> dict[str, Any]:
        """Print the table of one comparison and return the same as JSON."""
        runs = [*map(str, self.baselines), *(part for c in candidates for part in ("--candidate", str(c)))]
        command = probe("diff", *runs, "-t", str(TOLERANCES))
        statuses = (EQUIVALENT, DIFFERENT, UNDECIDED)
        table = self.stage(f"diff {title}", command, statuses)
        print(f"\n{table.stdout}", flush=True)
        answer = self.stage(f"diff {title} as JSON", [*command, "--json"], statuses)
        try:
            result: dict[str, Any] = json.loads(answer.stdout)
        except json.JSONDecodeError:
            sys.exit(f"`probe diff` exited with status {answer.returncode} and no verdict:\n{answer.stderr}")
        return result


def probe(*arguments: str) -> list[str]:
    """Return the command line of a `probe` command."""
    return [sys.executable, "-m", "probe", *arguments]


def training(run_id: int, *more: str) -> list[str]:
    """Return the command line of the training job; nothing in it knows of `probe`, nor where this folder lies."""
    launcher = ["python", "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(RANKS)]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    script, checkpoint = (str(path.relative_to(ROOT)) for path in (HERE / "train.py", CHECKPOINT))
    job = [script, "--checkpoint", checkpoint, "--steps", str(STEPS)]
    return [*launcher, *job, "--noise", "act", "--run-id", str(run_id), *more]


def disappointment(expectation: Expectation, result: dict[str, Any]) -> str | None:
    """Say what about a result is not as expected, or nothing."""
    if result["exit"] != expectation.exit:
        found = f"{result['verdict']!r} with status {result['exit']}"
        return f"The {expectation.branch} branch was found {found}; status {expectation.exit} is expected."
    if expectation.exit == DIFFERENT:
        first = result["first_divergence"]
        name = "nowhere" if first is None else first["name"]
        if not FAULT.search(name) or NOT_THE_FAULT.search(name):
            return f"The fault is in blocks.2.attn; the first divergence was found at {name}."
    return None


def main() -> None:
    """Run the demo."""
    shutil.rmtree(CAPTURES, ignore_errors=True)
    (CAPTURES / "logs").mkdir(parents=True)
    demo = Demo()
    demo.stage(
        "build the tiny checkpoint", [sys.executable, str(HERE / "make_checkpoint.py"), str(CHECKPOINT), str(SAMPLES)]
    )
    demo.record_baselines(BASELINE_IDS)
    demo.calibrate("calibrate")
    faults = [disappointment(expectation, demo.compare(expectation)) for expectation in EXPECTATIONS]
    for fault in filter(None, faults):
        print(fault, file=sys.stderr)
    print(f"[{time.monotonic() - demo.started:5.0f} s] {'not as expected' if any(faults) else 'as expected'}")
    sys.exit(1 if any(faults) else 0)


if __name__ == "__main__":
    main()
