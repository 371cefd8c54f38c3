"""The sketch of an array at hand is the sketch that recording makes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from probe import sketch
from probe.capture import summary
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K


@pytest.mark.parametrize("shape", [(1,), (250,), (251,), (40, 300), (4100, 251)])
def test_an_array_has_the_summary_that_recording_takes(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    recorded, sample = np.full(SKETCH_K, np.nan, np.float32), np.full(SAMPLES, np.nan, np.float32)
    numbers = summary.host_row(torch.from_numpy(values), "blocks.0", summary.Scratch(), recorded, sample)
    np.testing.assert_allclose(sketch.sketch(values), recorded, rtol=1e-4, atol=1e-3)
    index = sketch.sample_index("blocks.0", values.size)
    np.testing.assert_array_equal(values.ravel()[index], sample[: len(index)])
    total, l2, total_abs, largest = numbers[:4]
    of_all = dict(zip(SCALARS, (l2, total / values.size, total_abs / values.size), strict=False))
    of_all |= {"rms": l2 / math.sqrt(values.size), "max_abs": largest}
    assert sketch.reductions(values) == pytest.approx(of_all, rel=1e-4, abs=1e-6)


def test_signs_and_positions_are_those_of_the_capture_format() -> None:
    signs = [float(sketch.sketch(np.eye(1, 12 * SKETCH_K, row * SKETCH_K))[0]) for row in range(12)]
    assert signs == [-1, 1, 1, -1, 1, 1, 1, -1, 1, -1, 1, -1]
    assert sketch.sample_index("blocks.0.attn", 1000)[:6].tolist() == [9, 9, 13, 45, 52, 53]
