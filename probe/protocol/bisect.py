"""Find a smallest set of parts of a plan that has an effect, with few trials.

A part is a kind of point, or within it a module or parameter with all that is below it. This module must not know what
a trial is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from probe.point import Kind


class OutOfRuns(Exception):
    """Say that no trial is left; `parts` are the smallest that are known to have the effect."""

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        super().__init__()
        self.parts = tuple(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Part of what a plan records."""

    kind: Kind
    name: str = ""
    """Name of a module or parameter; empty: the whole kind."""
    deep: bool = True
    """With all that is below the name."""

    @property
    def globs(self) -> tuple[str, ...]:
        """Selections that leave the part out of a plan."""
        if not self.name:
            return (f"{self.kind}/*",)
        return (f"{self.kind}/{self.name}", *((f"{self.kind}/{self.name}.*",) if self.deep else ()))

    @property
    def label(self) -> str:
        """Text for people, which a plan takes too."""
        return f"{self.kind}/{self.name}{'*' if self.deep else ''}"

    def inner(self, names: Sequence[str]) -> list[Part]:
        """Split the part by the next component of the names; a part that is one name is itself.

        >>> Part(kind=Kind.FORWARD, name="blocks").inner(["embed", "blocks.0.attn", "blocks.0", "blocks.1"])[1].name
        'blocks.1'
        """
        if not self.deep:
            return [self]
        prefix = f"{self.name}." if self.name else ""
        below: dict[str, bool] = {}
        for name in names:
            if name.startswith(prefix):
                first, _, more = name.removeprefix(prefix).partition(".")
                below[prefix + first] = below.get(prefix + first, False) or bool(more)
        parts = [replace(self, name=name, deep=deep) for name, deep in below.items()]
        if self.name and self.name in names:
            parts.append(replace(self, deep=False))
        return parts


def smallest(parts: Sequence[Part], works: Callable[[Sequence[Part]], bool]) -> list[Part]:
    """Find a smallest set of parts that still has the effect that all of them have.

    By halving: the shortest beginning that works ends in a part that is needed; it is kept, and what else is needed is
    looked for before it. About log2(n) + 1 trials for each part of the set.

    Args:
        parts: Together they are known to work, and none of them is known not to.
        works: Tries a set.

    Raises:
        OutOfRuns: No trial is left; it has the smallest set that is known to work.
    """
    kept: list[Part] = []
    candidates = list(parts)
    best = list(parts)
    try:
        while candidates and not (kept and works(kept)):
            low, high = 0, len(candidates)
            while high - low > 1:
                middle = (low + high) // 2
                if works([*candidates[:middle], *kept]):
                    high = middle
                    best = [*candidates[:middle], *kept]
                else:
                    low = middle
            kept.append(candidates[high - 1])
            candidates = candidates[: high - 1]
    except OutOfRuns:
        raise OutOfRuns(best) from None
    return kept
