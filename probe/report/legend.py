"""What stands under a table: its marks, its words and how its differences are measured, as far as they occur in it.

This module must not know which report it writes for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from probe.judge.comparison import CheckResult, Comparison, Shown, Verdict
from probe.report.words import SKETCH

SEES = (
    "sees: a relative change by this much, at the first judged step, would have been flagged in any quantity of the "
    "row; by the smaller number of a range, in the most sensitive one."
)


def legend(checks: Iterable[CheckResult], *, with_marks: bool) -> list[str]:
    """Explain the marks and the metrics that occur in a table."""
    checks = tuple(checks)
    lines = []
    if any(check.assumed for check in checks):
        lines.append(
            f"{'* ' if with_marks else ''}assumed: nothing was measured for this tolerance; "
            "it is a floor from the precision of the numbers."
        )
    if any(check.vacuous and not check.fit for check in checks):
        lines.append(
            f"{'~ ' if with_marks else ''}vacuous: a scrambled run would pass this check, so its verdict says nothing."
        )
    if any(check.fit == "vacuous" for check in checks):
        lines.append(
            f"{'~ ' if with_marks else ''}vacuous: this declared tolerance is more than ten times what calibration "
            "would allow."
        )
    if any(check.fit == "flaky" for check in checks):
        lines.append(
            f"{'! ' if with_marks else ''}flaky: the unmodified code exceeds this declared tolerance by itself."
        )
    if any(not math.isnan(check.smallest_detectable) for check in checks):
        lines.append(SEES)
    lines += metrics(checks)
    return lines


def metrics(checks: Iterable[CheckResult]) -> list[str]:
    """Explain how the differences of a table are measured, and what its pairs of values are."""
    checks, lines = tuple(checks), []
    metrics: dict[str, list[str]] = {}
    for check in checks:
        if check.unit and check.metric and (check.bound or check.verdict is not Verdict.RECORDED_ONLY):
            metrics.setdefault(check.metric, []).append(check.what)
    if len(metrics) == 1:
        lines.append(f"difference: {next(iter(metrics))}.")
    else:
        lines += [f"difference: {metric} ({', '.join(whats)})." for metric, whats in metrics.items()]
    if any(SKETCH in metric for metric in metrics):
        lines.append(
            "sketch: the norm of the difference is estimated from 251 signed sums over the tensor, within 4.5 % (one "
            "standard deviation)."
        )
    if any(check.worst is not None and check.worst.shown is Shown.L2_NORM for check in checks):
        lines.append("l2 norm: the size of the whole tensor in each arm; two tensors of one size can still differ.")
    return lines


def tight(comparison: Comparison) -> str:
    """Explain the tolerance by which the first divergence was found; nothing where it is the table's own."""
    found = comparison.first_divergence
    if found is None or found.declared or not found.tolerance > 0 or comparison.calibration is None:
        return ""
    return "tight tolerance: what the quantity's own spread and floor allow; sibling layers count in the table only."
