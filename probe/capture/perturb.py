"""Perturb an unmodified run by one unit in the last place, to calibrate where repeats are bit-identical.

`ulp[:SEED]` moves every floating-point parameter, frozen ones too, by one ulp of its dtype, up or down at random,
before the first step. `layer[:SEED]` moves elements of every leaf module's output in the same way, as reductions in
another order would. Both draw from generators of their own, seeded by the seed and the name, so that all ranks and a
recompute draw the same. This module must not know what is recorded.

Source: weight noise of the compute dtype covers re-ordered candidates (the project's statistics study, section 3), but
under-calibrates bf16, where noise in every layer does not (the notes of the fault zoo).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

from probe.capture import names
from probe.capture.hook import Hook
from probe.errors import PlanError

SHARE = {torch.bfloat16: 0.02, torch.float16: 0.02}
"""Share of elements moved by `layer` in low precision: there few elements of a re-ordered fp32 accumulation round
differently; in fp32 and wider about half do (`SHARE_WIDE`)."""
SHARE_WIDE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Perturbation:
    """What to perturb, and the seed."""

    form: str
    """`ulp` (parameters) or `layer` (outputs)."""
    seed: int

    def __str__(self) -> str:
        return f"{self.form}:{self.seed}"


def parse(text: str) -> Perturbation | None:
    """Read `ulp`, `ulp:3`, `layer:3`; an empty text means none.

    Raises:
        PlanError: It is neither.
    """
    if not text:
        return None
    form, _, seed = text.partition(":")
    if form not in ("ulp", "layer") or (seed and not seed.isdigit()):
        raise PlanError(
            f"Perturbation {text!r} is not known; `ulp`, `ulp:SEED`, `layer` and `layer:SEED` are, with SEED >= 0."
        )
    return Perturbation(form=form, seed=int(seed or 0))


def seeded(seed: int, *parts: object) -> torch.Generator:
    """Make a generator of its own for a seed and a name."""
    text = "/".join(str(part) for part in (seed, *parts))
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(text.encode()) & 0x7FFFFFFFFFFFFFFF)


def moved(tensor: torch.Tensor, generator: torch.Generator, share: float = 1.0) -> torch.Tensor:
    """Move a share of the elements to the next representable number above or below, each with probability 1/2.

    Drawn on the CPU, so that every device gives the same choice. Zeros stay: a neighbour of zero is a denormal, which
    no re-ordered sum produces.
    """
    draw = torch.rand(tensor.shape, generator=generator)
    up = (draw < share / 2).to(tensor.device)
    down = ((draw >= share / 2) & (draw < share)).to(tensor.device)
    infinity = torch.full_like(tensor, float("inf"))
    result = torch.where(up, torch.nextafter(tensor, infinity), tensor)
    result = torch.where(down, torch.nextafter(tensor, -infinity), result)
    return torch.where(tensor == 0, tensor, result)


def perturb_parameters(parameters: dict[str, nn.Parameter], how: Perturbation) -> int:
    """Move every floating-point parameter by one ulp in place. Returns how many parameters were moved."""
    count = 0
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.dtype.is_floating_point:
                parameter.copy_(moved(parameter, seeded(how.seed, name)))
                count += 1
    return count


def perturb_outputs(
    modules: list[names.NamedModule], how: Perturbation, clock: Callable[[], tuple[int, int]]
) -> list[Any]:
    """Hook every leaf module so that its output is perturbed; the gradient passes unchanged.

    Args:
        modules: The walked model.
        how: Its seed enters every draw.
        clock: Gives (step, microbatch): a recompute in the same microbatch draws the same.

    Returns:
        The hooks' handles.
    """

    def hook(name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.dtype.is_floating_point:
            return None
        plain = output.detach()
        share = SHARE.get(plain.dtype, SHARE_WIDE)
        shift = moved(plain, seeded(how.seed, name, *clock()), share) - plain
        return output + shift

    handles = []
    for entry in modules:
        # A leaf without parameters (dropout, an activation) sums nothing: another order of summation cannot move it.
        leaf = not any(child is not None for child in entry.module._modules.values())
        if leaf and entry.module._parameters:
            handles.append(entry.module.register_forward_hook(Hook(_named(hook, entry.name)), prepend=True))
    return handles


def _named(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda module, args, output: hook(name, module, args, output)
