"""The module tree, each module coloured by how far its output is off: nested, folded, without any script.

Only outputs are shown, and of one step: gradients and later steps differ everywhere once something differs. This module
must not know what page it draws for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

import numpy as np

from probe.judge.comparison import FirstDivergence
from probe.point import Kind
from probe.report import words
from probe.report.grid import CellGrid
from probe.report.page import level

_FORWARD = f"{Kind.FORWARD.value}/"


@dataclass(slots=True)
class _Module:
    """One module: its own largest ratio, and the modules below it by name."""

    own: float = math.nan
    below: dict[str, _Module] = field(default_factory=dict)

    def worst(self) -> float:
        """Return the largest ratio at or below the module; NaN where nothing was judged."""
        return float(np.fmax.reduce([self.own, *(module.worst() for module in self.below.values())]))


def module_tree(grid: CellGrid, first: FirstDivergence | None) -> str:
    """Draw the tree of modules whose outputs were judged; empty when there are none.

    Args:
        grid: Cells.
        first: Its step is drawn and its path opened; without it, the worst over all steps is drawn.
    """
    step = first.place.step if first is not None and first.place.step in grid.steps else None
    columns = slice(None) if step is None else [grid.steps.index(step)]
    root = _Module()
    for row, label in enumerate(grid.labels):
        if not label.startswith(_FORWARD):
            continue
        ratio = float(np.fmax.reduce(grid.ratio[row, columns]))
        # The items of a structured output and later calls are the same module.
        name = label.removeprefix(_FORWARD).partition("#")[0].partition("[")[0]
        module = root
        for part in ["(root)"] if name == "(root)" else name.split("."):
            module = module.below.setdefault(part, _Module())
        module.own = float(np.fmax(module.own, ratio))
    if not root.below:
        return ""
    when = "over all steps" if step is None else f"in step {step}"
    opened = first.place.name.split(".") if first is not None else []
    items = "".join(_item(name, module, opened) for name, module in root.below.items())
    return (
        f'<h2>Modules</h2><p class="soft">Largest difference / tolerance of the outputs of each module and of those '
        f'inside it, {when}.</p><ul class="tree">{items}</ul>'
    )


def _item(name: str, module: _Module, opened: list[str]) -> str:
    worst = module.worst()
    colour = "none" if math.isnan(worst) else f"h{level(worst)}"
    swatch = '<i class="none"></i>' if colour == "none" else f'<i style="background:var(--{colour})"></i>'
    ratio = "not judged" if math.isnan(worst) else words.number(worst)
    text = f'{swatch}<span class="name">{escape(name)}</span> <span class="soft">{ratio}</span>'
    here = bool(opened) and opened[0] == name
    if not module.below:
        return f"<li>{text}</li>"
    inside = "".join(_item(each, below, opened[1:] if here else []) for each, below in module.below.items())
    state = " open" if here else ""
    return f"<li><details{state}><summary>{text}</summary><ul>{inside}</ul></details></li>"
