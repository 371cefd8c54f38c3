"""Taps inside a compiled region: one opaque operation each, so that no graph breaks and nothing is removed.

The operation is functional: it returns a copy, and the graph uses the copy. An operation whose result is discarded is
removed, one with a side effect in Python recompiles on every call, and a tensor hook inside a compiled region breaks
the graph (the project's torch study, section 3). The gradient is taken by a second operation in the first one's
backward. In low precision either can keep the compiler from fusing across it, which changes rounding: a module inside
a region is tapped only where the plan asks, and `probe selfcheck` says whether that changes the run.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from probe.capture.hook import Hook
from probe.capture.taps import in_recompute

NUMBER = "_probe_point"
"""Attribute of a tapped module: its number as a 0-dim int64 tensor. A constant would make each block a graph of its
own, and the compiler gives up after eight."""


# ---------------------------------------------------------------------- `probe.tap`, which the training code calls
@torch.library.custom_op("probe::tap", mutates_args=())  # type: ignore[untyped-decorator]
def tap(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Record a tensor when the compiled code runs, and return a copy of it."""
    from probe.capture import explicit

    if explicit.enabled() and not in_recompute():
        explicit.keep(name, tensor, "inside a compiled region")
    return tensor.clone()


@torch.library.custom_op("probe::tap_gradient", mutates_args=())  # type: ignore[untyped-decorator]
def tap_gradient(gradient: torch.Tensor, name: str) -> torch.Tensor:
    """Record a gradient when the compiled backward runs, and return a copy of it."""
    from probe.capture import explicit

    if explicit.enabled():
        explicit.keep(f"{name}.gradient", gradient, "inside a compiled region")
    return gradient.clone()


def _keep_name(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.name = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return tap_gradient(gradient, ctx.name), None


# ---------------------------------------------------------------------- modules that a plan names
class Point(Protocol):
    """What a tapped module's values are given to."""

    def output(self, item: str, tensor: torch.Tensor) -> None:
        """Take an output of the compiled module."""

    def gradient(self, item: str, tensor: torch.Tensor) -> None:
        """Take the gradient of an output."""

    def eager(self, output: Any) -> None:
        """Take the output of a call that was not compiled after all."""


_points: list[Point] = []
"""By number."""


def tap_module(module: nn.Module, point: Point) -> Any:
    """Tap the outputs of a module that lies inside a compiled region, before the region is first called.

    Args:
        module: A module whose output is a tensor, or tuples, lists and dictionaries of tensors; other outputs pass.
        point: Receives the values.

    Returns:
        The hook's handle.
    """
    # Not by setattr on the module's registries: the number is no state of the model's.
    module.__dict__[NUMBER] = torch.tensor(len(_points))
    _points.append(point)
    return module.register_forward_hook(_HOOK)


def _tapped(module: nn.Module, args: Any, output: Any) -> Any:
    if torch.compiler.is_compiling():
        return _through(output, module.__dict__[NUMBER], "")
    _points[int(module.__dict__[NUMBER])].eager(output)
    return None


_HOOK = Hook(_tapped)
"""One for all modules, so that blocks share a graph."""


def _through(value: Any, number: torch.Tensor, item: str) -> Any:
    if isinstance(value, torch.Tensor):
        return tap_output(value, number, item) if value.is_floating_point() else value
    if type(value) is tuple:
        return tuple(_through(each, number, f"{item}[{index}]") for index, each in enumerate(value))
    if type(value) is list:
        return [_through(each, number, f"{item}[{index}]") for index, each in enumerate(value)]
    if type(value) is dict:
        return {key: _through(each, number, f"{item}.{key}") for key, each in value.items()}
    return value


@torch.library.custom_op("probe::tap_output", mutates_args=())  # type: ignore[untyped-decorator]
def tap_output(tensor: torch.Tensor, number: torch.Tensor, item: str) -> torch.Tensor:
    """Take a module's output when the compiled code runs, and return a copy of it."""
    if not in_recompute():
        _points[int(number)].output(item, tensor)
    return tensor.clone()


@torch.library.custom_op("probe::tap_output_gradient", mutates_args=())  # type: ignore[untyped-decorator]
def tap_output_gradient(gradient: torch.Tensor, number: torch.Tensor, item: str) -> torch.Tensor:
    """Take the gradient of a module's output when the compiled backward runs, and return a copy of it."""
    _points[int(number)].gradient(item, gradient)
    return gradient.clone()


def _keep_number(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.item = inputs[2]


def _backward_of_output(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (number,) = ctx.saved_tensors
    return tap_output_gradient(gradient, number, ctx.item), None, None


def _same_shape(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


for _operation in (tap, tap_gradient, tap_output, tap_output_gradient):
    _operation.register_fake(_same_shape)
tap.register_autograd(_backward, setup_context=_keep_name)
tap_output.register_autograd(_backward_of_output, setup_context=_keep_number)
