"""Say why a check failed, in the few lines that a test's output has room for.

Where it first differs, where it is worst, what was allowed, what would have passed; never the tensors. This module must
not know how anything was judged, or where the text is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from probe.errors import listed
from probe.judge.comparison import CheckResult, Comparison, Outcome, Verdict
from probe.report import words


def explain(comparison: Comparison, *, also: Iterable[str] = ()) -> list[str]:
    """Return the lines.

    Args:
        comparison: What was found.
        also: Further sentences, such as how the baseline is recorded anew.
    """
    lines = [words.sentence(comparison)]
    found = comparison.first_divergence
    if found is not None:
        provisional = " (provisional)" if comparison.outcome is Outcome.INCONCLUSIVE else ""
        lines += [
            f"First divergence{provisional}: {words.divergence_place(found, words.world_size(comparison))}",
            f"  {words.divergence_values(found)}",
            f"  {words.ORIGINS[found.origin]} ({found.phase}): {found.because}",
        ]
    worst = worst_check(comparison) if comparison.outcome is not Outcome.NOT_COMPARABLE else None
    if worst is not None and worst.worst is not None:
        lines += [
            f"Worst: {worst.what}, {words.worst(worst.worst)}",
            f"  difference {words.actual_difference(worst)}, allowed {words.tolerance(worst)}"
            f"{words.marks(worst)}{_of_itself(worst)}",
        ]
    lines += [would_have_passed(comparison)] if comparison.outcome is not Outcome.NOT_COMPARABLE else []
    if comparison.coverage.missing:
        lines.append(f"Only in the baseline: {listed(comparison.coverage.missing, most=5)}")
    if comparison.coverage.reshaped:
        lines.append(f"With another shape: {listed(comparison.coverage.reshaped, most=5)}")
    lines += [f"Note: {note}" for note in comparison.notes]
    return [*lines, *also]


def _of_itself(check: CheckResult) -> str:
    if math.isnan(check.spread):
        return ""
    return f" (the baseline, perturbed by one ulp, moves by up to {words.spread(check)})"


def worst_check(comparison: Comparison) -> CheckResult | None:
    """Find the failing check that is furthest above its tolerance: the first, where three digits are the same."""
    failing = [check for check in comparison.checks if check.verdict in words.FAILING and check.worst is not None]
    return max(failing, key=lambda check: float(f"{times_allowed(check):.3g}"), default=None)


def times_allowed(check: CheckResult) -> float:
    """Return a check's difference over its tolerance, at its worst cell; 0 where nothing was compared."""
    worst = check.worst
    if worst is None or math.isnan(worst.difference):
        return 0.0
    if worst.tolerance > 0:
        return worst.difference / worst.tolerance
    return math.inf if worst.difference else 0.0


def would_have_passed(comparison: Comparison) -> str:
    """Say how wide the tolerances would have had to be."""
    verdicts = {check.verdict for check in comparison.checks}
    if Verdict.MISSING in verdicts:
        return "Would have passed: no tolerance; something required is missing, or has another shape."
    if Verdict.NOT_FINITE in verdicts:
        return "Would have passed: no tolerance; something is not finite."
    failing = [check for check in comparison.checks if check.verdict in words.FAILING]
    if any(times_allowed(check) == math.inf for check in failing):
        return "Would have passed: no tolerance; something that is judged exactly is not equal."
    if not failing:
        return "Would have passed: what is judged is within its tolerance."
    most = max(map(times_allowed, failing))
    return f"Would have passed: tolerances {words.number(most)} times as wide."


def properties(label: str, comparison: Comparison) -> list[tuple[str, str]]:
    """Return a check's numbers as the properties of a JUnit report."""
    judged = [check for check in comparison.checks if check.cells]
    most = max(map(times_allowed, judged), default=math.nan)
    found = comparison.first_divergence
    values = {
        "verdict": comparison.outcome.value,
        "difference_over_tolerance": f"{most:.3g}",
        "values": str(comparison.coverage.matched),
        "first_divergence": "" if found is None else words.series_label(found.place),
    }
    return [(f"probe.{label}.{name}", value) for name, value in values.items() if value]
