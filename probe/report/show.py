"""Show what one capture holds: the run, its ranks and steps, what is wrong with it, its quantities and their values.

On a terminal this is a table for people; in a pipe it is one tab-separated line per fact, for `grep` and `cut`. A
segment that cannot be read is named and the rest is shown. This module must not know how captures are compared.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probe.errors import CaptureError, CaptureFormatError
from probe.point import Key, Kind
from probe.report import words
from probe.selection import glob_pattern, matches, patterns_by_kind

if TYPE_CHECKING:
    from probe.store.layout import StepRows
    from probe.store.reader import Capture

OF_MODEL = (Kind.FORWARD, Kind.BACKWARD, Kind.GRAD, Kind.PARAM)
"""Kinds whose names are paths in a model."""

_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "uint8": "u8",
    "bool": "bool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """Say which rows of a capture are asked for."""

    name: str
    """Glob over names, or a label as it is; empty: every quantity."""
    step: int | None
    rank: int | None

    def wants(self, key: Key) -> bool:
        """Say whether a quantity is asked for."""
        if not self.name or self.name == key.label:
            return True
        return matches(patterns_by_kind((self.name,))[key.kind], key.name, key.item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivations:
    """From which path in the model each name of a capture was derived."""

    paths: Mapping[str, tuple[str, str]]
    """Path as PyTorch spells it, and what the name leaves out of it, by name."""
    without_name: tuple[str, ...]
    """What has no name, one sentence each."""

    @classmethod
    def of(cls, capture: Capture, rank: int | None) -> Derivations:
        """Read what a rank, or the first one, stored; nothing where it stored nothing."""
        from probe.store.layout import NAMES_FILE, rank_folder
        from probe.store.problems import read_json

        file = (
            capture.path / rank_folder(capture.ranks[0] if rank is None and capture.ranks else rank or 0) / NAMES_FILE
        )
        told = read_json(file) if file.is_file() else {}
        paths: dict[str, tuple[str, str]] = {}
        for each in told.get("names", ()):
            dropped = each["dropped"]
            paths.setdefault(each["name"], (each["path"], f"without {', '.join(dropped)}" if dropped else ""))
        unnamed = (
            f"Parameter {type_} of an optimizer is in no module that was called." for type_ in told.get("unnamed", ())
        )
        inside = (f"Module {name!r} is inside a compiled region." for name in told.get("inside_compiled", ()))
        return cls(paths=paths, without_name=(*unnamed, *inside))

    def columns(self, key: Key) -> tuple[str, ...]:
        """Return path and what was left out, as cells of a line; none for what is no part of a model."""
        path, dropped = self.paths.get(key.name, ("", "")) if key.kind in OF_MODEL else ("", "")
        return tuple(cell for cell in (path, dropped) if cell)


def show_capture(capture: Capture, name: str, *, step: int | None, rank: int | None, as_json: bool, names: bool) -> int:
    """Print a capture, or the values of the quantities that a glob names.

    Returns:
        Exit status: 2 when some of what was asked for could not be read.

    Raises:
        CaptureError: The rank, the step or the quantity does not exist.
    """
    selected = Selected(name=name, step=step, rank=rank)
    places = _places(capture, selected)
    unreadable: list[str] = []
    if as_json:
        rows = list(_readable(capture, places, unreadable)) if name or names else []
        print(json.dumps(_as_object(capture, rows, selected, names), indent=1, allow_nan=False))
    elif names:
        labels = {
            key.label: key
            for rows in _readable(capture, places, unreadable)
            for key in rows.keys
            if selected.wants(key)
        }
        _require(labels, capture, selected, unreadable)
        derived = Derivations.of(capture, selected.rank)
        for label, key in labels.items():
            print("\t".join((label, *derived.columns(key))))
        if not name:
            for line in derived.without_name:
                print(line)
    elif name:
        found = (row for rows in _readable(capture, places, unreadable) for row in value_rows(rows, selected))
        header = ("Step", "Rank", "Quantity", "Type", "Value or l2", "Mean", "Mean |x|", "Max |x|", "NaN")
        _require(_print_table(header, found, title=""), capture, selected, unreadable)
    else:
        _print_overview(capture, places, unreadable)
    for problem in unreadable:
        print(problem, file=sys.stderr)
    return 2 if unreadable else 0


def _places(capture: Capture, selected: Selected) -> list[tuple[int, int]]:
    """List (rank, step) of the segments that are asked for."""
    ranks = capture.ranks if selected.rank is None else (selected.rank,)
    places = [(rank, step) for rank in ranks for step in capture.steps(rank)]
    if selected.step is None:
        return places
    places = [place for place in places if place[1] == selected.step]
    if not places:
        held = words.steps(step for rank in ranks for step in capture.steps(rank)) or "none"
        raise CaptureError(f"Capture {capture.path} has no step {selected.step}; it has {held}.")
    return places


def _readable(capture: Capture, places: Iterable[tuple[int, int]], unreadable: list[str]) -> Iterator[StepRows]:
    for rank, step in places:
        try:
            yield capture.rows(rank, step)
        except CaptureFormatError as error:
            unreadable.append(str(error))


def _require(found: object, capture: Capture, selected: Selected, unreadable: Sequence[str]) -> None:
    if found or unreadable:
        return
    rank = next((rank for rank in capture.ranks if capture.steps(rank)), None)
    if rank is None:
        raise CaptureError(f"Capture {capture.path} has no steps, so it has no quantity {selected.name!r}.")
    keys = capture.rows(rank, capture.steps(rank)[0]).keys
    around = glob_pattern((f"*{selected.name.strip('*')}*",))
    near = [key.label for key in keys if around.fullmatch(key.label)]
    hint = f"Names that contain it: {', '.join(near[:5])}." if near else "Option --names lists them all."
    raise CaptureError(f"Capture {capture.path} has no quantity {selected.name!r}. {hint}")


def type_text(dtype: str, shape: Sequence[int]) -> str:
    """Write a tensor's type as `bf16[2,1024,64]`; scalars and text have no brackets."""
    short = _SHORT.get(dtype, dtype)
    return f"{short}[{','.join(map(str, shape))}]" if shape else short


def value_rows(rows: StepRows, selected: Selected) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the value table for one step of one rank."""
    for number, key in enumerate(rows.keys):
        if not selected.wants(key):
            continue
        value = float(rows.value[number])
        l2, mean, mean_abs, max_abs = (
            float(rows.scalars[name][number]) for name in ("l2", "mean", "mean_abs", "max_abs")
        )
        if rows.text[number]:
            shown = rows.text[number]
        else:
            shown = f"{l2:.9g}" if math.isnan(value) else f"{value:.17g}"
        scalar = not math.isnan(value) or bool(rows.text[number])
        others = ("", "", "") if scalar else tuple(f"{each:.6g}" for each in (mean, mean_abs, max_abs))
        type_ = type_text(rows.dtype[number], rows.shape[number])
        yield (str(rows.step), str(rows.rank), key.label, type_, shown, *others, str(int(rows.nonfinite[number])))


def _facts(capture: Capture) -> Iterator[tuple[str, str]]:
    config = capture.manifest.get("config") or {}
    provenance = capture.manifest.get("provenance") or {}
    command = config.get("command", "")
    yield "capture", str(capture.path)
    yield "run", capture.run_id
    yield "created", str(capture.manifest.get("created_utc", ""))
    yield "command", command if isinstance(command, str) else " ".join(map(str, command))
    for name in ("seed", "perturb"):
        yield name, str(config[name]) if config.get(name) not in (None, "") else ""
    for tree in provenance.get("trees") or []:
        yield (
            "tree",
            f"{tree.get('root', '')} {str(tree.get('commit') or '')[:10]}{' + changes' if tree.get('dirty') else ''}",
        )
    yield "ranks", f"{len(capture.ranks)} of {capture.world_size}"
    for ranks, steps in _folded_steps(capture):
        yield "steps", f"{steps} (rank {ranks})"
    yield "problems", "; ".join(capture.problems) or "none"


def _folded_steps(capture: Capture) -> Iterator[tuple[str, str]]:
    """Yield ranks and their steps, those with the same steps together."""
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for rank in capture.ranks:
        by_steps.setdefault(capture.steps(rank), []).append(rank)
    for steps, ranks in by_steps.items():
        yield words.steps(ranks), words.steps(steps) or "none"


def _print_overview(capture: Capture, places: Sequence[tuple[int, int]], unreadable: list[str]) -> None:
    _print_table(("", ""), ((name, text) for name, text in _facts(capture) if text), title="")
    for rows in _readable(capture, places, unreadable):
        kinds = Counter(key.kind.value for key in rows.keys)
        counts = [("quantities", kind, str(count)) for kind, count in kinds.items()]
        title = f"Quantities of rank {rows.rank}, step {rows.step}"
        _print_table(("", "Kind", "Number"), [*counts, ("quantities", "all", str(len(rows.keys)))], title=title)
        break


def _print_table(header: Sequence[str], rows: Iterable[tuple[str, ...]], *, title: str) -> int:
    """Print rows as a table on a terminal and as tab-separated lines in a pipe; return how many there were.

    In a pipe, columns that all have a name get a line with their names before the first row.
    """
    if not sys.stdout.isatty():
        number = 0
        for number, row in enumerate(rows, 1):
            if number == 1 and all(header):
                print("\t".join(header))
            print("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row))
        return number
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, title=title or None, title_justify="left", show_header=any(header), pad_edge=False)
    for name in header:
        if name == "Quantity":
            table.add_column(name, overflow="fold", min_width=20)
        else:
            table.add_column(name, overflow="ellipsis", no_wrap=bool(name))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if table.row_count:
        # A line too long for the terminal wraps there; rich would drop its last columns.
        Console(highlight=False, width=max(Console().width, 120), height=25).print(table)
    return table.row_count


def _as_object(capture: Capture, rows: Sequence[StepRows], selected: Selected, names: bool) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    if names:
        wanted["names"] = list(dict.fromkeys(key.label for each in rows for key in each.keys if selected.wants(key)))
    elif selected.name:
        wanted["values"] = [value for each in rows for value in _value_objects(each, selected)]
    return {
        "path": str(capture.path),
        "run_id": capture.run_id,
        "world_size": capture.world_size,
        "steps": {str(rank): list(capture.steps(rank)) for rank in capture.ranks},
        "problems": list(capture.problems),
        "manifest": capture.manifest,
        **wanted,
    }


def _value_objects(rows: StepRows, selected: Selected) -> Iterator[dict[str, Any]]:
    for number, key in enumerate(rows.keys):
        if selected.wants(key):
            numbers = {"value": rows.value[number], **{name: column[number] for name, column in rows.scalars.items()}}
            yield {
                "step": rows.step,
                "rank": rows.rank,
                "quantity": key.label,
                "order": int(rows.order[number]),
                "dtype": rows.dtype[number],
                "shape": list(rows.shape[number]),
                "nonfinite": int(rows.nonfinite[number]),
                **{name: float(each) if math.isfinite(each) else None for name, each in numbers.items()},
                "text": rows.text[number],
                "where": rows.where[number],
            }
