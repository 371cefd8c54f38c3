"""Attach to a training script that knows nothing of this: hang what takes values into what every training loop calls.

Installed when torch has been imported. This module joins the parts: the search for models, the losses, the gradients
and the steps. It must not know how a value is reduced or stored.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from probe.capture import perturb
from probe.capture.attention import AttentionWatch
from probe.capture.calls import Calls
from probe.capture.gradients import Gradients
from probe.capture.losses import Losses
from probe.capture.models import Models, parameters_of
from probe.capture.recorder import Recorder
from probe.capture.session import after_import
from probe.capture.steps import Steps
from probe.capture.taps import Taps, in_recompute

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
SCALER = "torch.amp.grad_scaler"


class Attachment:
    """Everything installed in one training process."""

    def __init__(self, recorder: Recorder, perturbation: perturb.Perturbation | None = None) -> None:
        self.recorder = recorder
        self.perturbation = perturbation
        self.models = Models(recorder, self._begin_forward, self._found, self.mine)
        self.losses = Losses(recorder)
        self.gradients = Gradients(recorder, self.models)
        self.steps = Steps(recorder, self.models, self.gradients)
        self.calls = Calls(recorder, self.models.training, self.models.calling_module)
        self._loose = 0
        """Parameters without a name that were told."""

    # ------------------------------------------------------------------ installing
    def install(self) -> None:
        """Patch what every training loop passes through."""
        self._patch(Optimizer, "__init__", self._around_optimizer_init)
        self._patch(torch.autograd, "backward", self._around_backward)
        self._patch(torch.autograd, "grad", self._around_grad)
        for module in (torch.nn.utils, torch.nn.utils.clip_grad):
            self._patch(module, "clip_grad_norm_", self._around_clip)
            self._patch(module, "clip_grad_value_", self._around_clip)
        # torch.cuda.amp.GradScaler and FSDP's ShardedGradScaler inherit the method.
        scaler = {"step": self._around_scaler, "scale": self._around_scale, "unscale_": self._around_unscale}
        after_import(SCALER, lambda: self._patch_class(SCALER, "GradScaler", scaler))
        clip = {"clip_grad_norm_": self._around_clip}
        after_import(FSDP1, lambda: self._patch_class(FSDP1, "FullyShardedDataParallel", clip))
        AttentionWatch(self.recorder, self.models.calling_module).install()
        self.calls.install()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        os.register_at_fork(after_in_child=self._in_fork)

    def _patch_class(self, module: str, name: str, methods: dict[str, Callable[..., Any]]) -> None:
        for method, around in methods.items():
            self._patch(getattr(sys.modules[module], name), method, around)

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
        return self.recorder.mine()

    # ------------------------------------------------------------------ models
    def _around_optimizer_init(
        self, inner: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        inner(optimizer, *args, **kwargs)
        if self.mine():
            self.calls.look_again()
            self.models.add_optimizer(optimizer)

    def _begin_forward(self) -> None:
        self.steps.begin_forward()

    def _found(self, taps: Taps) -> None:
        recorder = self.recorder
        if self.perturbation is not None:
            if self.perturbation.form == "ulp":
                perturb.perturb_parameters(taps.parameters, self.perturbation)
            else:
                perturb.perturb_outputs(taps.modules, self.perturbation, lambda: (recorder.step, recorder.microbatch))
        self.calls.look_last()
        self.steps.begin(taps)
        recorder.names = self.models.derivations()

    # ------------------------------------------------------------------ loss and gradients
    def _around_backward(self, inner: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or in_recompute() or not self.mine():
            return inner(tensors, *args, **kwargs)
        recorder, models = self.recorder, self.models
        recorder.count("backward passes")
        if not models.taps and not models.by_hand:
            return inner(tensors, *args, **kwargs)
        self._begin_forward()
        if not isinstance(tensors, (torch.Tensor, tuple, list)):
            tensors = tuple(tensors)
        if recorder.recording:
            self.losses.record(tensors, "argument of backward")
        result = inner(tensors, *args, **kwargs)
        if not models.taps:
            models.adopt_by_gradient()
        if recorder.recording:
            self.gradients.read()
        recorder.next_microbatch()
        return result

    def _around_grad(self, inner: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a training pass that asks for the gradients of parameters, and leave every other use alone.

        A gradient that is itself differentiated (a penalty, an inner loop) is no training pass.
        """
        if not isinstance(inputs, (torch.Tensor, tuple, list)):
            inputs = tuple(inputs)  # it may be a generator, and is needed twice
        wanted = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        create_graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        if torch.compiler.is_compiling() or in_recompute() or create_graph or not self.mine() or not self.models.taps:
            return inner(outputs, inputs, *args, **kwargs)
        trained = {id(parameter) for parameter in self.models.trained().values()}
        if not any(id(each) in trained for each in wanted):
            return inner(outputs, inputs, *args, **kwargs)
        recorder = self.recorder
        recorder.count("backward passes")
        self._begin_forward()
        if recorder.recording:
            self.losses.record(outputs, "argument of torch.autograd.grad")
        result = inner(outputs, inputs, *args, **kwargs)
        if recorder.recording:
            self.gradients.read_returned(wanted, result)
        recorder.next_microbatch()
        return result

    def _around_clip(self, inner: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Take what clipping returns, if it returns a norm.

        Args:
            inner: A function of torch.nn.utils that clips, or FSDP's method.
            parameters: What is clipped; FSDP's model in its own method.
        """
        if not self.recorder.recording or not self.mine() or not self.models.taps:
            return inner(parameters, *args, **kwargs)
        if not isinstance(parameters, (torch.Tensor, nn.Module)):
            parameters = list(parameters)  # it may be a generator, and is needed twice
        result = inner(parameters, *args, **kwargs)
        if not isinstance(parameters, nn.Module):
            self.gradients.clipped(parameters)
        self.gradients.norm(result)
        return result

    # ------------------------------------------------------------------ steps
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self.mine() or torch.compiler.is_compiling():
            return None
        return self.steps.before(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.mine() and not torch.compiler.is_compiling():
            self.steps.after(optimizer)
            if self.models.loose != self._loose:
                self._loose = self.models.loose
                self.recorder.names = self.models.derivations()

    def _around_scaler(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.steps.around_scaler(inner, *args, **kwargs) if self.mine() else inner(*args, **kwargs)

    def _around_scale(self, inner: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        result = inner(scaler, outputs)
        scale = scaler._scale if self.recorder.recording and self.mine() and scaler.is_enabled() else None
        if isinstance(outputs, torch.Tensor) and isinstance(scale, torch.Tensor):
            self.losses.scaled(outputs, result, scale)
        return result

    def _around_unscale(self, inner: Callable[..., Any], scaler: Any, optimizer: Optimizer) -> Any:
        result = inner(scaler, optimizer)
        if scaler.is_enabled() and self.mine():
            self.gradients.rescaled(parameters_of(optimizer))
        return result

    def end_step(self) -> None:
        """End the step because the training code says so; from now on the optimizer does not end steps."""
        self.steps.end_explicitly()

    def close(self) -> None:
        """End recording at the end of the process."""
        if self.mine():
            self.steps.close()
        self.recorder.close()
