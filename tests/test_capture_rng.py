"""The fingerprints of the global random generators: each draw changes its own, and taking them draws nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from probe.capture.taps import rng_facts


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Seed the generators of the process, and put them back."""
    kept, generator = (random.getstate(), torch.get_rng_state(), np.random.get_state()), np.random.get_bit_generator()
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    yield
    np.random.set_bit_generator(generator)
    random.setstate(kept[0])
    torch.set_rng_state(kept[1])
    np.random.set_state(kept[2])


def draw_normal() -> None:
    # The second of a pair was drawn with the first, and is only kept.
    np.random.standard_normal()


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("rng.python", random.random),
        ("rng.torch", lambda: torch.rand(1)),
        ("rng.numpy", np.random.random),
        ("rng.numpy", draw_normal),
    ],
)
def test_a_draw_changes_the_fingerprint_of_its_generator_alone(name: str, draw: Callable[[], Any]) -> None:
    draw()
    before = rng_facts()
    assert rng_facts() == before
    draw()
    after = rng_facts()
    assert {each for each in before if before[each] != after[each]} == {name}


def test_another_generator_of_numpy_is_told_and_followed() -> None:
    before = rng_facts()["rng.numpy"]
    np.random.set_bit_generator(np.random.PCG64(1))
    other = rng_facts()["rng.numpy"]
    np.random.random()
    assert len({before, other, rng_facts()["rng.numpy"]}) == 3
