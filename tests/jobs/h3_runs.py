"""Run the MiniMax-H3 example many times for its tests, importing torch and DiffSynth once.

    python h3_runs.py EXAMPLE OUT < RUNS

RUNS is a JSON object: the name of each run and the command line of `train.py`. Each run happens in a forked process,
for a branch patches DiffSynth's classes for good. It leaves OUT/NAME.json: the printed steps and losses; OUT/NAME.npz:
what the blocks and their attentions returned in the first forward pass; OUT/NAME.safetensors: the final LoRA weights.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

EXAMPLE, OUT = Path(sys.argv[1]), Path(sys.argv[2])
SAMPLES = 3


def watch(model: Any, outputs: dict[str, Any]) -> None:
    """Keep what blocks, attentions and their projections return the first time; hooks come last, as a tool's would."""

    def keep(short: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            outputs.setdefault(short, output.detach().float().numpy())

        return hook

    for name, module in model.named_modules():
        short = name.removeprefix("pipe.dit.")
        if short.startswith("blocks.") and short.rsplit(".", 1)[-1] in {
            "0",
            "1",
            "2",
            "3",
            "attn",
            "qkv_proj",
            "norm1",
        }:
            module.register_forward_hook(keep(short))


def run(name: str, arguments: list[str]) -> None:
    """Train once in this process and write down what came of it."""
    import accelerate
    import numpy as np
    import train

    outputs: dict[str, Any] = {}
    prepare = accelerate.Accelerator.prepare

    def watched(self: Any, model: Any, *rest: Any) -> Any:
        watch(model, outputs)
        return prepare(self, model, *rest)

    accelerate.Accelerator.prepare = watched
    weights = OUT / f"{name}.safetensors"
    sys.argv = ["train.py", "--checkpoint", str(OUT / "tiny"), "--weights", str(weights), *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train.main()
    lines = [json.loads(line) for line in printed.getvalue().splitlines() if line.startswith('{"step"')]
    np.savez(OUT / f"{name}.npz", **outputs)
    (OUT / f"{name}.json").write_text(json.dumps(lines))


def in_child(title: str, work: Any) -> None:
    """Do something in a forked process and leave where it fails."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit(f"{title} failed.")


def main() -> None:
    """Build the checkpoint and do all runs."""
    sys.path.insert(0, str(EXAMPLE))
    runs: dict[str, list[str]] = json.load(sys.stdin)
    import make_checkpoint
    import train  # noqa: F401

    in_child("The checkpoint", lambda: make_checkpoint.build(OUT / "tiny", SAMPLES))
    for name, arguments in runs.items():
        in_child(f"The run {name!r}", lambda name=name, arguments=arguments: run(name, arguments))


if __name__ == "__main__":
    main()
