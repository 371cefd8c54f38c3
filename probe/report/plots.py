"""Small plots as inline SVG: a ratio over steps with the spread's band, and the distribution of ratios.

Both have a logarithmic axis of difference / tolerance on which 1 is the tolerance. Colours are classes of the page's
style sheet, so that light and dark are one drawing. This module must not know what page it draws for.

Shapes: S steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from probe.report import words

_WIDTH, _HEIGHT = 320, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 42, 8, 8, 22
_LEAST, _MOST = 1e-4, 1e3
"""Range of the axis: below and above it a ratio says no more than 'far within' or 'far above'."""
_BIN = 0.25
"""Width of a histogram's bin in decades."""

Floats = npt.NDArray[np.float64]


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Choose the axis: whole decades around the values and around 1."""
    logs = [math.log10(min(max(value, _LEAST), _MOST)) for value in values if value > 0]
    low = min([math.floor(each) for each in logs] + [-1])
    high = max([math.ceil(each) for each in logs] + [1])
    return low, high


def _height(value: float, low: int, high: int) -> float:
    """Return the vertical position of a ratio; zero lies on the axis' foot."""
    log = math.log10(min(max(value, 10.0**low), 10.0**high)) if value > 0 else low
    return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high - log) / (high - low)


def _grid_lines(low: int, high: int) -> str:
    every = max(1, math.ceil((high - low) / 4))
    lines = []
    for decade in range(low, high + 1):
        if decade and (decade - low) % every:
            continue
        y = _height(10.0**decade, low, high)
        name = "limit" if decade == 0 else "grid"
        label = "tolerance" if decade == 0 else _power_of_ten(decade)
        # The foot of the axis holds zero too.
        label = f"≤ {label}" if decade == low else label
        lines.append(f'<line class="{name}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        anchor = f'x="{_LEFT - 4}" text-anchor="end"' if decade else f'x="{_LEFT + 3}"'
        lines.append(f'<text {anchor} y="{y + (3.5 if decade else -3):.1f}">{label}</text>')
    return "".join(lines)


def _power_of_ten(decade: int) -> str:
    return f"{10.0**decade:g}" if -4 < decade < 4 else f"1e{decade}"


def ratio_over_steps(title: str, steps: Sequence[int], ratio: Floats, spread: Floats) -> str:
    """Draw a family's largest difference / tolerance over steps, with the baseline's own spread as a band.

    Args:
        title: Name of the family, for readers that cannot see the drawing.
        steps: [S].
        ratio: [S] NaN where nothing was judged.
        spread: [S] spread / tolerance; NaN where not known.
    """
    low, high = _decades([*ratio[~np.isnan(ratio)], *spread[~np.isnan(spread)]])
    span = max(steps[-1] - steps[0], 1)
    across = [_LEFT + 6 + (_WIDTH - _LEFT - _RIGHT - 12) * (step - steps[0]) / span for step in steps]
    foot = _height(0.0, low, high)
    parts = [_grid_lines(low, high)]
    band = [(x, _height(value, low, high)) for x, value in zip(across, spread, strict=True) if not math.isnan(value)]
    if len(band) > 1:
        corners = [(band[0][0], foot), *band, (band[-1][0], foot)]
        parts.append(f'<polygon class="band" points="{_points(corners)}"/>')
    elif band:
        x, y = band[0]
        parts.append(f'<rect class="band" x="{x - 5:.1f}" y="{y:.1f}" width="10" height="{foot - y:.1f}"/>')
    seen = [
        (x, _height(value, low, high), value) for x, value in zip(across, ratio, strict=True) if not math.isnan(value)
    ]
    parts.append(f'<polyline class="line" points="{_points([(x, y) for x, y, _ in seen])}"/>')
    for (x, y, value), step in zip(seen, _judged(steps, ratio), strict=True):
        above = " above" if value > 1 else ""
        tip = f"step {step}: {words.number(value)} of the tolerance"
        parts.append(f'<circle class="dot{above}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{tip}</title></circle>')
    for step in {steps[0], steps[-1]}:
        x = across[steps.index(step)]
        anchor = "start" if step == steps[0] else "end"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">step {step}</text>')
    worst = max((value for _, _, value in seen), default=math.nan)
    spoken = f"{title}: largest difference / tolerance over steps, {words.number(worst)} at most"
    return _svg(spoken, parts)


def _judged(steps: Sequence[int], ratio: Floats) -> list[int]:
    return [step for step, value in zip(steps, ratio, strict=True) if not math.isnan(value)]


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _svg(spoken: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(spoken)}">{"".join(parts)}</svg>'


def distribution(ratio: Floats, spread: Floats) -> str:
    """Draw how many values have which difference / tolerance, and the same for the unmodified code with itself.

    Args:
        ratio: Any shape; NaN where nothing was judged.
        spread: Any shape; NaN where not known.
    """
    low, high = int(math.log10(_LEAST)), int(math.log10(_MOST))
    edges = np.arange(low, high + _BIN / 2, _BIN)
    counts = []
    for values in (ratio, spread):
        known = values[~np.isnan(values)]
        logs = np.log10(np.clip(known, _LEAST, _MOST * 0.999))
        counts.append(np.histogram(logs, bins=edges)[0] / max(len(known), 1))
    top = max(float(counts[0].max()), float(counts[1].max()), 1e-9)
    per_bin = (_WIDTH - _LEFT - _RIGHT) / (len(edges) - 1)
    foot, tall = _HEIGHT - _BOTTOM, _HEIGHT - _TOP - _BOTTOM
    parts = []
    outline = [(float(_LEFT), float(foot))]
    for number, (share, own) in enumerate(zip(*counts, strict=True)):
        x = _LEFT + number * per_bin
        above = " above" if edges[number] >= 0 else ""
        if share:
            tip = (
                f"{100 * share:.3g} % of the values between {10 ** edges[number]:.2g} and {10 ** edges[number + 1]:.2g}"
            )
            height = tall * share / top
            box = f'x="{x + 0.5:.1f}" y="{foot - height:.1f}" width="{per_bin - 1:.1f}" height="{height:.1f}"'
            parts.append(f'<rect class="bar{above}" {box}><title>{tip}</title></rect>')
        y = foot - tall * own / top
        outline += [(x, y), (x + per_bin, y)]
    outline.append((_WIDTH - _RIGHT, foot))
    parts.append(f'<polyline class="outline" points="{_points(outline)}"/>')
    limit = _LEFT + (0 - low) / _BIN * per_bin
    parts.append(f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{_TOP}" y2="{foot}"/>')
    parts.append(f'<text x="{limit + 3:.1f}" y="{_TOP + 8}">tolerance</text>')
    for decade in range(low, high + 1):
        x = _LEFT + (decade - low) / _BIN * per_bin
        # Everything smaller stands in the first bin, everything larger in the last.
        beyond = {low: "≤ ", high: "≥ "}.get(decade, "")
        anchor = f'x="{_WIDTH - 1}" text-anchor="end"' if decade == high else f'x="{x:.1f}" text-anchor="middle"'
        parts.append(f'<text {anchor} y="{_HEIGHT - 6}">{beyond}{_power_of_ten(decade)}</text>')
    return _svg("Distribution of difference / tolerance, candidate (bars) and unmodified code (line)", parts)
