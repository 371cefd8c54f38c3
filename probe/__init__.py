"""Record a training run's intermediates and say where an optimized branch first departs.

The explicit API: `record`, `record_lazy`, `tap`, `enabled`, `step`, `flush`. Nothing heavy is imported, and when
recording is off each function returns on its first line.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["close_to", "enabled", "flush", "record", "record_lazy", "step", "tap"]

_T = TypeVar("_T")

_ON = bool(os.environ.get("PROBE_REQUEST")) or os.environ.get("PROBE") == "1"


def enabled() -> bool:
    """Tell whether this process records explicit values in the current step."""
    if not _ON:
        return False
    from probe.capture import explicit

    return explicit.enabled()


def close_to(expected: Any, tolerances: Any = None, *, same_code: bool = False) -> Any:
    """Compare within tolerances, in a plain assertion: `assert actual == probe.close_to(expected)`.

    Where it fails, pytest says where and by how much, and never prints a tensor.

    Args:
        expected: A tensor, an array, a structure of them, or a capture (its folder as a `Path`, or opened).
        tolerances: What ||a - b|| / ||b|| may be: a number, a mapping of globs over names to numbers, a file that
            `probe calibrate` wrote; None: 32 eps of each type, which is assumed and not measured.
        same_code: Of two captures: allow both to have run the same code.
    """
    from probe.equivalence.close import CloseTo

    return CloseTo(expected, tolerances, same_code=same_code)


def record(name: str, value: Any, note: str = "") -> None:
    """Record a value under a name of your own: a tensor, number, truth value, text, shape, or a mapping of these.

    Args:
        name: Dotted name. The same name again within a microbatch becomes call 2, not an error.
        value: Reduced or copied now; the object itself is not kept.
        note: Shown beside the call site as where the value was taken.
    """
    if not _ON:
        return
    from probe.capture import explicit

    explicit.record(name, value, note)


def record_lazy(name: str, value: Callable[[], Any], note: str = "") -> None:
    """Record what a function returns; it is called only when the value is recorded."""
    if not _ON:
        return
    from probe.capture import explicit

    explicit.record_lazy(name, value, note)


def tap(name: str, tensor: _T) -> _T:
    """Record a tensor, and the gradient that reaches it, and return it: `x = probe.tap("after_rope", x)`.

    Works inside regions compiled by `torch.compile` too, where it is one opaque operation in the graph: it breaks no
    graph, but in low precision it can keep the compiler from fusing across it, which changes rounding.

    Args:
        name: Dotted name; see `record`.
        tensor: Any tensor; the same values come back, and gradients pass unchanged.
    """
    if not _ON:
        return tensor
    from probe.capture import explicit

    same: _T = explicit.tap(name, tensor)
    return same


def step() -> None:
    """End the current step where no optimizer of torch's does. From the first call on, only calls of it end steps."""
    if not _ON:
        return
    from probe.capture import explicit

    explicit.step()


def flush() -> None:
    """Wait until every finished step is on disk."""
    if not _ON:
        return
    from probe.capture import explicit

    explicit.flush()


if _ON:
    # `PROBE=1 PROBE_OUT=DIR` records a script that imports this package, without the launcher.
    from probe.capture import session as _session

    _session.begin_once()
