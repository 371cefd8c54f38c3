"""The explicit API with recording on: values that the training code names itself.

The call site is stored, for it fills the table's `Where`. Works before torch is imported (nothing is recorded then)
and from code that is also run without recording.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from probe.capture import session
from probe.point import Key, Kind


def _attachment() -> Any:
    attached = session.attachment()
    if attached is None and "torch" in sys.modules:
        request = session.read_request()
        if request is not None:
            session.begin(request)
            attached = session.attachment()
    return attached


def enabled() -> bool:
    """Tell whether a value given now would be recorded."""
    attached = _attachment()
    return attached is not None and attached.mine() and attached.recorder.recording


def _call_site() -> str:
    frame = sys._getframe(1)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    while frame.f_back is not None and os.path.abspath(frame.f_code.co_filename).startswith(package):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def record(name: str, value: Any, note: str = "") -> None:
    """Record a value; see `probe.record`."""
    if enabled():
        where = _call_site() + (f" ({note})" if note else "")
        _record(session.attachment(), name, "", value, where)


def record_lazy(name: str, value: Callable[[], Any], note: str = "") -> None:
    """Record what a function returns; see `probe.record_lazy`."""
    if enabled():
        record(name, value(), note)


def _record(attached: Any, name: str, item: str, value: Any, where: str) -> None:
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
    if attached is not None and attached.mine():
        attached.recorder.drain()
