"""One name for one tensor, whatever wraps the model.

A wrapper is recognised by its class, never by the text of a path: a model may own an attribute called `module`. The
classes are looked up among the modules that are already imported, so that no framework becomes a dependency.

Source of the table: the project's torch study, section 5.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

ROOT = "(root)"
"""Name of the outermost module itself; parentheses cannot occur in a module path."""

WRAPPERS: tuple[tuple[str, str, str], ...] = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.optim.swa_utils", "AveragedModel", "module"),
    ("peft.peft_model", "PeftModel", "base_model"),
    ("peft.tuners.tuners_utils", "BaseTuner", "model"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "module"),
)
"""Module that defines the class, the class, and the attribute that holds what it wraps."""


def _wrapper_edges() -> list[tuple[type[nn.Module], str]]:
    edges: list[tuple[type[nn.Module], str]] = []
    for module, name, attribute in WRAPPERS:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, nn.Module):
            edges.append((found, attribute))
    return edges


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModule:
    """A module of the model under its canonical name."""

    name: str
    """Dotted path from the outermost module, wrapper edges dropped; `ROOT` for the outermost itself."""
    path: str
    """The path as PyTorch spells it, wrappers included; empty for the outermost."""
    module: nn.Module
    wrapper: bool
    """The module only wraps the one that has the same name."""
    dropped: tuple[str, ...] = ()
    """Edges of the path that the name leaves out, each with the class of its wrapper: `module (DDP)`."""


def join(prefix: str, name: str) -> str:
    """Append a child's name to a canonical name."""
    return name if prefix in ("", ROOT) else f"{prefix}.{name}"


def walk(top: nn.Module, root: str = ROOT) -> Iterator[NamedModule]:
    """Visit every module once, parents first, in registration order; a shared module keeps its first name.

    Args:
        top: The outermost module.
        root: Its name; another one than `ROOT` begins the names of all modules in it.
    """
    edges = _wrapper_edges()
    seen: set[int] = set()
    stack: list[tuple[nn.Module, str, str, tuple[str, ...]]] = [(top, root, "", ())]
    while stack:
        module, name, path, without = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        inner = next((attr for cls, attr in edges if isinstance(module, cls) and attr in module._modules), None)
        yield NamedModule(name=name, path=path, module=module, wrapper=inner is not None, dropped=without)
        for child_name, child in reversed(list(module._modules.items())):
            if child is not None:
                dropped = child_name == inner
                child_path = f"{path}.{child_name}" if path else child_name
                edges_out = (*without, f"{child_name} ({type(module).__name__})") if dropped else without
                stack.append((child, name if dropped else join(name, child_name), child_path, edges_out))


def named_parameters(modules: list[NamedModule]) -> dict[str, nn.Parameter]:
    """Give every parameter of the walked modules one canonical name; a shared one keeps its first."""
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for entry in modules:
        for name, parameter in entry.module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.setdefault(join(entry.name, name), parameter)
    return found


def derivations(modules: list[NamedModule]) -> list[dict[str, Any]]:
    """Say of every module and parameter from which path its name was derived, and what was left out of it."""
    told: list[dict[str, Any]] = []
    seen: set[int] = set()
    for entry in modules:
        dropped = list(entry.dropped)
        if not entry.wrapper:
            kind = type(entry.module).__name__
            told.append({"name": entry.name, "path": entry.path, "class": kind, "dropped": dropped})
        for name, parameter in entry.module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                path = f"{entry.path}.{name}" if entry.path else name
                kind = type(parameter).__name__
                told.append({"name": join(entry.name, name), "path": path, "class": kind, "dropped": dropped})
    return told


def outermost(module: nn.Module, parents: dict[int, nn.Module]) -> nn.Module:
    """Climb from a module to the module that nothing contains."""
    seen: set[int] = set()
    while id(module) in parents and id(module) not in seen:
        seen.add(id(module))
        module = parents[id(module)]
    return module


def parents_of(objects: list[Any]) -> dict[int, nn.Module]:
    """Map every module among `objects` that is contained in another to a module that contains it. One linear pass."""
    parents: dict[int, nn.Module] = {}
    for candidate in objects:
        # type() and not isinstance: lazy proxies run code when asked for their class.
        if issubclass(type(candidate), nn.Module):
            for child in candidate.__dict__.get("_modules", {}).values():
                if child is not None and child is not candidate:
                    parents.setdefault(id(child), candidate)
    return parents
