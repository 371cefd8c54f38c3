"""Take what a training run ends in, with as little as can be: its losses and its trained parameters.

`probe selfcheck` holds a bare run against a recorded one by this. It adds no module hook, reads no gradient and copies
nothing to the host before the process ends: one function wraps `torch.autograd.backward` and keeps the loss on its
device, and the optimizer's own post hook notes which parameters it updates. This module must not know what is compared.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from probe.capture import summary
from probe.capture.launched import launched_rank


class OutcomeDigest:
    """The digest of one process; nothing is written by a process in which no optimizer stepped."""

    def __init__(self, folder: Path) -> None:
        """Prepare to watch; `folder` must exist when `write` is called."""
        self._folder = folder
        self._pid = os.getpid()
        self._losses: list[torch.Tensor] = []
        self._parameters: dict[int, torch.Tensor] = {}
        self._steps = 0

    def install(self) -> None:
        """Watch every backward pass and every optimizer step of this process."""
        inner = torch.autograd.backward

        @functools.wraps(inner)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                for loss in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
                    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                        self._losses.append(loss.detach().clone())
            return inner(tensors, *args, **kwargs)

        torch.autograd.backward = backward
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._parameters.setdefault(id(parameter), parameter)

    def write(self) -> None:
        """Write `rank00000-0.json`: the losses as hex numbers, and type, shape and hash of each parameter."""
        if os.getpid() != self._pid or not self._steps:
            return
        content = {
            "rank": launched_rank(),
            "steps": self._steps,
            "losses": [_described(loss, value=True) for loss in self._losses],
            "parameters": [_described(parameter) for parameter in self._parameters.values()],
            "compiled": _compiled(),
        }
        # A command may train twice in a row: the second process of a rank takes the next number.
        for number in range(1000):
            try:
                file = (self._folder / f"rank{launched_rank():05d}-{number}.json").open("x")
            except FileExistsError:
                continue
            with file:
                json.dump(content, file)
            return


def _compiled() -> dict[str, int]:
    """Count what torch.compile did in this process: a recording that makes it compile again costs, and may round."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return {
        "frames": counters.get("frames", {}).get("ok", 0),
        "graphs": counters.get("stats", {}).get("unique_graphs", 0),
        "graph breaks": sum(counters.get("graph_break", {}).values()),
        "recompile limits": sum(counters.get("recompile_limit", {}).values()),
    }


def _described(tensor: torch.Tensor, *, value: bool = False) -> str:
    """Write a tensor's type and shape, and its bits: as a number for a loss, as a hash for a parameter."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    form = f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"
    high, low = summary.fingerprint(local)
    bits = f"{high:016x}{low:016x}"
    return f"{form} {float(local.double()):.17g} {bits}" if value else f"{form} {bits}"
