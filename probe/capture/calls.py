"""Take the arguments and results of functions that a plan names by import path: what is no module.

A function is replaced where its module defines it, as soon as that module has been imported, and wherever else the same
object is bound by then; functions of the training script itself when it makes its optimizer. A call inside a
compiled region is left alone, for what a compiler traces must not depend on this. This module must not know what a
step or a model is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from probe.capture.recorder import Recorder
from probe.capture.session import after_import
from probe.capture.taps import in_recompute, in_transform, tensors_in
from probe.point import Key, Kind

# A quantity is `MODULE.NAME` and its item: `call/blocks.3.attn.attention(result)`.
RESULT, GRADIENT = "(result)", "(gradient)"
"""Items of what a call returned, and of the gradient that reached it; arguments are `.name`."""


class Calls:
    """The functions of one plan."""

    def __init__(self, recorder: Recorder, training: Callable[[], bool], calling_module: Callable[[], str]) -> None:
        """Prepare.

        Args:
            recorder: Receives the values; its plan names the functions.
            training: Tells whether a training forward pass is under way.
            calling_module: Names the module of the model that is being called, or gives an empty text.
        """
        self._recorder, self._training, self._calling_module = recorder, training, calling_module
        self._waiting: dict[str, str] = dict(recorder.plan.calls)
        """Import paths that are not wrapped yet, by name."""

    def install(self) -> None:
        """Wrap each function when its module is imported, or now where it has been."""
        for name, path in list(self._waiting.items()):
            after_import(path.partition(":")[0], partial(self._wrap, name, path))

    def look_again(self) -> None:
        """Wrap what did not exist when it was looked for, in the script itself or a module that was being imported.

        Called when an optimizer is made, for a call may look its function up before the model is called that gives the
        argument: `loss_of(model(x))`.
        """
        for name, path in list(self._waiting.items()):
            if path.partition(":")[0] in sys.modules:
                self._wrap(name, path)

    def look_last(self) -> None:
        """Look again, and tell what does not exist; called when a model is found."""
        self.look_again()
        for name, path in list(self._waiting.items()):
            module, _, qualified = path.partition(":")
            if module in sys.modules:
                del self._waiting[name]
                self._recorder.warn(f"Function {path!r} of the plan does not exist.{_meant(module, qualified)}")

    def _wrap(self, name: str, path: str) -> None:
        module, _, qualified = path.partition(":")
        owner: Any = sys.modules[module]
        *outer, attribute = qualified.split(".")
        for each in outer:
            owner = getattr(owner, each, None)
        inner = getattr(owner, attribute, None)
        if not callable(inner):
            return
        self._waiting.pop(name, None)
        self._recorder.events.setdefault(f"calls of {name}", 0)
        outer_function = self._around(name, inner)
        if not inspect.isclass(owner):
            for namespace in _namespaces():
                for key in [key for key, value in list(namespace.items()) if value is inner]:
                    namespace[key] = outer_function
        elif inspect.isfunction(inspect.getattr_static(owner, attribute)):
            setattr(owner, attribute, outer_function)
        else:
            # A static or class method, or `apply` of an autograd function: `inner` is bound already.
            setattr(owner, attribute, staticmethod(outer_function))

    def _around(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        arguments_of = _binder(inner)

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._wanted():
                return inner(*args, **kwargs)
            recorder = self._recorder
            recorder.count(f"calls of {name}")
            # Counted by module: a call that one arm lacks must not shift those of the other modules.
            module = self._calling_module()
            called = f"{module}.{name}" if module else name
            call = recorder.next_call(Kind.CALL, called)
            key = Key(kind=Kind.CALL, name=called, microbatch=recorder.microbatch, call=call)
            where = f"called in {module}" if module else "called outside of any module"
            for argument, value in arguments_of(args, kwargs).items():
                self._keep(key, f".{argument}", value, where)
            result = inner(*args, **kwargs)
            self._keep(key, RESULT, result, where)
            self._await_gradients(key, result, where)
            return result

        return outer

    def _wanted(self) -> bool:
        recorder = self._recorder
        if not recorder.recording or not recorder.mine() or in_recompute() or in_transform():
            return False
        return self._training() or torch.is_grad_enabled()

    def _keep(self, key: Key, item: str, value: Any, where: str) -> None:
        if isinstance(value, (bool, int, float, str)):
            self._recorder.scalar(_at(key, item), value, where)
            return
        for inside, tensor in tensors_in(value):
            self._recorder.tensor(_at(key, item + inside), tensor, where)

    def _await_gradients(self, key: Key, result: Any, where: str) -> None:
        if not torch.is_grad_enabled():
            return
        for inside, tensor in tensors_in(result):
            # A hook on a leaf would stay, and be called for every later use of it.
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(partial(self._gradient, self._recorder.step, _at(key, GRADIENT + inside), where))

    def _gradient(self, step: int, key: Key, where: str, gradient: torch.Tensor) -> None:
        recorder = self._recorder
        if recorder.recording and recorder.step == step:
            recorder.tensor(key, gradient, where)


def _at(key: Key, item: str) -> Key:
    return Key(kind=key.kind, name=key.name, item=item, microbatch=key.microbatch, call=key.call)


def _namespaces() -> list[dict[str, Any]]:
    # Not by getattr: a lazy module would import what it stands for.
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    return [object.__getattribute__(module, "__dict__") for module in modules]


def _meant(module: str, qualified: str) -> str:
    import difflib

    callables = [name for name, value in vars(sys.modules[module]).items() if callable(value)]
    close = difflib.get_close_matches(qualified, callables, n=1)
    return f" Did you mean '{module}:{close[0]}'?" if close else f" Look into module {module!r} for its name."


def _binder(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Name the arguments of a function; by position where it does not tell its signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if signature is not None:
            try:
                return dict(signature.bind(*args, **kwargs).arguments)
            except TypeError:
                pass  # the call itself is about to say so
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}

    return bind
