"""Tolerances laid out for the series and steps of one comparison."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from test_tolerance import MEMBER, TOLERANCES

from probe.judge.limits import edited, lay_out
from probe.judge.tolerance import Tolerances
from probe.point import Key, Kind

A = Key(kind=Kind.FORWARD, name="blocks.0.attn")
B = Key(kind=Kind.FORWARD, name="blocks.1.attn")
GROWING = replace(MEMBER, spread=(1.0, 2.0, 4.0), floor=(0.5,) * 3, tolerance=(3.0, 6.0, 12.0), horizon=2)


def only(**members: object) -> Tolerances:
    labels = {"a": A.label, "b": B.label, "grad": "grad/w"}
    families = {"f": {labels[name]: member for name, member in members.items()}}
    return replace(TOLERANCES, families=families)  # type: ignore[arg-type]


def test_a_step_between_two_calibrated_ones_has_the_later_one_s_tolerance() -> None:
    tolerances = replace(only(a=GROWING), steps=(1, 5, 9))
    limits = lay_out(tolerances, [A], [1, 3, 9])
    np.testing.assert_array_equal(limits.tolerance, [[3.0], [6.0], [12.0]])


def test_a_step_after_the_last_calibrated_one_or_past_the_horizon_is_not_judged() -> None:
    np.testing.assert_array_equal(lay_out(only(a=GROWING), [A], [1, 2, 3, 4]).judged, [[1], [1], [0], [0]])


def test_the_tight_tolerance_knows_no_siblings_and_no_flips() -> None:
    member = replace(GROWING, tolerance=(100.0,) * 3, flip=(50.0,) * 3)
    limits = lay_out(only(a=member), [A], [1, 2, 3])
    np.testing.assert_array_equal(limits.tight, [[3.0], [6.0], [12.0]])
    np.testing.assert_array_equal(limits.flip, [[50.0]] * 3)


def test_another_multiple_of_the_spread_scales_the_tolerance_down_to_the_floor() -> None:
    limits = lay_out(only(a=GROWING), [A], [1, 2, 3], [0.3])
    np.testing.assert_allclose(limits.tolerance[:, 0], [0.5, 0.6, 1.2])


def test_a_series_that_was_not_calibrated_is_not_known() -> None:
    limits = lay_out(only(a=GROWING), [A, B], [1])
    np.testing.assert_array_equal(limits.known, [1.0, 0.0])
    assert np.isnan(limits.tolerance[0, 1])


def test_a_clipped_gradient_stands_in_for_the_plain_one() -> None:
    limits = lay_out(only(grad=GROWING), [Key(kind=Kind.GRAD, name="w", item="clipped")], [1])
    np.testing.assert_array_equal(limits.tolerance, [[3.0]])


def test_an_edit_is_noticed_in_either_direction_and_rounding_is_not() -> None:
    keys = {A.label: A, B.label: B}
    sibling = replace(GROWING, spread=(0.0,) * 3, floor=(0.5,) * 3, tolerance=(1.0, 2.0, 4.0))
    rounded = replace(GROWING, tolerance=(3.01, 6.02, 12.1))
    assert edited(only(a=GROWING, b=sibling), keys) == ()
    assert edited(only(a=rounded), keys) == ()
    assert edited(only(a=replace(GROWING, tolerance=(3.0, 6.0, 13.0))), keys) == (A.label,)
    assert edited(only(a=replace(GROWING, tolerance=(2.0, 6.0, 12.0))), keys) == (A.label,)
