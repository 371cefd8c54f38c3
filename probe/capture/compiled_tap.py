"""`probe.tap` inside a compiled region: one opaque operation, so that no graph breaks and nothing is removed.

The operation is functional: it returns a copy, and the graph uses the copy. An operation whose result is discarded is
removed, one with a side effect in Python recompiles on every call, and a tensor hook inside a compiled region breaks
the graph (the project's torch study, section 3). The gradient is taken by a second operation in the first one's
backward.
"""

from __future__ import annotations

from typing import Any

import torch

from probe.capture.taps import in_recompute


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


def _fake(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _keep_name(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.name = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return tap_gradient(gradient, ctx.name), None


tap.register_fake(_fake)
tap_gradient.register_fake(_fake)
tap.register_autograd(_backward, setup_context=_keep_name)
