"""The module tree of the HTML page."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
from report_cases import DIVERGENCE, NAN

from probe.report.grid import CellGrid
from probe.report.page import level
from probe.report.tree import module_tree

LABELS = ("forward/blocks.1.attn[0]", "forward/blocks.1.attn[1]", "forward/blocks.1", "forward/blocks.2.attn", "loss/x")
GRID = CellGrid(
    labels=(*LABELS, "forward/(root)", "forward/<head>"),
    steps=(1, 2),
    families=("outputs",),
    family=np.zeros(7, dtype=np.intp),
    ratio=np.array([[0.1, 0.2], [0.5, 0.4], [0.05, 9.0], [40.0, 200.0], [1e6, 1e6], [np.inf, 1.0], [NAN, NAN]]),
    spread_ratio=np.full((7, 2), NAN),
    rank=np.zeros((7, 2), dtype=np.int32),
)
ITEM = re.compile(
    r'<i (?:style="background:var\(--(h\d)\)"|class="(none)")></i><span class="name">([^<]*)</span> <[^>]*>([^<]*)<'
)


def items(text: str) -> list[tuple[str, str, str]]:
    return [(colour or none, name, ratio) for colour, none, name, ratio in ITEM.findall(text)]


def test_a_module_has_the_colour_of_the_worst_output_at_or_below_it_in_the_step_of_the_divergence() -> None:
    assert items(module_tree(GRID, DIVERGENCE)) == [
        ("h7", "blocks", "40"),
        ("h3", "1", "0.5"),
        ("h3", "attn", "0.5"),
        ("h7", "2", "40"),
        ("h7", "attn", "40"),
        ("h8", "(root)", "inf"),
        ("none", "&lt;head&gt;", "not judged"),
    ]


def test_without_a_divergence_the_worst_over_all_steps_is_drawn() -> None:
    text = module_tree(GRID, None)
    assert items(text)[:3] == [("h8", "blocks", "200"), ("h6", "1", "9"), ("h3", "attn", "0.5")]
    assert ("over all steps" in text, " open" in text) == (True, False)


def test_the_path_to_the_divergence_is_open_and_no_other() -> None:
    text = module_tree(GRID, DIVERGENCE)
    assert re.findall(r'<details open><summary>.*?name">([^<]*)<', text) == ["blocks", "2"]
    assert text.count("<details") == 3


def test_without_outputs_there_is_no_tree() -> None:
    assert module_tree(replace(GRID, labels=tuple(f"grad/{number}" for number in range(7))), DIVERGENCE) == ""


def test_levels_end_where_they_say() -> None:
    assert [level(ratio) for ratio in (0.0, 0.01, 0.011, 1.0, 1.01, 100.0, float("inf"))] == [0, 0, 1, 4, 5, 7, 8]
