"""Find the models that a training script trains, and the parameters of theirs that are trained.

An optimizer's construction arms the search; the first forward pass of a module that holds parameters of that optimizer
ends it. A script that updates its parameters by hand has no optimizer: there the first backward pass shows what is
trained, by the gradients it leaves. This module must not know what is taken from a model, or when a step is over.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from probe.capture import names
from probe.capture.recorder import Recorder
from probe.capture.shards import Part, flat_parts
from probe.capture.taps import Taps

MAX_FRAMES = 40
"""Frames that are searched for the module that is being called."""

DATA_PARALLEL = (
    "The model is wrapped in torch.nn.DataParallel, which copies it to every device in every step and runs the copies "
    "in threads: what a copy computes has no place in the model that is trained. Wrap it in "
    "torch.nn.parallel.DistributedDataParallel and launch one process for each device with torchrun."
)


FLAT_PARAMETERS = (
    "FSDP without use_orig_params keeps the parameters of a module in one flat tensor: they and their gradients are "
    "recorded as `_flat_param`, and match no run that is wrapped in another way. Use use_orig_params=True, or "
    "fully_shard."
)


class Models:
    """The models of one process, in the order in which they were first called."""

    def __init__(
        self,
        recorder: Recorder,
        begin_forward: Callable[[], None],
        found: Callable[[Taps], None],
        mine: Callable[[], bool],
    ) -> None:
        """Prepare to search.

        Args:
            recorder: Receives what the models' taps take.
            begin_forward: Called when a training forward pass begins.
            found: Called with each model that is found, before its first recorded call.
            mine: Tells whether this is the process that was attached.
        """
        self.recorder = recorder
        self.taps: list[Taps] = []
        self._begin_forward, self._found, self._mine = begin_forward, found, mine
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._foreign: set[int] = set()
        self._call: Callable[..., Any] | None = None
        """`Module.__call__` as it was, while the search replaces it."""
        self._parts: dict[int, Part] = {}
        self._loose: set[int] = set()
        """Parameters that were seen with a gradient and are in no model."""

    @property
    def by_hand(self) -> bool:
        """Tell whether no optimizer of torch's was ever constructed: the script updates its parameters itself."""
        return not self._optimizers

    def name_of(self, candidate: object) -> str | None:
        """Give the canonical name of a module of some model, or None for anything else."""
        return next((name for taps in self.taps if (name := taps.name_of(candidate)) is not None), None)

    def calling_module(self) -> str:
        """Name the innermost module that is being called, by the frames of this thread; an empty text for none."""
        frame = sys._getframe(1)
        for _ in range(MAX_FRAMES):
            name = self.name_of(frame.f_locals.get("self"))
            if name is not None:
                return name
            if frame.f_back is None:
                break
            frame = frame.f_back
        return ""

    def training(self) -> bool:
        """Tell whether a training forward pass of some model is under way."""
        return any(taps.training for taps in self.taps)

    @property
    def loose(self) -> int:
        """Count the parameters that are trained and in no model."""
        return len(self._loose)

    # ------------------------------------------------------------------ optimizers and what they train
    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer and look for the model that it trains."""
        self.recorder.count("optimizers constructed")
        if self.by_hand and self.taps:
            self.recorder.restart()  # what looked like training by hand came before the training
        self._optimizers.append(weakref.ref(optimizer))
        self._foreign.clear()
        self._begin_search()

    def optimizers(self) -> list[Optimizer]:
        """List the optimizers that are alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def trained(self) -> dict[str, nn.Parameter]:
        """Give the parameters that some optimizer updates, by canonical name, in the models' order."""
        found: dict[str, nn.Parameter] = {}
        if self.by_hand:
            for taps in self.taps:
                found.update((name, p) for name, p in taps.parameters.items() if p.requires_grad)
            return found
        updated = {id(p): p for optimizer in self.optimizers() for p in parameters_of(optimizer)}
        for taps in self.taps:
            for name, parameter in taps.parameters.items():
                if updated.pop(id(parameter), None) is not None:
                    found[name] = parameter
        # What sharding has put another parameter in place of is still held by an earlier optimizer, and never trained.
        self._loose.update(identity for identity, parameter in updated.items() if parameter.grad is not None)
        for index, parameter in enumerate(p for identity, p in updated.items() if identity in self._loose):
            found[f"(unnamed).{index}"] = parameter
        return found

    def derivations(self) -> dict[str, Any]:
        """Say how each name was derived, and what has none."""
        unnamed = [p for name, p in self.trained().items() if name.startswith("(unnamed).")]
        return {
            "names": [told for taps in self.taps for told in names.derivations(taps.modules)],
            "unnamed": [f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for p in unnamed],
            "inside_compiled": [name for taps in self.taps for name in taps.inside_compiled],
        }

    def part(self, parameter: nn.Parameter) -> Part | None:
        """Say which part of a whole parameter this is, where the parameter itself does not know."""
        return self._parts.get(id(parameter))

    # ------------------------------------------------------------------ searching
    def _begin_search(self) -> None:
        """Look at each outermost module call until every optimized parameter has been found in a model.

        `Module.__call__` is replaced for that time, and put back while a call runs, so that nothing inside it, and
        nothing that is compiled in it, sees the replacement. A global forward hook would not see keyword arguments.
        """
        if self._call is not None:
            return
        self._call = nn.Module.__call__
        search = self

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inner = search._call
            if inner is None:
                return module(*args, **kwargs)
            nn.Module.__call__ = inner
            try:
                search._first_forward(module)
                return inner(module, *args, **kwargs)
            finally:
                if search._call is not None:
                    nn.Module.__call__ = call

        nn.Module.__call__ = call

    def _end_search(self) -> None:
        found = {id(p) for taps in self.taps for p in taps.parameters.values()}
        missing = [p for optimizer in self.optimizers() for p in parameters_of(optimizer) if id(p) not in found]
        if self._call is not None and not missing:
            nn.Module.__call__ = self._call
            self._call = None

    def _first_forward(self, module: nn.Module) -> None:
        if id(module) in self._foreign or not self._mine():
            return
        trained = {id(p) for optimizer in self.optimizers() for p in parameters_of(optimizer)}
        known = any(entry.module is module for taps in self.taps for entry in taps.modules)
        if known or not any(id(parameter) in trained for parameter in module.parameters()):
            self._foreign.update(id(child) for child in module.modules())
            return
        self._adopt(module, names.outermost(module, names.parents_of(gc.get_objects())))
        self._end_search()

    def adopt_by_gradient(self) -> None:
        """Take as models what a backward pass left gradients in; for scripts that have no optimizer of torch's."""
        objects = gc.get_objects()
        parents = names.parents_of(objects)
        # A dictionary as an ordered set: what was made first is model 0.
        tops: dict[int, nn.Module] = {}
        for module in objects:
            if issubclass(type(module), nn.Module):
                held = module.__dict__.get("_parameters", {}).values()
                if any(p is not None and p.requires_grad and p.grad is not None for p in held):
                    top = names.outermost(module, parents)
                    tops[id(top)] = top
        for top in tops.values():
            self._adopt(top, top)

    def _adopt(self, called: nn.Module, top: nn.Module) -> None:
        if any(isinstance(module, nn.DataParallel) for module in top.modules()):
            self.recorder.refuse(DATA_PARALLEL)
            self._foreign.update(id(child) for child in top.modules())
            return
        root = names.ROOT if not self.taps else f"model{len(self.taps)}"
        taps = Taps(top, self.recorder, self._begin_forward, root=root, called=called)
        self.taps.append(taps)
        if any(name.rpartition(".")[2] == "_flat_param" for name in taps.parameters):
            self.recorder.warn(FLAT_PARAMETERS)
        self._parts.update(flat_parts(entry.module for entry in taps.modules))
        self.recorder.count("models found")
        self._found(taps)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """List the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
