"""Numbers that checks make of what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from table_captures import Quantity, capture

from probe.check import NO_CHECK, Check, owner
from probe.judge.compare import compare
from probe.judge.comparison import Verdict
from probe.measure.loss_scale import as_backward_got
from probe.measure.reduced import reduced
from probe.point import STEP_CLOCK, Key, Kind
from probe.selection import parse_steps
from probe.store.layout import StepRows

W1, W2, BIAS = (Key(kind=Kind.GRAD, name=f"blocks.{name}", microbatch=STEP_CLOCK) for name in ("1.w", "2.w", "2.bias"))
OUT = Key(kind=Kind.FORWARD, name="head", item="[0]", microbatch=0)


def loss(microbatch: int) -> Key:
    return Key(kind=Kind.LOSS, name="micro_loss", microbatch=microbatch)


def made(step: int, rank: int) -> Iterator[Quantity]:
    yield Quantity(key=OUT, scalars={"mean": 0.25, "mean_abs": 2.0, "l2": 9.0}, sample=np.arange(64) / 8)
    for microbatch in range(2):
        yield Quantity(key=loss(microbatch), value=step + 10.0 * rank + 100.0 * microbatch, dtype="bfloat16")
    yield Quantity(key=W1, scalars={"l2": 3.0 * step})
    yield Quantity(key=W2, scalars={"l2": 4.0 * step})
    yield Quantity(key=replace(W2, item="clipped"), scalars={"l2": 1.0})
    yield Quantity(key=BIAS, value=-2.0)
    yield Quantity(key=Key(kind=Kind.STATE, name="mode"), text="train")


def new_rows(*checks: Check, step: int = 1, rank: int = 0, steps: int = 4) -> dict[str, float]:
    """Return the numbers that the checks add, by label."""
    recorded = capture("base", range(1, steps + 1), 2, made)
    (with_numbers,) = reduced([recorded], checks)
    rows = with_numbers.rows(rank, step)
    known = len(recorded.rows(rank, step).keys)
    assert rows.keys[:known] == recorded.rows(rank, step).keys
    return {key.label: float(value) for key, value in zip(rows.keys[known:], rows.value[known:], strict=True)}


def check(select: str, **fields: object) -> Check:
    return Check(what="x", where="here", form="rel", rel=0.1, select=(select,), **fields)  # type: ignore[arg-type]


def test_without_reductions_captures_are_what_they_were() -> None:
    recorded = capture("base", [1], 2, made)
    assert reduced([recorded], [check("grad/*"), check("*", metric=("sketch",))]) == [recorded]


def test_a_metric_makes_a_number_of_each_quantity_that_has_it() -> None:
    assert new_rows(check("forward/*", metric=("mean_abs", "mean"))) == {
        "forward/head[0](mean_abs)": 2.0,
        "forward/head[0](mean)": 0.25,
    }
    assert new_rows(check("grad/*", metric=("l2",))) == {
        "grad/blocks.1.w(l2)": 3.0,
        "grad/blocks.2.w(l2)": 4.0,
        "grad/blocks.2.bias(l2)": 2.0,
    }


def test_only_numbers_have_a_value() -> None:
    assert new_rows(check("*", metric=("value",))) == {
        "loss/micro_loss(value)": 1.0,
        "loss/micro_loss(value)@1": 101.0,
        "grad/blocks.2.bias(value)": -2.0,
    }


def test_a_group_is_one_number_and_counts_nothing_twice() -> None:
    assert new_rows(check("grad/*.w", reduce="norm")) == {"grad/*.w(norm)": 5.0}
    assert new_rows(check("grad/*.w", reduce="sum_squares")) == {"grad/*.w(sum_squares)": 25.0}
    assert new_rows(check("grad/*", reduce="count")) == {"grad/*(count)": 3.0}
    assert new_rows(check("grad/*.w:clipped", reduce="norm")) == {"grad/*.w:clipped:clipped(norm)": 1.0}


def test_a_group_is_one_number_for_each_microbatch() -> None:
    assert new_rows(check("loss/*", reduce="mean"), rank=1) == {
        "loss/*(mean)": 11.0,
        "loss/*(mean)@1": 111.0,
    }


def test_a_window_has_its_mean_at_its_last_step_over_microbatches_too() -> None:
    window = check("loss/*", window=2)
    assert new_rows(window, step=1) == {}
    assert new_rows(window, step=2) == {"loss/micro_loss(mean of 2 steps)": 51.5}
    assert new_rows(window, step=4, rank=1) == {"loss/micro_loss(mean of 2 steps)": 63.5}
    assert new_rows(window, step=3, steps=3) == {}
    assert new_rows(check("loss/*", window=1), step=3) == {"loss/micro_loss(mean of 1 step)": 53.0}


def test_the_mean_over_ranks_stands_on_the_first_rank() -> None:
    over = check("loss/*", over_ranks="mean")
    assert new_rows(over, step=2) == {
        "loss/micro_loss(mean over ranks)": 7.0,
        "loss/micro_loss(mean over ranks)@1": 107.0,
    }
    assert new_rows(over, step=2, rank=1) == {}
    both = check("loss/*", over_ranks="mean", window=2)
    assert new_rows(both, step=2) == {"loss/micro_loss(mean of 2 steps, mean over ranks)": 56.5}


def test_numbers_are_made_in_the_steps_of_their_check_only() -> None:
    band = check("grad/*.w", reduce="norm", steps=parse_steps("2-3"))
    assert [bool(new_rows(band, step=step)) for step in (1, 2, 3, 4)] == [False, True, True, False]


def test_two_checks_of_the_same_number_make_it_once() -> None:
    one, two = (check("grad/*.w", reduce="norm", steps=parse_steps(steps)) for steps in ("1-2", "2-"))
    assert new_rows(one, two, step=2) == {"grad/*.w(norm)": 10.0}


def test_samples_are_as_far_apart_as_the_largest_difference_over_the_largest_value() -> None:
    def other(step: int, rank: int) -> Iterator[Quantity]:
        sample = np.arange(64) / 8
        sample[[5, 40]] += (0.01, -0.0315)
        yield Quantity(key=OUT, scalars={"l2": 9.0}, sample=sample)

    base, opt = capture("base", [1], 1, made), capture("opt", [1], 1, other)
    rows = {
        form: compare(
            [base],
            [opt],
            None,
            checks=[Check(what="x", where="", select=("forward/*",), metric=("sample",), form=form, **bounds)],  # type: ignore[arg-type]
        ).checks[0]
        for form, bounds in (("rel", {"rel": 0.005}), ("abs", {"abs": 0.03}), ("exact", {}))
    }
    assert {form: (row.verdict, row.difference, row.metric) for form, row in rows.items()} == {
        "rel": (Verdict.WITHIN, pytest.approx(0.004, rel=1e-4), "largest |a - b| / largest |b| of the sampled values"),
        "abs": (Verdict.ABOVE, pytest.approx(0.0315, rel=1e-4), "largest |a - b| of the sampled values"),
        "exact": (Verdict.ABOVE, pytest.approx(0.004, rel=1e-4), "equality of the sampled values"),
    }
    worst = rows["rel"].worst
    assert worst is not None
    assert (worst.expected, worst.actual) == (5.0, pytest.approx(4.9685))


@pytest.mark.parametrize(
    "fields",
    [{"metric": ("mean_abs",)}, {"reduce": "norm"}, {"window": 1}, {"over_ranks": "mean"}, {"metric": ("sample",)}],
)
def test_what_is_made_of_something_that_is_not_finite_is_not_finite(fields: dict[str, object]) -> None:
    recorded = capture("base", [1], 2, made)

    def spoil(rows: StepRows) -> StepRows:
        return replace(rows, nonfinite=np.where([key.kind is Kind.FORWARD for key in rows.keys], 3, 0))

    (with_numbers,) = reduced([recorded.edited(spoil)], [check("forward/*", **fields)])
    rows = with_numbers.rows(0, 1)
    known = len(recorded.rows(0, 1).keys)
    assert [bool(bad) for bad in rows.nonfinite[known:]] == [True]


def test_numbers_of_a_loss_are_of_what_backward_got_and_are_not_scaled_again() -> None:
    def scaled(step: int, rank: int) -> Iterator[Quantity]:
        yield Quantity(key=loss(0), value=3.0)
        yield Quantity(key=Key(kind=Kind.LOSS, name="loss_scale", microbatch=0), value=0.25)

    (with_numbers,) = reduced(
        [capture("base", [1], 1, scaled)], [check("loss/micro_loss", metric=("value",), window=1)]
    )
    rows = as_backward_got(with_numbers.rows(0, 1))
    assert {key.label: float(value) for key, value in zip(rows.keys, rows.value, strict=True)} == {
        "loss/micro_loss": 0.75,
        "loss/loss_scale": 0.25,
        "loss/micro_loss(value, mean of 1 step)": 0.75,
    }
    (with_numbers,) = reduced([capture("base", [1], 1, scaled)], [check("loss/micro_loss", metric=("mean_abs",))])
    rows = as_backward_got(with_numbers.rows(0, 1))
    assert [float(value) for value in rows.value] == [0.75, 0.25, 0.75]


def test_a_quantity_belongs_to_the_first_check_of_each_metric_that_selects_it() -> None:
    checks = [
        check("forward/*", metric=("mean",)),
        check("forward/*", metric=("mean",)),
        check("forward/*", metric=("l2", "sketch")),
        check("forward/*"),
        check("grad/*", reduce="norm"),
        check("grad/*"),
    ]
    made_of = {suffix: replace(OUT, item=f"[0]{suffix}") for suffix in ("(mean)", "(l2)")}
    assert [owner(checks, key) for key in made_of.values()] == [0, 2]
    assert owner(checks, OUT) == 2
    assert owner([checks[0], checks[3]], OUT) == NO_CHECK
    assert owner([checks[3], checks[0]], OUT) == 0
    assert owner(checks, W1) == 5
    assert owner(checks, Key(kind=Kind.GRAD, name="*", item="(norm)")) == 4
    assert owner(checks, Key(kind=Kind.PARAM, name="*", item="(norm)")) == NO_CHECK
