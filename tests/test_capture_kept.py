"""Copies of tensors that are kept whole: their values, and that memory in use is never handed out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from probe.capture.kept import Copies, Copy
from probe.capture.summary import dtype_name, host_bits
from probe.store.layout import PAGE


def copy_of(copies: Copies, tensor: torch.Tensor) -> Copy:
    copy = copies.room_for(tensor.nbytes, dtype_name(tensor.dtype), tuple(tensor.shape))
    copy.fill(tensor)
    return copy


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3).T,
        torch.empty(0, 4, dtype=torch.bfloat16),
        torch.randn(5000).to(torch.bfloat16)[::2],
        torch.randn(7, dtype=torch.complex64).conj(),
        torch.tensor(True),
        torch.arange(4096, dtype=torch.int64),
    ],
    ids=["strided", "empty", "bf16", "conjugated", "bool", "long"],
)
def test_a_copy_has_the_values_in_logical_order(tensor: torch.Tensor) -> None:
    whole = copy_of(Copies(), tensor).whole()
    assert whole.dtype == dtype_name(tensor.dtype)
    np.testing.assert_array_equal(whole.bits, host_bits(tensor).view(whole.bits.dtype))
    assert whole.bits.shape == tensor.shape


def test_memory_is_used_again_only_after_it_was_given_back() -> None:
    copies = Copies()
    first, second = copy_of(copies, torch.zeros(6)), copy_of(copies, torch.ones(6))
    assert first.address != second.address
    copies.give_back([first])
    third = copy_of(copies, torch.full((3,), 2.0, dtype=torch.float64))
    assert (third.address, third.whole().bits.tolist()) == (first.address, [2.0] * 3)
    assert second.whole().bits.tolist() == [1.0] * 6
    copies.give_back([third])
    assert first.address % PAGE == 0
    copies.clear()
    assert copy_of(copies, torch.ones(6)).whole().bits.tolist() == [1.0] * 6
