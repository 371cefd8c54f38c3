"""Find the model, the loss, the gradients and the optimizer step of a training script that knows nothing of this.

Installed when torch has been imported. An optimizer's construction arms the search; the first forward pass of a module
that holds parameters of that optimizer ends it. Gradients are read when `backward` returns, for only then are they
reduced across ranks, and before anything that follows can clip or rescale them. This module must not know how a value
is reduced or stored.
"""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from probe.capture import names, perturb
from probe.capture.recorder import Recorder, ranks, step_key
from probe.capture.taps import Taps, in_recompute, rng_facts
from probe.point import Key, Kind

LOSS = "micro_loss"
"""Name of the loss of a microbatch, before it is scaled or divided."""
LOSS_SCALE = "loss_scale"
"""Name of the product of the constants that the loss was multiplied with before backward."""


def constant_factor(loss: torch.Tensor) -> float:
    """Multiply the constants at the root of a loss's graph: 1/4 for `loss / 4`, 1024 for `loss * 1024`, 1 if none.

    Only single numbers that need no gradient count. Sign and other operations end the walk.
    """
    factor, node = 1.0, loss.grad_fn
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
        number = float(constant)
        if number == 0.0 or (kind == "DivBackward0" and number in (float("inf"), float("-inf"))):
            break
        factor = factor * number if kind == "MulBackward0" else factor / number
        node = following
    return factor


class Attachment:
    """Everything installed in one training process."""

    def __init__(self, recorder: Recorder, perturbation: perturb.Perturbation | None = None) -> None:
        self.recorder = recorder
        self.perturbation = perturbation
        self.taps: list[Taps] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._foreign: set[int] = set()
        self._call: Callable[..., Any] | None = None
        """`Module.__call__` as it was, while the search replaces it."""
        self._versions: dict[str, tuple[int, int]] = {}
        self._stepped: list[int] = []
        """Optimizers that stepped in the current step."""
        self.explicit_steps = False
        """`probe.step` ends the steps, not the optimizer."""
        self._cycle: set[int] | None = None
        """Optimizers that stepped in the step before; None until one step is over."""

    # ------------------------------------------------------------------ installing
    def install(self) -> None:
        """Patch what every training loop passes through."""
        self._patch(Optimizer, "__init__", self._around_optimizer_init)
        self._patch(torch.autograd, "backward", self._around_backward)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._patch(module, "clip_grad_norm_", self._around_clip)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        os.register_at_fork(after_in_child=self._in_fork)

    @staticmethod
    def _patch(owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        setattr(owner, name, outer)

    def _in_fork(self) -> None:
        # A forked DataLoader worker must neither record nor wait for a writer thread it does not have.
        self.recorder.recording = False

    def mine(self) -> bool:
        """Tell whether this is the process that was attached, and not a fork of it."""
        return os.getpid() == self.recorder.pid

    # ------------------------------------------------------------------ finding the model
    def _around_optimizer_init(
        self, inner: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        inner(optimizer, *args, **kwargs)
        if self.mine():
            self.recorder.count("optimizers constructed")
            self._optimizers.append(weakref.ref(optimizer))
            self._foreign.clear()
            self._begin_search()

    def _optimized(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        alive = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        return [(optimizer, group) for optimizer in alive for group in optimizer.param_groups]

    def _begin_search(self) -> None:
        """Look at each outermost module call until every optimized parameter has been found in a model.

        `Module.__call__` is replaced for that time, and put back while a call runs, so that nothing inside it, and
        nothing that is compiled in it, sees the replacement. A global forward hook would not see keyword arguments.
        """
        if self._call is not None:
            return
        self._call = nn.Module.__call__
        attachment = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = attachment._call
            if inner is None:
                return module(*args, **kwargs)
            nn.Module.__call__ = inner
            try:
                attachment._first_forward(module)
                return inner(module, *args, **kwargs)
            finally:
                if attachment._call is not None:
                    nn.Module.__call__ = call

        nn.Module.__call__ = call

    def _end_search(self) -> None:
        found = {id(p) for taps in self.taps for p in taps.parameters.values()}
        missing = [p for _, group in self._optimized() for p in group["params"] if id(p) not in found]
        if self._call is not None and not missing:
            nn.Module.__call__ = self._call
            self._call = None

    def _first_forward(self, module: nn.Module) -> None:
        if id(module) in self._foreign or not self.mine():
            return
        trained = {id(parameter) for _, group in self._optimized() for parameter in group["params"]}
        known = any(entry.module is module for taps in self.taps for entry in taps.modules)
        if known or not any(id(parameter) in trained for parameter in module.parameters()):
            self._foreign.update(id(child) for child in module.modules())
            return
        top = names.outermost(module, names.parents_of(gc.get_objects()))
        taps = Taps(top, self.recorder, self._begin_forward)
        self.taps.append(taps)
        self.recorder.count("models found")
        self._end_search()
        if self.perturbation is not None:
            if self.perturbation.form == "ulp":
                perturb.perturb_parameters(taps.parameters, self.perturbation)
            else:
                recorder = self.recorder
                perturb.perturb_outputs(taps.modules, self.perturbation, lambda: (recorder.step, recorder.microbatch))
        if self.recorder.recording:
            self._initial_parameters()

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Give the parameters that some optimizer updates, by canonical name, in the model's order."""
        trained = {id(p): p for _, group in self._optimized() for p in group["params"]}
        found: dict[str, nn.Parameter] = {}
        for index, taps in enumerate(self.taps):
            for name, parameter in taps.parameters.items():
                if id(parameter) in trained:
                    found[name if name not in found else f"model{index}.{name}"] = parameter
                    del trained[id(parameter)]
        for index, parameter in enumerate(trained.values()):
            found[f"(unnamed).{index}"] = parameter
        return found

    def _begin_forward(self) -> None:
        if self._stepped:
            self._finish_step()

    # ------------------------------------------------------------------ loss and gradients
    def _around_backward(self, inner: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or in_recompute() or not self.mine():
            return inner(tensors, *args, **kwargs)
        recorder = self.recorder
        recorder.count("backward passes")
        if not self.taps:
            return inner(tensors, *args, **kwargs)
        self._begin_forward()
        if recorder.recording:
            self._loss(tensors)
        result = inner(tensors, *args, **kwargs)
        if recorder.recording:
            self._gradients()
        recorder.next_microbatch()
        return result

    def _loss(self, tensors: Any) -> None:
        recorder = self.recorder
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        for index, loss in enumerate(root for root in roots if isinstance(root, torch.Tensor) and root.numel() == 1):
            item = f"[{index}]" if index else ""
            factor = constant_factor(loss)
            where = "argument of backward"
            key = Key(kind=Kind.LOSS, name=LOSS, item=item, microbatch=recorder.microbatch)
            if loss.device.type == "cpu":
                dtype = str(loss.dtype).removeprefix("torch.")
                recorder.scalar(key, float(loss.detach()) / factor, where, dtype)
            else:
                recorder.tensor(key, loss.detach().double() / factor, where)
            key = Key(kind=Kind.LOSS, name=LOSS_SCALE, item=item, microbatch=recorder.microbatch)
            recorder.scalar(key, factor, where)

    def _gradients(self) -> None:
        """Read every gradient after a backward pass; the last reading of the step stands."""
        recorder = self.recorder
        recorder.forget(Kind.GRAD)
        self._versions.clear()
        for name, parameter in self.trained_parameters().items():
            gradient = parameter.grad
            if gradient is not None:
                recorder.tensor(step_key(Kind.GRAD, name), gradient, "after the last backward")
                self._versions[name] = (id(gradient), gradient._version)

    def _around_clip(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        recorder = self.recorder
        if recorder.recording and self.mine() and self.taps and isinstance(result, torch.Tensor):
            recorder.tensor(step_key(Kind.GRAD_NORM, "grad_norm"), result, "returned by clip_grad_norm_")
        return result

    # ------------------------------------------------------------------ the optimizer's step
    def _initial_parameters(self) -> None:
        for name, parameter in self.trained_parameters().items():
            self.recorder.tensor(step_key(Kind.PARAM, name, "before"), parameter, "before the step", exact=True)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.mine() or not self.taps or torch.compiler.is_compiling():
            return
        if id(optimizer) in self._stepped:
            self._finish_step()
        recorder = self.recorder
        recorder.count("optimizer steps")
        if not recorder.recording:
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {name: p for name, p in self.trained_parameters().items() if id(p) in mine}
        for name, parameter in trained.items():
            gradient = parameter.grad
            if gradient is not None and self._versions.get(name) != (id(gradient), gradient._version):
                recorder.tensor(step_key(Kind.GRAD, name, "clipped"), gradient, "given to the optimizer")
        for index, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if rate is not None:
                item = f"[{index}]" if index else ""
                recorder.scalar(step_key(Kind.LR, "lr", item), float(rate), type(optimizer).__name__, "float")
        if not self._stepped:
            self._state(optimizer)

    def _state(self, optimizer: Optimizer) -> None:
        recorder = self.recorder
        trained = self.trained_parameters()
        _, world_size = ranks()
        facts: dict[str, int | str] = {
            "trainable_parameters": len(trained),
            "gradients": sum(p.grad is not None for p in trained.values()),
            "microbatches": recorder.microbatch,
            "world_size": world_size,
            "optimizer": type(optimizer).__name__,
            **rng_facts(),
        }
        for name, value in facts.items():
            recorder.scalar(step_key(Kind.STATE, name), value, "before the optimizer's step")

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self.mine() or not self.taps or torch.compiler.is_compiling():
            return
        recorder = self.recorder
        if recorder.recording:
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, parameter in self.trained_parameters().items():
                if id(parameter) in mine:
                    recorder.tensor(step_key(Kind.PARAM, name), parameter, "after the optimizer's step", exact=True)
        self._stepped.append(id(optimizer))
        # Optimizers that step on the same backward pass share the step. It is over when all that stepped last time have
        # stepped; the first time, when the only optimizer has, or the next forward or backward pass begins.
        known = {id(o) for o, _ in self._optimized()} if self._cycle is None else self._cycle
        if known <= set(self._stepped):
            self._finish_step()

    def _finish_step(self) -> None:
        self._cycle = set(self._stepped)
        self._stepped.clear()
        if self.explicit_steps:
            return
        self._versions.clear()
        for taps in self.taps:
            taps.settle()
        recorder = self.recorder
        recorder.next_step()
        if recorder.recording and not recorder.previous_recorded:
            self._initial_parameters()

    def end_step(self) -> None:
        """End the step because the training code says so; from now on the optimizer does not end steps."""
        self.explicit_steps = True
        self._finish_step()
        self.recorder.next_step()

    def close(self) -> None:
        """End recording at the end of the process."""
        if self.mine() and self._stepped:
            self._finish_step()
        self.recorder.close()
