"""The optimized branch with one planted fault: block 2's attention has the wrong softmax scale.

The story is a common one. A kernel wants head widths padded to a power of two, the width is padded where the block is made,
and the scale is computed from the padded width. The loss hardly moves, since the model's output is a sum over all blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optimized
from diffsynth.models import minimax_h3_dit as h3

FAULTY_BLOCK = 2
PADDED_HEAD_DIM = 64
"""Width to which a head of 32 is padded; the scale is 0.71 of the right one."""

original_init = h3.MiniMaxH3DiT.__init__


def apply(chosen: Iterable[str] | None = None) -> None:
    """Patch DiffSynth's classes as the optimized branch does, and plant the fault.

    Args:
        chosen: Which of `optimized.OPTIMIZATIONS`; all of them where None.
    """
    optimized.apply(chosen)
    h3.MiniMaxH3DiT.__init__ = init_with_fault


def init_with_fault(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for `MiniMaxH3DiT.__init__`; leaves the scale of a padded head in one block."""
    original_init(self, *args, **kwargs)
    self.blocks[FAULTY_BLOCK].attn.softmax_scale = PADDED_HEAD_DIM**-0.5
