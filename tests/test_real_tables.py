"""The tables of real pull requests: declared as plans, fed with captures that differ as they did, and read back.

The figures are those that the authors printed; their captures were not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from table_captures import Quantity, capture

from probe.compare import compare
from probe.comparison import Comparison, Outcome, Verdict
from probe.plan import load_plan
from probe.point import STEP_CLOCK, Kind
from probe.point import Key as NewKey
from probe.report.markdown import to_markdown

Key = lru_cache(maxsize=None)(NewKey)
"""One key for one quantity, as the reader makes them: comparing the same objects costs nothing."""
PLANS = Path(__file__).parent / "plans"
EXAMPLE = Path(__file__).parent.parent / "examples" / "plans" / "lora.toml"


def table(comparison: Comparison) -> dict[str, tuple[str, str, str]]:
    """Read the Markdown's table back: row to unmodified, difference, tolerance."""
    rows = {}
    for line in to_markdown(comparison).splitlines():
        # A bar inside a cell is escaped.
        cells = [cell.strip() for cell in line.replace("\\|", "\0").split("|")[1:-1]]
        if len(cells) == 5 and not cells[0].startswith(("---", "What is recorded")):
            what, _, spread, difference, tolerance = (cell.replace("\0", "|").replace("\\", "") for cell in cells)
            rows[what] = (spread, difference, tolerance)
    return rows


# DiffSynth-Studio#1680


def lora_names() -> Iterator[str]:
    modules = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    for block in [f"blocks.{n}" for n in range(50)] + [f"text_refiner.{n}" for n in range(2)]:
        for module in modules:
            for half in "AB":
                yield f"{block}.{module}.lora_{half}.weight"


LORA = tuple(lora_names())
TAIL = tuple(name for name in LORA if name.startswith("blocks.4") and name[8] != ".")


@lru_cache(maxsize=None)
def lora_gradients(norm: float, tail: float) -> tuple[Quantity, ...]:
    l2 = norm / float(np.sqrt(len(LORA)))
    return tuple(
        Quantity(
            key=Key(kind=Kind.GRAD, name=name, microbatch=STEP_CLOCK),
            scalars={"l2": l2 * (tail if name in TAIL else 1.0)},
        )
        for name in LORA
    )


@lru_cache(maxsize=None)
def lora_parameters(sum_squares: float, mean_abs: tuple[tuple[str, float], ...]) -> tuple[Quantity, ...]:
    special = dict(mean_abs)
    l2 = float(np.sqrt(sum_squares / len(LORA)))
    return tuple(
        Quantity(
            key=Key(kind=Kind.PARAM, name=name, microbatch=STEP_CLOCK),
            scalars={"l2": l2, "mean_abs": special.get(name, 0.01 if "lora_A" in name else 5e-4)},
        )
        for name in LORA
    )


def diffsynth(arm: str) -> Callable[[int, int], Iterator[Quantity]]:
    """Return what one arm records; `opt` differs by the figures of the table."""

    def made(step: int, rank: int) -> Iterator[Quantity]:
        def at(place: tuple[int, int], base: float, other: float) -> float:
            return other if arm == "opt" and place == (step, rank) else base

        def forward(item: str, mean_abs: float) -> Quantity:
            key = Key(kind=Kind.FORWARD, name="(root)", item=item, microbatch=0)
            return Quantity(key=key, scalars={"mean_abs": mean_abs, "l2": 100 * mean_abs}, dtype="bfloat16")

        yield Quantity(key=Key(kind=Kind.EXPLICIT, name="timestep", microbatch=0), value=1000.0 - 7 * step + rank)
        if step == 1:
            for name in ("video", "audio", "text"):
                yield Quantity(key=Key(kind=Kind.EXPLICIT, name=f"{name}_shape"), text=f"[1, 16, {rank + 1}, 60, 104]")
        yield forward("[0]", at((17, 2), 0.5, 0.5 * 1.0041))
        yield forward("[1]", at((8, 5), 0.25, 0.25 * 1.0051))
        loss = 0.0076 / 0.024
        yield Quantity(key=Key(kind=Kind.LOSS, name="micro_loss", microbatch=0), value=at((22, 6), loss, loss + 0.0076))
        yield from lora_gradients(at((14, 3), 0.043, 0.247), at((1, 4), 1.0, 1.051))
        special = (
            ("blocks.9.mlp.fc1.lora_A.weight", at((30, 7), 0.01, 0.01 * 1.0095)),
            ("blocks.31.mlp.fc2.lora_B.weight", at((30, 0), 5e-4, 5e-4 + 1.4e-4)),
        )
        yield from lora_parameters(at((30, 1), 1.0, 1.0018), special)

    return made


@pytest.fixture(scope="module")
def diffsynth_1680() -> Comparison:
    base, opt = (capture(arm, range(1, 31), 8, diffsynth(arm)) for arm in ("base", "opt"))
    return compare([base], [opt], None, checks=load_plan(PLANS / "diffsynth_1680.toml").checks)


def test_diffsynth_1680_passes_with_its_5040_checks(diffsynth_1680: Comparison) -> None:
    assert diffsynth_1680.outcome is Outcome.EQUIVALENT, diffsynth_1680.reason
    assert "0 of 5,040 values are above tolerance." in to_markdown(diffsynth_1680)
    assert sum(check.cells for check in diffsynth_1680.checks) == 5040


def test_diffsynth_1680_has_the_rows_and_numbers_of_the_table(diffsynth_1680: Comparison) -> None:
    assert table(diffsynth_1680) == {
        "mean |.| of each LoRA A after step 30 (208 quantities, 1,664 values)": ("-", "0.95 %", "2 % (sees 2 %)"),
        "mean |.| of each LoRA B after step 30 (208 quantities, 1,664 values)": (
            "-",
            "0.00014 abs",
            "0.0004 abs (sees 80 %)",
        ),
        "loss (1 quantity, 240 values)": ("-", "0.0076 abs (2.4 %)", "15 % or 0.03 abs (sees 15 %)"),
        "DiT video output, mean |noise_pred| (1 quantity, 240 values)": ("-", "0.41 %", "2 % (sees 2 %)"),
        "DiT audio output, mean |noise_pred| (1 quantity, 240 values)": ("-", "0.51 %", "2.5 % (sees 2.5 %)"),
        "LoRA sum of squares (1 quantity, 240 values)": ("-", "0.18 %", "1.5 % (sees 1.5 %)"),
        "LoRA gradient norm, blocks 40-49, step 1 (1 quantity, 8 values)": ("-", "5.1 %", "10 % (sees 10 %)"),
        "LoRA gradient norm, all 416 tensors (1 quantity, 240 values)": (
            "-",
            "5.74x; at step 14, rank 3, `*lora_*(norm)`: expected 0.043, actual 0.247",
            "20x (sees 1,900 %)",
        ),
        "gradient tensor count (1 quantity, 240 values)": ("-", "identical (416)", "exact (sees any)"),
        "sampled timestep, input shapes (4 quantities, 264 values)": ("-", "identical", "exact (sees any)"),
    }
