"""`probe.close_to` in plain assertions, and what pytest shows when they fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import probe
from probe.equivalence.close import CloseTo
from probe.errors import IncomparableError, PlanError, ToleranceError
from probe.judge.tolerance import Tolerance, Tolerances
from probe.store.folder import write_manifest
from probe.store.writer import RankWriter
from tests.step_rows import make_rows

pytest_plugins = ["pytester"]

ONES = torch.ones(4, 8)


def changed(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.ones(4, 8, dtype=dtype)
    tensor[1, 3] = value
    return tensor


def test_what_is_close_is_equal_from_either_side() -> None:
    near = ONES * (1 + 1e-6)
    assert near == probe.close_to(ONES)
    assert probe.close_to(ONES) == near
    assert near.numpy() == probe.close_to(ONES.numpy())
    assert {"a": [near, 3, "text", None], "b": (near,)} == probe.close_to({"a": [ONES, 3, "text", None], "b": (ONES,)})
    assert not near == probe.close_to(ONES * 1.001)  # noqa: SIM201 - both operators
    assert near != probe.close_to(ONES * 1.001)


@pytest.mark.parametrize(
    ("actual", "expected", "tolerances", "lines"),
    [
        (
            changed(1.5),
            ONES,
            None,
            [
                "1 of 1 value not close (||a - b|| / ||b||)",
                "At: f32[4,8]: difference 8.84 %, allowed 3.81e-06 (assumed: 32 eps)",
                "  furthest off: [1, 3] expected 1, actual 1.5",
                "Would have passed: close_to(expected, 0.089)",
            ],
        ),
        (
            {"x": changed(1.5), "y": [ONES, changed(3.0)]},
            {"x": ONES, "y": [ONES, ONES]},
            {"*": 0.01, "y*": 0.001},
            [
                "2 of 3 values not close (||a - b|| / ||b||)",
                "First: x f32[4,8]: difference 8.84 %, allowed 1 % (declared)",
                "  furthest off: [1, 3] expected 1, actual 1.5",
                "Worst: y[1] f32[4,8]: difference 35.4 %, allowed 1 % (declared)",
                "  furthest off: [1, 3] expected 1, actual 3",
                "Would have passed: close_to(expected, 0.36)",
            ],
        ),
        (
            changed(float("nan")),
            ONES,
            0.5,
            [
                "1 of 1 value not close (||a - b|| / ||b||)",
                "At: f32[4,8] is not finite in 1 element",
                "  furthest off: [1, 3] expected 1, actual NaN",
                "Would have passed: no tolerance",
            ],
        ),
        (
            changed(1.0, torch.bfloat16),
            ONES,
            None,
            [
                "1 of 1 value not close (||a - b|| / ||b||)",
                "At: is bf16[4,8], expected f32[4,8]",
                "Would have passed: no tolerance",
            ],
        ),
        (
            {"a": ONES, "c": ONES},
            {"a": ONES, "b": torch.ones(2, dtype=torch.int64)},
            None,
            [
                "2 of 2 values not close (||a - b|| / ||b||)",
                "First: b i64[2] is missing",
                "Would have passed: no tolerance",
            ],
        ),
        (
            torch.tensor([1, 3]),
            torch.tensor([1, 2]),
            None,
            [
                "1 of 1 value not close (||a - b|| / ||b||)",
                "At: i64[2]: difference 44.7 %, allowed 0 (judged exactly)",
                "  furthest off: [1] expected 2, actual 3",
                "Would have passed: no tolerance",
            ],
        ),
        (
            {"mode": "eval"},
            {"mode": "train"},
            None,
            [
                "1 of 1 value not close (||a - b|| / ||b||)",
                "At: mode is 'eval', expected 'train'",
                "Would have passed: no tolerance",
            ],
        ),
    ],
    ids=["tensor", "structure", "not finite", "another type", "other names", "whole numbers", "text"],
)
def test_the_explanation_names_places_and_numbers(
    actual: object, expected: object, tolerances: object, lines: list[str]
) -> None:
    close = CloseTo(expected, tolerances)  # type: ignore[arg-type]
    assert actual != close
    assert close.explain(actual) == lines


def test_what_would_have_passed_passes() -> None:
    assert changed(1.5) == probe.close_to(ONES, 0.089)
    assert changed(1.5) != probe.close_to(ONES, 0.088)


def test_infinities_in_the_same_places_are_equal_and_nan_never_is() -> None:
    mask = torch.tensor([0.0, float("-inf")])
    assert mask == probe.close_to(mask.clone())
    assert torch.tensor([float("nan")]) != probe.close_to(torch.tensor([float("nan")]), 1.0)


def test_a_shape_that_broadcasts_is_not_equal() -> None:
    assert torch.ones(1) != probe.close_to(ONES)
    assert np.ones((4, 1), np.float32) != probe.close_to(np.ones((4, 8), np.float32))


def test_calibrated_tolerances_are_found_by_name() -> None:
    member = Tolerance(spread=(0.01,), floor=(0.0,), tolerance=(0.03,))
    tolerances = Tolerances(
        k=3.0, created_utc="", steps=(1,), world_size=1, runs=(), families={"outputs": {"forward/attn": member}}
    )
    assert probe.close_to({"attn": ONES}, tolerances) == {"attn": ONES * 1.02}
    assert probe.close_to({"attn": ONES}, tolerances) != {"attn": ONES * 1.04}
    with pytest.raises(ToleranceError) as caught:
        assert probe.close_to({"mlp": ONES}, tolerances) == {"mlp": ONES}
    assert str(caught.value) == (
        "No tolerance is known for 'mlp'. Known: forward/attn ... Name the values as the tolerance file does."
    )


def test_tolerances_of_another_kind_are_refused_at_once() -> None:
    with pytest.raises(PlanError) as caught:
        probe.close_to(ONES, [1e-5])
    assert str(caught.value) == (
        "Tolerances are 'list'. Allowed: a number, a mapping of selections to numbers, a tolerance file, or None to "
        "calibrate."
    )


def test_the_repr_says_what_is_expected_and_no_values() -> None:
    found = [repr(probe.close_to(value)) for value in (ONES, {"a": ONES, "b": 1.0}, [ONES])]
    assert found == ["close_to(f32[4,8])", "close_to(dict of 2 values)", "close_to(list of 1 values)"]


def test_pytest_shows_the_explanation_whole_and_not_the_tensors(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch
        import probe

        def test_close():
            ones, other = torch.ones(4, 8), torch.ones(4, 8)
            other[1, 3] = 1.5
            assert {"x": other, "y": [ones, other * 2]} == probe.close_to({"x": ones, "y": [ones, ones]})
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    assert [line for line in result.outlines if line.startswith("E ")] == [
        "E       assert 2 of 3 values not close (||a - b|| / ||b||)",
        "E         First: x f32[4,8]: difference 8.84 %, allowed 3.81e-06 (assumed: 32 eps)",
        "E           furthest off: [1, 3] expected 1, actual 1.5",
        "E         Worst: y[1] f32[4,8]: difference 105 %, allowed 3.81e-06 (assumed: 32 eps)",
        "E           furthest off: [1, 3] expected 1, actual 3",
        "E         Would have passed: close_to(expected, 1.1)",
    ]
    assert not any("tensor(" in line for line in result.outlines)


def capture(path: Path, run_id: str, seed: int) -> Path:
    writer = RankWriter(path, run_id=run_id, rank=0, world_size=1)
    writer.write(make_rows(seed=seed, nonfinite=np.zeros(9, np.int64)))
    writer.close(error=None, dropped_steps=[])
    write_manifest(path, {"run_id": run_id, "world_size": 1})
    return path


def test_two_captures_are_compared_as_by_the_command(tmp_path: Path) -> None:
    one, same, other = (capture(tmp_path / name, name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    close = probe.close_to(one)
    assert repr(close) == f"close_to({str(one)!r})"
    assert same == close
    assert other != close
    assert close.explain(other)[0] == (
        "Different: A value that is judged exactly is not equal: forward/blocks.2.attn at step 1. The first divergence "
        "is forward of blocks.2.attn at step 1, rank 0 (forward)."
    )
    with pytest.raises(IncomparableError, match="are the same run 'a'"):
        assert one == close
