"""Steps and globs: the small language in which plans and command lines name what they mean.

It is used by plan files, by `--steps` and `--full`, and by the checks, so that a name is written in one way everywhere.
This module must not know what a plan or a check is.

A selection is a glob over the names of `probe.point.Key`, case-insensitive: `*` stands for any text (dots too), `?` for
one character, `#` for a number; a kind may stand before it, as in `forward/blocks.#.attn`. Brackets are plain text, so
that `forward/blocks.3.attn[0]` means the first item of that output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from probe.errors import PlanError
from probe.point import Kind

KINDS = tuple(kind.value for kind in Kind)


@dataclass(frozen=True, slots=True)
class StepSet:
    """Hold a set of optimizer updates, counted from 1.

    >>> steps = parse_steps("1-5,10")
    >>> 5 in steps, 6 in steps, str(steps)
    (True, False, '1-5,10')
    """

    ranges: tuple[tuple[int, int | None], ...]
    """First and last step of each range, both included, sorted and apart; None: no end."""

    def __contains__(self, step: int) -> bool:
        return any(first <= step and (last is None or step <= last) for first, last in self.ranges)

    def __str__(self) -> str:
        return ",".join(_range_text(first, last) for first, last in self.ranges)

    @property
    def last(self) -> int | None:
        """The last step of the set, or None when it has no end."""
        return self.ranges[-1][1]


def _range_text(first: int, last: int | None) -> str:
    if last is None:
        return f"{first}-"
    return str(first) if first == last else f"{first}-{last}"


ALL_STEPS = StepSet(((1, None),))


def parse_steps(text: str) -> StepSet:
    """Read steps such as `1-5,10` or `10-`; overlapping ranges are joined.

    Raises:
        PlanError: The text is empty, no list of numbers and ranges, or names a step before 1.
    """
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]+)\s*(?:(-)\s*([0-9]+)?\s*)?", part)
        if found is None:
            raise PlanError(
                f"Steps {text!r} cannot be read at {part.strip()!r}. "
                "Write numbers and ranges such as '1-5,10' or '10-'; the first step is 1."
            )
        first = int(found[1])
        last = int(found[3]) if found[3] else (None if found[2] else first)
        if first < 1 or (last is not None and last < first):
            why = "steps count from 1" if first < 1 else f"{last} comes before {first}"
            raise PlanError(f"Steps {text!r} cannot be used at {part.strip()!r}: {why}.")
        ranges.append((first, last))
    joined: list[tuple[int, int | None]] = []
    for first, last in sorted(ranges, key=lambda pair: pair[0]):
        if joined and (joined[-1][1] is None or first <= joined[-1][1] + 1):
            before = joined[-1][1]
            joined[-1] = (joined[-1][0], None if before is None or last is None else max(before, last))
        else:
            joined.append((first, last))
    return StepSet(tuple(joined))


@lru_cache(maxsize=1024)
def glob_pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    """Compile globs (without a kind before them) into one pattern for `fullmatch`."""
    parts = {"*": ".*", "?": ".", "#": "[0-9]+"}
    texts = ["".join(parts.get(char) or re.escape(char) for char in glob) for glob in globs]
    return re.compile("|".join(f"(?:{text})" for text in texts), re.IGNORECASE | re.DOTALL)


@lru_cache(maxsize=4096)
def split_kind(selection: str) -> tuple[Kind | None, str]:
    """Split `forward/blocks.*` into its kind and its glob; no kind stands for every kind.

    Raises:
        PlanError: The selection is empty, its kind does not exist, or it has a character class.
    """
    if not selection:
        raise PlanError("A selection is empty. Write '*' to select everything.")
    if re.search(r"\[[^\]]*[-!^][^\]]*\]", selection):
        raise PlanError(
            f"Selection {selection!r} has a character class. Brackets are plain text here; "
            "write '#' for a number, '?' for one character, '*' for any text."
        )
    before, slash, rest = selection.partition("/")
    if not slash:
        return None, selection
    if before == "*":
        return None, rest
    try:
        kind = Kind(before.lower())
    except ValueError:
        raise PlanError(
            f"Selection {selection!r} starts with {before!r}, which is no kind.{nearest(before, KINDS)}"
        ) from None
    if not rest:
        raise PlanError(f"Selection {selection!r} names no quantity. Write '{before}/*' to select the whole kind.")
    return kind, rest


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Say which allowed word was probably meant, and all that are allowed, as the end of a message."""
    # difflib costs 8 ms to import: only for a message.
    import difflib

    names = sorted(allowed)
    begun = [name for name in names if word.startswith(name) or (word and name.startswith(word))]
    alike = difflib.get_close_matches(word, names, n=1, cutoff=0.8)
    close = alike or begun[:1] or difflib.get_close_matches(word, names, n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"{meant} Allowed: {', '.join(names)}."


@lru_cache(maxsize=256)
def patterns_by_kind(selections: tuple[str, ...]) -> dict[Kind, re.Pattern[str] | None]:
    """One pattern per kind for a list of selections; None where none of them speaks of the kind."""
    found: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for selection in selections:
        kind, glob = split_kind(selection)
        for each in Kind if kind is None else (kind,):
            found[each].append(glob)
    return {kind: glob_pattern(tuple(globs)) if globs else None for kind, globs in found.items()}


def matches(pattern: re.Pattern[str] | None, name: str, item: str) -> bool:
    if pattern is None:
        return False
    if pattern.fullmatch(name):
        return True
    return bool(item) and pattern.fullmatch(name + (item if item[0] in "[.(" else f":{item}")) is not None
