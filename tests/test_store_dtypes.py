from __future__ import annotations

import numpy as np
import pytest
import torch

from probe.store.dtypes import BITS, widen


@pytest.mark.parametrize("dtype", [name for name in BITS if name.startswith("float8") or name == "bfloat16"])
def test_every_code_of_a_narrow_type_widens_to_the_value_torch_gives_it(dtype: str) -> None:
    size = np.dtype(BITS[dtype]).itemsize
    codes = np.arange(256**size).astype(BITS[dtype])
    signed = torch.from_numpy(codes.view(f"<i{size}"))
    expected = signed.view(getattr(torch, dtype)).to(torch.float32).numpy()
    actual = widen(codes, dtype)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual[actual == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize("dtype", list(BITS))
def test_bits_have_the_size_of_torch_s_element_and_exist_there(dtype: str) -> None:
    assert getattr(torch, dtype).itemsize == np.dtype(BITS[dtype]).itemsize


def test_other_types_stay_as_they_are() -> None:
    bits = np.array([[1, -2]], dtype=np.int16)
    assert widen(bits, "int16") is bits
