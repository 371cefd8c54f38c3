"""Take the loss as backward got it, and undo the constants it was multiplied with on the way there.

A loss that is divided by the number of microbatches, or multiplied by a gradient scaler's factor, is still the same
loss: the factor is told beside it. This module must not know who calls backward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from probe.capture.recorder import Recorder
from probe.point import Key, Kind

LOSS = "micro_loss"
"""Name of the loss of a microbatch, before it is scaled or divided."""
LOSS_SCALE = "loss_scale"
"""Name of the product of the constants that the loss was multiplied with before backward."""


def constant_factor(loss: torch.Tensor) -> float | torch.Tensor:
    """Multiply the constants at the root of a loss's graph: 1/4 for `loss / 4`, 1024 for `loss * 1024`, 1 if none.

    Only single numbers that need no gradient count. Sign and other operations end the walk. A constant on an
    accelerator (a gradient scaler's) makes the product a float64 tensor there: reading it would stop the run.
    """
    factor: float | torch.Tensor = 1.0
    node = loss.grad_fn
    while node is not None:
        kind = type(node).__name__
        if kind not in ("MulBackward0", "DivBackward0"):
            break
        (first, _), (second, _) = node.next_functions
        try:
            if second is None and first is not None:
                constant, following = node._saved_other, first
            elif first is None and second is not None and kind == "MulBackward0":
                constant, following = node._saved_self, second
            else:
                break
        except RuntimeError:  # freed or modified in place since
            break
        if constant is None or constant.numel() != 1 or constant.is_complex():
            break
        number: float | torch.Tensor
        if constant.device.type == "cpu":
            number = float(constant)
            if number == 0.0 or (kind == "DivBackward0" and number in (float("inf"), float("-inf"))):
                break
        else:
            number = constant.detach().reshape(()).double()
        factor = factor * number if kind == "MulBackward0" else factor / number
        node = following
    return factor


class Losses:
    """What is known of the losses of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor] | None = None
        """What a gradient scaler returned last, what it was given, and its factor at that time."""

    def scaled(self, given: torch.Tensor, returned: torch.Tensor, scale: torch.Tensor) -> None:
        """Note that a gradient scaler multiplied a loss: the product may overflow where the loss does not."""
        if given.numel() == 1:
            self._scaled = weakref.ref(returned), given, scale.detach().clone()

    def record(self, roots: Any, where: str) -> None:
        """Record every single number that backward starts from, and its factor.

        Args:
            roots: A tensor, or a sequence of them.
            where: Which call got them.
        """
        recorder = self._recorder
        tensors = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        numbers = [root for root in tensors if isinstance(root, torch.Tensor) and root.numel() == 1]
        for index, root in enumerate(numbers):
            item = f"[{index}]" if index else ""
            loss, scale = self._before_scaling(root)
            divided = constant_factor(loss)
            factor = divided * scale
            key = Key(kind=Kind.LOSS, name=LOSS, item=item, microbatch=recorder.microbatch)
            if loss.device.type == "cpu" and isinstance(divided, float):
                dtype = str(loss.dtype).removeprefix("torch.")
                recorder.scalar(key, float(loss.detach()) / divided, where, dtype)
            else:
                recorder.tensor(key, loss.detach().double() / divided, where)
            key = Key(kind=Kind.LOSS, name=LOSS_SCALE, item=item, microbatch=recorder.microbatch)
            if isinstance(factor, float):
                recorder.scalar(key, factor, where)
            else:
                recorder.tensor(key, factor, where)

    def _before_scaling(self, root: torch.Tensor) -> tuple[torch.Tensor, float | torch.Tensor]:
        if self._scaled is None or self._scaled[0]() is not root:
            return root, 1.0
        _, loss, scale = self._scaled
        self._scaled = None
        return loss, float(scale) if scale.device.type == "cpu" else scale.double()
