"""Re-judge a candidate with a known change in it: would each check have flagged it?

`smallest_detectable` says by calculation what a check would see. This asks the judge itself, and holds the two against
each other. This module must not know how the change is put in.

Shapes: S steps, R ranks, C cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from probe.check import Check
from probe.errors import IncomparableError, listed
from probe.judge.cells import Judgement
from probe.judge.compare import compare_cells
from probe.judge.comparison import Comparison
from probe.judge.inject import DROP_RANK, OF_TENSORS, SCALE, SHIFT_STEP, ChangedCapture, Injection, kept_whole
from probe.judge.tolerance import Tolerances
from probe.measure.series import BoolArray, CaptureLike
from probe.point import Key, Kind
from probe.reduction import COUNT, SUM_SQUARES

NEAR = 0.5
"""A change within this part of the limit is near it: the noise of sound code takes a third of a tolerance that is three
times the spread, and the sketch estimates a norm to 4.5 %."""

Segment = tuple[int, int]
"""Rank and step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPower:
    """What a check says of the change."""

    what: str
    label: str
    """The quantity that was changed, or empty where whole runs were."""
    step: int | None
    change: float
    """Relative change of what the check judges, where it is known; else NaN."""
    flagged: bool | None
    """None where the change could not be put in."""
    ratio: float
    """Difference / tolerance with the change; NaN where it was not judged."""
    smallest_detectable: float
    """Least relative change that the check sees in any of its quantities, by calculation."""
    limit: float = float("nan")
    """The same for the quantity that was changed: a number is allowed a part of its usual size, whatever it is here."""
    why_not: str = ""
    """Why the change could not be put in."""

    @property
    def as_calculated(self) -> bool | None:
        """Whether the judge agrees with the calculation; None where one of them says nothing.

        A change that is near the calculated limit is decided by the candidate's own noise, and agrees with both.
        """
        if self.flagged is None or np.isnan(self.change) or np.isnan(self.limit):
            return None
        near = abs(self.change - self.limit) <= NEAR * self.limit
        return near or self.flagged == (self.change > self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What all checks say of a change."""

    injection: Injection
    into: str
    """Path of the capture whose values were changed."""
    checks: tuple[CheckPower, ...]
    """Empty where only the comparison as a whole can see the change."""
    outcome: str = ""
    """Verdict of the whole comparison, where whole runs were changed."""
    reason: str = ""


def measure_power(
    baselines: Sequence[CaptureLike],
    candidate: CaptureLike,
    tolerances: Tolerances | None,
    injection: Injection,
    *,
    checks: Sequence[Check],
) -> Power:
    """Judge the candidate as it is, and with the change put into one quantity of each check.

    The quantity is the one whose tolerance is largest where the check judges first: the one that
    `smallest_detectable` speaks of. A number that is made of others is changed through all of them.

    Args:
        candidate: May be one of the baselines: then the baseline is judged against itself.
    """
    plain, (judgement,) = _compared(baselines, ChangedCapture(candidate, injection=_NOTHING), tolerances, checks)
    if injection.kind in (DROP_RANK, SHIFT_STEP):
        return _of_whole_runs(baselines, candidate, tolerances, injection, checks, plain)
    chosen = [_choose(judgement, number, candidate, injection) for number in range(len(checks))]
    cells = [np.zeros_like(judgement.differences.present) if one is None else one.cells for one in chosen]
    of_data = [bool(one and one.key.kind is Kind.BATCH) for one in chosen]
    judged: dict[int, Judgement] = {}
    relative: dict[tuple[int, int, Key], float] = {}
    # Other data make everything behind them not comparable: they are changed in a comparison of their own.
    for data in (True, False):
        numbers = [n for n, one in enumerate(chosen) if one is not None and of_data[n] is data]
        if not numbers:
            continue
        targets = _targets(judgement, [cells[n] for n in numbers], [checks[n] for n in numbers], candidate)
        changed = ChangedCapture(candidate, injection, targets)
        _, (found,) = _compared(baselines, changed, tolerances, checks)
        relative |= changed.relative
        judged |= dict.fromkeys(numbers, found)
    rows = {row.what: row.smallest_detectable for row in plain.checks}
    found_powers = []
    for number, check in enumerate(checks):
        if check.what in rows and check.form != "record only":
            one, after = chosen[number], judged.get(number)
            found_powers.append(_power(check, number, rows[check.what], one, after, relative, injection, judgement))
    return Power(injection=injection, into=str(candidate.path), checks=tuple(found_powers))


_NOTHING = Injection(kind=SCALE, size=1.0)


def _compared(
    baselines: Sequence[CaptureLike], changed: CaptureLike, tolerances: Tolerances | None, checks: Sequence[Check]
) -> tuple[Comparison, tuple[Judgement, ...]]:
    return compare_cells(baselines, [changed], tolerances, checks=checks, same_code=True)


@dataclass(frozen=True, slots=True)
class _Chosen:
    key: Key
    step: int
    cells: BoolArray
    """[S, R, C]"""


def _choose(judgement: Judgement, number: int, candidate: CaptureLike, injection: Injection) -> _Chosen | None:
    """Choose which quantity of a check is changed, and where; None where there is none that can be."""
    d = judgement.differences
    mine = (judgement.check == number)[:, None, d.index.of_cell] & ~np.isnan(judgement.excess)
    mine &= ~np.isnan(d.expected)
    if injection.kind == SCALE:
        # Zero times anything is zero: the next quantity is taken.
        mine &= d.actual != 0
    if injection.kind in OF_TENSORS:
        whole = np.zeros_like(mine)
        for s, step in enumerate(d.steps):
            for r, rank in enumerate(d.ranks):
                kept = kept_whole(candidate, rank, step) if mine[s, r].any() else frozenset()
                whole[s, r] = [key in kept for key in d.keys]
        mine &= whole
    if not mine.any():
        return None
    s = int(np.argmax(mine.any(axis=(1, 2))))
    allowed = np.where(mine[s], np.where(judgement.exact[s], 0.0, judgement.relative_tolerance[s]), -1.0)
    r, cell = (int(i) for i in np.unravel_index(int(np.argmax(np.nan_to_num(allowed, nan=-1.0))), allowed.shape))
    cells = np.zeros_like(mine)
    cells[s, :, cell] = mine[s, :, cell]
    return _Chosen(d.keys[cell], d.steps[s], cells)


def _targets(
    judgement: Judgement, chosen: Sequence[BoolArray], checks: Sequence[Check], candidate: CaptureLike
) -> Mapping[Segment, set[Key]]:
    """Return the recorded quantities to change, by segment: the chosen cells, or all that they are made of."""
    d = judgement.differences
    targets: dict[Segment, set[Key]] = {}
    for cells, check in zip(chosen, checks, strict=True):
        for s, r, cell in (tuple(int(i) for i in at) for at in np.argwhere(cells)):
            key, step = d.keys[cell], d.steps[s]
            suffix = next((each for each in check.suffixes if key.item.endswith(each)), "")
            if not suffix:
                targets.setdefault((d.ranks[r], step), set()).add(key)
                continue
            first = step if check.window is None else step - check.window + 1
            for rank in candidate.ranks if check.over_ranks else (d.ranks[r],):
                for at_step in range(first, step + 1):
                    keys = candidate.rows(rank, at_step).keys
                    source = replace(key, item=key.item[: -len(suffix)])
                    members = {one for one in keys if _is_source(check, one, source)}
                    targets.setdefault((rank, at_step), set()).update(members)
    return targets


def _is_source(check: Check, recorded: Key, source: Key) -> bool:
    if not check.reads(recorded) or recorded.kind is not source.kind:
        return False
    same_microbatch = check.window is not None or recorded.microbatch == source.microbatch
    if check.reduce:
        return same_microbatch
    same = replace(recorded, microbatch=source.microbatch) == source if check.window is not None else recorded == source
    return same_microbatch and same


def _why_not(judgement: Judgement, number: int, injection: Injection) -> str:
    """Say why a change cannot be put into any quantity of a check."""
    if injection.kind in OF_TENSORS:
        return "no tensor is kept whole"
    d = judgement.differences
    mine = (judgement.check == number)[:, None, d.index.of_cell] & ~np.isnan(judgement.excess)
    if not mine.any():
        return "none of its values is judged"
    return "all of its values are zero" if (d.actual[mine] == 0).any() else "none of its values is a number"


def _power(
    check: Check,
    number: int,
    smallest: float,
    one: _Chosen | None,
    after: Judgement | None,
    relative: Mapping[tuple[int, int, Key], float],
    injection: Injection,
    before: Judgement,
) -> CheckPower:
    if one is None or after is None:
        return CheckPower(
            what=check.what,
            label="",
            step=None,
            change=float("nan"),
            flagged=None,
            ratio=float("nan"),
            smallest_detectable=smallest,
            why_not=_why_not(before, number, injection),
        )
    d = before.differences
    changes = [relative.get((d.ranks[int(r)], d.steps[int(s)], one.key), np.nan) for s, r, _ in np.argwhere(one.cells)]
    known = [change for change in changes if not np.isnan(change)]
    if check.suffixes and not known and injection.kind == SCALE:
        known = [_of_made(check, injection.size)]
    judged = one.cells & ~np.isnan(after.excess)
    return CheckPower(
        what=check.what,
        label=one.key.label,
        step=one.step,
        change=max(known) if known else float("nan"),
        flagged=bool((one.cells & (after.above | after.poisoned | after.lost)).any()),
        ratio=float(after.excess[judged].max()) if judged.any() else float("nan"),
        smallest_detectable=smallest,
        limit=_limit(before, one.cells),
    )


def _of_made(check: Check, factor: float) -> float:
    """Return by how much a number changes that is made of numbers which all are multiplied by a factor."""
    if check.reduce == COUNT:
        return 0.0
    return abs(factor**2 - 1) if check.reduce == SUM_SQUARES else abs(factor - 1)


def _limit(judgement: Judgement, cells: BoolArray) -> float:
    """Return the least relative change that is flagged in some cells; 0 where they are judged by equality."""
    d = judgement.differences
    if judgement.exact[cells].all():
        return 0.0
    with np.errstate(all="ignore"):
        of_number = judgement.tolerance * d.scale[d.index.of_cell] / np.abs(d.expected)
        limit = np.where(d.number & ~judgement.declared, of_number, judgement.relative_tolerance)
    return float(np.nanmin(limit[cells]))


def _of_whole_runs(
    baselines: Sequence[CaptureLike],
    candidate: CaptureLike,
    tolerances: Tolerances | None,
    injection: Injection,
    checks: Sequence[Check],
    plain: Comparison,
) -> Power:
    """Judge a run that lost a rank, or is a step ahead: every row of the table says whether it saw it."""
    lengths = (
        [len(candidate.ranks)] if injection.kind == DROP_RANK else [len(candidate.steps(r)) for r in candidate.ranks]
    )
    if min(lengths) <= injection.size:
        what = "ranks" if injection.kind == DROP_RANK else "recorded steps"
        raise IncomparableError(
            f"Injection '{injection}' leaves nothing of {str(candidate.path)!r}, which has {min(lengths)} {what}. "
            "Record more."
        )
    comparison, (judgement,) = _compared(baselines, ChangedCapture(candidate, injection), tolerances, checks)
    rows = {row.what: row.smallest_detectable for row in plain.checks}
    powers = []
    for number, check in enumerate(checks):
        if check.what not in rows or check.form == "record only" or injection.kind == DROP_RANK:
            continue
        mine = (judgement.check == number)[:, None, judgement.differences.index.of_cell]
        excess = np.where(mine, judgement.excess, np.nan)
        bad = mine & (judgement.above | judgement.poisoned | judgement.lost)
        powers.append(
            CheckPower(
                what=check.what,
                label="",
                step=None,
                change=float("nan"),
                flagged=bool(bad.any()),
                ratio=float("nan") if np.isnan(excess).all() else float(np.nanmax(excess)),
                smallest_detectable=rows[check.what],
            )
        )
    return Power(
        injection=injection,
        into=str(candidate.path),
        outcome=comparison.outcome.value,
        reason=comparison.reason,
        checks=tuple(powers),
    )


def unexpected(power: Power) -> str:
    """Name the checks in which the judge and the calculation disagree; empty if there are none."""
    return listed(repr(one.what) for one in power.checks if one.as_calculated is False)
