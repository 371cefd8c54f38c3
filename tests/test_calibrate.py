"""Repeated runs of unmodified code make tolerances."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from synthetic import SyntheticCapture, run

from probe.errors import ToleranceError
from probe.judge.calibrate import calibrate
from probe.judge.tolerance import ALL_JUDGED
from probe.measure.distance import EPSILON_FLOAT32
from probe.point import Key, Kind


def baselines(count: int = 3, **options: object) -> list[SyntheticCapture]:
    return [run(f"base-{n}", run_seed=n, **options) for n in range(count)]  # type: ignore[arg-type]


def test_a_tolerance_is_three_times_the_spread() -> None:
    member = calibrate(baselines(noise=1e-4)).members()["forward/blocks.0.attn"]
    assert 1e-4 < member.spread[0] < 2e-4  # Two noisy values differ by sqrt(2) of the noise.
    assert member.tolerance[0] == pytest.approx(3 * member.spread[0], rel=0.3)
    assert member.tolerance[0] >= 3 * member.spread[0]


def test_the_spread_never_falls_with_the_step() -> None:
    for member in calibrate(baselines(noise=1e-4)).members().values():
        assert list(member.spread) == sorted(member.spread)
        assert list(member.tolerance) == sorted(member.tolerance)


def test_a_quiet_series_gets_a_third_of_its_loudest_sibling() -> None:
    def quiet(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        return np.round(value, 1) if key.kind is Kind.FORWARD and key.name == "blocks.1" else value

    members = calibrate(baselines(noise=1e-6, fault=quiet)).members()
    loudest = max(members[f"forward/blocks.{n}"].tolerance[0] for n in (0, 2))
    assert members["forward/blocks.1"].spread[0] == 0.0
    assert members["forward/blocks.1"].tolerance[0] == pytest.approx(max(loudest / 3, 8 * EPSILON_FLOAT32))


def test_no_tolerance_is_zero_when_a_series_never_moves() -> None:
    member = calibrate(baselines()).members()["lr/lr"]
    assert (member.spread, member.tolerance) == ((0.0,) * 3, (8 * EPSILON_FLOAT32,) * 3)


def test_bit_identical_runs_get_assumed_floors_and_say_so() -> None:
    tolerances = calibrate(baselines(noise=0.0))
    member = tolerances.members()["forward/blocks.0"]
    assert (tolerances.assumed, tolerances.repeatable) == (True, True)
    assert member.tolerance == (32 * EPSILON_FLOAT32,) * 3
    assert member.mark == "insensitive"
    assert tolerances.notes == (
        "All runs are bit-identical, so nothing was measured: tolerances are assumed floors of 32 eps of the recorded "
        "type. Record runs of the unmodified code with `probe record --perturb ulp:1`, `ulp:2` and `ulp:3`, and "
        "calibrate with them.",
    )


def test_runs_that_computed_the_same_repeat_whatever_their_unseeded_generators_were() -> None:
    def unseeded(number: int) -> SyntheticCapture:
        def generators(key: Key, step: int, rank: int, value: np.ndarray) -> object:
            return f"state {number}" if key.kind is Kind.STATE else value

        return run(f"base-{number}", noise=0.0, fault=generators)

    tolerances = calibrate([unseeded(number) for number in range(3)])
    assert (tolerances.assumed, tolerances.repeatable) == (True, True)


def test_perturbed_runs_take_the_place_of_noise() -> None:
    plain = run("base-0", noise=0.0)
    perturbed = [run(f"ulp-{n}", run_seed=n, noise=1e-5, perturb=f"ulp:{n}") for n in (1, 2, 3)]
    tolerances = calibrate([*perturbed, plain])
    assert (tolerances.assumed, tolerances.repeatable) == (False, True)
    assert [each.path for each in tolerances.runs] == ["base-0", "ulp-1", "ulp-2", "ulp-3"]
    assert (tolerances.plain_runs, tolerances.perturbed_runs) == (1, 3)
    assert tolerances.members()["forward/blocks.0"].spread[0] == pytest.approx(1.45e-5, rel=0.2)


def test_one_perturbed_run_is_paired_with_the_plain_one() -> None:
    tolerances = calibrate([run("base-0", noise=0.0), run("ulp-1", run_seed=1, noise=1e-5, perturb="ulp:1")])
    assert tolerances.members()["forward/blocks.0"].spread[0] == pytest.approx(1e-5, rel=0.2)


def test_a_series_is_not_judged_past_the_step_at_which_noise_nears_a_scrambled_run() -> None:
    members = calibrate(baselines(noise=1e-5, growth=30.0, steps=range(1, 7))).members()
    member = members["forward/blocks.0"]
    assert 1.2 < member.control < 1.6
    last = member.horizon
    assert last == max(step for step in range(1, 7) if member.tolerance[step - 1] < 0.1 * member.control)
    assert member.mark == ""


def test_a_check_that_a_scrambled_run_passes_is_vacuous() -> None:
    tolerances = calibrate(baselines(noise=3.0))
    member = tolerances.members()["forward/blocks.0"]
    assert (member.horizon, member.mark) == (0, "vacuous")
    assert tolerances.self_test == {"step shift": "not told apart", "rank rotation": "not run"}


def test_a_scrambled_baseline_is_told_from_the_baseline() -> None:
    assert calibrate(baselines(ranks=2)).self_test == {"step shift": "different", "rank rotation": "different"}


def test_ranks_that_agree_after_a_reduction_do_not_make_the_control_vanish() -> None:
    members = calibrate(baselines(ranks=2)).members()
    assert members["grad/blocks.0.lora_A.weight"].control > 1


def test_a_constant_series_has_no_horizon() -> None:
    def constant(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        return np.full(value.shape, 3.0) + 1e-7 * value if key.name == "blocks.1" else value

    member = calibrate(baselines(fault=constant)).members()["forward/blocks.1"]
    assert (math.isnan(member.control), member.horizon) == (True, ALL_JUDGED)


def test_a_parameter_may_move_by_one_flipped_sign_of_its_update() -> None:
    member = calibrate(baselines()).members()["param/blocks.0.lora_A.weight"]
    update = 1e-3 / math.sqrt(1.0 + 1e-6)
    assert member.flip[0] == pytest.approx(2 / math.sqrt(600) * update, rel=0.15)
    assert member.tolerance[0] == member.flip[0]


def test_the_multiple_of_the_spread_is_configurable() -> None:
    three, ten = (calibrate(baselines(noise=1e-4), k=k).members()["forward/blocks.0"] for k in (3.0, 10.0))
    assert ten.tolerance[0] == pytest.approx(three.tolerance[0] * 10 / 3)


@pytest.mark.parametrize("k", [0.0, -1.0, math.inf, math.nan])
def test_a_multiple_that_means_nothing_is_refused(k: float) -> None:
    with pytest.raises(ToleranceError) as raised:
        calibrate(baselines(), k=k)
    assert str(raised.value) == (
        f"The multiple of the spread is {k!r}. It must be finite and above 0; 3 is the custom."
    )


def test_a_run_that_lacks_steps_of_the_others_is_refused() -> None:
    with pytest.raises(ToleranceError) as raised:
        calibrate([run("a", steps=(1, 2, 3)), run("b", steps=(1,)), run("c", steps=(1, 2, 3))])
    assert str(raised.value) == (
        "The capture 'b' lacks step 2, 3, which 'a' has: the tolerances would not cover it. Leave the capture out, or "
        "record it again with the same --steps."
    )


def test_runs_without_a_common_step_are_refused() -> None:
    with pytest.raises(ToleranceError) as raised:
        calibrate([run("a", steps=(1, 2)), run("b", steps=(3, 4))])
    assert str(raised.value) == (
        "The 2 runs have no step in common on any rank. Record the same --steps in all of them."
    )


def test_baselines_that_saw_other_data_are_refused() -> None:
    with pytest.raises(ToleranceError) as raised:
        calibrate([run("base-0"), run("base-1", run_seed=1, data_seed=5)])
    assert str(raised.value) == (
        "The baselines saw different data: 'batch/x' differs at step 1, rank 0, between 'base-0' and 'base-1'. "
        "Record all with the same --seed and data order."
    )


def test_what_bit_identical_runs_lack_is_not_a_third_one() -> None:
    plain = run("base-0", noise=0.0)
    assert [note[:20] for note in calibrate([plain, run("base-1", noise=0.0)]).notes] == ["All runs are bit-ide"]
    assert calibrate([plain, run("ulp-1", run_seed=1, noise=1e-5, perturb="ulp:1")]).notes == (
        "Two runs were calibrated from. Record two more perturbed ones: the spread of a single pair can be small by "
        "luck.",
    )


def test_two_runs_are_enough_with_a_warning() -> None:
    assert calibrate(baselines(2)).notes == (
        "Two runs were calibrated from. Record a third one: the spread of a single pair can be small by luck.",
    )


def test_a_value_that_is_not_finite_does_not_widen_a_tolerance() -> None:
    def broken(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        return np.full(value.shape, np.nan) if key.name == "blocks.1" and step == 2 else value

    runs = baselines()
    runs[1] = run("base-1", run_seed=1, fault=broken)
    member = calibrate(runs).members()["forward/blocks.1"]
    assert max(member.tolerance) < 1e-4


def test_the_order_of_rows_does_not_matter() -> None:
    runs = baselines()

    def reversed_rows(capture: SyntheticCapture) -> SyntheticCapture:
        return capture.edited(reverse)

    changed = calibrate([runs[0], reversed_rows(runs[1]), runs[2]])
    assert changed.members() == calibrate(runs).members()


def reverse(rows):  # type: ignore[no-untyped-def]
    flip = slice(None, None, -1)
    return replace(
        rows,
        **{name: getattr(rows, name)[flip] for name in ("keys", "dtype", "shape", "text", "where")},
        **{
            name: getattr(rows, name)[flip]
            for name in ("order", "numel", "nonfinite", "value", "sketch", "sample", "hash")
        },
        scalars={name: values[flip] for name, values in rows.scalars.items()},
    )
