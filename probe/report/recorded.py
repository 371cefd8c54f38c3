"""What the captures of a comparison say about themselves on disk, as far as a suggestion needs it.

A report can be made of captures that are no longer there, or that were never stored: then nothing is known, which is
not an error. This module must not open a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.errors import ProbeError
from probe.judge.comparison import FirstDivergence
from probe.selection import matches, parse_steps, patterns_by_kind
from probe.store.layout import MANIFEST_FILE, NAMES_FILE
from probe.store.problems import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A source tree that a run imported code from."""

    root: str
    commit: str
    dirty: bool


def manifest(path: str) -> Mapping[str, Any]:
    """Return what the capture at a path says about its run; empty where none can be read."""
    return read(Path(path) / MANIFEST_FILE)


def run_id(path: str) -> str:
    """Return the run that a capture holds; empty where no capture is."""
    return str(manifest(path).get("run_id") or "")


def trees(path: str) -> tuple[Tree, ...]:
    """Return the source trees that a run imported code from."""
    found = _part(manifest(path), "provenance").get("trees")
    return tuple(
        Tree(root=str(each["root"]), commit=str(each.get("commit") or ""), dirty=bool(each.get("dirty")))
        for each in (found if isinstance(found, Sequence) else ())
        if isinstance(each, Mapping) and each.get("root")
    )


def record_table(path: str) -> Mapping[str, Any]:
    """Return the `[record]` table of the plan that a run was recorded by."""
    return _part(_part(_part(manifest(path), "config"), "plan"), "record")


def keeps_whole(path: str, found: FirstDivergence) -> bool:
    """Say whether a run was told to keep the tensor of a divergence whole."""
    record, place = record_table(path), found.place
    full = record.get("full")
    if not isinstance(full, Sequence) or isinstance(full, str) or not full:
        return False
    try:
        kept = matches(patterns_by_kind(tuple(map(str, full)))[place.kind], place.name, place.item)
        return kept and place.step in parse_steps(str(record.get("steps") or "1-"))
    except ProbeError:
        return False


def inside_compiled(path: str) -> frozenset[str] | None:
    """Return the modules that lie inside a compiled region on any rank; None where the capture does not tell."""
    told = [read(file) for file in sorted(Path(path).glob(f"rank*/{NAMES_FILE}"))]
    if not told:
        return None
    return frozenset(str(name) for each in told for name in each.get("inside_compiled") or ())


def read(file: Path) -> Mapping[str, Any]:
    """Return a file of JSON; empty where none can be read."""
    try:
        return read_json(file) if file.is_file() else {}
    except (ProbeError, OSError):
        return {}


def _part(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = of.get(name)
    return part if isinstance(part, Mapping) else {}
