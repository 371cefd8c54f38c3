"""The power of the checks as a table: what a known change did to each, and whether that is what was calculated.

This module must not know how anything was judged.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from probe.judge.inject import OF_TENSORS
from probe.judge.power import CheckPower, Power, unexpected
from probe.report import words

_COLUMNS = ("Check", "Changed", "Change", "Flagged", "Difference / tolerance", "Sees")


def to_text(power: Power) -> str:
    """Return the table and what it comes to, without a newline at the end."""
    lines = [f"Injected {power.injection} into {power.into}."]
    if power.checks:
        rows = [_COLUMNS, *(_row(one) for one in power.checks)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
        lines += ["", *("  ".join(row).rstrip() for row in cells)]
        lines += [
            "",
            "Sees: a relative change by this much would be flagged in any quantity of the row, by calculation.",
        ]
    if any(one.flagged is None for one in power.checks) and power.injection.kind in OF_TENSORS:
        lines.append("Tensors are kept whole with `probe record --full GLOB`.")
    if unexpected(power):
        lines.append(f"The judge and the calculation disagree in {unexpected(power)}.")
    if power.outcome:
        lines.append(f"With the change, the comparison is {power.outcome}. {power.reason}")
    if power.checks:
        tried = [one for one in power.checks if one.flagged is not None]
        lines.append(f"{sum(bool(one.flagged) for one in tried)} of {len(tried)} checks would have flagged it.")
    return "\n".join(lines)


def _row(one: CheckPower) -> tuple[str, ...]:
    if one.flagged is None:
        return one.what, one.why_not, words.NOTHING, "not tried", words.NOTHING, _sees(one)
    where = f"{one.label}, step {one.step}" if one.label else "all of it"
    ratio = words.NOTHING if math.isnan(one.ratio) else "unequal" if math.isinf(one.ratio) else words.number(one.ratio)
    return one.what, where, words.difference(one.change, "relative"), "yes" if one.flagged else "no", ratio, _sees(one)


def _sees(one: CheckPower) -> str:
    return "any" if one.smallest_detectable == 0 else words.difference(one.smallest_detectable, "relative")


def to_json(power: Power) -> str:
    """Return one JSON object."""
    checks = [asdict(one) | {"as_calculated": one.as_calculated} for one in power.checks]
    found: dict[str, Any] = {
        "injected": str(power.injection),
        "into": power.into,
        "verdict": power.outcome,
        "checks": [{name: _plain(value) for name, value in check.items()} for check in checks],
    }
    return json.dumps(found, indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
