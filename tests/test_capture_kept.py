"""Copies of tensors that are kept whole: their values, and that memory in use is never handed out."""

from __future__ import annotations

import torch

from probe.capture.kept import Copies


def test_a_copy_has_the_values_and_its_memory_is_used_again_only_after_it_was_given_back() -> None:
    copies = Copies()
    first = copies.of(torch.arange(6.0).view(2, 3).T)
    second = copies.of(torch.zeros(6))
    assert first.is_contiguous()
    assert torch.equal(first, torch.arange(6.0).view(2, 3).T)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    copies.give_back([first])
    third = copies.of(torch.ones(3, dtype=torch.float64))
    assert (third.data_ptr(), third.tolist()) == (place, [1.0] * 3)
    assert torch.equal(second, torch.zeros(6))
    copies.give_back([third])
    copies.clear()
    assert copies.of(torch.ones(6)).tolist() == [1.0] * 6
    assert copies.of(torch.empty(0, 4, dtype=torch.bfloat16)).shape == (0, 4)
