"""The compiled reduction: what it reads where it lies, what it refuses, and its numbers, those of any other tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from probe.capture import summary
from probe.store.layout import SAMPLES, SKETCH_K

pytestmark = pytest.mark.skipif(
    summary.compiled is None, reason="there was no C compiler when the package was installed"
)


def host(tensor: torch.Tensor, name: str = "x") -> tuple[tuple[float, ...], np.ndarray, np.ndarray]:
    sketch, sample = np.full(SKETCH_K, np.nan, np.float32), np.full(SAMPLES, np.nan, np.float32)
    return summary.host_row(tensor, name, summary.Scratch(), sketch, sample), sketch, sample


class Matrices:
    """Rows of which one is written."""

    def __init__(self, count: int) -> None:
        self.sums, self.counts = np.full((count, 4), 9.0), np.full((count, 2), 9, np.int64)
        self.sketch = np.full((count, SKETCH_K), 9.0, np.float32)
        self.sample = np.full((count, SAMPLES), 9.0, np.float32)


def test_the_compiled_reduction_refuses_buffers_that_do_not_fit() -> None:
    tensor, index, m = torch.ones(10), np.arange(10), Matrices(2)
    fits = (tensor.data_ptr(), 10, 0, 0, 1, index, m.sums, m.counts, m.sketch, m.sample)
    summary.compiled.reduce(*fits)
    assert m.sums[1].tolist() == pytest.approx([10, math.sqrt(10), 10, 1])
    wrong = {
        0: [0],
        2: [3, -1],
        4: [2, -1],
        5: [index + 1, index - 1, np.zeros(65, np.int64)],
        6: [m.sums[1:].copy()],
        7: [m.counts[1:].copy()],
        8: [m.sketch[1:].copy(), m.sketch[:, 1:].copy()],
        9: [m.sample[:, :9].copy()],
    }
    for at, values in wrong.items():
        for value in values:
            with pytest.raises(ValueError, match="a buffer has another size, an index is outside the tensor, or"):
                summary.compiled.reduce(*fits[:at], value, *fits[at + 1 :])
    same = (tensor.data_ptr(), 10, 0, index, m.sample[1])
    assert summary.compiled.samples_are(*same)
    for at, value in {0: 0, 2: 3, 3: index + 1, 4: m.sample[1, :9].copy()}.items():
        with pytest.raises(ValueError, match="a buffer has another size, an index is outside the tensor, or"):
            summary.compiled.samples_are(*same[:at], value, *same[at + 1 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 4016, 30_001])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_plain_tensor_has_the_row_of_any_other_and_its_copy_every_element_and_nothing_beyond(
    dtype: torch.dtype, size: int, shift: int
) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(6)).to(dtype)
    room = torch.full((size + 4,), 9.0, dtype=dtype)
    rows = Matrices(3)
    assert summary.is_plain(tensor)
    summary.reduce_plain(tensor, "x", rows, 1, room[shift:].data_ptr())
    numbers, sketch, sample = host(tensor)
    assert (*rows.sums[1], *rows.counts[1]) == numbers
    np.testing.assert_array_equal(rows.sketch[1], sketch)
    np.testing.assert_array_equal(rows.sample[1, : min(size, SAMPLES)], sample[: min(size, SAMPLES)])
    for matrix in (rows.sums, rows.counts, rows.sketch, rows.sample):
        assert (matrix[[0, 2]] == 9).all()
    assert (rows.sample[1, size:] == 9).all()
    assert torch.equal(room[shift : shift + size], tensor)
    assert torch.equal(room[:shift], torch.full((shift,), 9.0, dtype=dtype))
    assert torch.equal(room[shift + size :], torch.full((4 - shift,), 9.0, dtype=dtype))
    assert summary.fingerprint_plain(tensor) == summary.fingerprint(tensor)


def test_what_is_no_plain_tensor_is_told_from_one() -> None:

    class Wrapper(torch.Tensor):
        pass

    ones = torch.ones(4, 4)
    lazy = torch.view_as_complex(torch.ones(4, 2)).conj().imag
    special = {
        "strided": ones.t()[:, 1:],
        "half": ones.half(),
        "meta": ones.to("meta"),
        "sparse": ones.to_sparse(),
        "wrapped": ones.as_subclass(Wrapper),
        "negated": lazy,
        "complex": torch.view_as_complex(torch.ones(4, 2)),
        "empty": ones[:0],
    }
    assert summary.is_plain(ones)
    assert summary.is_plain(torch.nn.Parameter(ones))
    assert [name for name, tensor in special.items() if summary.is_plain(tensor)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_samples_tell_a_change_of_any_of_them(dtype: torch.dtype) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(6)).to(dtype)
    index, sample = summary.sample_index("x", 1000), host(tensor)[2]
    assert summary.samples_are(tensor, "x", sample)
    for place in index[[0, 31, 63]].tolist():
        changed = tensor.clone()
        changed[place] += 0.1
        assert not summary.samples_are(changed, "x", sample)
    tensor[index[5]] = math.nan
    assert not summary.samples_are(tensor, "x", sample)
    assert summary.samples_are(tensor, "x", host(tensor)[2])
