"""Take module outputs, their gradients and the batch, from hooks that leave the model as it was.

One shared function serves every module: a function or a constant per module would make `torch.compile` specialise each
block. Inside a compiled region nothing is taken; values at its boundary are. Gradients come from tensor hooks on
outputs (`register_full_backward_hook` re-orders gradient accumulation and changes the trained bits). A recompute under
activation checkpointing is told by the autograd graph task that runs it. Source of these facts: the project's torch
study, sections 3 to 5.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from probe.capture import names
from probe.capture.hook import Hook
from probe.capture.recorder import Recorder, step_key
from probe.point import Key, Kind

MAX_DEPTH = 3
"""Nesting of tuples, lists, mappings and dataclasses searched for tensors in a module's input and output."""


def in_recompute() -> bool:
    """Tell whether a backward pass is running the forward again (True inside any backward)."""
    return torch._C._current_graph_task_id() != -1  # type: ignore[no-any-return]


def in_transform() -> bool:
    """Tell whether a function transform (`torch.func.vmap`, `grad`) is running: its tensors have no data of their own,
    and no optimizer trains by it."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Find the tensors of a structured value with their paths, `[0]` or `.logits`; a bare tensor has the path ''."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth >= MAX_DEPTH:
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{index}]", depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{path}.{field.name}", depth + 1)


def named_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name what enters a module by its forward's arguments; a lone mapping gives its keys instead of its own name."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {**{f"input{i}": value for i, value in enumerate(args)}, **kwargs}
    inputs: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, dict) and name == "kwargs":
            inputs.update(value)
        elif isinstance(value, tuple) and name == "args":
            inputs.update({f"input{i}": item for i, item in enumerate(value)})
        else:
            inputs[name] = value
    if len(inputs) == 1:
        (only,) = inputs.values()
        if isinstance(only, Mapping) and all(isinstance(key, str) for key in only):
            return dict(only)
    return inputs


def compiled_forward(module: nn.Module) -> bool:
    """Tell whether a module's own forward was replaced by a compiled one (`block.forward = torch.compile(...)`)."""
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


class Taps:
    """The hooks of one model."""

    def __init__(
        self,
        top: nn.Module,
        recorder: Recorder,
        begin_forward: Callable[[], None],
        *,
        root: str = names.ROOT,
        called: nn.Module | None = None,
    ) -> None:
        """Find the points of a model and hook them.

        Args:
            top: The outermost module.
            recorder: Receives the values.
            begin_forward: Called before anything of a training forward pass is taken: a step may be over.
            root: Name of the outermost module; a second model's own name begins all of its names.
            called: The module that the training loop calls, where that is not the outermost one.
        """
        self._begin_forward = begin_forward
        self.recorder = recorder
        self.root = root
        self.modules = list(names.walk(top, root))
        self.parameters = names.named_parameters(self.modules)
        self.inside_compiled: list[str] = []
        """Names of modules that lie inside a compiled region and are not taken."""
        self._names: dict[int, tuple[str, str]] = {}
        self._root = next(e.module for e in self.modules if e.name == root and not e.wrapper)
        entry = next((e.module for e in self.modules if e.module is called and e.name != root), None)
        self._entries = [self._root] if entry is None else [self._root, entry]
        """Modules whose outermost call brings the batch."""
        self._open = 0
        self._quiet_entry = False
        self._without_graph: dict[str, list[tuple[int, int]]] = {}
        """(microbatch, call) of the outputs that were computed with gradients off inside a training forward pass."""
        self._handles: list[Any] = []
        self._wrapped: list[tuple[nn.Module, Any]] = []
        """Modules whose compiled call is wrapped, and the call as it was."""
        self._attach()

    # ------------------------------------------------------------------ hooking
    def _attach(self) -> None:
        optimized = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
        compiled_roots: list[str] = []
        named: set[str] = set()
        for entry in self.modules:
            region = next((p for p in compiled_roots if _under(entry.path, p)), None)
            if region is not None:
                if entry.name not in named and not entry.wrapper and not self._tap_inside(entry):
                    self.inside_compiled.append(entry.name)
                continue
            if isinstance(entry.module, optimized):
                compiled_roots.append(f"{entry.path}._orig_mod" if entry.path else "_orig_mod")
                self._hook(entry)
                named.add(entry.name)
            elif entry.wrapper:
                continue
            elif entry.module._compiled_call_impl is not None:
                compiled_roots.append(f"{entry.path}." if entry.path else "")
                self._wrap_compiled_call(entry)
                named.add(entry.name)
            else:
                if compiled_forward(entry.module):
                    compiled_roots.append(f"{entry.path}." if entry.path else "")
                self._hook(entry)
                named.add(entry.name)
        for entry in self.modules:
            inside = any(_under(entry.path, region) for region in compiled_roots)
            entered = entry.name == self.root or entry.module in self._entries
            if entered and not inside and entry.module._compiled_call_impl is None:
                self._handles.append(entry.module.register_forward_pre_hook(Hook(self._enter), with_kwargs=True))
                self._handles.append(entry.module.register_forward_hook(Hook(self._leave), always_call=True))

    def _hook(self, entry: names.NamedModule) -> None:
        self._names[id(entry.module)] = (entry.name, type(entry.module).__name__)
        if not self._ignored(entry):
            self._handles.append(entry.module.register_forward_hook(Hook(self._forward)))

    def _tap_inside(self, entry: names.NamedModule) -> bool:
        """Tap a module inside a compiled region if the plan asks for it, and say whether it does."""
        if self._ignored(entry) or not self.recorder.plan.taps_inside(entry.name):
            return False
        # It imports parts of torch that a job without compiled regions has no use for.
        from probe.capture import compiled_tap

        where = type(entry.module).__name__
        self._names[id(entry.module)] = (entry.name, where)
        point = _Inside(self, entry.module, entry.name, f"{where} (inside a compiled region)")
        self._handles.append(compiled_tap.tap_module(entry.module, point))
        return True

    def _ignored(self, entry: names.NamedModule) -> bool:
        # What a plan leaves out is not even hooked: that a module has a hook can be what disturbs a run.
        plan = self.recorder.plan
        return plan.ignores(Kind.FORWARD, entry.name) and plan.ignores(Kind.BACKWARD, entry.name)

    def _wrap_compiled_call(self, entry: names.NamedModule) -> None:
        """Take the output of `module.compile()` outside its compiled region: its own hooks are compiled with it."""
        inner, module = entry.module._compiled_call_impl, entry.module
        self._names[id(module)] = (entry.name, type(module).__name__)
        if entry.name != self.root and self._ignored(entry):
            return

        def call(*args: Any, **kwargs: Any) -> Any:
            if entry.name == self.root:
                self._enter(module, args, kwargs)
            output = inner(*args, **kwargs)
            self._forward(module, args, output)
            if entry.name == self.root:
                self._leave(module, args, output)
            return output

        module._compiled_call_impl = call
        self._wrapped.append((module, inner))

    def name_of(self, candidate: object) -> str | None:
        """Give the canonical name of a hooked module, or None for anything else."""
        named = self._names.get(id(candidate))
        return named[0] if named is not None else None

    def remove(self) -> None:
        """Take all hooks off the model again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, inner in self._wrapped:
            module._compiled_call_impl = inner
        self._wrapped.clear()

    # ------------------------------------------------------------------ entering the model
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None = None) -> None:
        """Note that the outermost call of the model begins; take the batch."""
        if torch.compiler.is_compiling() or in_recompute() or in_transform():
            return
        recorder = self.recorder
        if self._open == 0 and torch.is_grad_enabled():
            self._begin_forward()  # may close a step, which forgets open calls
        self._open += 1
        if self._open > 1:
            return
        self._quiet_entry = not torch.is_grad_enabled()
        if self._quiet_entry:
            return
        self._without_graph.clear()
        recorder.count("training forward passes")
        if not recorder.recording:
            return
        if recorder.microbatch == 0 and recorder.next_call(Kind.STATE, "modes") == 0:
            self._modes()
        entered = module if module in self._entries else self._root
        for argument, value in named_inputs(entered, args, kwargs).items():
            name = argument if self.root == names.ROOT else f"{self.root}.{argument}"
            call = recorder.next_call(Kind.BATCH, name)
            for item, tensor in tensors_in(value):
                key = Key(kind=Kind.BATCH, name=name, item=item, microbatch=recorder.microbatch, call=call)
                recorder.tensor(key, tensor, "input of the model", exact=True)
            if isinstance(value, (bool, int, float, str)):
                key = Key(kind=Kind.BATCH, name=name, microbatch=recorder.microbatch, call=call)
                recorder.scalar(key, value, "input of the model")

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.enter(args, kwargs, module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or in_recompute() or in_transform():
            return
        self._open = max(0, self._open - 1)

    @property
    def training(self) -> bool:
        """Tell whether a training forward pass of the model is under way."""
        return self._open > 0 and not self._quiet_entry

    def take_output(self, module: nn.Module, output: Any) -> None:
        """Take the output of a module that was called eagerly."""
        self._forward(module, (), output)

    def settle(self) -> None:
        """Forget calls that an exception left open. Called at each step."""
        self._open = 0

    def _modes(self) -> None:
        modules = [entry.module for entry in self.modules if not entry.wrapper]
        dropouts = [m for m in modules if isinstance(m, nn.modules.dropout._DropoutNd)]
        facts = {
            "modules_in_train_mode": sum(m.training for m in modules),
            "dropouts_in_train_mode": sum(m.training for m in dropouts),
        }
        for name, value in facts.items():
            self.recorder.scalar(step_key(Kind.STATE, name), value, "at the first forward of the step")

    # ------------------------------------------------------------------ outputs and their gradients
    def _forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling() or in_transform():
            return
        if in_recompute():
            self._recomputed(module, output)
            return
        if self._quiet_entry if self._open else not torch.is_grad_enabled():
            return
        if not self._open:
            self._begin_forward()
        recorder = self.recorder
        if not recorder.recording:
            return
        name, cls = self._names[id(module)]
        call = recorder.next_call(Kind.FORWARD, name)
        microbatch = recorder.microbatch
        for item, tensor in tensors_in(output):
            key = Key(kind=Kind.FORWARD, name=name, item=item, microbatch=microbatch, call=call)
            recorder.tensor(key, tensor, cls)
        if torch.is_grad_enabled():
            self._await_gradients(name, cls, microbatch, call, output)
        else:
            self._without_graph.setdefault(name, []).append((microbatch, call))

    def _await_gradients(self, name: str, cls: str, microbatch: int, call: int, output: Any) -> None:
        recorder = self.recorder
        if not recorder.plan.records(Kind.BACKWARD, name):
            return
        for item, tensor in tensors_in(output):
            if tensor.requires_grad:
                key = Key(kind=Kind.BACKWARD, name=name, item=item, microbatch=microbatch, call=call)
                tensor.register_hook(partial(self._backward, recorder.step, key, cls))

    def _recomputed(self, module: nn.Module, output: Any) -> None:
        """Await the gradients of an output whose forward ran without a graph: reentrant checkpointing builds it now."""
        name, cls = self._names[id(module)]
        if self.recorder.recording and self._without_graph.get(name):
            # Segments are recomputed last first, so the latest call without a graph is this one.
            microbatch, call = self._without_graph[name].pop()
            self._await_gradients(name, cls, microbatch, call, output)

    def _backward(self, step: int, key: Key, where: str, gradient: torch.Tensor) -> None:
        recorder = self.recorder
        if recorder.recording:
            # What one update computed may be trained through in the next: a generator's output, between two optimizers.
            late = recorder.step != step
            recorder.tensor(replace(key, microbatch=recorder.microbatch) if late else key, gradient, where)


class _Inside:
    """A module inside a compiled region; its values come from an operation in the graph."""

    def __init__(self, taps: Taps, module: nn.Module, name: str, where: str) -> None:
        self._taps, self._module, self._name, self._where = taps, module, name, where
        self._awaited: dict[str, list[tuple[int, int, int]]] = {}
        """(step, microbatch, call) of the outputs of an item whose gradient has not come yet."""

    def output(self, item: str, tensor: torch.Tensor) -> None:
        """Take an output; gradients are off in here, so that a training pass is told by the model's own call."""
        recorder = self._taps.recorder
        if not self._taps.training or not recorder.recording:
            return
        call = recorder.next_call(Kind.FORWARD, self._name, item)
        microbatch = recorder.microbatch
        key = Key(kind=Kind.FORWARD, name=self._name, item=item, microbatch=microbatch, call=call)
        recorder.tensor(key, tensor, self._where)
        if call == 0 and microbatch == 0:
            self._awaited.pop(item, None)  # of outputs that no gradient reached
        self._awaited.setdefault(item, []).append((recorder.step, microbatch, call))

    def gradient(self, item: str, tensor: torch.Tensor) -> None:
        """Take a gradient: that of the latest output which has none yet, for backward goes the other way."""
        recorder = self._taps.recorder
        if not recorder.recording or not self._awaited.get(item):
            return
        step, microbatch, call = self._awaited[item].pop()
        if step == recorder.step:
            key = Key(kind=Kind.BACKWARD, name=self._name, item=item, microbatch=microbatch, call=call)
            recorder.tensor(key, tensor, self._where)

    def eager(self, output: Any) -> None:
        """Take the output of a call that was not compiled after all."""
        self._taps.take_output(self._module, output)


def _under(path: str, region: str) -> bool:
    if region == "" or region.endswith("."):
        return path.startswith(region) and path != region.rstrip(".")
    return path == region or path.startswith(f"{region}.")


def rng_facts() -> dict[str, str]:
    """Fingerprint the global random generators without drawing from them."""
    facts = {"rng.python": repr(random.getstate()).encode(), "rng.torch": torch.get_rng_state().numpy().tobytes()}
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        facts["rng.numpy"] = _plain(numpy_random.get_state(legacy=False))
    return {name: f"{xxhash.xxh3_64_intdigest(state):016x}" for name, state in facts.items()}


def _plain(state: Any) -> bytes:
    """Write the state of a generator of numpy: not by its repr, for which numpy takes 4 ms."""
    if isinstance(state, Mapping):
        return b"".join(repr(name).encode() + _plain(value) for name, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()
