"""Put a known change into recorded values: what a fault of known size would have left in a capture.

A capture is wrapped, never written. A change is put in where the recorded values allow it: a factor into any number or
summary (summaries are linear), a change of single rows, tokens or heads only where the tensor was kept whole. This
module must not know how anything is judged.

Shapes: T tokens, D features, H heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from probe.errors import PlanError
from probe.measure.series import BEFORE, CaptureLike, names_in
from probe.point import Key, Kind
from probe.selection import nearest
from probe.sketch import reductions, sample_index, sketch
from probe.store.dtypes import widen
from probe.store.layout import SCALARS, FullTensor, StepRows

Values = npt.NDArray[np.float64]

SCALE, DROP_RANK, SHIFT_STEP = "scale", "drop-rank", "shift-step"
WRONG_ROW, SWAP_TOKENS, ZERO_HEAD = "wrong-row", "swap-tokens", "zero-head"
OF_TENSORS = (WRONG_ROW, SWAP_TOKENS, ZERO_HEAD)
"""Changes that need the tensor itself."""
INJECTIONS = {
    SCALE: "1.001: the factor",
    WRONG_ROW: "1: how many rows get the values of the row before",
    SWAP_TOKENS: "1: how many pairs of neighbouring tokens change places",
    ZERO_HEAD: "number of heads, of which the first is zeroed",
    DROP_RANK: "1: how many ranks are lost",
    SHIFT_STEP: "1: by how many recorded steps values come early; the last get the first ones'",
}
"""What may be injected, and what its size means."""
_DEFAULT = {SCALE: 1.001, ZERO_HEAD: math.nan}


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """Name a change and its size."""

    kind: str
    size: float

    def __str__(self) -> str:
        return f"{self.kind}:{self.size:.12g}"


def parse_injection(text: str) -> Injection:
    """Read an injection such as `scale:1.001` or `swap-tokens`.

    Raises:
        PlanError: The kind does not exist, or the size is none.
    """
    kind, _, size = text.partition(":")
    if kind not in INJECTIONS:
        raise PlanError(f"Injection {text!r} has kind {kind!r}.{nearest(kind, INJECTIONS)}")
    if not size:
        value = _DEFAULT.get(kind, 1.0)
    elif re.fullmatch(r"[0-9]*\.?[0-9]+(e[-+]?[0-9]+)?", size, re.IGNORECASE):
        value = float(size)
    else:
        value = math.nan
    if not math.isfinite(value) or (kind != SCALE and (value < 1 or value != int(value))):
        raise PlanError(f"Injection {text!r} has no usable size. Write '{kind}:SIZE' with SIZE {INJECTIONS[kind]}.")
    return Injection(kind=kind, size=value)


class HoldsTensors(Protocol):
    """A capture that may have kept tensors whole; `probe.store.reader.Capture` is one."""

    def tensor_keys(self, rank: int, step: int) -> tuple[Key, ...]: ...
    def tensor(self, rank: int, step: int, key: Key) -> FullTensor: ...


def kept_whole(capture: CaptureLike, rank: int, step: int) -> frozenset[Key]:
    """Return the quantities of a step whose tensors are at hand."""
    found = getattr(capture, "tensor_keys", None)
    return frozenset() if found is None else frozenset(found(rank, step))


def changed_tensor(injection: Injection, values: Values) -> Values:
    """Return a tensor [..., T, D] after the change; unchanged where it has too few tokens or features for it."""
    count = int(injection.size)
    new: Values = values.copy()
    if injection.kind == ZERO_HEAD:
        if values.ndim and values.shape[-1] % count == 0:
            new[..., : values.shape[-1] // count] = 0.0
        return new
    if values.ndim < 2:
        return new
    tokens = values.shape[-2]
    if injection.kind == WRONG_ROW:
        for at in range(1, min(count, tokens - 1) + 1):
            new[..., at, :] = values[..., at - 1, :]
    if injection.kind == SWAP_TOKENS:
        for at in range(min(count, tokens // 2)):
            new[..., [2 * at, 2 * at + 1], :] = values[..., [2 * at + 1, 2 * at], :]
    return new


@dataclass
class ChangedCapture:
    """A capture with a change in some of its values."""

    capture: CaptureLike
    injection: Injection
    targets: Mapping[tuple[int, int], Collection[Key]] = field(default_factory=dict)
    """Quantities that are changed, by rank and step; not used by what changes whole runs."""
    relative: dict[tuple[int, int, Key], float] = field(default_factory=dict)
    """By how much each changed quantity differs from itself, filled when it is read."""

    @property
    def path(self) -> Path:
        return self.capture.path

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.capture.manifest

    @property
    def run_id(self) -> str:
        # A baseline may be compared with itself; the same run twice is refused.
        return f"{self.capture.run_id}+{self.injection}"

    @property
    def world_size(self) -> int:
        return self.capture.world_size

    @property
    def problems(self) -> tuple[str, ...]:
        return self.capture.problems

    @property
    def ranks(self) -> tuple[int, ...]:
        ranks = self.capture.ranks
        return ranks[: len(ranks) - int(self.injection.size)] if self.injection.kind == DROP_RANK else ranks

    def steps(self, rank: int) -> tuple[int, ...]:
        return self.capture.steps(rank)

    def names(self, rank: int) -> tuple[tuple[Key, ...], tuple[str, ...]]:
        """Keys of a rank's first step, and their texts."""
        return names_in(self, rank)

    def rows(self, rank: int, step: int) -> StepRows:
        """Return a segment with the change."""
        rows = self.capture.rows(rank, step)
        if self.injection.kind == SHIFT_STEP:
            steps = self.capture.steps(rank)
            later = steps[(steps.index(step) + int(self.injection.size)) % len(steps)]
            return _early(rows, self.capture.rows(rank, later))
        chosen = [row for row, key in enumerate(rows.keys) if key in self.targets.get((rank, step), ())]
        return self._edited(rows, chosen, rank, step) if chosen else rows

    def _edited(self, rows: StepRows, chosen: list[int], rank: int, step: int) -> StepRows:
        columns = {name: getattr(rows, name).copy() for name in ("value", "sketch", "sample", "hash")}
        scalars = {name: values.copy() for name, values in rows.scalars.items()}
        for row in chosen:
            key = rows.keys[row]
            if self.injection.kind == SCALE:
                factor = self.injection.size
                for values in (columns["value"], columns["sketch"], columns["sample"], *scalars.values()):
                    values[row] = values[row] * factor
                # The mean keeps its sign, sizes have none.
                for name in set(SCALARS) - {"mean"}:
                    scalars[name][row] = abs(scalars[name][row])
                self.relative[rank, step, key] = abs(factor - 1)
            else:
                full = self.capture.tensor(rank, step, key)  # type: ignore[attr-defined]
                old = np.asarray(widen(full.bits, full.dtype), dtype=np.float64)
                new = changed_tensor(self.injection, old)
                size = float(np.linalg.norm(old)) or 1.0
                self.relative[rank, step, key] = float(np.linalg.norm(new - old)) / size
                # What the summary rounded stays as it is: only the change is added.
                columns["sketch"][row] = columns["sketch"][row] + sketch(new - old)
                before, after = reductions(old), reductions(new)
                for name in SCALARS:
                    scalars[name][row] += after[name] - before[name]
                index = sample_index(key.name, new.size)
                columns["sample"][row, : len(index)] = new.ravel()[index]
            if columns["hash"][row].any() and self.relative[rank, step, key]:
                columns["hash"][row] ^= np.uint64(1)
        return replace(rows, scalars=scalars, **columns)


def _early(rows: StepRows, later: StepRows) -> StepRows:
    """Return the later step's rows under this step's number, but for the data and the state.

    The data are kept: a run that is a step ahead on other data is known by them, and no other check would be asked.
    """

    def kept(key: Key) -> bool:
        return key.kind in (Kind.BATCH, Kind.STATE) or key.item == BEFORE

    own = [row for row, key in enumerate(rows.keys) if kept(key)]
    taken = [row for row, key in enumerate(later.keys) if not kept(key)]

    def texts(name: str) -> Any:
        one, two = getattr(rows, name), getattr(later, name)
        return (*(one[row] for row in own), *(two[row] for row in taken))

    def arrays(name: str) -> Any:
        return np.concatenate([getattr(rows, name)[own], getattr(later, name)[taken]])

    columns: dict[str, Any] = {name: texts(name) for name in ("keys", "dtype", "shape", "text", "where")}
    columns |= {n: arrays(n) for n in ("order", "numel", "nonfinite", "value", "sketch", "sample", "hash")}
    scalars = {name: np.concatenate([rows.scalars[name][own], later.scalars[name][taken]]) for name in rows.scalars}
    return replace(rows, scalars=scalars, **columns)
