"""Make the rows of the table: what one check found over all of its cells.

This module must not know how an outcome is reached.

Shapes: S steps, R ranks, C cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from probe.check import Check
from probe.comparison import CheckResult, Place, Verdict, Worst
from probe.differences import MISSING, UNEXPECTED
from probe.judge import NO_CHECK, Judgement
from probe.limits import Limits
from probe.point import STEP_CLOCK
from probe.series import BoolArray, FloatArray

_TENSOR = "||a - b|| / ||b|| (sketch)"
_NUMBER = "|a - b| / median |b|"
_METRIC = {
    "exact": "equality",
    "rel": "|a - b| / |b|",
    "abs": "|a - b|",
    "rel or abs": "|a - b|",
    "rel + abs": "|a - b|",
    "ratio": "larger / smaller",
    "record only": "shown, not judged",
}
_UNIT = {"calibrated": "relative", "rel": "relative", "ratio": "ratio", "exact": "", "record only": "relative"}


def rows(checks: Sequence[Check], judgements: Sequence[Judgement], limits: Limits | None) -> tuple[CheckResult, ...]:
    """Return one row for each check that has cells.

    Args:
        judgements: One for each candidate. A row shows the candidate that is furthest off; where candidates disagree
            about being above, the one that is not (only what repeats is above).
    """
    made = []
    for number, check in enumerate(checks):
        of_candidates = [_row(number, check, judgement, limits) for judgement in judgements]
        present = [row for row in of_candidates if row is not None]
        if present:
            made.append(_most_telling(present))
    return tuple(made)


_SEVERITY = (
    Verdict.NOT_FINITE,
    Verdict.MISSING,
    Verdict.ABOVE,
    Verdict.NOT_COMPARABLE,
    Verdict.WITHIN,
    Verdict.IDENTICAL,
    Verdict.RECORDED_ONLY,
    Verdict.UNEXPECTED,
)


def _most_telling(of_candidates: Sequence[CheckResult]) -> CheckResult:
    def rank(row: CheckResult) -> tuple[int, float]:
        return _SEVERITY.index(row.verdict), -_ratio(row)

    if any(row.verdict is Verdict.ABOVE for row in of_candidates):
        calm = [row for row in of_candidates if row.verdict in (Verdict.WITHIN, Verdict.IDENTICAL)]
        return min(calm or of_candidates, key=rank)
    return min(of_candidates, key=rank)


def _ratio(row: CheckResult) -> float:
    if row.worst is None or not row.worst.tolerance > 0:
        return 0.0
    return row.worst.difference / row.worst.tolerance


def place_of(judgement: Judgement, s: int, r: int, cell: int) -> Place:
    """Return where a cell is in training."""
    d = judgement.differences
    key = d.keys[cell]
    return Place(
        step=d.steps[s],
        rank=d.ranks[r],
        kind=key.kind,
        name=key.name,
        item=key.item,
        microbatch=None if key.microbatch == STEP_CLOCK else key.microbatch,
        call=key.call,
        order=int(d.order[s, r, cell]),
    )


def values_of(judgement: Judgement, s: int, r: int, cell: int) -> tuple[float | str, float | str]:
    """Return the baseline's and the candidate's value of a cell: the number, the l2 norm, or text."""
    d = judgement.differences
    texts = d.texts.get((s, r, cell))
    if texts is not None:
        return texts
    return float(d.expected[s, r, cell]), float(d.actual[s, r, cell])


def _row(number: int, check: Check, judgement: Judgement, limits: Limits | None) -> CheckResult | None:
    d = judgement.differences
    mine = np.broadcast_to((judgement.check == number)[:, None, d.index.of_cell], d.present.shape)
    there = mine & (d.present | (d.absent > 0))
    if not there.any():
        return None
    judged = mine & ~np.isnan(judgement.excess)
    shown_cells = judged if judged.any() or check.form != "record only" else mine & d.present
    worst = _worst(judgement, shown_cells, check)
    exact = bool(judgement.exact[judged].all()) if judged.any() else check.form == "exact"
    spread = judgement.spread[judged & ~judgement.exact]
    vacuous, horizon = _power(judgement, limits, mine & d.present & ~judgement.exact)
    form = "exact" if exact and check.form == "calibrated" else check.form
    return CheckResult(
        what=check.what,
        where=check.where,
        form=form,
        metric=_metric(form, bool(d.number[judged].all()) if judged.any() else False),
        verdict=_verdict(judgement, mine, judged, check),
        difference=worst.difference if worst else float("nan"),
        unit="" if worst and isinstance(worst.expected, str) else _UNIT.get(form, "absolute"),
        tolerance=worst.tolerance if worst else float("nan"),
        spread=_spread(spread, form),
        worst=worst,
        quantities=len(set(d.index.of_cell[np.flatnonzero(there.any(axis=(0, 1)))])),
        cells=int(judged.sum()),
        above=int((mine & (judgement.above | judgement.poisoned | judgement.lost)).sum()),
        not_compared=int((there & ~judged).sum()),
        not_compared_why=_why_not(judgement, there & ~judged, check),
        smallest_detectable=_smallest(judgement, judged),
        vacuous=vacuous,
        assumed=bool(judgement.assumed[judged].any()),
        horizon=horizon,
        bound=check.bound,
    )


def _spread(spread: FloatArray, form: str) -> float:
    """Return the largest difference of the unmodified code with itself in the form's unit; NaN where not known."""
    if not spread.size or np.isnan(spread).all() or form in ("abs", "rel or abs", "rel + abs"):
        return float("nan")
    largest = float(np.nanmax(spread))
    return 1 + largest if form == "ratio" else largest


def _metric(form: str, numbers: bool) -> str:
    if form == "calibrated":
        return _NUMBER if numbers else _TENSOR
    return _METRIC[form]


def _verdict(judgement: Judgement, mine: BoolArray, judged: BoolArray, check: Check) -> Verdict:
    d = judgement.differences
    if (mine & (judgement.poisoned | judgement.blind)).any():
        return Verdict.NOT_FINITE
    if check.form == "record only":
        return Verdict.RECORDED_ONLY
    if (mine & judgement.lost).any():
        return Verdict.MISSING
    if (mine & judgement.above).any():
        return Verdict.ABOVE
    if not judged.any():
        only_new = (mine & (d.absent == UNEXPECTED)).any() and not (mine & (d.present | (d.absent == MISSING))).any()
        return Verdict.UNEXPECTED if only_new else Verdict.NOT_COMPARABLE
    return Verdict.IDENTICAL if d.identical[judged].all() else Verdict.WITHIN


def _worst(judgement: Judgement, cells: BoolArray, check: Check) -> Worst | None:
    if not cells.any():
        return None
    measure = judgement.shown if check.form == "record only" else judgement.excess
    ranked = np.where(cells & ~np.isnan(measure), measure, -1.0)
    # Among cells that are infinitely or equally far off, the earliest is the most telling.
    s, r, cell = (int(i) for i in np.unravel_index(int(np.argmax(ranked)), ranked.shape))
    expected, actual = values_of(judgement, s, r, cell)
    return Worst(
        place=place_of(judgement, s, r, cell),
        expected=expected,
        actual=actual,
        difference=float(judgement.shown[s, r, cell]),
        tolerance=float(judgement.tolerance[s, r, cell]) if check.form != "record only" else float("nan"),
        spread=float("nan") if judgement.exact[s, r, cell] else float(judgement.spread[s, r, cell]),
    )


def _smallest(judgement: Judgement, judged: BoolArray) -> float:
    """Return the least relative change that would have been flagged in *any* quantity of the check.

    It is the largest tolerance among the members at the first judged step: the smallest one would say what the luckiest
    quantity sees, and a reader would take it for all of them.
    """
    cells = judged & ~judgement.exact
    if not cells.any():
        return 0.0 if judged.any() else float("nan")
    first = int(np.argmax(cells.any(axis=(1, 2))))
    return float(np.nanmax(judgement.tolerance[first][cells[first]]))


def _power(judgement: Judgement, limits: Limits | None, cells: BoolArray) -> tuple[bool, int | None]:
    """Tell whether a scrambled run would pass the check, and the last step that is judged in every quantity of it."""
    if limits is None or not cells.any():
        return False, None
    d = judgement.differences
    series = np.unique(d.index.of_cell[np.flatnonzero(cells.any(axis=(0, 1)))])
    known = series[limits.known[series] > 0]
    if not known.size:
        return False, None
    vacuous = all(limits.mark[one] in ("vacuous", "weak") for one in known)
    judged_steps = (limits.judged[:, known] > 0).all(axis=1)
    if judged_steps.all():
        return vacuous, None
    last = int(np.argmin(judged_steps))
    return vacuous, d.steps[last - 1] if last else 0


def _why_not(judgement: Judgement, cells: BoolArray, check: Check) -> str:
    if check.form == "record only":
        return "recorded only" if cells.any() else ""
    d = judgement.differences
    reasons = (
        ("in the baseline only", d.absent == MISSING),
        ("in the candidate only", d.absent == UNEXPECTED),
        ("not finite", judgement.poisoned | judgement.blind),
        ("of another shape", d.present & d.reshaped & ~judgement.exact),
        ("after other data", judgement.after_data),
        ("beyond the horizon", judgement.beyond),
        ("without a tolerance", judgement.unknown),
    )
    counts: Counter[str] = Counter()
    left = cells.copy()
    for reason, where in reasons:
        counts[reason] = int((left & where).sum())
        left &= ~where
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)


def unselected(judgement: Judgement) -> int:
    """Count the series that no check selects."""
    d = judgement.differences
    column = (judgement.check == NO_CHECK).all(axis=0)
    present = np.zeros(len(d.index), dtype=bool)
    np.logical_or.at(present, d.index.of_cell, d.present.any(axis=(0, 1)))
    return int((column & present).sum())
