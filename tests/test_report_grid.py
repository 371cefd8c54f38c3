"""The cells that the plots are drawn from."""

from __future__ import annotations

import re

import numpy as np
import pytest
from report_cases import GRID, NAN
from synthetic import run

from probe.check import default_checks
from probe.judge.calibrate import calibrate
from probe.judge.compare import compare_cells
from probe.point import Key, Kind
from probe.report.grid import CellGrid, encoded, grid_of, largest


def test_a_family_is_the_largest_of_its_series_at_each_step() -> None:
    ratio, spread = GRID.of_family(1)
    np.testing.assert_array_equal(ratio, [0.5, 40.0, 2.5])
    np.testing.assert_array_equal(spread, [0.3, 0.3, NAN])


def test_a_column_of_nothing_has_no_largest() -> None:
    np.testing.assert_array_equal(largest(np.array([[1.0, NAN], [2.0, NAN]])), [2.0, NAN])
    np.testing.assert_array_equal(largest(np.empty((0, 2))), [NAN, NAN])


def test_codes_tell_not_judged_zero_and_ratios_apart() -> None:
    ratio = np.array([NAN, 0.0, 1e-9, 1e-8, 1.0, 1e8, np.inf])
    np.testing.assert_array_equal(encoded(ratio), [0, 1, 2, 2, 32768, 65535, 65535])


def test_codes_keep_a_ratio_to_a_thousandth() -> None:
    ratio = np.geomspace(1e-7, 1e7, 1001)
    again = 10.0 ** (-8 + 16 * (encoded(ratio).astype(float) - 2) / 65533)
    assert np.abs(again / ratio - 1).max() < 1e-3


def test_codes_do_not_carry_a_ratio_across_the_tolerance() -> None:
    ratio = np.array([0.9999999, 1.0, 1.0000001, 1.0001])
    assert (encoded(ratio) <= 32768).tolist() == [True, True, False, False]
    assert 10.0 ** (-8 + 16 * (32768 - 2) / 65533) <= 1 < 10.0 ** (-8 + 16 * (32769 - 2) / 65533)


def test_arrays_of_another_shape_are_refused() -> None:
    message = "CellGrid.ratio has shape (1, 2), and must have (1, 3) (series, steps)."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CellGrid(
            labels=("a",),
            steps=(1, 2, 3),
            families=("f",),
            family=np.zeros(1, dtype=np.intp),
            ratio=np.zeros((1, 2)),
            spread_ratio=np.zeros((1, 3)),
            rank=np.zeros((1, 3), dtype=np.int32),
        )


def attention_of_block_1(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
    """Scale one attention output on rank 1 in step 2."""
    return value * 1.5 if (key.kind, key.name, step, rank) == (Kind.FORWARD, "blocks.1.attn", 2, 1) else value


def test_the_grid_of_a_comparison_is_in_execution_order_and_worst_over_ranks() -> None:
    checks = default_checks()
    baselines = [run(f"base-{number}", run_seed=number, ranks=2, layers=2, microbatches=2) for number in range(3)]
    candidate = run("opt", run_seed=9, ranks=2, layers=2, microbatches=2, code="bbbb", fault=attention_of_block_1)
    comparison, judgements = compare_cells(baselines, [candidate], calibrate(baselines), checks=checks)
    grid = grid_of(judgements, checks)
    assert grid.labels == (
        "param/blocks.0.lora_A.weight:before",
        "param/blocks.1.lora_A.weight:before",
        "batch/x",
        "forward/blocks.0.attn",
        "forward/blocks.0",
        "forward/blocks.1.attn",
        "forward/blocks.1",
        "loss/micro_loss",
        "backward/blocks.1",
        "backward/blocks.1.attn",
        "backward/blocks.0",
        "backward/blocks.0.attn",
        "grad/blocks.0.lora_A.weight",
        "grad/blocks.1.lora_A.weight",
        "grad_norm/grad_norm",
        "lr/lr",
        "param/blocks.0.lora_A.weight",
        "param/blocks.1.lora_A.weight",
        "state/train_mode",
    )
    assert [grid.families[number] for number in grid.family[3:7]] == ["attention outputs", "block outputs"] * 2
    assert (grid.steps, np.isnan(grid.ratio[0]).tolist()) == ((1, 2, 3), [False, True, True])
    at = grid.labels.index("forward/blocks.1.attn")
    assert np.argwhere(grid.ratio > 10).tolist() == [[at, 1]]
    assert (grid.rank[at, 1], grid.rank[0].tolist()) == (1, [0, -1, -1])
    worst = max(
        check.worst.difference / check.worst.tolerance
        for check in comparison.checks
        if check.what == "attention outputs"
    )
    assert grid.ratio[at, 1] == pytest.approx(worst)
    assert np.nanmax(grid.spread_ratio) <= 0.34


def test_only_what_repeats_in_every_candidate_counts_in_the_grid() -> None:
    checks = default_checks()
    baselines = [run(f"base-{number}", run_seed=number, ranks=2) for number in range(3)]
    candidates = [
        run("opt-0", run_seed=9, ranks=2, code="bbbb", fault=attention_of_block_1),
        run("opt-1", run_seed=10, ranks=2, code="bbbb"),
    ]
    judgements = compare_cells(baselines, candidates, calibrate(baselines), checks=checks)[1]
    assert np.nanmax(grid_of(judgements[:1], checks).ratio) > 10
    assert np.nanmax(grid_of(judgements, checks).ratio) < 2
