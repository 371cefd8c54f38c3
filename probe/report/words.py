"""Numbers and places in the words of the reports, so that all of them say the same thing in the same way.

Three significant digits; a relative difference is a percentage from 0.001 % up and a power of ten below. This module
must not know which report it writes for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from probe.errors import listed
from probe.judge.comparison import (
    WITHOUT_TOLERANCE,
    CheckResult,
    Comparison,
    Coverage,
    FirstDivergence,
    Origin,
    Place,
    RunSummary,
    Shown,
    Verdict,
    Worst,
)
from probe.point import STEP_CLOCK, Key
from probe.report.narrowing import advice

if TYPE_CHECKING:
    from probe.judge.tolerance import CalibratedRun

NOTHING = "-"
"""Stands where there is no number: nothing was compared, or nothing is known."""

SKETCH = "(sketch)"
"""Stands in the metric of a check that compares tensors."""
COUNTED = "number of quantities"
"""Stands in the metric of a check that counts."""

SEVERITY = (
    Verdict.NOT_FINITE,
    Verdict.MISSING,
    Verdict.ABOVE,
    Verdict.UNEXPECTED,
    Verdict.NOT_COMPARABLE,
    Verdict.WITHIN,
    Verdict.IDENTICAL,
    Verdict.RECORDED_ONLY,
)
"""Order of the rows of a table: what fails stands first."""
FAILING = frozenset({Verdict.NOT_FINITE, Verdict.MISSING, Verdict.ABOVE, Verdict.UNEXPECTED})


def number(value: float, *, digits: int = 3) -> str:
    """Write a number with a few significant digits, as a power of ten when it is small or large.

    >>> number(1234.5), number(0.041), number(4.1e-7), number(2.0)
    ('1,230', '0.041', '4.1e-07', '2')
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value) or value == 0 or not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits}g}"
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def difference(value: float, unit: str) -> str:
    """Write a difference, a tolerance or a spread in its unit.

    >>> difference(0.0041, "relative"), difference(4.1e-7, "relative"), difference(0.03, "absolute")
    ('0.41 %', '4.1e-07', '0.03 abs')
    >>> difference(5.744, "ratio")
    '5.74x'
    """
    if math.isnan(value):
        return NOTHING
    if unit == "relative":
        return f"{number(100 * value)} %" if 1e-5 <= value < math.inf else number(value)
    suffix = {"absolute": " abs", "ratio": "x"}.get(unit, "")
    return number(value) + (suffix if value else "")


def actual_difference(check: CheckResult) -> str:
    """Write how far a check's worst cell moved."""
    if check.verdict is Verdict.IDENTICAL:
        # Of a count, the number itself is what a reader wants to know.
        counted = COUNTED in check.metric and check.worst is not None and isinstance(check.worst.expected, float)
        return f"identical ({number(check.worst.expected)})" if counted else "identical"  # type: ignore[union-attr,arg-type]
    if not check.unit and not math.isnan(check.difference):
        return "identical" if check.difference == 0 else "differs"
    text = difference(check.difference, check.unit)
    if check.form in ("rel or abs", "rel + abs") and check.worst is not None:
        expected = check.worst.expected
        if isinstance(expected, float) and expected and not math.isnan(check.difference):
            text += f" ({difference(check.difference / abs(expected), 'relative')})"
    return text


def tolerance(check: CheckResult) -> str:
    """Write what a check allows at its worst cell."""
    if check.form == "exact":
        return "exact"
    if check.form == "record only":
        return f"{check.bound}, not judged" if check.bound else "none"
    if not check.unit and not math.isnan(check.tolerance):
        return "exact"
    return check.bound or difference(check.tolerance, check.unit)


def spread(check: CheckResult) -> str:
    """Write how far the unmodified code moves by itself where the check came closest to its tolerance.

    Tolerances grow with the steps, so the largest spread of all steps beside the tolerance of one would mislead.
    """
    if check.worst is not None and check.worst.spread > 0:
        return difference(check.worst.spread, check.unit)
    if check.spread == 0:
        return "0 (bit-identical)"
    if check.worst is not None and check.worst.spread == 0:
        return "0"
    return difference(check.spread, check.unit)


def detectable(check: CheckResult) -> str:
    """Write the relative change that any quantity of a check would have been flagged at; `any` where all is exact."""
    if check.smallest_detectable == 0:
        return "any"
    return difference(check.smallest_detectable, "relative")


def detectable_range(check: CheckResult) -> str:
    """Write the change that its most sensitive quantity would have been flagged at, and the one of any of them."""
    finest, any_of_them = difference(check.finest_detectable, "relative"), detectable(check)
    return any_of_them if finest in (NOTHING, any_of_them) or any_of_them == "any" else f"{finest} to {any_of_them}"


def verdict(check: CheckResult) -> str:
    """Write a check's verdict with its counts, e.g. `above 3 of 5,040`."""
    if check.verdict in (Verdict.ABOVE, Verdict.NOT_FINITE, Verdict.MISSING, Verdict.UNEXPECTED) and check.above:
        return f"{check.verdict.value} {check.above:,} of {check.cells + check.unjudged_failures:,}"
    return check.verdict.value


def totals(checks: Iterable[CheckResult]) -> str:
    """Write how many values all checks judged, and how many are above tolerance.

    A value that is judged in two metrics counts twice, as in the tables of pull requests.
    """
    checks = tuple(checks)
    judging = [check for check in checks if check.verdict is not Verdict.RECORDED_ONLY]
    cells, failures = sum(check.cells for check in judging), sum(check.unjudged_failures for check in judging)
    above = sum(check.above for check in judging) - failures
    if not cells:
        return ""
    others = (
        (failures, "missing, of another shape or type, or not finite"),
        (sum(check.not_compared for check in judging) - failures, "not compared"),
        (sum(check.cells + check.not_compared for check in checks if check not in judging), "recorded only"),
    )
    text = f"{above:,} of {values_of(cells)} {'is' if above == 1 else 'are'} above tolerance."
    listed_others = "; ".join(f"{count:,} {what}" for count, what in others if count)
    return f"{text} Not among the {cells:,}: {listed_others}." if listed_others else text


def values_of(count: int) -> str:
    """Write a number of values: one quantity at one step, in one microbatch, on one rank, each."""
    return "1 value" if count == 1 else f"{count:,} values"


def quantities_of(count: int) -> str:
    """Write a number of quantities, each of which has a value in every step, microbatch and rank."""
    return "1 quantity" if count == 1 else f"{count:,} quantities"


def coverage(found: Coverage) -> str:
    """Say how many values could be matched, and what the others are: the parts add up to the whole."""
    parts = []
    for labels, cells, what in (
        (found.missing, found.missing_cells, "only in the baseline"),
        (found.unexpected, found.unexpected_cells, "only in the candidate"),
        (found.reshaped, found.reshaped_cells, "with another shape"),
    ):
        if labels:
            counted = f" ({values_of(cells)})" if cells else ""
            parts.append(f"{quantities_of(len(labels))}{counted} {what}")
    there = found.matched + found.missing_cells + found.unexpected_cells + found.reshaped_cells
    of_all = "" if there == found.matched else f"{found.matched:,} of "
    text = f"{of_all}{values_of(there)} in both arms"
    if found.retyped:
        has = "has" if len(found.retyped) == 1 else "have"
        text += f", of which {quantities_of(len(found.retyped))} {has} another element type"
    others = f"; the others: {', '.join(parts)}" if parts else "; there are no others"
    return f"{text}{others}. A value is one quantity at one step, in one microbatch, on one rank."


def shows_values(check: CheckResult) -> bool:
    """Say whether a row names its worst place and both values even when it passes.

    It does where one number does not tell what happened: a ratio, and a check of a single value.
    """
    moved = check.verdict in (Verdict.WITHIN, Verdict.RECORDED_ONLY)
    return moved and check.worst is not None and (check.form == "ratio" or (check.cells == 1 and bool(check.bound)))


def fit(check: CheckResult) -> str:
    """Name what is wrong with a check's tolerance: `vacuous`, `flaky`, or nothing."""
    return check.fit or ("vacuous" if check.vacuous else "")


def counts(check: CheckResult) -> str:
    """Write how much a check judged, e.g. `4 quantities, 1,240 values`."""
    return f"{quantities_of(check.quantities)}, {values_of(check.cells)}"


def by_severity(checks: Iterable[CheckResult]) -> list[CheckResult]:
    """Order checks so that what fails stands first; equals keep their order."""
    return sorted(checks, key=lambda check: SEVERITY.index(check.verdict))


def pair(expected: float | str, actual: float | str) -> tuple[str, str]:
    """Write two values with as many digits as it takes to tell them apart."""
    if isinstance(expected, str) or isinstance(actual, str):
        return tuple(repr(each) if isinstance(each, str) else number(each) for each in (expected, actual))  # type: ignore[return-value]
    digits = next((d for d in range(3, 17) if number(expected, digits=d) != number(actual, digits=d)), 3)
    return number(expected, digits=digits), number(actual, digits=digits)


ORIGINS = {Origin.HERE: "origin here", Origin.BEFORE: "origin before it", Origin.UNKNOWN: "origin unknown"}


def values(expected: str, actual: str, shown: Shown) -> str:
    """Write a pair of values, and that they are norms where they are."""
    return f"{'l2 norm ' if shown is Shown.L2_NORM else ''}expected {expected}, actual {actual}"


def lines_after(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences that follow a divergence: what differs after it, and what to do next."""
    found = comparison.first_divergence
    if found is not None and found.after:
        yield found.after
    what_next = advice(comparison)
    if what_next:
        yield f"Next: {what_next}"


def not_compared(check: CheckResult, tolerances: str) -> str:
    """Say how many values a check did not compare and why; nothing for one that is recorded only.

    Args:
        check: The check.
        tolerances: Path of the tolerance file, or empty.
    """
    if not check.not_compared or check.verdict is Verdict.RECORDED_ONLY:
        return ""
    why = f" ({check.not_compared_why})" if check.not_compared_why else ""
    text = f"{values_of(check.not_compared)} not compared{why}"
    if WITHOUT_TOLERANCE in check.not_compared_why and tolerances:
        text += (
            f"; not recorded when {tolerances} was calibrated: calibrate again from runs that have them, or leave out "
            "-t"
        )
    return text


def horizon(check: CheckResult) -> str:
    """Say up to where a check was judged; nothing when it was judged throughout."""
    if check.horizon is None:
        return ""
    if check.covered:
        covered = f"step{'s' * (len(check.covered) > 1)} {steps(check.covered)}"
        until = f"up to step {check.horizon} only" if check.horizon else "at no step"
        return f"judged {until}: the tolerances cover {covered}"
    if check.horizon == 0:
        return "some quantities are judged at no step, for unmodified runs drift apart from the first"
    return f"some quantities are judged up to step {check.horizon} only, for unmodified runs drift apart after it"


def series_label(place: Place) -> str:
    """Return the label of the series that a place belongs to: its key without the microbatch."""
    return Key(kind=place.kind, name=place.name, item=place.item, call=place.call).label


def quantity(place: Place) -> str:
    """Name the quantity of a place, with its item, microbatch (from 1 up) and call."""
    microbatch = STEP_CLOCK if place.microbatch is None else place.microbatch
    key = Key(kind=place.kind, name=place.name, item=place.item, microbatch=microbatch, call=place.call)
    return key.label.removeprefix(f"{place.kind.value}/")


def worst(cell: Worst) -> str:
    """Say where a check came closest to its tolerance, or passed it furthest, with both values."""
    place = cell.place
    both = values(*pair(cell.expected, cell.actual), cell.shown)
    return f"step {place.step}, rank {place.rank}, {quantity(place)}: {both}"


def ranks(found: FirstDivergence, all_ranks: int) -> str:
    """Fold the ranks of a divergence: `all ranks`, `rank 1 only`, `ranks 0 and 2`."""
    if len(found.ranks) >= all_ranks:
        return "all ranks" if all_ranks > 1 else f"rank {found.place.rank}"
    if len(found.ranks) == 1:
        return f"rank {found.ranks[0]} only"
    return f"ranks {listed(found.ranks)}" if found.ranks else f"rank {found.place.rank}"


def divergence_place(found: FirstDivergence, all_ranks: int) -> str:
    """Say where the first divergence is: step, microbatch, ranks, kind and name."""
    microbatch = "" if found.place.microbatch is None else f", microbatch {found.place.microbatch}"
    return f"step {found.place.step}{microbatch}, {ranks(found, all_ranks)}: {series_label(found.place)}"


def divergence_values(found: FirstDivergence) -> str:
    """Say how far the first divergence is off, against what, with both values."""
    both = values(*pair(found.expected, found.actual), found.shown)
    if found.tolerance == 0:
        return f"differs where exactness is judged, {both}"
    measured, allowed = (difference(each, found.unit) for each in (found.difference, found.tolerance))
    if found.declared:
        return f"difference {measured}, tolerance {allowed}, {both}"
    times = found.difference / found.tolerance
    if not math.isfinite(times):
        return f"difference {measured}, tight tolerance {allowed}, {both}"
    return f"difference {measured}, {number(times)} x its tight tolerance ({allowed}), {both}"


def steps(numbers: Iterable[int]) -> str:
    """Fold step numbers into ranges.

    >>> steps([1, 2, 3, 7])
    '1-3,7'
    """
    ranges: list[list[int]] = []
    for each in sorted(set(numbers)):
        if ranges and each == ranges[-1][1] + 1:
            ranges[-1][1] = each
        else:
            ranges.append([each, each])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def world_size(comparison: Comparison) -> int:
    """Return the number of ranks that took part."""
    return max((run.ranks for run in comparison.runs), default=1)


def commit(run: RunSummary) -> str:
    """Write a run's commit, and whether its tree had changes on top."""
    if not run.commit:
        return NOTHING
    return run.commit[:10] + (" + changes" if run.dirty else "")


def marks(check: CheckResult) -> str:
    """Return the marks of the legend that a check carries."""
    return ("*" if check.assumed else "") + {"vacuous": "~", "flaky": "!"}.get(fit(check), "")


def calibration_runs(comparison: Comparison) -> list[tuple[CalibratedRun, bool]]:
    """Return the runs that the tolerances come from, and whether each is among the runs compared."""
    if comparison.calibration is None:
        return []
    compared = {run.run_id for run in comparison.runs}
    return [(run, run.run_id in compared) for run in comparison.calibration.runs]


def calibrated_name(run: CalibratedRun) -> str:
    """Name a run that tolerances come from, with its perturbation where the name does not say it."""
    known = not run.perturb or run.perturb.replace(":", "-") in run.path.replace(":", "-")
    return run.path if known else f"{run.path} ({run.perturb})"


def sentence(comparison: Comparison) -> str:
    """Say the verdict and why in one sentence."""
    reason = comparison.reason.strip().rstrip(".")
    return (
        f"{comparison.outcome.value.capitalize()}: {reason}." if reason else f"{comparison.outcome.value.capitalize()}."
    )
