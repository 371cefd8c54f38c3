"""Names for what a suggested command writes: not taken on disk, and not picked up by the globs of what is there.

A reader pastes whole lines, so none may stop at a file that exists, and `captures/base-*` must go on meaning the runs
that it meant: what is new has another beginning. This module must not know what is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import PurePath


class FreeNames:
    """Names that are free, each given once."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        """Begin with names that are taken although nothing may be there on this machine."""
        self._taken = {PurePath(path) for path in taken}

    def beside(self, path: str, beginning: str) -> str:
        """Return a folder beside a capture: `full-base-0`, then `full-base-0-2`."""
        own = PurePath(path)
        name = own.name if own.name.startswith(beginning) else f"{beginning}{own.name}"
        found = re.fullmatch(r"(.*-\d+)-(\d+)", name)
        stem, number = (found[1], int(found[2]) + 1) if found and name == own.name else (name, 1)
        return self._first(own, stem, "", number)

    def next(self, path: str, beginning: str) -> str:
        """Return a folder for one more run like a capture's: `again-base-3` where there are `base-0` to `base-2`."""
        own = PurePath(path)
        plain = own.name.removeprefix(beginning)
        digits = re.search(r"[0-9]*$", plain)
        last = digits[0] if digits else ""
        stem = plain.removesuffix(last) if last else f"{plain}-"
        number = int(last or 0) + 1
        while any(self._is_taken(own.with_name(f"{before}{stem}{number}")) for before in ("", beginning)):
            number += 1
        return self._take(own.with_name(f"{beginning}{stem}{number}"))

    def wanted(self, path: str, beginning: str) -> str:
        """Return a name as it is where it is free, else with the beginning: `ulp-1`, then `again-ulp-1`."""
        return self.beside(path, beginning) if self._is_taken(PurePath(path)) else self._take(PurePath(path))

    def new_file(self, path: str) -> str:
        """Return a file's name as it is where it is free, else one for another version of it."""
        return self.file(path) if self._is_taken(PurePath(path)) else self._take(PurePath(path))

    def file(self, path: str) -> str:
        """Return a name for another version of a file: `job-2.toml` after `job.toml`."""
        own = PurePath(path)
        found = re.fullmatch(r"(.+)-(\d+)", own.stem)
        stem, number = (found[1], int(found[2]) + 1) if found else (own.stem, 2)
        return self._first(own, stem, own.suffix, number)

    def _first(self, own: PurePath, stem: str, suffix: str, number: int) -> str:
        while self._is_taken(own.with_name(f"{stem}{_ending(number)}{suffix}")):
            number += 1
        return self._take(own.with_name(f"{stem}{_ending(number)}{suffix}"))

    def _is_taken(self, path: PurePath) -> bool:
        return path in self._taken or os.path.lexists(path)

    def _take(self, path: PurePath) -> str:
        self._taken.add(path)
        return str(path)


def _ending(number: int) -> str:
    return f"-{number}" if number > 1 else ""
