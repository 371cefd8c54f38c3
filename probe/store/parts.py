"""Say which part of a whole tensor a row was reduced from, and read it again.

A sharded tensor is reduced on each rank where it lies, without talking to other ranks. The row's `shape` is the whole
tensor's, its `numel` and numbers are the part's, and its `text` says which part, and which ranks hold the whole between
them. Sums, squares and sketches of parts add up (`probe.measure.whole`). This module must not know torch, nor how rows
are stored.

Forms of the text:

* `part [0:32,0:64] of [64,64] on ranks 0-1`: a box, by its range in each dimension;
* `part 0:2048 of [64,64] on ranks 0-1`: a range of the whole's flat index;
* `part 0 of 2 of a 2-norm on ranks 0-1`: the norm of part 0; the whole's is the root of the sum of the powers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

PREFIX = "part "
_PLACED = re.compile(r"part (?:\[[0-9:,]*\]|\d+:\d+) of \[(?P<shape>[0-9,]*)\] on ranks (?P<ranks>[0-9,-]+)")
_NORM = re.compile(r"part \d+ of (?P<count>\d+) of a (?P<power>[0-9.]+)-norm on ranks (?P<ranks>[0-9,-]+)")


def box_text(offset: Sequence[int], local: Sequence[int], shape: Sequence[int], ranks: Sequence[int]) -> str:
    """Describe a box of a tensor.

    >>> box_text((0, 0), (32, 64), (64, 64), (0, 1))
    'part [0:32,0:64] of [64,64] on ranks 0-1'
    """
    ranges = ",".join(f"{first}:{first + length}" for first, length in zip(offset, local, strict=True))
    return f"part [{ranges}] of [{_joined(shape)}] on ranks {_folded(ranks)}"


def flat_text(start: int, count: int, shape: Sequence[int], ranks: Sequence[int]) -> str:
    """Describe a range of a tensor's flat index.

    >>> flat_text(0, 2048, (64, 64), (0, 1, 2, 4))
    'part 0:2048 of [64,64] on ranks 0-2,4'
    """
    return f"part {start}:{start + count} of [{_joined(shape)}] on ranks {_folded(ranks)}"


def norm_text(index: int, count: int, power: float, ranks: Sequence[int]) -> str:
    """Describe the norm of one part.

    >>> norm_text(0, 2, 2.0, (0, 1))
    'part 0 of 2 of a 2-norm on ranks 0-1'
    """
    return f"part {index} of {count} of a {power:g}-norm on ranks {_folded(ranks)}"


def _joined(lengths: Sequence[int]) -> str:
    return ",".join(map(str, lengths))


def _folded(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ",".join("-".join(map(str, run)) for run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What the text of a row says of its part."""

    numel: int
    """Elements of the whole; of a norm, the number of its parts."""
    power: float
    """Power of a norm; 0: the part of a tensor."""
    ranks: tuple[int, ...]
    """Ranks that hold the whole between them, some perhaps the same part."""


def read(text: str) -> Described | None:
    """Read the text of a row; None: the row is no part.

    >>> read("part [0:32,0:64] of [64,64] on ranks 0-1")
    Described(numel=4096, power=0.0, ranks=(0, 1))
    """
    if not text.startswith(PREFIX):
        return None
    found = _PLACED.fullmatch(text)
    norm = None if found else _NORM.fullmatch(text)
    match = found or norm
    if match is None:
        return None
    ranks: list[int] = []
    for run in match["ranks"].split(","):
        first, _, last = run.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    if found:
        lengths = [int(length) for length in found["shape"].split(",") if length]
        return Described(numel=math.prod(lengths), power=0.0, ranks=tuple(ranks))
    return Described(numel=int(match["count"]), power=float(match["power"]), ranks=tuple(ranks))
