"""Find the first divergence: the earliest quantity, in execution order, that is above its tight tolerance.

After one optimizer step nearly everything differs, so "what differs" is no answer. Inner modules fire before the module
that contains them, so that of `blocks.3.attn` and `blocks.3` the inner one is found first. This module must not know
how an outcome is reached.

Shapes: S steps, R ranks, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from probe.judge.cells import Judgement
from probe.judge.check_rows import place_of, shown_of, values_of
from probe.judge.comparison import FirstDivergence, Origin, Place
from probe.measure.differences import MISSING
from probe.measure.series import BEFORE, CLIPPED, BoolArray, FloatArray
from probe.point import Key, Kind
from probe.selection import matches, patterns_by_kind

LARGEST_MARGIN = 3.0
"""Ratio to the tight tolerance that is asked of the first divergence when the rest of the evidence is overwhelming."""

_PHASES = {
    Kind.BATCH: "batch",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.LOSS: "loss",
    Kind.GRAD: "backward",
    Kind.GRAD_NORM: "clipping",
    Kind.LR: "schedule",
    Kind.PARAM: "optimizer update",
    Kind.CALL: "forward",
    Kind.EXPLICIT: "forward",
    Kind.STATE: "state",
}


@dataclass(frozen=True, slots=True)
class _Spot:
    s: int
    r: int
    cell: int


def locate(judgements: Sequence[Judgement]) -> FirstDivergence | None:
    """Find the first divergence that all candidates share.

    A cell must exceed its tight tolerance (3 x its own spread and the floor; no siblings, no horizon) by a margin that
    grows with the evidence: the sixth root of the largest ratio, at most `LARGEST_MARGIN`. Among hundreds of cells
    ahead of a fault one exceeds a tolerance from three runs by luck, but hardly by 3 x; and noise is amplified
    downstream as the fault is, so that the first cell of a fault seen at 1,000 x is not at 1.5 x. Where the whole
    evidence is weak (bf16), the margin is near 1, and the plain rule of the project's statistics study, section 0c,
    holds.

    Args:
        judgements: One for each candidate, over the same cells.
    """
    ratio = np.fmin.reduce([_tight_ratio(judgement) for judgement in judgements])
    first = judgements[0]
    state = np.array([key.kind is Kind.STATE for key in first.differences.keys])
    # Something required that is missing is proof enough: what is slightly above ahead of it is luck.
    margin = LARGEST_MARGIN if all(judgement.lost.any() for judgement in judgements) else _margin(ratio)
    off = ratio > margin
    spot = _earliest(first, off & ~state) or _earliest(first, off)
    if spot is None:
        return None
    return _describe(first, ratio, off, spot, state)


def _tight_ratio(judgement: Judgement) -> FloatArray:
    """Return the difference over the tight tolerance, [S, R, C]; infinite for what is wrong in itself; 0 elsewhere."""
    d = judgement.differences
    usable = ~np.isnan(judgement.excess) | judgement.beyond
    with np.errstate(all="ignore"):
        declared = np.where(judgement.exact, judgement.excess, judgement.shown / judgement.tight)
    ratio = np.where(usable, np.nan_to_num(declared, nan=0.0, posinf=np.inf), 0.0)
    ratio[judgement.poisoned | judgement.lost] = np.inf
    ratio[judgement.after_data & ~(d.absent == MISSING)] = 0.0
    return np.asarray(ratio, dtype=np.float64)


def _margin(ratio: FloatArray) -> float:
    largest = float(np.where(np.isfinite(ratio), ratio, 0.0).max(initial=0.0))
    return float(min(LARGEST_MARGIN, max(1.0, largest ** (1 / 6))))


def _earliest(judgement: Judgement, off: BoolArray) -> _Spot | None:
    """Return the first cell in execution order: by step, by order in its rank, by rank."""
    if not off.any():
        return None
    s_all, r_all, c_all = np.nonzero(off)
    order = judgement.differences.order[s_all, r_all, c_all]
    # A cell without an order (only the candidate has it) comes last within its step.
    order = np.where(order < 0, np.iinfo(np.int32).max, order)
    first = int(np.lexsort((r_all, c_all, order, s_all))[0])
    return _Spot(int(s_all[first]), int(r_all[first]), int(c_all[first]))


def _describe(
    judgement: Judgement, ratio: FloatArray, off: BoolArray, spot: _Spot, state: BoolArray
) -> FirstDivergence:
    d = judgement.differences
    key = d.keys[spot.cell]
    above = np.flatnonzero(off[spot.s, :, spot.cell])
    r = int(above[0])
    spot = _Spot(spot.s, r, spot.cell)
    place = place_of(judgement, spot.s, r, spot.cell)
    expected, actual = values_of(judgement, spot.s, r, spot.cell)
    missing = d.absent[spot.s, r, spot.cell] == MISSING
    if missing:
        actual = "missing"
    differing_state = np.flatnonzero((off & state)[spot.s].any(axis=0))
    origin, because, ahead = _origin(judgement, ratio, spot)
    phase = _phase(judgement, key, spot)
    if differing_state.size and key.kind is not Kind.STATE:
        phase = "state" if key.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.GRAD) else phase
        because += f" State differs in the same step: {_state_text(judgement, spot, differing_state)}."
    return FirstDivergence(
        place=place,
        ranks=tuple(d.ranks[int(one)] for one in above),
        difference=float(judgement.shown[spot.s, r, spot.cell]),
        tolerance=float(judgement.tight[spot.s, r, spot.cell]),
        expected=expected,
        actual=actual,
        origin=origin,
        phase=phase,
        because=because,
        after=_after(judgement, off, spot),
        next=_next(place, missing=missing),
        keep=_recorded(_keep(key, ahead, missing=missing), d.keys),
        ahead="" if ahead is None else ahead.label,
        unit=_unit(judgement, spot),
        shown=shown_of(judgement, spot.s, r, spot.cell),
        declared=bool(judgement.declared[spot.s, r, spot.cell]),
    )


def _unit(judgement: Judgement, spot: _Spot) -> str:
    cell = (spot.s, spot.r, spot.cell)
    return "ratio" if judgement.is_ratio[cell] else "absolute" if judgement.is_absolute[cell] else "relative"


def _phase(judgement: Judgement, key: Key, spot: _Spot) -> str:
    d = judgement.differences
    if key.kind is Kind.GRAD and key.item == CLIPPED:
        return "clipping"
    if key.kind is Kind.GRAD and len(d.ranks) > 1:
        expected, actual = d.expected[spot.s, :, spot.cell], d.actual[spot.s, :, spot.cell]
        if (expected == expected[0]).all() and (actual != actual[0]).any() and np.isfinite(actual).all():
            return "gradient reduction"
    if key.kind is Kind.PARAM and key.item:
        return "state"
    return _PHASES[key.kind]


def _origin(judgement: Judgement, ratio: FloatArray, spot: _Spot) -> tuple[Origin, str, Key | None]:
    """Say whether what entered the place was within tolerance: everything recorded ahead of it, nearest first.

    Returns:
        The origin, a sentence for it, and the nearest quantity ahead that could be compared.
    """
    d = judgement.differences
    key = d.keys[spot.cell]
    order = d.order[spot.s, spot.r]
    here = order[spot.cell]
    kinds = np.array([k.kind is not Kind.STATE for k in d.keys])
    ahead = (order >= 0) & (order < here) & kinds
    if key.microbatch >= 0:
        ahead &= np.array([k.microbatch in (key.microbatch, -1) for k in d.keys])
    nearest = [int(cell) for cell in np.flatnonzero(ahead)]
    nearest.sort(key=lambda cell: -int(order[cell]))
    unseen: list[str] = []
    for cell in nearest:
        present = bool(d.present[spot.s, spot.r, cell]) and not bool(d.reshaped[spot.s, spot.r, cell])
        beyond = bool(judgement.beyond[spot.s, spot.r, cell])
        judged = present and (beyond or not np.isnan(judgement.excess[spot.s, spot.r, cell]))
        if not judged:
            if not _recorded_only(judgement, cell, spot.s):
                unseen.append(d.keys[cell].label)
            continue
        value = float(ratio[spot.s, spot.r, cell])
        share = f"{value:.2g} x its tight tolerance"
        if value > 1:
            off = f"{d.keys[cell].label}, recorded just before it, is slightly off already ({share})."
            return Origin.BEFORE, off, d.keys[cell]
        if unseen:
            count = f"{len(unseen)} values that" if len(unseen) > 1 else "1 value that"
            first = f", the first of them {unseen[-1]}" if len(unseen) > 1 else f": {unseen[-1]}"
            return (
                Origin.UNKNOWN,
                f"{d.keys[cell].label} is within tolerance ({share}). Between it and this place, {count} the baseline "
                f"has could not be compared{first}.",
                d.keys[cell],
            )
        # Up to the margin, what is above ahead of the place may be luck: it is said, and not taken for the origin.
        highest = max(nearest, key=lambda one: float(ratio[spot.s, spot.r, one]))
        most = float(ratio[spot.s, spot.r, highest])
        within = f"Everything compared before it in the step is within tolerance, last {d.keys[cell].label} ({share})."
        if most > 1:
            within = (
                f"The last compared before it, {d.keys[cell].label}, is within tolerance ({share}); the highest "
                f"before it, {d.keys[highest].label}, is at {most:.2g} x, which may be chance."
            )
        return Origin.HERE, within, d.keys[cell]
    if key.kind is Kind.BATCH:
        return Origin.HERE, "The data that enter the model differ.", None
    if key.item == BEFORE:
        return Origin.HERE, "The parameter differs before the first recorded step.", None
    if spot.s and not unseen:
        first = f"It is the first recorded value of step {d.steps[spot.s]}; the steps before are within."
        return Origin.HERE, first, None
    return Origin.UNKNOWN, "Nothing that was recorded before it in the step could be compared.", None


def _recorded_only(judgement: Judgement, cell: int, s: int) -> bool:
    d = judgement.differences
    known = d.present[s, :, cell].any() and not d.reshaped[s, :, cell].any()
    return bool(known and not judgement.unknown[s, :, cell].any() and not judgement.after_data[s, :, cell].any())


def _state_text(judgement: Judgement, spot: _Spot, cells: np.ndarray[tuple[int], np.dtype[np.intp]]) -> str:
    parts = []
    for cell in cells[:3]:
        r = int(np.argmax(judgement.above[spot.s, :, cell] | judgement.lost[spot.s, :, cell]))
        expected, actual = values_of(judgement, spot.s, r, int(cell))
        parts.append(f"{judgement.differences.keys[cell].name} is {_text(actual)}, expected {_text(expected)}")
    return "; ".join(parts) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")


def _text(value: float | str) -> str:
    return repr(value) if isinstance(value, str) else f"{value:.6g}"


def _after(judgement: Judgement, off: BoolArray, spot: _Spot) -> str:
    d = judgement.differences
    later = d.order[spot.s] > d.order[spot.s, spot.r, spot.cell]
    judged = ~np.isnan(judgement.excess) | judgement.beyond
    same_step = int((off[spot.s] & later).sum())
    of = int((judged[spot.s] & later).sum())
    text = f"After it, {same_step} of {of} values of step {d.steps[spot.s]} are off"
    if spot.s + 1 < len(d.steps):
        text += f", and {int(off[spot.s + 1 :].sum())} of {int(judged[spot.s + 1 :].sum())} in later steps"
    return text + "."


def _next(place: Place, *, missing: bool) -> str:
    """Say what to look at, in one sentence; nothing where only more recording tells more."""
    step = place.step
    if missing:
        return f"Find out why the candidate has no {place.kind.value} of {place.name!r} at step {step}."
    if place.kind is Kind.BATCH:
        return "Compare the data order, seeds and preprocessing of the two arms; the model has not run yet."
    if place.kind in (Kind.LR, Kind.STATE):
        return f"Compare how {place.name!r} is set in the two arms before step {step}."
    if place.kind is Kind.GRAD_NORM:
        return "Compare what is clipped, and by what norm, in the two arms; the gradients it is made of come before it."
    if place.kind in (Kind.FORWARD, Kind.BACKWARD):
        between = "feeds" if place.kind is Kind.FORWARD else "follows"
        return (
            f"Look at the code that {between} {place.name!r} (what is no module there can be named with `probe.tap`; "
            "new values have no tolerance until you calibrate with them: compare without -t)."
        )
    if place.kind is Kind.LOSS:
        return (
            f"Look at the code between the model's output and {place.name!r} (functions there can be recorded by name, "
            "`calls` in a plan; new values have no tolerance until you calibrate with them: compare without -t)."
        )
    return ""


def _recorded(selections: Sequence[str], keys: Sequence[Key]) -> tuple[str, ...]:
    """Drop what selects nothing that was recorded: a list of modules, say, has no output to keep."""

    def is_there(selection: str) -> bool:
        patterns = patterns_by_kind((selection,))
        return any(matches(patterns[key.kind], key.name, key.item) for key in keys)

    return tuple(selection for selection in selections if is_there(selection))


def _keep(key: Key, ahead: Key | None, *, missing: bool) -> tuple[str, ...]:
    """Select the tensors to keep whole: the last that is within, and what surrounds the first that is not.

    Args:
        ahead: The nearest quantity recorded before it that could be compared.
    """
    if missing or key.kind in (Kind.BATCH, Kind.LR, Kind.STATE, Kind.GRAD_NORM):
        return ()
    own = f"{key.kind.value}/{key.name}"
    module = key.name.rpartition(".")[0]
    if key.kind is Kind.GRAD:
        around = [own, *([f"forward/{module}", f"backward/{module}"] if module else [])]
    elif key.kind is Kind.PARAM:
        around = [own, f"grad/{key.name}"]
    elif key.kind in (Kind.FORWARD, Kind.BACKWARD) and module:
        # With the dot: `blocks.1*` would keep blocks 10 to 19 too. What surrounds a numbered block is the whole model.
        around = [own, f"{own}.*"]
        if not key.name.rpartition(".")[2].isdigit():
            around = [f"{key.kind.value}/{module}", f"{key.kind.value}/{module}.*"]
    else:
        around = [own]
    if ahead is not None and ahead.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.EXPLICIT):
        around.insert(0, f"{ahead.kind.value}/{ahead.name}")
    return tuple(dict.fromkeys(around))
