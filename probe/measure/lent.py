"""Hand what a forked process found to its parent through memory that both see, instead of through a pipe.

Measurements are dozens of megabytes. A pipe carries them in pieces of 64 KiB, each copied twice and waited for, and
takes as long as measuring itself. So the arrays are written to a file in memory that the parent made before it forked,
where the parent finds them. This module must not know what they are.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

REGION_NBYTES = 1 << 36
"""Bytes from one result to the next: a file in memory takes only what is written."""
WORTH_NBYTES = 1 << 20
"""What is smaller goes through the pipe."""
_AT_ONCE = 512
"""Pieces of one write: Linux takes up to 1,024."""
_ALIGNMENT = 64
"""Bytes of which each array begins at a multiple: arithmetic is slow on numbers that lie across."""


class Lent:
    """A result that is pickled as a hint where it lies, and unpickled as itself."""

    def __init__(self, result: Any, memory: int, number: int) -> None:
        """Keep the result.

        Args:
            memory: Descriptor of the file in memory, the same in both processes.
            number: Of the result among all that go through this file.
        """
        self._result, self._memory, self._offset = result, memory, number * REGION_NBYTES

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Write the arrays, and return how they are found."""
        buffers: list[pickle.PickleBuffer] = []
        plain = pickle.dumps(self._result, protocol=5, buffer_callback=buffers.append)
        views = [buffer.raw() for buffer in buffers]
        nbytes = sum(_padded(view.nbytes) for view in views)
        if not WORTH_NBYTES <= nbytes < REGION_NBYTES or not _write(self._memory, views, self._offset):
            return pickle.loads, (pickle.dumps(self._result, protocol=5),)
        return _taken, (plain, self._memory, self._offset, [view.nbytes for view in views])


def lend(memory: int, number: int, call: Callable[..., Any], *arguments: Any) -> Lent:
    """Make a call, in a forked process."""
    return Lent(call(*arguments), memory, number)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _write(memory: int, views: list[memoryview], offset: int) -> bool:
    """Write all; False where memory is short, so that the pipe is tried."""
    pieces = [piece for view in views for piece in (view, bytes(_padded(view.nbytes) - view.nbytes))]
    try:
        for first in range(0, len(pieces), _AT_ONCE):
            some = pieces[first : first + _AT_ONCE]
            nbytes = sum(map(len, some))
            if os.pwritev(memory, some, offset) != nbytes:
                return False
            offset += nbytes
    except OSError:
        return False
    return True


def _taken(plain: bytes, memory: int, offset: int, sizes: list[int]) -> Any:
    whole = memoryview(mmap.mmap(memory, sum(map(_padded, sizes)), offset=offset))
    views, at = [], 0
    for size in sizes:
        views.append(whole[at : at + size])
        at += _padded(size)
    return pickle.loads(plain, buffers=views)
