"""A module hook that stays behind when the module is copied or pickled.

Training code copies its model (a moving average, an evaluation copy) and saves it whole. A copy must not record as the
model does, and a file must not need this package to be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class Hook:
    """Call a function as a module's hook; a copy or a pickle of it is a function of the standard library that does
    nothing."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap a function.

        Args:
            function: Called with what the hook is called with; what it returns is returned.
        """
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # `nullcontext.__exit__` takes whatever it is given and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")
