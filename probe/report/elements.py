"""Say what comparing tensors kept whole, element by element, has shown.

This module must not know how they were compared.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from probe.judge.comparison import Comparison
from probe.report import words

if TYPE_CHECKING:
    from probe.measure.elementwise import ElementDifference, ElementsCompared

MOST = 1000
"""Tensors that the JSON object has in full; of more, those that differ most, as a run of 30 steps can keep 60,000."""
SHOWN = 5
"""Tensors that a report for people shows."""


def sentences(comparison: Comparison) -> list[str]:
    """Return one sentence for each candidate, and one for each of the tensors that differ most."""
    lines = []
    for candidate, found in comparison.elements:
        parts = [f"{found.identical:,} identical"]
        parts += [f"{found.equal:,} equal but for the bits of zeros and NaN"] if found.equal else []
        parts += [f"{len(found.different):,} different"]
        if found.reshaped:
            more = f" and {len(found.reshaped) - 3} more" if len(found.reshaped) > 3 else ""
            parts += [f"of another shape or type: {', '.join(found.reshaped[:3])}{more}"]
        tensors = "1 tensor is" if found.tensors == 1 else f"{found.tensors:,} tensors are"
        lines.append(f"{tensors} kept whole in the first baseline and in {candidate}: {', '.join(parts)}.")
        worst = _by_size(found)
        lines += [_sentence(each) for each in worst[:SHOWN]]
        if len(worst) > SHOWN:
            lines.append(f"{len(worst) - SHOWN:,} more differ by less; --json has them.")
    return lines


def objects(comparison: Comparison) -> list[dict[str, Any]]:
    """Return what each candidate showed as plain values, the tensors by step, rank and order of execution."""
    made = []
    for candidate, found in comparison.elements:
        most = {id(each) for each in _by_size(found)[:MOST]}
        made.append(
            {
                "candidate": candidate,
                "tensors": found.tensors,
                "identical": found.identical,
                "equal": found.equal,
                "reshaped": list(found.reshaped),
                "different": len(found.different),
                "differences": [_object(each) for each in found.different if id(each) in most],
            }
        )
    return made


def _by_size(found: ElementsCompared) -> list[ElementDifference]:
    """Sort by relative norm, what is not finite first; by execution where they are equal."""

    def size(each: ElementDifference) -> tuple[bool, float]:
        return not each.nonfinite, -(each.relative_l2 if not math.isnan(each.relative_l2) else math.inf)

    return sorted(found.different, key=size)


def _sentence(each: ElementDifference) -> str:
    share = "all" if each.different == each.elements else f"{each.different:,} of"
    text = f"step {each.step}, rank {each.rank}, {each.key.label}: {share} {each.elements:,} elements differ"
    where = f" at {list(each.at)}" if each.at else ""
    text += f", by up to {words.number(each.max_abs)}{where} (expected {_value(each.expected)}, actual "
    text += f"{_value(each.actual)})"
    text += f", {each.ulps:,} ulp" if each.ulps is not None else ""
    text += f"; l2 norm of the difference {words.difference(each.relative_l2, 'relative')}"
    return text + (f"; {each.nonfinite:,} of them are not finite" if each.nonfinite else "")


def _value(value: float | complex) -> str:
    return f"{value:.6g}"


def _object(each: ElementDifference) -> dict[str, Any]:
    return {
        "step": each.step,
        "rank": each.rank,
        "name": each.key.label,
        "elements": each.elements,
        "different": each.different,
        "nonfinite": each.nonfinite,
        "max_abs": each.max_abs,
        "relative_l2": None if math.isnan(each.relative_l2) else each.relative_l2,
        "ulps": each.ulps,
        "at": list(each.at),
        "expected": _plain(each.expected),
        "actual": _plain(each.actual),
    }


def _plain(value: float | complex) -> Any:
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    return value if math.isfinite(value) else None
