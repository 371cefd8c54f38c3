"""Say which part of a whole tensor a row was reduced from, and read it again.

A sharded tensor is reduced on each rank where it lies, without talking to other ranks. The row's `shape` is the whole
tensor's, its `numel` and numbers are the part's, and its `text` says which part. Sums, squares and sketches of parts
add up (`probe.whole`). This module must not know torch, nor how rows are stored.

Forms of the text:

* `part [0:32,0:64] of [64,64]`: a box, by its range in each dimension;
* `part 0:2048 of [64,64]`: a range of the whole's flat index;
* `part 0 of 2 of a 2-norm`: a norm over part 0, where the whole's is the root of the sum of the powers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX = "part "
_PLACED = re.compile(r"part (?P<range>\[[0-9:,]*\]|\d+:\d+) of \[(?P<shape>[0-9,]*)\]")
_NORM = re.compile(r"part (?P<index>\d+) of (?P<count>\d+) of a (?P<power>[0-9.]+)-norm")


def box_text(offset: Sequence[int], local: Sequence[int], shape: Sequence[int]) -> str:
    """Describe a box of a tensor.

    >>> box_text((0, 0), (32, 64), (64, 64))
    'part [0:32,0:64] of [64,64]'
    """
    ranges = ",".join(f"{first}:{first + length}" for first, length in zip(offset, local, strict=True))
    return f"part [{ranges}] of [{_joined(shape)}]"


def flat_text(start: int, count: int, shape: Sequence[int]) -> str:
    """Describe a range of a tensor's flat index.

    >>> flat_text(0, 2048, (64, 64))
    'part 0:2048 of [64,64]'
    """
    return f"part {start}:{start + count} of [{_joined(shape)}]"


def norm_text(index: int, count: int, power: float) -> str:
    """Describe the norm of one part.

    >>> norm_text(0, 2, 2.0)
    'part 0 of 2 of a 2-norm'
    """
    return f"part {index} of {count} of a {power:g}-norm"


def _joined(lengths: Sequence[int]) -> str:
    return ",".join(map(str, lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What the text of a row says of its part."""

    numel: int
    """Elements of the whole; of a norm, the number of its parts."""
    power: float
    """Power of a norm; 0: the part of a tensor."""


def read(text: str) -> Described | None:
    """Read the text of a row; None: the row is no part.

    >>> read("part [0:32,0:64] of [64,64]")
    Described(numel=4096, power=0.0)
    """
    if not text.startswith(PREFIX):
        return None
    placed = _PLACED.fullmatch(text)
    if placed:
        lengths = [int(length) for length in placed["shape"].split(",") if length]
        return Described(numel=math.prod(lengths), power=0.0)
    norm = _NORM.fullmatch(text)
    return Described(numel=int(norm["count"]), power=float(norm["power"])) if norm else None
