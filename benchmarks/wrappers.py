"""Judge a training job under every wrapper against the plain job, sound and with planted faults, and print one table.

The job is given by path: a script with `--variant base|fused|bug|gbug` and `--wrap ...`, as the peers' workload has
them. The plain job, and three runs of it perturbed by one ulp, are recorded once for each number of ranks. Then each
wrapper is recorded with each variant and compared. `fused` is another order of summation, `bug` a fault in the
attention of layer 2, `gbug` one in the backward of the MLP of layer 1. Modules inside compiled regions are tapped by a
plan.

    python benchmarks/wrappers.py ../shared/peers/job.py [--only compile] [--work DIR]

Exit status: 0 when every sound run is equivalent with all names matched and every fault is located, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLACES = {"base": "", "fused": "", "bug": "layers.2.attn", "gbug": "layers.1.mlp"}
"""Where each variant first departs."""

ONE_RANK = ("compile", "compile-method", "compile-block", "ckpt", "ckpt-reentrant", "ckpt-selective", "accum", "ddp")
TWO_RANKS = ("ddp", "fsdp2")
PLAN = '[record]\ninside_compiled = ["*"]\n'


@dataclass
class Bench:
    """Records and compares; captures that exist are used again."""

    job: Path
    work: Path
    autocast: bool
    port: int = 29511
    tolerances: dict[int, tuple[Path, Path]] = field(default_factory=dict)
    """(baseline, tolerance file) for each number of ranks."""

    def probe(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one command of probe."""
        self.port += 1
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(self.port)}
        whole = [sys.executable, "-m", "probe", *words]
        return subprocess.run(whole, capture_output=True, text=True, env=environment, check=False)

    def record(self, name: str, ranks: int, arguments: Sequence[str], *options: str) -> Path:
        """Record the job, unless it was."""
        output = self.work / name
        if not output.is_dir():
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            command = [sys.executable, *launcher, str(self.job), *arguments, *(["--autocast"] if self.autocast else [])]
            done = self.probe("record", "-o", str(output), *options, "--", *command)
            if done.returncode:
                sys.exit(done.stderr)
        return output

    def baseline(self, ranks: int) -> tuple[Path, Path]:
        """Record the plain job and its perturbed runs, and calibrate."""
        if ranks not in self.tolerances:
            plain = ("--wrap", "ddp") if ranks > 1 else ()
            first = self.record(f"base-{ranks}", ranks, plain)
            form = "layer" if self.autocast else "ulp"
            runs = [
                self.record(f"base-{ranks}-{form}-{k}", ranks, plain, "--perturb", f"{form}:{k}") for k in (1, 2, 3)
            ]
            file = self.work / f"tolerances-{ranks}.toml"
            if not file.exists():
                done = self.probe("calibrate", str(first), *map(str, runs), "-o", str(file))
                if done.returncode:
                    sys.exit(done.stderr)
            self.tolerances[ranks] = first, file
        return self.tolerances[ranks]

    def compare(self, wrap: str, ranks: int, variant: str) -> dict[str, Any]:
        """Record one wrapper with one variant, and return what the comparison says."""
        first, file = self.baseline(ranks)
        plan = self.work / "plan.toml"
        plan.write_text(PLAN)
        options = ("--plan", str(plan)) if wrap.startswith("compile") else ()
        candidate = self.record(f"{wrap}-{ranks}-{variant}", ranks, ("--wrap", wrap, "--variant", variant), *options)
        done = self.probe("diff", str(first), str(candidate), "-t", str(file), "--same-code", "--json")
        if not done.stdout:
            sys.exit(done.stderr)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def right(variant: str, found: dict[str, Any]) -> bool:
    """Tell whether a variant was judged and located as it should be."""
    if not PLACES[variant]:
        return bool(found["verdict"] == "equivalent" and not found["coverage"]["missing"])
    first = found["first_divergence"] or {"name": ""}
    return bool(found["verdict"] == "different" and f"{first['name']}.".startswith(f"{PLACES[variant]}."))


def main() -> None:
    """Print a line for each wrapper and variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("--only", default="", help="part of a wrapper's name")
    parser.add_argument("--work", type=Path, help="keep captures here")
    parser.add_argument("--autocast", action="store_true", help="run the job under bf16 autocast")
    arguments = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        work = arguments.work or Path(folder)
        work.mkdir(exist_ok=True)
        bench = Bench(arguments.job.resolve(), work.resolve(), arguments.autocast)
        forms = [("none", 1), *((wrap, 1) for wrap in ONE_RANK), *((wrap, 2) for wrap in TWO_RANKS)]
        for wrap, ranks in forms:
            if arguments.only not in wrap:
                continue
            plain = wrap == "none" or (wrap, ranks) == ("ddp", 2)
            # Another order of summation is what the plain job has in the place of a wrapper.
            for variant in ("fused" if plain else "base", "bug", "gbug"):
                found = bench.compare(wrap, ranks, variant)
                good = right(variant, found)
                wrong += not good
                first = found["first_divergence"]
                place = f"{first['kind']} {first['name']} step {first['step']}" if first else "-"
                coverage = found["coverage"]
                print(
                    f"{'ok  ' if good else 'WRONG'} {wrap:15s}{ranks} {variant:5s}{found['verdict']:15s}{place:45s}"
                    f"matched {coverage['matched']}, missing {len(coverage['missing'])}, "
                    f"unexpected {len(coverage['unexpected'])}",
                    flush=True,
                )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
