"""What is called in a check: a callable, the module behind it, its parameters, and the state it must get back.

A check calls both arms many times, moves their parameters by one ulp and lets an optimizer step on them; afterwards
everything is as it was. Copies of the modules would not do: a compiled module, a closure or a wrapper with process
groups cannot be copied reliably, and both arms may share their parameters. This module must not know what is recorded.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from probe.capture import names
from probe.capture.perturb import Perturbation, moved, seeded
from probe.errors import IncomparableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the two callables of a check."""

    role: str
    """`baseline` or `candidate`."""
    call: Callable[..., Any]
    module: nn.Module | None
    """The module whose insides are compared; None for a function without one."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name, in the module's order."""
        return {} if self.module is None else names.named_parameters(list(names.walk(self.module)))


def find_arm(role: str, call: object) -> Arm:
    """Find the module behind a callable: itself, the owner of a method, or the only one that a function closes over.

    Raises:
        IncomparableError: It is no callable.
    """
    if not callable(call):
        raise IncomparableError(
            f"The {role} of probe_check is {type(call).__name__!r}, which cannot be called. Give a module or a "
            "function."
        )
    return Arm(role=role, call=call, module=_module_of(call))


def _module_of(call: Any) -> nn.Module | None:
    if isinstance(call, nn.Module):
        return call
    if isinstance(call, functools.partial):
        return _module_of(call.func)
    owner = getattr(call, "__self__", None)
    if isinstance(owner, nn.Module):
        return owner
    call = getattr(call, "_torchdynamo_orig_callable", call)
    cells = getattr(call, "__closure__", None) or ()
    found: dict[int, nn.Module] = {}
    for cell in cells:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        inner = content if isinstance(content, nn.Module) else getattr(content, "__self__", None)
        if isinstance(inner, nn.Module):
            found[id(inner)] = inner
    # Of several, one that contains the others is the module that is meant.
    outer = [one for one in found.values() if all(other is one or _holds(one, other) for other in found.values())]
    return outer[0] if len(outer) == 1 else None


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())


class Inputs:
    """The arguments of a check. Every run gets its own copies, with the same values."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the arguments.

        If no argument requires a gradient, each floating-point tensor of `args` (not of `kwargs`, where masks are) is
        given one: what flows back into the call is half of what it computes.
        """
        self._args, self._kwargs = tuple(args), dict(kwargs)
        tensors = [tensor for _, tensor in self._tensors()]
        self._give = not any(tensor.requires_grad for tensor in tensors)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, value in enumerate(self._args):
            yield from _tensors_in(value, f"[{index}]")
        for name, value in self._kwargs.items():
            yield from _tensors_in(value, f".{name}")

    def fresh(self, how: Perturbation | None) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, torch.Tensor]]:
        """Copy the arguments.

        Args:
            how: Move floating-point tensors by one ulp; None: leave them.

        Returns:
            Positional arguments, keyword arguments, and every tensor among them by its path, e.g. `[0]` or `.mask`.
            Those that require a gradient are leaves, whose gradient can be read after the backward pass.
        """
        leaves: dict[str, torch.Tensor] = {}

        def copy(value: Any, path: str) -> Any:
            if isinstance(value, torch.Tensor):
                leaf = value.detach().clone(memory_format=torch.preserve_format)
                floating = leaf.dtype.is_floating_point
                if how is not None and floating:
                    shifted = moved(leaf, seeded(how.seed, f"(input){path}"))
                    # A mask holds infinities, whose neighbours are finite.
                    leaf = torch.where(torch.isfinite(leaf), shifted, leaf)
                wanted = value.requires_grad or (self._give and floating and path.startswith("["))
                leaves[path] = leaf.requires_grad_(wanted) if floating or leaf.is_complex() else leaf
                # Not the leaf itself: a call may change its input in place.
                return leaf.clone() if leaf.requires_grad else leaf
            if isinstance(value, dict):
                return {key: copy(item, f"{path}.{key}") for key, item in value.items()}
            if type(value) in (list, tuple):
                return type(value)(copy(item, f"{path}[{index}]") for index, item in enumerate(value))
            return value

        args = tuple(copy(value, f"[{index}]") for index, value in enumerate(self._args))
        kwargs = {name: copy(value, f".{name}") for name, value in self._kwargs.items()}
        return args, kwargs, leaves


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(item, f"{path}.{key}")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{path}[{index}]")


class State:
    """Parameters, buffers and gradients of the arms, as they were before the check."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        """Copy the state of all modules."""
        modules = [arm.module for arm in arms if arm.module is not None]
        parameters = {id(p): p for module in modules for p in module.parameters()}
        buffers = {id(b): b for module in modules for b in module.buffers()}
        self._saved = [(tensor, tensor.detach().clone()) for tensor in (*parameters.values(), *buffers.values())]
        self._gradients = [(parameter, parameter.grad) for parameter in parameters.values()]

    def put_back(self) -> None:
        """Give all tensors their values back, and no gradients."""
        with torch.no_grad():
            for tensor, saved in self._saved:
                tensor.copy_(saved)
        for parameter, _ in self._gradients:
            parameter.grad = None

    def put_back_all(self) -> None:
        """Give all tensors their values and gradients back."""
        self.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def seed_all(seed: int) -> None:
    """Seed Python, torch, and numpy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)


@contextmanager
def undisturbed(arms: Sequence[Arm]) -> Iterator[State]:
    """Lend the arms to a check: their state and all global random generators are as before when it ends."""
    numpy_random = sys.modules.get("numpy.random")
    python, numpy = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cpu, devices = torch.get_rng_state(), torch.cuda.get_rng_state_all() if cuda else []
    state = State(arms)
    try:
        yield state
    finally:
        state.put_back_all()
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(devices)
        if numpy_random is not None and numpy is not None:
            numpy_random.set_state(numpy)
