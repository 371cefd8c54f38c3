"""Check that recording leaves the MiniMax-H3 example as it is in all its forms, to the bit.

    python benchmarks/neutral.py [--steps 3] [--only compiled]

One and two ranks; eager, blocks with compiled functions, selective activation checkpointing; bf16 and fp32. Each form
is run bare twice and recorded once by `probe selfcheck`, which compares losses, parameters and what the compiler
did. Exit status: 0 when every form is bit-identical, else 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "minimax_h3"
FORMS = {"eager": (), "compiled": ("sdpa", "compile"), "selective": ("sdpa", "sac"), "all": ("sdpa", "compile", "sac")}


def command(form: str, ranks: int, dtype: str, steps: int, checkpoint: Path) -> list[str]:
    """Write the command line of one form."""
    script = [str(EXAMPLE / "train.py"), "--steps", str(steps), "--dtype", dtype, "--checkpoint", str(checkpoint)]
    if FORMS[form]:
        script += ["--branch", "optimized", "--optimizations", ",".join(FORMS[form])]
    if ranks == 1:
        return [sys.executable, *script]
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(ranks)]
    return [sys.executable, *launcher, "--main_process_port", "0", *script]


def main() -> None:
    """Check every form and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a form's line")
    arguments = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        made = [sys.executable, str(EXAMPLE / "make_checkpoint.py"), str(checkpoint)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        for number, (form, ranks, dtype) in enumerate(product(FORMS, (1, 2), ("bfloat16", "float32"))):
            line = f"{form:10s}{ranks} {'rank' if ranks == 1 else 'ranks':6s}{dtype:10s}"
            if arguments.only not in line:
                continue
            words = [sys.executable, "-m", "probe", "selfcheck", "-o", str(Path(folder) / str(number)), "--"]
            words += command(form, ranks, dtype, arguments.steps, checkpoint)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
            done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
            failed += done.returncode != 0
            said = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
            print(line, " ".join(said), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
