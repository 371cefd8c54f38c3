"""Add up the parts of sharded tensors, so that a sharded run has the same rows as one that is not.

Every rank stored what it held (`probe.store.parts`). Sums and sketches of parts add up, norms are roots of sums of
squares, largest values are largest of largest; samples are put together. Each rank of the group then has the whole
row in place of its part. A whole of which a part is missing has no row. This module must not know how values are
compared.

Shapes: Q rows of a segment, W wholes, K sketch buckets, N samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.measure.series import CaptureLike, View
from probe.point import Key
from probe.store import parts
from probe.store.layout import SCALARS, StepRows


def whole(capture: CaptureLike) -> CaptureLike:
    """Return a capture whose rows are of whole tensors; the same one where a single rank recorded."""
    return capture if len(capture.ranks) < 2 else WholeCapture(capture)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A row of one rank that is a part, with the segment that holds it."""

    rows: StepRows
    row: int


class WholeCapture(View):
    """A capture of several ranks, its parts added up."""

    def __init__(self, capture: CaptureLike) -> None:
        super().__init__(capture)
        self._sharded: bool | None = None
        self._known: dict[int, dict[tuple[Key, tuple[int, ...]], _Piece]] = {}

    def rows(self, rank: int, step: int) -> StepRows:
        """Return a segment with whole rows in place of parts, and wholes of which the rank itself holds nothing."""
        rows = self._capture.rows(rank, step)
        if not self.across_ranks(step):
            return rows
        if step not in self._known:
            self._known = {step: _wholes(self._segments(step))}
        mine = {key: piece for (key, group), piece in self._known[step].items() if rank in group}
        return _placed(rows, mine)

    def across_ranks(self, step: int) -> bool:
        """Tell whether any rank holds parts; once told, it holds for all steps."""
        if self._sharded is None:
            # Ranks mostly have the same texts, which are then one object. Segments are let go one by one.
            texts = {id(text): text for text in (rows.text for rows in self._segments(step))}
            self._sharded = any(text.startswith(parts.PREFIX) for column in texts.values() for text in column)
        return self._sharded

    def _segments(self, step: int) -> Iterator[StepRows]:
        return (self._capture.rows(rank, step) for rank in self.ranks if step in self.steps(rank))


def _wholes(segments: Iterable[StepRows]) -> dict[tuple[Key, tuple[int, ...]], _Piece]:
    """Add up the parts of one step, by key and by the ranks that hold the whole between them."""
    pieces: dict[tuple[Key, tuple[int, ...]], dict[str, _Piece]] = {}
    described: dict[str, parts.Described | None] = {}
    for rows in segments:
        for row, text in enumerate(rows.text):
            if not text.startswith(parts.PREFIX):
                continue
            if text not in described:
                described[text] = parts.read(text)
            part = described[text]
            if part is not None:
                # Ranks that hold the same part say the same of it: one of them counts.
                pieces.setdefault((rows.keys[row], part.ranks), {}).setdefault(text, _Piece(rows, row))
    found = {}
    for name, of_whole in pieces.items():
        part = described[next(iter(of_whole))]
        assert part is not None
        added = _normed(list(of_whole.values()), part) if part.power else _added(list(of_whole.values()), part)
        if added is not None:
            found[name] = _Piece(added, 0)
    return found


def _added(pieces: list[_Piece], part: parts.Described) -> StepRows | None:
    """Add up the parts of a tensor, a segment of one row; None where a part is missing."""
    numel = np.array([piece.rows.numel[piece.row] for piece in pieces])
    if int(numel.sum()) != part.numel:
        return None
    column = {name: np.array([piece.rows.scalars[name][piece.row] for piece in pieces]) for name in SCALARS}
    l2 = float(np.sqrt((column["l2"] ** 2).sum()))
    total = float((column["mean"] * numel).sum())
    size = max(part.numel, 1)
    samples = np.stack([piece.rows.sample[piece.row] for piece in pieces])
    return _one_row(
        pieces[0],
        numel=part.numel,
        nonfinite=sum(int(piece.rows.nonfinite[piece.row]) for piece in pieces),
        value=total if part.numel == 1 else float("nan"),
        scalars={
            "l2": l2,
            "mean": total / size,
            "mean_abs": float((column["mean_abs"] * numel).sum()) / size,
            "rms": l2 / size**0.5,
            "max_abs": float(column["max_abs"].max()),
        },
        sketch=np.stack([piece.rows.sketch[piece.row] for piece in pieces]).sum(axis=0, dtype=np.float64),
        sample=_joined(samples),
    )


def _joined(samples: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Take each sample from the part that has it, [P, N] to [N]; a value that is NaN itself stays NaN."""
    joined: npt.NDArray[Any] = samples[0].copy()
    for other in samples[1:]:
        joined = np.where(np.isnan(joined), other, joined)
    return joined


def _normed(pieces: list[_Piece], part: parts.Described) -> StepRows | None:
    """Take the norm of norms, a segment of one row; None where a part is missing."""
    if len(pieces) != part.numel:
        return None
    values = np.array([piece.rows.value[piece.row] for piece in pieces])
    value = float((np.abs(values) ** part.power).sum() ** (1 / part.power))
    first = pieces[0]
    sketch = np.zeros(first.rows.sketch.shape[1])
    sketch[0] = np.copysign(value, first.rows.sketch[first.row][0])
    sample = np.full(first.rows.sample.shape[1], np.nan)
    sample[0] = value
    return _one_row(
        first,
        numel=1,
        nonfinite=int(not np.isfinite(value)),
        value=value,
        scalars=dict.fromkeys(SCALARS, value),
        sketch=sketch,
        sample=sample,
    )


def _one_row(
    like: _Piece,
    *,
    numel: int,
    nonfinite: int,
    value: float,
    scalars: dict[str, float],
    sketch: npt.NDArray[Any],
    sample: npt.NDArray[Any],
) -> StepRows:
    rows, row = like.rows, like.row
    return replace(
        rows,
        keys=(rows.keys[row],),
        order=rows.order[row : row + 1],
        dtype=(rows.dtype[row],),
        shape=(rows.shape[row],),
        numel=np.array([numel], np.int64),
        nonfinite=np.array([nonfinite], np.int64),
        value=np.array([value]),
        scalars={name: np.array([scalars[name]]) for name in SCALARS},
        sketch=sketch[None].astype(np.float32),
        sample=sample[None].astype(np.float32),
        hash=np.zeros((1, 2), np.uint64),
        text=("",),
        where=(rows.where[row],),
        tensors={},
    )


def _placed(rows: StepRows, wholes: dict[Key, _Piece]) -> StepRows:
    """Put whole rows in place of parts, leave out parts without a whole, and append wholes that have no row."""
    keep = [row for row, text in enumerate(rows.text) if not text.startswith(parts.PREFIX) or rows.keys[row] in wholes]
    at = {rows.keys[row]: place for place, row in enumerate(keep)}
    # Appended ones come when they came on the rank that had them.
    extra = [key for key in wholes if key not in at]
    fill = [wholes[key].rows for key in extra]

    def column(name: str) -> Any:
        own = getattr(rows, name)
        if isinstance(own, tuple):
            return (*(own[row] for row in keep), *(getattr(one, name)[0] for one in fill))
        return np.concatenate([own[keep], *(getattr(one, name) for one in fill)])

    names = ("keys", "order", "dtype", "shape", "numel", "nonfinite", "value", "sketch", "sample", "hash", "where")
    columns = {name: column(name) for name in names}
    scalars = {
        name: np.concatenate([rows.scalars[name][keep], *(one.scalars[name] for one in fill)]) for name in SCALARS
    }
    text = [*(rows.text[row] for row in keep), *("" for _ in fill)]
    for place, row in enumerate(keep):
        if not rows.text[row].startswith(parts.PREFIX):
            continue
        whole_row = wholes[rows.keys[row]].rows
        text[place] = ""
        for name in ("numel", "nonfinite", "value", "sketch", "sample", "hash"):
            columns[name][place] = getattr(whole_row, name)[0]
        for name in SCALARS:
            scalars[name][place] = whole_row.scalars[name][0]
    return replace(rows, **columns, scalars=scalars, text=tuple(text))
