"""Compiled from `_sketches.c` where a C compiler was at hand when the package was installed."""

from typing import Any

def squared(a: Any, b: Any, out: Any, /) -> None:
    """Square the distances of paired rows of two fp32 blocks of the same size, given by their buffers.

    Args:
        out: fp64, one for each row.

    Raises:
        ValueError: The blocks have other sizes.
    """

def __getattr__(name: str) -> Any: ...
