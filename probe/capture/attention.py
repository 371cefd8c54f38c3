"""Say which attention kernel ran in which module: a branch that silently gets another kernel is the seed of many
surprises.

A repository without the right package falls back to a slower kernel and logs nothing
(modelscope/DiffSynth-Studio#1687). The choice is asked for with the call's own arguments, and the calls of the known
packages are noted as they pass. What ran is a fact about the job (`state/attention.<module>`): shown where the arms
differ, never judged.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from probe.capture.recorder import Recorder, step_key
from probe.capture.session import after_import
from probe.capture.taps import in_recompute
from probe.point import Kind

BACKENDS = {-1: "none", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
"""Names of `torch.nn.attention.SDPBackend`, which `torch._fused_sdp_choice` numbers."""

PACKAGES = {
    "flash_attn.flash_attn_interface": ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func"),
    "flash_attn_interface": ("flash_attn_func", "flash_attn_varlen_func"),
    "xformers.ops": ("memory_efficient_attention",),
    "sageattention": ("sageattn", "sageattn_varlen"),
}
"""Module and functions of the attention packages beside torch; `flash_attn_interface` is version 3 of flash-attn."""

DISPATCH = (("diffsynth.core.attention.attention", "ATTENTION_IMPLEMENTATION"),)
"""Constants by which a framework chooses its kernel at import."""


class AttentionWatch:
    """Note each attention call of a recorded step under the module that makes it."""

    def __init__(self, recorder: Recorder, calling_module: Callable[[], str]) -> None:
        """Prepare.

        Args:
            recorder: Receives the facts.
            calling_module: Names the module of the model that is being called, or gives an empty text.
        """
        self._recorder, self._calling_module = recorder, calling_module
        self._noted: set[tuple[int, str, str]] = set()

    def install(self) -> None:
        """Wrap torch's attention now, and each package's when it is imported."""
        functional = torch.nn.functional
        inner = functional.scaled_dot_product_attention

        @functools.wraps(inner)
        def attention(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._recorder.recording and not in_recompute():
                self._note(f"torch sdpa: {chosen_backend(*args, **kwargs)}")
            return inner(*args, **kwargs)

        functional.scaled_dot_product_attention = attention
        for package, functions in PACKAGES.items():
            after_import(package, functools.partial(self._wrap_package, package, functions))

    def _wrap_package(self, package: str, functions: tuple[str, ...]) -> None:
        module = sys.modules[package]
        for name in functions:
            inner = getattr(module, name, None)
            if inner is not None:
                setattr(module, name, self._noting(f"{package}.{name}", inner))

    def _noting(self, kernel: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def attention(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and self._recorder.recording and not in_recompute():
                self._note(kernel)
            return inner(*args, **kwargs)

        return attention

    def _note(self, kernel: str) -> None:
        module = self._calling_module()
        fact = (self._recorder.step, module, kernel)
        if module and fact not in self._noted:
            self._noted.add(fact)
            self._recorder.scalar(step_key(Kind.STATE, f"attention.{module}"), kernel, "attention call")


def chosen_backend(*args: Any, **kwargs: Any) -> str:
    """Name the backend that torch's own dispatch would choose for a call of `scaled_dot_product_attention`."""
    try:
        return BACKENDS.get(int(torch._fused_sdp_choice(*args, **kwargs)), "unknown")
    except (RuntimeError, TypeError, ValueError):
        return "unknown"


def dispatch_constants() -> dict[str, str]:
    """Give the dispatch constants of the frameworks that the process has imported."""
    found = {}
    for module, name in DISPATCH:
        value = getattr(sys.modules.get(module), name, None)
        if value is not None:
            found[f"{module}.{name}"] = str(value)
    return found
