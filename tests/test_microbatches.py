"""Steps cut into different numbers of microbatches: the step is compared, its microbatches are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from probe.judge.calibrate import calibrate
from probe.judge.compare import compare
from probe.judge.comparison import Comparison, Outcome
from probe.measure.loss_scale import as_backward_got
from probe.measure.microbatches import matched
from probe.point import Key, Kind
from probe.store.layout import StepRows
from tests.recording import command, record
from tests.step_rows import make_rows


def step(losses: list[float], factor: float) -> StepRows:
    keys = [Key(kind=Kind.BATCH, name="x", microbatch=m) for m in range(len(losses))]
    keys += [
        Key(kind=Kind.LOSS, name=n, microbatch=m) for m in range(len(losses)) for n in ("micro_loss", "loss_scale")
    ]
    keys += [Key(kind=Kind.GRAD, name="w"), Key(kind=Kind.STATE, name="microbatches")]
    rows = make_rows(tuple(keys))
    value = rows.value.copy()
    for row, key in enumerate(keys):
        if key.kind is Kind.LOSS:
            value[row] = factor if key.name == "loss_scale" else losses[key.microbatch]
    return replace(rows, value=value)


@pytest.mark.parametrize(("one", "two"), [([2.5], [1.0, 2.0, 3.0, 4.0]), ([1.0, 2.0, 3.0, 4.0], [2.5])])
def test_the_losses_of_a_step_are_summed_with_their_factors_in_the_baselines_unit(
    one: list[float], two: list[float]
) -> None:
    both = matched(step(one, 1 / len(one)), step(two, 1 / len(two)))
    assert both.numbers == (len(one), len(two))
    assert both.left_out == len(one)
    kept = (
        Key(kind=Kind.GRAD, name="w"),
        Key(kind=Kind.LOSS, name="micro_loss", microbatch=0),
        Key(kind=Kind.LOSS, name="loss_scale", microbatch=0),
    )
    assert both.baseline.keys == both.candidate.keys == kept
    for rows in (both.baseline, both.candidate):
        np.testing.assert_allclose(as_backward_got(rows).value[1:], [2.5 / len(one), 1 / len(one)])


def test_steps_with_as_many_microbatches_are_left_as_they_are() -> None:
    one, two = step([1.0, 2.0], 0.5), step([1.0, 3.0], 0.5)
    both = matched(one, two)
    assert (both.baseline is one, both.candidate is two, both.numbers, both.left_out) == (True, True, None, 0)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Comparison]:
    """Judge four microbatches a step against one, sound and with a fault."""
    folder = tmp_path_factory.mktemp("cut")

    def run(name: str, *options: str, perturb: str = "") -> object:
        perturbed = ("--perturb", perturb) if perturb else ()
        return record(folder / name, command("loops.py", "cut", *options), "--seed", "1", *perturbed)

    base = [run("base"), *(run(f"ulp{n}", perturb=f"ulp:{n}") for n in (1, 2))]
    tolerances = calibrate(base)  # type: ignore[arg-type]
    return {
        name: compare([base[0]], [run(name, "--micro", "4", *options)], tolerances, same_code=True)  # type: ignore[list-item]
        for name, options in (("sound", ()), ("fault", ("--fault",)))
    }


def test_four_microbatches_are_equivalent_to_one_and_the_report_says_what_was_not_compared(
    compared: dict[str, Comparison],
) -> None:
    sound = compared["sound"]
    assert (sound.outcome, sound.coverage.missing, sound.coverage.unexpected) == (Outcome.EQUIVALENT, (), ())
    assert [note for note in sound.notes if "microbatches" in note] == [
        "The candidate has 4 microbatches a step against 1: 27 values of single microbatches are not compared, and "
        "losses are compared as sums over the step."
    ]
    assert {"loss", "gradients"} <= {word for check in sound.checks for word in check.what.lower().split()}


def test_a_gradient_that_is_lost_between_microbatches_is_still_found(compared: dict[str, Comparison]) -> None:
    fault = compared["fault"]
    assert fault.outcome is Outcome.DIFFERENT
    assert fault.first_divergence is not None
    place = fault.first_divergence.place
    assert (place.step, place.kind, place.name, place.microbatch) == (1, Kind.GRAD, "2.bias", None)
