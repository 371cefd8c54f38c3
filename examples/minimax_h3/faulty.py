"""The optimized branch with one planted fault: block 2's attention has lost its softmax scale.

The story is a common one. Scaling the queries is moved into the kernel that normalizes them, the attention is told to
scale by one, and one block is made in a way that misses the new kernel. The loss does not give it away: it moves by
less than a thousandth, for one block's attention is a small part of the sum that a DiT is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optimized
from diffsynth.models import minimax_h3_dit as h3

FAULTY_BLOCK = 2
FAULTY_SCALE = 1.0
"""The right one is the head width to the power of -1/2: 0.177 for the tiny model's 32."""

original_init = h3.MiniMaxH3DiT.__init__


def apply(chosen: Iterable[str] | None = None) -> None:
    """Patch DiffSynth's classes as the optimized branch does, and plant the fault.

    Args:
        chosen: Which of `optimized.OPTIMIZATIONS`; all of them where None.
    """
    optimized.apply(chosen)
    h3.MiniMaxH3DiT.__init__ = init_with_fault


def init_with_fault(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stand in for `MiniMaxH3DiT.__init__`; takes the softmax scale from one block."""
    original_init(self, *args, **kwargs)
    self.blocks[FAULTY_BLOCK].attn.softmax_scale = FAULTY_SCALE
