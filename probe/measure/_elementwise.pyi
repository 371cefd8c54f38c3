"""Compiled from `_elementwise.c` where a C compiler was at hand when the package was installed."""

from typing import Any

INTERFACE: int
"""How `compare` is called."""

def compare(a: Any, b: Any, type: int, known: float, /) -> tuple[int, int, float, float, int, int]:
    """Compare two blocks of fp32 (`type` 0) or bf16 (1) of the same size, given by their buffers.

    Returns:
        Number of elements that differ, of those that are not finite among them, sum of squared differences, largest
        difference, largest distance in units in the last place; and, if the largest difference is above `known`, the
        place of the first element that has it, or of the first unequal one where it is 0; else -1.

    Raises:
        ValueError: The blocks have other sizes, or the type is unknown.
    """

def __getattr__(name: str) -> Any: ...
