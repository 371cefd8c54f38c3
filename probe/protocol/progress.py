"""Say how far a long command is, with the time since it began. This module must not know what it does."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """Lines with the time since the start, as in `[1:05] base-1: recording`."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """Begin to count.

        Args:
            tell: Receives each line.
        """
        self._tell = tell
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        """Tell one line."""
        seconds = int(time.monotonic() - self._began)
        self._tell(f"[{seconds // 60}:{seconds % 60:02d}] {text}")
