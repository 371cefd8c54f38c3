"""How far two recorded values are apart."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from synthetic import Rows, signs

from probe.measure import distance
from probe.measure.distance import ASSUMED_EPSILONS, EPSILON, Measured, is_exact, measure, rounding_floor
from probe.measure.series import Catalog
from probe.point import Key, Kind
from probe.store.layout import StepRows

FORWARD = Key(kind=Kind.FORWARD, name="blocks.0", microbatch=0)
LOSS = Key(kind=Kind.LOSS, name="micro_loss", microbatch=0)
BATCH = Key(kind=Kind.BATCH, name="x", microbatch=0)
TEXT = Key(kind=Kind.EXPLICIT, name="mode")


def segment(*rows: tuple[Key, object], dtype: str = "float32", hashed: bool = False) -> StepRows:
    made = Rows(1, 0, 1)
    for key, value in rows:
        made.add(key, value, dtype=dtype, hashed=hashed)
    return made.finish()


def measured(baseline: StepRows, candidate: StepRows, divisor: np.ndarray | None = None) -> Measured:
    catalog = Catalog()
    return measure(baseline, candidate, catalog.align(baseline.keys, candidate.keys), divisor)


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_a_tensor_s_distance_is_relative_to_the_baseline_s_norm() -> None:
    value = noise((64, 96))
    moved = value + 1e-3 * noise((64, 96), 1)
    found = measured(segment((FORWARD, value)), segment((FORWARD, moved)))
    true = np.linalg.norm(moved - value) / np.linalg.norm(value)
    assert found.difference[0] == pytest.approx(true, rel=0.2)
    assert not found.number[0]


def test_a_number_s_distance_is_absolute_until_its_series_scale_is_known() -> None:
    found = measured(segment((LOSS, 2.0)), segment((LOSS, 2.5)))
    assert (found.difference[0], bool(found.number[0])) == (0.5, True)


@pytest.mark.parametrize("seed", range(4))
def test_a_constant_shift_cannot_hide_between_the_signs(seed: int) -> None:
    """With as many rows of either sign the sketch alone gives nothing of it; the means give all of it."""
    rows = next(count for count in range(10, 1000) if signs(count).sum() == 0)
    value = noise((rows, 251), seed)
    found = measured(segment((FORWARD, value)), segment((FORWARD, value + 0.1)))
    true = 0.1 * math.sqrt(value.size) / np.linalg.norm(value)
    assert found.difference[0] >= 0.99 * true


def test_the_means_add_nothing_to_rounding_noise() -> None:
    value = noise((64, 96))
    distances = []
    for seed in range(30):
        moved = value + 1e-6 * noise((64, 96), 100 + seed)
        baseline, candidate = segment((FORWARD, value)), segment((FORWARD, moved))
        blind = replace(candidate, scalars={**candidate.scalars, "mean": baseline.scalars["mean"]})
        distances.append(measured(baseline, candidate).difference[0] / measured(baseline, blind).difference[0])
    assert distances == [1.0] * 30


@pytest.mark.parametrize(
    ("baseline", "candidate", "expected"),
    [(0.0, 0.0, 0.0), (0.0, 1.0, 1.0), (0.0, 1e-45, 0.0), (1e-45, 0.0, 0.0), (1.0, 0.0, 1.0)],
)
def test_zero_tensors_have_a_finite_distance(baseline: float, candidate: float, expected: float) -> None:
    shape = (4, 251)
    found = measured(segment((FORWARD, np.full(shape, baseline))), segment((FORWARD, np.full(shape, candidate))))
    assert found.difference[0] == pytest.approx(expected, rel=0.2)


def test_the_candidate_is_divided_by_its_agreed_scale() -> None:
    value = noise((64, 96))
    found = measured(segment((FORWARD, value)), segment((FORWARD, 1024 * value)), np.array([1024.0]))
    assert found.difference[0] == 0.0


def test_the_batch_is_judged_by_its_bits() -> None:
    value = noise((8, 8))
    same = measured(segment((BATCH, value), hashed=True), segment((BATCH, value), hashed=True))
    other = measured(segment((BATCH, value), hashed=True), segment((BATCH, value + 1e-9), hashed=True))
    assert (same.exact[0], same.unequal[0], other.exact[0], other.unequal[0]) == (True, False, True, True)


def test_an_attention_mask_with_infinities_is_no_fault_when_its_bits_agree() -> None:
    mask = np.array([[0.0, -np.inf], [0.0, 0.0]])
    same = measured(segment((BATCH, mask), hashed=True), segment((BATCH, mask), hashed=True))
    nan = np.array([[0.0, np.nan], [0.0, 0.0]])
    both = measured(segment((BATCH, nan), hashed=True), segment((BATCH, nan), hashed=True))
    assert (int(same.nonfinite[0]), int(both.nonfinite[0])) == (0, 3)


def test_values_that_are_not_finite_are_told_apart_by_arm() -> None:
    good, bad = np.ones((2, 2)), np.array([[1.0, np.nan], [1.0, 1.0]])
    codes = [
        int(measured(segment((FORWARD, one)), segment((FORWARD, two))).nonfinite[0])
        for one, two in ((good, good), (bad, good), (good, bad), (bad, bad))
    ]
    assert codes == [0, 1, 2, 3]


def test_another_shape_is_not_compared() -> None:
    found = measured(segment((FORWARD, np.ones((2, 3)))), segment((FORWARD, np.ones((3, 2)))))
    assert bool(found.reshaped[0])
    assert math.isnan(found.difference[0])


def test_text_is_equal_or_not() -> None:
    same = measured(segment((TEXT, "flash")), segment((TEXT, "flash")))
    other = measured(segment((TEXT, "flash")), segment((TEXT, "math")))
    assert (same.unequal[0], other.unequal[0]) == (False, True)
    assert other.texts == {0: ("flash", "math")}


@pytest.mark.parametrize(
    ("key", "dtype", "exact"),
    [
        (BATCH, "float32", True),
        (TEXT, "int", True),
        (TEXT, "bool", True),
        (TEXT, "int64", True),
        (TEXT, "float", False),
        (FORWARD, "bfloat16", False),
        (Key(kind=Kind.STATE, name="train_mode"), "float32", True),
    ],
)
def test_the_kinds_that_are_judged_exactly(key: Key, dtype: str, exact: bool) -> None:
    assert is_exact(key, dtype) is exact


def test_the_rounding_floor_is_one_ulp_of_the_largest_element() -> None:
    value = np.ones(100)
    value[0] = 440.0
    rows = segment((FORWARD, value), (LOSS, 3.0), dtype="bfloat16")
    floor = rounding_floor(rows)
    assert floor[0] == pytest.approx(EPSILON["bfloat16"] * 440 / np.linalg.norm(value))
    assert floor[1] == pytest.approx(3 * EPSILON["bfloat16"])


def test_the_assumed_tolerance_follows_the_recorded_type() -> None:
    rows = segment((FORWARD, np.ones(4)), dtype="bfloat16")
    assert measured(rows, rows).assumed[0] == ASSUMED_EPSILONS * EPSILON["bfloat16"]


@pytest.mark.skipif(distance.compiled is None, reason="there was no C compiler when the package was installed")
@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 250, 251, 256])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 300])
def test_the_compiled_module_gives_the_same_bits_as_numpy(
    width: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = np.random.default_rng(width * count)
    sizes = np.float32(10) ** made.integers(-18, 18, (2, count, width)).astype(np.float32)
    baseline, candidate = made.standard_normal((2, count, width), dtype=np.float32) * sizes
    baseline[1:2, 0], baseline[2:3, -1], candidate[3:4, 0] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        compiled = distance._squared_distance(baseline, candidate, None)
        monkeypatch.setattr(distance, "compiled", None)
        np.testing.assert_array_equal(compiled, distance._squared_distance(baseline, candidate, None), strict=True)


@pytest.mark.skipif(distance.compiled is None, reason="there was no C compiler when the package was installed")
@pytest.mark.parametrize("sizes", [(8, 4, 8), (8, 8, 12), (12, 12, 16), (8, 8, 0)])
def test_the_compiled_module_refuses_blocks_that_do_not_fit(sizes: tuple[int, int, int]) -> None:
    squared = distance.compiled.squared
    with pytest.raises(ValueError, match=r"^squared: the blocks have other sizes\.$"):
        squared(*(bytearray(size) for size in sizes))
