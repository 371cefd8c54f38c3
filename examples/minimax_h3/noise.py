"""Give a run on a CPU the run-to-run noise of a GPU: linear layers whose outputs move by one ulp here and there.

On a GPU a matrix product may add its terms in another order in every launch, so an output element rounds up in one run
and down in the next. On a CPU two runs agree bit for bit, and nothing can be learnt about noise from them. Here each
output element of a linear layer moves to a neighbouring number with some probability.

The noise is a function of (run id, rank, forward number, layer) and of nothing else: a generator that ran on would give
the recomputation of a checkpointed block other values than its forward had, and gradients that belong to neither. The
global random state is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

MOVES_OF_256 = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 64}
"""Of 256 elements so many move up by one ulp, and as many down: 0.8 % of the elements in 16 bits, half of them in fp32.
Source: a sum in another order seldom changes a result rounded to 8 bits and often one of 24 bits; the shares of the
project's statistics study, 1 % and half, rounded to what a byte can draw."""


@dataclass(slots=True, kw_only=True)
class NoiseState:
    """Where the run is: together with a layer's number, all that decides the noise."""

    run_id: int = 0
    rank: int = 0
    forward: int = 0
    """Number of the root module's forward pass, from 1. The recomputation in backward belongs to the same number."""


STATE = NoiseState()


class NoisyLinear(nn.Linear):
    """Behave as `nn.Linear`, with some elements of the output moved by one ulp."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return move_ulps(super().forward(input), self.noise_layer)


def add_noise(model: nn.Module, *, run_id: int, rank: int) -> int:
    """Turn every linear layer of a model into a noisy one.

    The class of each layer is exchanged, and no hook added: whatever hook somebody registers later sees the noisy
    output, and the layer's name and parameters stay what they were.

    Args:
        model: Model with all its adapters already in place.
        run_id: Which run this is; the same number repeats the same noise.
        rank: Index of the process.

    Returns:
        Number of layers that were changed.
    """
    STATE.run_id, STATE.rank, STATE.forward = run_id, rank, 0
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for number, layer in enumerate(layers):
        layer.__class__ = NoisyLinear
        # A tensor, for a Python number would make a compiled block special to each layer.
        layer.noise_layer = torch.tensor(number)
    model.register_forward_pre_hook(count_forward)
    return len(layers)


def count_forward(module: nn.Module, inputs: object) -> None:
    """Begin the noise of the next forward pass."""
    STATE.forward += 1


@torch.library.custom_op("minimax_h3_example::move_ulps", mutates_args=())
def move_ulps(values: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    """Move some elements to the next number up or down.

    An operator of its own, so that `torch.compile` calls it and does not look inside. Zeros stay: a sum of zeros is
    zero in any order.

    Args:
        values: Output of a linear layer, any shape.
        layer: Number of the layer, int64 [].

    Returns:
        A copy of `values` with the moves made.
    """
    each = MOVES_OF_256[values.dtype]
    random = np.random.default_rng([STATE.run_id, STATE.rank, STATE.forward, int(layer)])
    draw = torch.from_numpy(random.integers(0, 256, values.numel(), dtype=np.uint8)).to(values.device)
    place = torch.nonzero(draw < 2 * each).squeeze(1)
    moved = values.clone(memory_format=torch.contiguous_format)
    flat = moved.view(-1)
    old = flat[place]
    toward = torch.where(draw[place] < each, torch.inf, -torch.inf).to(values.dtype)
    flat[place] = torch.where(old == 0, old, torch.nextafter(old, toward))
    return moved


@move_ulps.register_fake
def _(values: torch.Tensor, layer: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def pass_gradient(context: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Hand the gradient on unchanged: rounding has no derivative of its own."""
    return gradient, None


move_ulps.register_autograd(pass_gradient)
