"""Read the gradients of the trained parameters: after the last backward, and again as the optimizer gets them.

They are read when `backward` returns, for only then are they reduced across ranks, and before anything that follows can
clip or rescale them. This module must not know when a step is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from probe.capture.models import Models, parameters_of
from probe.capture.recorder import Recorder, step_key
from probe.point import Kind

CHANGED = (0, -1)
"""A version that no gradient has."""
AFTER_BACKWARD = "after the last backward"
CLIPPED = "clipped"
"""Item of a gradient as the optimizer got it."""


class Gradients:
    """What was read of the gradients in the current step."""

    def __init__(self, recorder: Recorder, models: Models) -> None:
        self._recorder, self._models = recorder, models
        self._versions: dict[str, tuple[int, int]] = {}
        """Identity and version of each gradient that was read: changed since means clipped, unscaled or cleared."""
        self._kept: list[torch.Tensor] = []
        """What `torch.autograd.grad` returned is kept until the step ends, so that its identity stays its own."""

    def clear(self) -> None:
        """Forget what was read; the step is over."""
        self._versions.clear()
        self._kept.clear()

    def read(self) -> None:
        """Read every gradient after a backward pass; the last reading of the step stands."""
        self.clear()
        self._recorder.forget(Kind.GRAD)
        for name, parameter in self._models.trained().items():
            if parameter.grad is not None:
                self._take(name, parameter, parameter.grad, AFTER_BACKWARD)

    def read_returned(self, inputs: Iterable[Any], gradients: Iterable[Any]) -> None:
        """Read what `torch.autograd.grad` returned for trained parameters."""
        self.clear()
        self._recorder.forget(Kind.GRAD)
        names = {id(parameter): (name, parameter) for name, parameter in self._models.trained().items()}
        for parameter, gradient in zip(inputs, gradients, strict=True):
            if id(parameter) in names and gradient is not None:
                self._take(*names[id(parameter)], gradient, "returned by torch.autograd.grad")
                self._kept.append(gradient)

    def _take(self, name: str, parameter: nn.Parameter, gradient: torch.Tensor, where: str) -> None:
        self._recorder.tensor(step_key(Kind.GRAD, name), gradient, where, part=self._models.part(parameter))
        self._versions[name] = _version(gradient)

    def rescaled(self, parameters: Iterable[Any]) -> None:
        """Note that gradients were changed in place by what leaves no trace in their versions.

        A gradient scaler's division leaves none, and nothing that is done to a distributed tensor does.
        """
        mine = {id(parameter) for parameter in parameters}
        for name, parameter in self._models.trained().items():
            if id(parameter) in mine and name in self._versions:
                self._versions[name] = CHANGED

    def clipped(self, parameters: Any) -> None:
        """Note that gradients were clipped, where that leaves no trace."""
        several = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.rescaled(parameter for parameter in several if hasattr(parameter, "_local_tensor"))

    @property
    def changed(self) -> bool:
        """Tell whether a gradient that was read is gone or has other bits."""
        trained = self._models.trained()
        return any(
            (gradient := trained[name].grad) is None or _version(gradient) != version
            for name, version in self._versions.items()
            if name in trained
        )

    def given_to(self, optimizer: Optimizer) -> None:
        """Read the gradients that an optimizer is about to use, where they are not what backward left.

        A fused optimizer gets them still multiplied by the gradient scaler's factor and divides by it inside.
        """
        mine = {id(parameter) for parameter in parameters_of(optimizer)}
        trained = {name: p for name, p in self._models.trained().items() if id(p) in mine and p.grad is not None}
        scale = getattr(optimizer, "grad_scale", None)
        if self._kept and not {id(p.grad) for p in trained.values()} & {id(kept) for kept in self._kept}:
            # The script summed what autograd.grad returned, so that these are the step's gradients.
            self.clear()
            self._recorder.forget(Kind.GRAD)
        for name, parameter in trained.items():
            gradient = parameter.grad
            assert gradient is not None
            version = self._versions.get(name)
            if version is None:
                self._take(name, parameter, gradient, "given to the optimizer")
            elif (
                isinstance(scale, torch.Tensor)
                or version != _version(gradient)
                # What is done to `.data` leaves no trace in the version.
                or not self._recorder.unchanged(step_key(Kind.GRAD, name), gradient)
            ):
                with torch.no_grad():
                    given = gradient / scale if isinstance(scale, torch.Tensor) else gradient
                key = step_key(Kind.GRAD, name, CLIPPED)
                self._recorder.tensor(key, given, "given to the optimizer", part=self._models.part(parameter))

    def norm(self, total: Any) -> None:
        """Record what gradient clipping returned."""
        if isinstance(total, torch.Tensor):
            self._recorder.tensor(step_key(Kind.GRAD_NORM, "grad_norm"), total, "returned by clip_grad_norm_")


def _version(gradient: torch.Tensor) -> tuple[int, int]:
    """Identify a gradient and its bits."""
    return id(gradient), gradient._version
