"""Hold a tolerance that a person declared against the noise that was measured, and against what was declared before.

A bound that is far wider than the noise asks for sees little; one that is under the noise fails sound code. Neither
changes what was declared: it is said beside the verdict. This module must not decide about an outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from probe.check import DECLARED, Check
from probe.judge.cells import Judgement
from probe.judge.comparison import CheckResult
from probe.measure.series import BoolArray

MOST_TIMES = 10.0
"""A declared tolerance is vacuous when it is more than this many times what calibration would allow: the margin that
users' own gates have settled on."""
VACUOUS, FLAKY = "vacuous", "flaky"


def fit(judgement: Judgement, judged: BoolArray) -> tuple[str, float]:
    """Say how the declared tolerances of some cells fit the measured noise, and what calibration would allow in them.

    Returns:
        `flaky` if the unmodified code exceeds one of them by itself; `vacuous` if all whose spread is known are more
        than `MOST_TIMES` what calibration would allow; else nothing. And the largest that calibration would allow, in
        the unit of the form; NaN where no spread was measured.
    """
    cells = judged & judgement.declared
    known = cells & ~np.isnan(judgement.needed)
    if not known.any():
        return "", float("nan")
    needed, tolerance = judgement.needed[known], judgement.tolerance[known]
    largest = float(needed.max())
    if (cells & judgement.flaky).any():
        return FLAKY, largest
    one = judgement.is_ratio[known].astype(np.float64)
    return VACUOUS if bool((tolerance - one > MOST_TIMES * (needed - one)).all()) else "", largest


def fit_notes(rows: Sequence[CheckResult]) -> list[str]:
    """Say which declared tolerances do not fit the noise, with the numbers."""
    notes = []
    for row in rows:
        if row.fit == VACUOUS:
            notes.append(
                f"Check {row.what!r} is vacuous: it allows {row.bound}, more than {MOST_TIMES:.0f} times what "
                f"calibration would allow ({_amount(row.needed, row.unit)})."
            )
        elif row.fit == FLAKY:
            notes.append(
                f"Check {row.what!r} is flaky: it allows {row.bound}, and the unmodified code differs from itself "
                f"by up to {_amount(row.spread, row.unit)}."
            )
    return notes


def _amount(value: float, unit: str) -> str:
    return {"relative": f"{100 * value:.3g} %", "absolute": f"{value:.3g} abs", "ratio": f"{value:.3g}x"}[unit]


def bounds_of(checks: Sequence[Check]) -> dict[str, str]:
    """Return the declared bound of each check, by its name; of several with one name, all of them."""
    bounds: dict[str, list[str]] = {}
    for check in checks:
        if check.form in DECLARED:
            steps = "" if check.steps is None else f" at steps {check.steps}"
            bounds.setdefault(check.what, []).append(f"{check.bound}{steps}")
    return {what: "; ".join(found) for what, found in bounds.items()}


def edits(calibrated: Mapping[str, str], checks: Sequence[Check]) -> list[str]:
    """Say which declared bounds are not those that the plan had when the tolerances were calibrated."""
    now = bounds_of(checks)
    notes = []
    for what in sorted(calibrated.keys() | now.keys()):
        then = calibrated.get(what)
        if then is None:
            notes.append(
                f"Check {what!r} allows {now[what]}, and was not declared when the tolerances were calibrated."
            )
        elif what not in now:
            notes.append(f"Check {what!r} allowed {then} when the tolerances were calibrated, and is not declared now.")
        elif then != now[what]:
            notes.append(f"Check {what!r} allows {now[what]}, and allowed {then} when the tolerances were calibrated.")
    return notes
