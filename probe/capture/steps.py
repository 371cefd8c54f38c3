"""Tell when a step is over, and take what exists once per step: rates, state, parameters.

A step is one update. Optimizers that step on the same backward pass share it; an update that a gradient scaler leaves
out is a step too, for the data have moved on. A script that updates its parameters by hand ends a step when its
gradients or parameters have changed by the next forward pass. This module must not know how a model is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from probe.capture.gradients import Gradients
from probe.capture.models import Models, parameters_of
from probe.capture.recorder import Recorder, ranks, step_key
from probe.capture.rows import SKIPPED
from probe.capture.taps import Taps, rng_facts
from probe.point import Kind

BY_HAND = "no optimizer of torch's"


class Steps:
    """The end of each step of one process."""

    def __init__(self, recorder: Recorder, models: Models, gradients: Gradients) -> None:
        self._recorder, self._models, self._gradients = recorder, models, gradients
        self.explicit = False
        """`probe.step` ends the steps, not the optimizer."""
        self._inside: list[int] = []
        """Optimizers whose step is running; the inner ones belong to the outer (a sharded optimizer's own)."""
        self._stepped: list[int] = []
        """Optimizers that stepped in the current step."""
        self._cycle: set[int] | None = None
        """Optimizers that stepped in the step before; None until one step is over."""
        self._versions: dict[str, int] = {}
        """Versions of the parameters when they were last read; where they are updated by hand."""
        self._updates = 0
        """Optimizer steps that ran."""
        self._skipping: int | None = None
        """Under a gradient scaler: whether it leaves this update out (1) or not (0)."""

    # ------------------------------------------------------------------ an optimizer's step
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Take what an optimizer is about to use; with a closure, once it has computed the gradients.

        Returns:
            New arguments of the step, or None to leave them.
        """
        if id(optimizer) in self._inside:
            self._inside.clear()  # its last step raised
        self._inside.append(id(optimizer))
        if len(self._inside) > 1:
            return None
        if id(optimizer) in self._stepped:
            self.finish()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._about_to_update(optimizer)
            return None

        def then(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            self._about_to_update(optimizer)
            return result

        if len(args) > 1:
            return (args[0], then, *args[2:]), kwargs
        return args, {**kwargs, "closure": then}

    def _about_to_update(self, optimizer: Optimizer) -> None:
        recorder = self._recorder
        if not self._models.taps:
            return
        recorder.count("optimizer steps")
        if not recorder.recording:
            return
        self._gradients.given_to(optimizer)
        for index, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            key = step_key(Kind.LR, "lr", f"[{index}]" if index else "")
            if isinstance(rate, torch.Tensor) and rate.device.type != "cpu":
                recorder.tensor(key, rate.detach(), type(optimizer).__name__)
            elif rate is not None:
                recorder.scalar(key, float(rate), type(optimizer).__name__, "float")
        if not self._stepped:
            # A sharded optimizer only deals out the parameters to those of another class.
            inner = getattr(optimizer, "optim", None)
            self._state(type(inner if isinstance(inner, Optimizer) else optimizer).__name__)
        skipped = getattr(optimizer, "found_inf", None)
        if isinstance(skipped, torch.Tensor):  # a fused optimizer finds out on its device
            with torch.no_grad():
                recorder.tensor(step_key(Kind.STATE, SKIPPED), (skipped > 0).long(), "the gradient scaler")
        elif self._skipping is not None:
            recorder.scalar(step_key(Kind.STATE, SKIPPED), self._skipping, "the gradient scaler", "int64")

    def after(self, optimizer: Optimizer) -> None:
        """Take what an optimizer made of its parameters, and close the step if it was the last to update."""
        if self._inside:
            self._inside.pop()
        if self._inside or not self._models.taps:
            return
        self._updates += 1
        self._parameters({id(parameter) for parameter in parameters_of(optimizer)}, "after the optimizer's step")
        self._stepped.append(id(optimizer))
        # Optimizers that step on the same backward pass share the step. It is over when all that stepped last time have
        # stepped; the first time, when the only optimizer has, or the next forward or backward pass begins.
        known = {id(other) for other in self._models.optimizers()} if self._cycle is None else self._cycle
        if known <= set(self._stepped):
            self.finish()

    def around_scaler(self, inner: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Note whether a gradient scaler lets the optimizer update: where it does not, none of its hooks fire."""
        if not scaler.is_enabled() or not isinstance(optimizer, Optimizer):
            return inner(scaler, optimizer, *args, **kwargs)
        updates, self._skipping = self._updates, 0
        try:
            result = inner(scaler, optimizer, *args, **kwargs)
            if self._updates == updates and not self._inside and self._models.taps:
                self._skipping = 1
                self.before(optimizer, (optimizer,), {})
                self.after(optimizer)
        finally:
            self._skipping = None
        return result

    # ------------------------------------------------------------------ what exists once per step
    def _state(self, optimizer: str) -> None:
        recorder = self._recorder
        trained = self._models.trained()
        _, world_size = ranks()
        # Flat shards leave a rank without the gradients of which it holds nothing.
        flat = any(self._models.part(parameter) is not None for parameter in trained.values())
        gradients: dict[str, int] = {} if flat else {"gradients": sum(p.grad is not None for p in trained.values())}
        modules = [entry.module for taps in self._models.taps for entry in taps.modules if not entry.wrapper]
        facts: dict[str, int | str] = {
            "trainable_parameters": len(trained),
            **gradients,
            "microbatches": recorder.microbatch,
            "world_size": world_size,
            "optimizer": optimizer,
            "modules_in_train_mode_at_update": sum(module.training for module in modules),
            **rng_facts(),
        }
        for name, value in facts.items():
            recorder.scalar(step_key(Kind.STATE, name), value, "before the optimizer's step")

    def _parameters(self, mine: set[int] | None, where: str, item: str = "") -> None:
        """Record parameters: those with the given identities, or all that are trained."""
        if not self._recorder.recording:
            return
        for name, parameter in self._models.trained().items():
            if mine is None or id(parameter) in mine:
                part = self._models.part(parameter)
                self._recorder.tensor(step_key(Kind.PARAM, name, item), parameter, where, exact=True, part=part)

    def begin(self, found: Taps | None = None) -> None:
        """Take the parameters that the first step of a recorded stretch starts from: of one model, or of all."""
        mine = None if found is None else {id(parameter) for parameter in found.parameters.values()}
        self._parameters(mine, "before the step", "before")
        self._note_versions()

    # ------------------------------------------------------------------ closing
    def begin_forward(self) -> None:
        """Close the step if it is over; a training forward or backward pass is about to begin."""
        if self._inside:
            return
        if self._stepped:
            self.finish()
        elif self._models.by_hand and not self.explicit and self._updated_by_hand():
            self._end_by_hand()

    def _note_versions(self) -> None:
        if self._models.by_hand:
            self._versions = {name: parameter._version for name, parameter in self._models.trained().items()}

    def _updated_by_hand(self) -> bool:
        if not self._recorder.microbatch:
            return False
        trained = self._models.trained()
        moved = any(trained[name]._version != version for name, version in self._versions.items() if name in trained)
        # `parameter.data -= ...` leaves no trace in the version; that the gradients are cleared does.
        return moved or self._gradients.changed

    def _end_by_hand(self) -> None:
        if self._recorder.recording:
            self._state(BY_HAND)
        self._parameters(None, "at the next forward")
        self._close()

    def finish(self) -> None:
        """Close the step after its last optimizer, unless the training code ends steps itself."""
        self._cycle = set(self._stepped)
        self._stepped.clear()
        if not self.explicit:
            self._close()

    def end_explicitly(self) -> None:
        """End the step because the training code says so; from now on nothing else ends steps."""
        self.explicit = True
        self._stepped.clear()
        if self._models.by_hand:
            self._parameters(None, "at the end of the step")
        self._close()

    def _close(self) -> None:
        self._gradients.clear()
        for taps in self._models.taps:
            taps.settle()
        recorder = self._recorder
        recorder.next_step()
        if recorder.recording and not recorder.previous_recorded:
            self.begin()
        self._note_versions()

    def close(self) -> None:
        """Close the last step at the end of the process."""
        if self._stepped:
            self.finish()
        elif self._models.by_hand and not self.explicit and self._models.taps and self._updated_by_hand():
            self._end_by_hand()
