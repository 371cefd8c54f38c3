"""The explicit API with recording on: values that the training code names itself.

The call site is stored, for it fills the table's `Where`. Works before torch is imported (nothing is recorded then)
and from code that is also run without recording.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from probe.capture import session
from probe.point import Key, Kind

if TYPE_CHECKING:
    from probe.capture.attach import Attachment


def _attachment() -> Attachment | None:
    attached = session.attachment()
    return attached if attached is not None and attached.mine() else None


def enabled() -> bool:
    """Tell whether a value given now would be recorded."""
    attached = _attachment()
    return attached is not None and attached.recorder.recording


def _call_site() -> str:
    frame = sys._getframe(1)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(package):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def record(name: str, value: Any, note: str = "") -> None:
    """Record a value; see `probe.record`."""
    attached = _attachment()
    if attached is not None and attached.recorder.recording:
        where = _call_site() + (f" ({note})" if note else "")
        _record(attached, name, "", value, where)


def record_lazy(name: str, value: Callable[[], Any], note: str = "") -> None:
    """Record what a function returns; see `probe.record_lazy`."""
    if enabled():
        record(name, value(), note)


def _record(attached: Attachment, name: str, item: str, value: Any, where: str) -> None:
    import torch

    recorder = attached.recorder
    if isinstance(value, Mapping):
        for key, part in value.items():
            _record(attached, name, f"{item}.{key}", part, where)
        return
    if isinstance(value, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in value):
        for index, part in enumerate(value):
            _record(attached, name, f"{item}[{index}]", part, where)
        return
    call = recorder.next_call(Kind.EXPLICIT, name, item)
    key = Key(kind=Kind.EXPLICIT, name=name, item=item, microbatch=recorder.microbatch, call=call)
    if isinstance(value, torch.Tensor):
        recorder.tensor(key, value, where, exact=True)
    elif isinstance(value, (bool, int, float, str)):
        recorder.scalar(key, value, where)
    elif hasattr(value, "__array__"):
        import numpy as np

        recorder.tensor(key, torch.from_numpy(np.ascontiguousarray(value)), where, exact=True)
    else:
        recorder.scalar(key, str(value), where)


def flush() -> None:
    """Wait until every finished step is on disk."""
    attached = _attachment()
    if attached is not None:
        attached.recorder.drain()


def step() -> None:
    """End the current step; see `probe.step`."""
    attached = _attachment()
    if attached is not None:
        attached.end_step()


def tap(name: str, tensor: Any) -> Any:
    """Record a tensor and its gradient; see `probe.tap`."""
    import torch

    from probe.capture import compiled_tap

    if torch.compiler.is_compiling():
        return compiled_tap.tap(tensor, name)
    attached = _attachment()
    if attached is None or not attached.recorder.recording:
        return tensor
    keep(name, tensor, _call_site())
    if tensor.requires_grad and torch.is_grad_enabled():
        recorder = attached.recorder
        step, microbatch = recorder.step, recorder.microbatch

        def on_gradient(gradient: torch.Tensor) -> None:
            if recorder.recording and recorder.step == step:
                keep(f"{name}.gradient", gradient, "", microbatch)

        tensor.register_hook(on_gradient)
    return tensor


def keep(name: str, tensor: Any, where: str, microbatch: int | None = None) -> None:
    """Record one tensor under a name given by the training code."""
    attached = _attachment()
    if attached is None:
        return
    recorder = attached.recorder
    call = recorder.next_call(Kind.EXPLICIT, name)
    key = Key(
        kind=Kind.EXPLICIT, name=name, microbatch=recorder.microbatch if microbatch is None else microbatch, call=call
    )
    recorder.tensor(key, tensor, where, exact=False)
