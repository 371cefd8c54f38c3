"""Make the rows of the table: what one check found over all of its cells.

This module must not know how an outcome is reached.

Shapes: S steps, R ranks, C cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from probe.check import DECLARED, NO_CHECK, Check, is_default
from probe.judge.cells import Judgement
from probe.judge.comparison import WITHOUT_TOLERANCE, CheckResult, Place, Shown, Verdict, Worst
from probe.judge.fit import fit
from probe.judge.limits import Limits
from probe.judge.part import part_of
from probe.measure.differences import MISSING, UNEXPECTED
from probe.measure.series import BoolArray
from probe.point import STEP_CLOCK
from probe.reduction import SAMPLE, in_words

_TENSOR = "||a - b|| / ||b|| (sketch)"
_NUMBER = "|a - b| / median |b|"
_METRIC = {
    "exact": "equality",
    "rel": "|a - b| / |b|",
    "abs": "|a - b|",
    "rel or abs": "|a - b|, and in brackets / |b|",
    "rel + abs": "|a - b|, and in brackets / |b|",
    "ratio": "larger / smaller",
    "record only": "shown, not judged",
}


def rows(checks: Sequence[Check], judgements: Sequence[Judgement], limits: Limits | None) -> tuple[CheckResult, ...]:
    """Return one row for each check that has cells, and for each of a plan whether it has or not.

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
        elif not is_default(check):
            made.append(_without_cells(check, checks[:number], judgements[0]))
    return tuple(made)


def _without_cells(check: Check, earlier: Sequence[Check], judgement: Judgement) -> CheckResult:
    d = judgement.differences
    selected = [key for key in d.index.keys if check.selects(key)]
    if not selected:
        why = "its selection matches nothing that was recorded"
    elif check.steps is not None and not any(step in check.steps for step in d.steps):
        why = f"none of its steps {check.steps} was recorded"
    elif not check.suffixes and any(one.selects(selected[0]) for one in earlier):
        why = "all that it selects belongs to checks before it"
    else:
        why = "no such number can be made of what was recorded"
    return CheckResult(
        what=check.what,
        where=check.where,
        form=check.form,
        metric=_metric(check, check.form, numbers=False),
        verdict=Verdict.NOT_COMPARABLE,
        difference=float("nan"),
        unit=_unit(check, check.form),
        tolerance=float("nan"),
        spread=float("nan"),
        worst=None,
        quantities=0,
        cells=0,
        above=0,
        not_compared=0,
        not_compared_why=why,
        bound=check.bound,
    )


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


def shown_of(judgement: Judgement, s: int, r: int, cell: int) -> Shown:
    """Return what `values_of` returns for a cell."""
    d = judgement.differences
    texts = d.texts.get((s, r, cell))
    if texts is not None:
        return Shown.TEXT if any(isinstance(text, str) for text in texts) else Shown.VALUE
    return Shown.VALUE if d.single[s, r, cell] else Shown.L2_NORM


def _row(number: int, check: Check, judgement: Judgement, limits: Limits | None) -> CheckResult | None:
    cells = np.flatnonzero((judgement.check == number).any(axis=0)[judgement.differences.index.of_cell])
    if not cells.size:
        return None
    everything, judgement = judgement, part_of(judgement, cells)
    d = judgement.differences
    mine = np.broadcast_to((judgement.check == number)[:, None, d.index.of_cell], d.present.shape)
    there = mine & (d.present | (d.absent > 0))
    if not there.any():
        return None
    judged = mine & ~np.isnan(judgement.excess)
    shown_cells = judged
    if not judged.any():
        shown_cells = mine & (d.present if check.form == "record only" else judgement.unknown & ~judgement.exact)
    at = _furthest(judgement, shown_cells)
    worst = None if at is None else _worst(everything, at[0], at[1], int(cells[at[2]]), check)
    failing = mine & (judgement.above | judgement.poisoned | judgement.lost)
    exact = bool(judgement.exact[judged].all()) if judged.any() else check.form == "exact"
    spread = judgement.spread[shown_cells & ~judgement.exact]
    vacuous, horizon = _power(judgement, limits, mine & d.present & ~judgement.exact, check)
    finest, smallest = _smallest(judgement, judged)
    fitting, needed = fit(judgement, judged)
    form = "exact" if exact and check.form == "calibrated" else check.form
    return CheckResult(
        what=check.what,
        where=check.where,
        form=form,
        metric=_metric(check, form, numbers=_of_numbers(judgement, shown_cells)),
        verdict=_verdict(judgement, mine, judged, check),
        difference=worst.difference if worst else float("nan"),
        unit="" if worst and isinstance(worst.expected, str) else _unit(check, form),
        tolerance=worst.tolerance if worst else float("nan"),
        spread=float("nan") if not spread.size or np.isnan(spread).all() else float(np.nanmax(spread)),
        worst=worst,
        quantities=len(set(d.index.of_cell[np.flatnonzero(there.any(axis=(0, 1)))])),
        cells=int(judged.sum()),
        above=int(failing.sum()),
        not_compared=int((there & ~judged).sum()),
        not_compared_why=_why_not(judgement, limits, there & ~judged, check),
        smallest_detectable=smallest,
        finest_detectable=finest,
        unjudged_failures=int((failing & ~judged).sum()),
        vacuous=vacuous,
        assumed=bool(judgement.assumed[judged].any()),
        horizon=horizon,
        covered=() if horizon is None else _covered(judgement, limits, horizon),
        bound=check.bound,
        fit=fitting,
        needed=needed,
    )


def _of_numbers(judgement: Judgement, cells: BoolArray) -> bool:
    """Say whether the cells are numbers, so that no norm is taken of their difference."""
    return bool(cells.any() and judgement.differences.number[cells].all())


def _metric(check: Check, form: str, *, numbers: bool) -> str:
    made = in_words(check.metric, check.reduce, check.window, check.over_ranks)
    if form == "exact" or (form == "record only" and not check.bound):
        return f"{_METRIC[form]} {made}".rstrip()
    text = _NUMBER if numbers else _TENSOR
    if form != "calibrated":
        text = _METRIC[form] if form != "record only" else _METRIC["rel" if check.unit == "relative" else "abs"]
        if not numbers and not made:
            text = text.replace("|a - b|", "||a - b||").replace("|b|", "||b||") + " (sketch)"
    if SAMPLE in check.metric:
        text = text.replace("|a - b|", "largest |a - b|").replace("/ |b|", "/ largest |b|")
    return f"{text} {made}".rstrip()


def _unit(check: Check, form: str) -> str:
    if form == "exact":
        return ""
    return check.unit if form in DECLARED or check.bound else "relative"


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


def _furthest(judgement: Judgement, cells: BoolArray) -> tuple[int, int, int] | None:
    """Find which of some cells is furthest off: step, rank, cell."""
    if not cells.any():
        return None
    unjudged = bool(np.isnan(judgement.excess[cells]).all())
    measure = judgement.shown if unjudged else judgement.excess
    ranked = np.where(cells & ~np.isnan(measure), measure, -1.0)
    # Among cells that are infinitely or equally far off, the earliest is the most telling.
    s, r, cell = (int(i) for i in np.unravel_index(int(np.argmax(ranked)), ranked.shape))
    return s, r, cell


def _worst(judgement: Judgement, s: int, r: int, cell: int, check: Check) -> Worst:
    expected, actual = values_of(judgement, s, r, cell)
    return Worst(
        place=place_of(judgement, s, r, cell),
        expected=expected,
        actual=actual,
        difference=float(judgement.shown[s, r, cell]),
        tolerance=float(judgement.tolerance[s, r, cell])
        if check.form != "record only" or check.bound
        else float("nan"),
        spread=float("nan") if judgement.exact[s, r, cell] else float(judgement.spread[s, r, cell]),
        shown=shown_of(judgement, s, r, cell),
    )


def _smallest(judgement: Judgement, judged: BoolArray) -> tuple[float, float]:
    """Return the least relative changes that would have been flagged: in the most sensitive quantity, and in *any*.

    These are the smallest and the largest tolerance among the members at the first judged step. The largest is what the
    check vouches for: the smallest one says what the luckiest quantity sees.
    """
    cells = judged & ~judgement.exact
    if not cells.any():
        return (0.0, 0.0) if judged.any() else (float("nan"), float("nan"))
    first = int(np.argmax(cells.any(axis=(1, 2))))
    with np.errstate(all="ignore"):
        allowed = judgement.relative_tolerance[first][cells[first]]
    if np.isnan(allowed).all():
        return float("nan"), float("nan")
    return float(np.nanmin(allowed)), float(np.nanmax(allowed))


def _covered(judgement: Judgement, limits: Limits | None, horizon: int) -> tuple[int, ...]:
    """Return the calibrated steps where it is their end that ends the judging."""
    later = [step for step in judgement.differences.steps if step > horizon]
    return limits.steps if limits is not None and later and later[0] > limits.steps[-1] else ()


def _power(judgement: Judgement, limits: Limits | None, cells: BoolArray, check: Check) -> tuple[bool, int | None]:
    """Tell whether a scrambled run would pass the check, and the last step that is judged in every quantity of it."""
    if limits is None or not cells.any():
        return False, None
    d = judgement.differences
    series = np.unique(d.index.of_cell[np.flatnonzero(cells.any(axis=(0, 1)))])
    known = series[limits.known[series] > 0]
    if not known.size:
        return False, None
    if check.form in DECLARED:
        return _scrambled_passes(judgement, limits, cells), None
    vacuous = all(limits.mark[one] in ("vacuous", "weak") for one in known)
    judged_steps = (limits.judged[:, known] > 0).all(axis=1)
    if judged_steps.all():
        return vacuous, None
    last = int(np.argmin(judged_steps))
    return vacuous, d.steps[last - 1] if last else 0


def _scrambled_passes(judgement: Judgement, limits: Limits, cells: BoolArray) -> bool:
    """Tell whether a declared tolerance is above what a scrambled run differs by, wherever that is known."""
    control = np.broadcast_to(limits.control[judgement.differences.index.of_cell], cells.shape)
    known = cells & (control > 0)
    return bool(known.any() and (judgement.relative_tolerance[known] >= control[known]).all())


def _why_not(judgement: Judgement, limits: Limits | None, cells: BoolArray, check: Check) -> str:
    if check.form == "record only":
        return "recorded only" if cells.any() else ""
    d = judgement.differences
    after = np.zeros(len(d.steps), dtype=bool) if limits is None else np.array(d.steps) > limits.steps[-1]
    reasons = (
        ("in the baseline only", d.absent == MISSING),
        ("in the candidate only", d.absent == UNEXPECTED),
        ("not finite", judgement.poisoned | judgement.blind),
        ("of another shape", d.present & d.reshaped & ~judgement.exact),
        ("after other data", judgement.after_data),
        ("after the last calibrated step", judgement.beyond & after[:, None, None]),
        ("beyond the horizon", judgement.beyond),
        (WITHOUT_TOLERANCE, judgement.unknown),
    )
    counts: Counter[str] = Counter()
    left = cells.copy()
    for reason, where in reasons:
        counts[reason] = int((left & where).sum())
        left &= ~where
    return ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)


def unselected(judgement: Judgement, checks: Sequence[Check]) -> int:
    """Count the series that no check judges, or makes a number of."""
    d = judgement.differences
    column = (judgement.check == NO_CHECK).all(axis=0)
    present = np.zeros(len(d.index), dtype=bool)
    np.logical_or.at(present, d.index.of_cell, d.present.any(axis=(0, 1)))
    left = np.flatnonzero(column & present)
    return sum(not any(check.suffixes and check.selects(d.index.keys[int(one)]) for check in checks) for one in left)
