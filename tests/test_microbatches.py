"""Steps cut into different numbers of microbatches: the step is compared, its microbatches are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from probe.judge.calibrate import calibrate
from probe.judge.compare import compare
from probe.judge.comparison import Comparison, Outcome
from probe.measure.loss_scale import as_backward_got
from probe.measure.microbatches import _joined, matched
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


def test_outputs_are_reduced_to_their_norm_and_means_over_the_step_unless_other_elements_were_taken() -> None:
    def outputs(parts: int) -> StepRows:
        whole = np.arange(1.0, 9.0).reshape(4, 2)
        rows = step([1.0] * parts, 1 / parts)
        pieces = [*np.split(whole, parts), *[np.ones(3)] * parts]
        names = ["out"] * parts + ["padded"] * parts
        keys = [Key(kind=Kind.FORWARD, name=n, microbatch=m % parts) for m, n in enumerate(names)]
        taken = make_rows(tuple(keys))
        scalars = {
            "l2": [np.linalg.norm(p) for p in pieces],
            "mean": [p.mean() for p in pieces],
            "mean_abs": [np.abs(p).mean() for p in pieces],
            "rms": [np.sqrt(np.square(p).mean()) for p in pieces],
            "max_abs": [np.abs(p).max() for p in pieces],
        }
        taken = replace(
            taken, numel=np.array([p.size for p in pieces]), scalars={n: np.array(v) for n, v in scalars.items()}
        )
        return _joined(rows, taken)

    both = matched(outputs(1), outputs(4))
    out = Key(kind=Kind.FORWARD, name="out", microbatch=0)
    assert both.left_out == 1 + 1  # the batch, and what was padded
    for rows in (both.baseline, both.candidate):
        assert [key for key in rows.keys if key.kind is Kind.FORWARD] == [out]
        row = rows.keys.index(out)
        found = {name: float(column[row]) for name, column in rows.scalars.items()}
        l2 = np.sqrt(204.0)
        assert found == pytest.approx({"l2": l2, "mean": 4.5, "mean_abs": 4.5, "rms": l2 / np.sqrt(8), "max_abs": 8.0})
        assert (rows.numel[row], rows.shape[row]) == (8, (8,))
        np.testing.assert_allclose(rows.sketch[row], [l2, *[0.0] * (rows.sketch.shape[1] - 1)], rtol=1e-6)


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
        "The candidate has 4 microbatches a step against 1: outputs of modules and their gradients are compared by "
        "their norms over the step, which see a change of size and none of direction, losses as sums over the step, "
        "and 3 values of single microbatches are not compared."
    ]
    assert {"loss", "gradients"} <= {word for check in sound.checks for word in check.what.lower().split()}


def test_a_gradient_that_is_lost_between_microbatches_is_still_found(compared: dict[str, Comparison]) -> None:
    fault = compared["fault"]
    assert fault.outcome is Outcome.DIFFERENT
    assert fault.first_divergence is not None
    place = fault.first_divergence.place
    assert (place.step, place.kind, place.name, place.microbatch) == (1, Kind.GRAD, "2.bias", None)
