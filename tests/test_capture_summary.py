"""A tensor's row: right numbers, the same on every path, and no trace left in the run."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from probe.capture import device, summary
from probe.store.layout import SAMPLES, SKETCH_K


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def reduction(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to reduce a tensor in host memory."""
    if request.param == "torch":
        monkeypatch.setattr(summary, "compiled", None)
    elif summary.compiled is None:
        pytest.skip("the compiled reduction was not built: no C compiler when the package was installed")
    return request.param


def host(tensor: torch.Tensor, name: str = "x") -> tuple[tuple[float, ...], np.ndarray, np.ndarray]:
    sketch, sample = np.full(SKETCH_K, np.nan, np.float32), np.full(SAMPLES, np.nan, np.float32)
    return summary.host_row(tensor, name, summary.Scratch(), sketch, sample), sketch, sample


def definition(tensor: torch.Tensor) -> np.ndarray:
    """The sketch as its definition reads, element by element."""
    flat = tensor.double().reshape(-1).numpy()
    signs = summary.row_signs(0, -(-len(flat) // SKETCH_K)).astype(np.float64)
    out = np.zeros(SKETCH_K)
    for index, value in enumerate(flat):
        out[index % SKETCH_K] += signs[index // SKETCH_K] * value
    return out


@pytest.mark.parametrize("shape", [(1,), (7,), (251,), (252,), (3, 500), (40, 300)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_a_row_holds_the_sums_the_sketch_and_the_samples_of_its_definition(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    numbers, sketch, sample = host(tensor)
    exact = tensor.double().reshape(-1)
    wanted = (exact.sum(), exact.norm(), exact.abs().sum(), exact.abs().max(), 0, exact.numel())
    assert numbers == pytest.approx([float(w) for w in wanted], rel=2e-6, abs=1e-5)
    np.testing.assert_allclose(sketch, definition(tensor), rtol=1e-5, atol=1e-5 * max(1.0, float(exact.norm())))
    index = summary.sample_index("x", exact.numel())
    np.testing.assert_array_equal(sample[: len(index)], exact.numpy()[index].astype(np.float32))
    assert np.isnan(sample[len(index) :]).all()


def test_the_device_path_gives_the_numbers_of_the_host_path() -> None:
    tensor = torch.randn(70, 300, generator=torch.Generator().manual_seed(2))
    numbers, sketch, sample = host(tensor)
    row = device.device_row(tensor, "x", summary.Scratch()).numpy()
    np.testing.assert_allclose(row[:6], numbers, rtol=2e-6, atol=1e-4)
    # 83 rows are added up in fp32 there, in another order.
    np.testing.assert_allclose(row[6 : 6 + SKETCH_K], sketch, rtol=0, atol=1e-6 * float(np.abs(sketch).max()))
    np.testing.assert_array_equal(row[6 + SKETCH_K :].astype(np.float32), sample)


def test_long_tensors_are_summed_in_blocks_to_the_same_sketch() -> None:
    rows = summary.ROWS_PER_BLOCK + 5
    tensor = torch.randn(rows * SKETCH_K + 3, generator=torch.Generator().manual_seed(3))
    _, sketch, _ = host(tensor)
    signs = torch.from_numpy(summary.row_signs(0, rows)).double()
    wanted = signs @ tensor[: rows * SKETCH_K].double().view(rows, SKETCH_K)
    wanted[:3] += float(summary.row_signs(rows, 1)[0]) * tensor[rows * SKETCH_K :].double()
    np.testing.assert_allclose(sketch, wanted.numpy(), rtol=1e-5, atol=1e-4)


def test_the_signs_and_the_sample_positions_never_change() -> None:
    # Captures of different versions are compared with each other, so these are part of the format.
    assert summary.row_signs(0, 12).astype(int).tolist() == [-1, 1, 1, -1, 1, 1, 1, -1, 1, -1, 1, -1]
    assert summary.row_signs(100_000, 5).tolist() == summary.row_signs(0, 100_005)[100_000:].tolist()
    assert summary.sample_index("blocks.0.attn", 1000)[:6].tolist() == [9, 9, 13, 45, 52, 53]


def test_the_norm_of_a_sketched_difference_is_the_norm_of_the_difference_within_a_fifth() -> None:
    generator = torch.Generator().manual_seed(4)
    for _ in range(20):
        a, b = torch.randn(64, 96, generator=generator), torch.randn(64, 96, generator=generator)
        estimate = np.linalg.norm(host(a)[1] - host(b)[1])
        assert estimate == pytest.approx(float((a - b).norm()), rel=0.2)


def test_layout_does_not_matter_only_logical_order_does() -> None:
    tensor = torch.randn(30, 40, generator=torch.Generator().manual_seed(5))
    (numbers, sketch, sample), (n2, s2, p2) = host(tensor.t().contiguous().t()), host(tensor)
    assert numbers == n2
    np.testing.assert_array_equal(sketch, s2)
    np.testing.assert_array_equal(sample, p2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_counted(bad: float) -> None:
    tensor = torch.ones(3, 400)
    tensor[1, 7], tensor[2, 9] = bad, bad
    assert host(tensor)[0][4:] == (2, 1200)
    assert device.device_row(tensor, "x", summary.Scratch())[4:6].tolist() == [2, 1200]


@pytest.mark.parametrize("place", [0, 5, 251 * 700, -1])
def test_one_nan_anywhere_in_a_long_tensor_is_counted_and_is_the_largest(place: int) -> None:
    tensor = torch.ones(SKETCH_K * 1500 + 7)
    tensor[place] = math.nan
    total, l2, sum_abs, max_abs, nonfinite, _ = host(tensor)[0]
    assert nonfinite == 1
    assert all(math.isnan(number) for number in (total, l2, sum_abs, max_abs))


def test_the_lazily_negated_and_conjugated_are_reduced_as_what_they_stand_for() -> None:
    numbers = torch.view_as_complex(torch.randn(30, 40, 2, generator=torch.Generator().manual_seed(5)))
    for lazy in (numbers.conj().imag, numbers.conj()):
        assert lazy.is_neg() or lazy.is_conj()
        plain = lazy.resolve_conj().resolve_neg()
        for one, two in zip(host(lazy), host(plain), strict=True):
            np.testing.assert_array_equal(one, two)
