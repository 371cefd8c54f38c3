"""A loss that was scaled on purpose is no difference."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic import Rows

from probe.measure.loss_scale import agreed_scales, as_backward_got, divisors, microbatches
from probe.measure.series import Catalog
from probe.point import Key, Kind
from probe.store.layout import StepRows


def losses(value: float, factor: float, count: int = 1) -> StepRows:
    rows = Rows(1, 0, 1)
    for microbatch in range(count):
        rows.add(Key(kind=Kind.LOSS, name="micro_loss", microbatch=microbatch), value)
        rows.add(Key(kind=Kind.LOSS, name="loss_scale", microbatch=microbatch), factor)
    return rows.finish()


@pytest.mark.parametrize(
    ("baseline", "candidate", "scale"),
    [
        ((2.0, 1.0), (2.0, 1.0), {}),
        ((2.0, 1.0), (4.0, 0.5), {}),  # sum() * (1 / n) instead of mean(): backward got the same
        ((2.0, 1.0), (2.0, 1024.0), {0: 1024.0}),  # loss scaling
        ((2.0, 0.25), (2.0, 256.0), {0: 1024.0}),  # with accumulation in both arms
        ((2.0, 0.5), (1.0, 2.0), {0: 2.0}),  # the baseline's factor is inside the candidate's loss
        ((2.0, 1.0), (2.2, 1.0), {}),  # another loss
        ((2.0, 1.0), (2.2, 0.5), {}),  # another loss, scaled
    ],
)
def test_the_factor_between_two_arms_is_found_only_where_the_losses_agree(
    baseline: tuple[float, float], candidate: tuple[float, float], scale: dict[int, float]
) -> None:
    assert agreed_scales(losses(*baseline), losses(*candidate), 1e-6) == scale


def test_the_judged_loss_is_what_backward_got() -> None:
    rows = as_backward_got(losses(2.0, 0.25))
    assert rows.value.tolist() == [0.5, 0.25]


def test_only_gradients_before_clipping_are_divided() -> None:
    keys = (
        Key(kind=Kind.FORWARD, name="a", microbatch=0),
        Key(kind=Kind.BACKWARD, name="a", microbatch=0),
        Key(kind=Kind.BACKWARD, name="a", microbatch=1),
        Key(kind=Kind.GRAD, name="w"),
        Key(kind=Kind.GRAD, name="w", item="clipped"),
        Key(kind=Kind.GRAD_NORM, name="grad_norm"),
        Key(kind=Kind.PARAM, name="w"),
    )
    catalog = Catalog()
    pairs = catalog.align(keys, keys)
    both = divisors(pairs, {0: 8.0, 1: 8.0}, (2, 2))
    one = divisors(pairs, {0: 8.0}, (2, 2))
    other_count = divisors(pairs, {0: 8.0, 1: 8.0}, (2, 4))
    np.testing.assert_array_equal(both, [1, 8, 8, 8, 1, 1, 1])
    np.testing.assert_array_equal(one, [1, 8, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(other_count, [1, 8, 8, 1, 1, 1, 1])


def test_microbatches_are_counted_by_their_losses() -> None:
    assert microbatches(losses(1.0, 1.0, 3).keys) == 3
