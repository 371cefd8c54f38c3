"""Where a step ends and what it holds, in training loops of every form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from probe.capture.launch import NOTHING_RECORDED
from probe.point import Kind
from probe.store.layout import StepRows
from probe.store.reader import Capture, open_capture
from tests.recording import by_label, command, probe, record, run

Runs = Callable[..., Capture]

PARAMETERS = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Record a loop of `loops.py` once, whoever asks for it."""
    folder = tmp_path_factory.mktemp("loops")
    made: dict[str, Capture] = {}

    def one(loop: str) -> Capture:
        if loop not in made:
            made[loop] = record(folder / loop, command("loops.py", loop))
        return made[loop]

    return one


def names(rows: StepRows, kind: Kind, item: str = "") -> list[str]:
    return [key.name for key in rows.keys if key.kind is kind and key.item == item]


def numbers(capture: Capture, label: str) -> list[float]:
    found = []
    for step in capture.steps(0):
        rows = capture.rows(0, step)
        row = by_label(rows).get(label)
        found.append(float("nan") if row is None else float(rows.value[row]))
    return found


def same_values(one: StepRows, two: StepRows, *kinds: Kind) -> None:
    at_one, at_two = by_label(one), by_label(two)
    labels = [key.label for key in one.keys if key.kind in kinds]
    assert sorted(labels) == sorted(key.label for key in two.keys if key.kind in kinds)
    rows_one, rows_two = [at_one[label] for label in labels], [at_two[label] for label in labels]
    np.testing.assert_allclose(one.sketch[rows_one], two.sketch[rows_two], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(one.value[rows_one], two.value[rows_two], rtol=1e-6)


@pytest.mark.parametrize("loop", ["scaler", "scaler_fused"])
def test_an_update_that_the_gradient_scaler_leaves_out_is_a_step_without_the_gradients_that_overflowed(
    runs: Runs, loop: str
) -> None:
    capture = runs(loop)
    assert capture.steps(0) == (1, 2, 3)
    assert numbers(capture, "state/skipped_updates") == [0, 1, 0]
    assert numbers(capture, "state/microbatches") == [2, 2, 2]
    overflowed = capture.rows(0, 2)
    assert names(overflowed, Kind.GRAD) == names(overflowed, Kind.BACKWARD) == []
    assert not overflowed.nonfinite.any()
    at = by_label(overflowed)
    before = capture.rows(0, 1)
    for name in PARAMETERS:
        np.testing.assert_array_equal(
            overflowed.hash[at[f"param/{name}"]], before.hash[by_label(before)[f"param/{name}"]]
        )


@pytest.mark.parametrize("loop", ["scaler", "scaler_fused"])
def test_under_a_gradient_scaler_the_loss_is_told_unscaled_and_the_optimizers_gradients_too(
    runs: Runs, loop: str
) -> None:
    capture, plain = runs(loop), runs("sgd")
    assert numbers(capture, "loss/loss_scale")[::2] == [512, 256]  # 1024 / 2 microbatches, halved by the overflow
    rows, expected = capture.rows(0, 1), plain.rows(0, 1)
    at, expected_at = by_label(rows), by_label(expected)
    for label in ("loss/micro_loss", "loss/micro_loss@1"):
        assert rows.value[at[label]] == expected.value[expected_at[label]]
    for name in PARAMETERS:
        gradient = expected.sketch[expected_at[f"grad/{name}"]]
        np.testing.assert_allclose(rows.sketch[at[f"grad/{name}"]], 1024 * gradient, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(rows.sketch[at[f"grad/{name}:clipped"]], gradient, rtol=1e-5, atol=1e-7)


def test_two_models_that_train_each_other_keep_their_names_apart_and_each_update_is_a_step(runs: Runs) -> None:
    capture = runs("gan")
    assert capture.steps(0) == (1, 2, 3, 4, 5, 6)
    of_judge, of_maker = capture.rows(0, 3), capture.rows(0, 4)
    assert names(of_judge, Kind.PARAM) == [f"model1.{name}" for name in PARAMETERS]
    assert names(of_maker, Kind.PARAM) == PARAMETERS
    assert names(capture.rows(0, 1), Kind.PARAM, "before") == PARAMETERS + [f"model1.{name}" for name in PARAMETERS]
    assert numbers(capture, "lr/lr") == [0.02, 0.01] * 3
    judged_twice = [key.label for key in of_judge.keys if key.kind is Kind.FORWARD and key.name == "model1"]
    assert judged_twice == ["forward/model1", "forward/model1#2"]
    through_maker = [key.label for key in of_maker.keys if key.kind is Kind.BACKWARD and "model1" not in key.name]
    assert through_maker == ["backward/2", "backward/(root)", "backward/1", "backward/0"]


def test_two_optimizers_on_one_backward_pass_share_the_step(runs: Runs) -> None:
    capture = runs("two")
    assert capture.steps(0) == (1, 2, 3)
    for step in (1, 2, 3):
        rows = capture.rows(0, step)
        assert sorted(names(rows, Kind.PARAM)) == sorted(PARAMETERS)
        assert names(rows, Kind.GRAD) == PARAMETERS
    assert numbers(capture, "lr/lr") == [0.01] * 3
    assert numbers(capture, "lr/lr#2") == [0.003] * 3


@pytest.mark.parametrize("loop", ["by_hand", "by_hand_data"])
def test_an_optimizer_that_is_nobodys_subclass_ends_its_step_by_the_next_forward(runs: Runs, loop: str) -> None:
    capture, plain = runs(loop), runs("sgd")
    assert capture.steps(0) == plain.steps(0) == (1, 2, 3)
    for step in (1, 2, 3):
        same_values(capture.rows(0, step), plain.rows(0, step), Kind.GRAD, Kind.PARAM, Kind.LOSS)
    # The first backward pass shows what is trained: what ran before it was not taken.
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        assert {key.microbatch for key in capture.rows(0, 1).keys if key.kind is kind} == {1}
    same_values(capture.rows(0, 2), plain.rows(0, 2), Kind.FORWARD, Kind.BACKWARD, Kind.BATCH)


@pytest.mark.parametrize("loop", ["autograd", "closure"])
def test_gradients_from_autograd_grad_and_from_a_closure_are_those_of_backward(runs: Runs, loop: str) -> None:
    capture, plain = runs(loop), runs("sgd")
    assert capture.steps(0) == plain.steps(0) == (1, 2, 3)
    for step in (1, 2, 3):
        rows = capture.rows(0, step)
        assert names(rows, Kind.GRAD, "clipped") == []
        same_values(rows, plain.rows(0, step), *(set(Kind) - {Kind.STATE}))


def test_the_rate_of_each_update_is_recorded_whatever_steps_the_schedule(runs: Runs) -> None:
    assert numbers(runs("schedule"), "lr/lr") == pytest.approx([1, 1 / 3, 1 / 5])


def test_a_gradient_clipped_by_value_is_recorded_before_and_after(runs: Runs) -> None:
    rows = runs("schedule").rows(0, 1)
    at = by_label(rows)
    largest = rows.scalars["max_abs"]
    assert [bool(largest[at[f"grad/{name}"]] > 1e-3) for name in PARAMETERS] == [True] * 4
    assert [float(largest[at[f"grad/{name}:clipped"]]) for name in PARAMETERS] == pytest.approx([1e-3] * 4)


def test_a_gradient_that_is_changed_behind_its_version_is_recorded_before_and_after(runs: Runs) -> None:
    capture = runs("clipped_by_hand")
    assert [names(capture.rows(0, step), Kind.GRAD, "clipped") for step in (1, 2, 3)] == [[], PARAMETERS, []]
    rows = capture.rows(0, 2)
    at = by_label(rows)
    for name in PARAMETERS:
        before, after = rows.sketch[at[f"grad/{name}"]], rows.sketch[at[f"grad/{name}:clipped"]]
        np.testing.assert_array_equal(after, before / 2)


def test_an_evaluation_that_never_returns_to_training_shows_in_the_state(runs: Runs) -> None:
    capture = runs("forgetful")
    assert numbers(capture, "state/modules_in_train_mode_at_update") == [6, 6, 0]
    assert numbers(capture, "state/modules_in_train_mode") == [6, 6, 0]
    assert numbers(capture, "state/dropouts_in_train_mode") == [1, 1, 0]


def test_a_run_that_goes_on_from_a_checkpoint_has_the_steps_of_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved.pt")
    whole = record(tmp_path / "whole", command("loops.py", "resume", "--steps", "4", "--save", saved))
    words = command("loops.py", "resume", "--steps", "4", "--resume", saved)
    rest = record(tmp_path / "rest", words, "--step-offset", "2", "--steps", "3-4")
    assert (whole.steps(0), rest.steps(0)) == ((1, 2, 3, 4), (3, 4))
    for step in (3, 4):
        rows, expected = rest.rows(0, step), whole.rows(0, step)
        at = by_label(rows)
        shared = [row for row, key in enumerate(expected.keys) if key.kind in (Kind.GRAD, Kind.PARAM, Kind.LOSS)]
        mine = [at[expected.keys[row].label] for row in shared]
        np.testing.assert_array_equal(rows.sketch[mine], expected.sketch[shared])


def test_a_moving_average_of_the_weights_is_no_model_that_is_trained(runs: Runs) -> None:
    capture, plain = runs("ema"), runs("sgd")
    rows = capture.rows(0, 2)
    assert names(rows, Kind.PARAM) == PARAMETERS
    once = [key for key in plain.rows(0, 2).keys if key.microbatch < 1]
    assert [key for key in rows.keys if key.kind is not Kind.STATE] == [k for k in once if k.kind is not Kind.STATE]


def test_function_transforms_are_no_training_pass_and_what_cannot_be_read_never_ends_the_run(tmp_path: Path) -> None:
    words = command("transforms.py")
    bare, done = run(words), probe("record", "-o", str(tmp_path / "c"), "--", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == bare.stdout
    told = "probe: Some tensors have no numbers, the first of them 'batch/input': Odd has no address."
    assert [line for line in done.stderr.splitlines() if "numbers" in line] == [told] * 2
    capture = open_capture(tmp_path / "c")
    for step in (1, 2):
        rows = capture.rows(0, step)
        assert [key.label for key in rows.keys if key.kind is Kind.FORWARD] == [
            "forward/0",
            "forward/1",
            "forward/2",
            "forward/(root)",
        ]
        assert not any(rows.text[at] for label, at in by_label(rows).items() if not label.startswith("state/"))
    rows = capture.rows(0, 3)
    assert rows.text[by_label(rows)["batch/input"]] == "not reduced: Odd has no address."


def test_a_copy_and_a_pickle_of_the_model_neither_record_nor_need_this_package(tmp_path: Path) -> None:
    words = command("loops.py", "copies")
    done = probe("record", "-o", str(tmp_path / "c"), "--", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == '{"names_probe": false}\n' * 3
    # The copies' backward passes are microbatches 0 and 1: nothing was recorded in them.
    forward = [key.label for key in open_capture(tmp_path / "c").rows(0, 2).keys if key.kind is Kind.FORWARD]
    assert forward == ["forward/0@2", "forward/1@2", "forward/2@2", "forward/(root)@2"]


def test_data_parallel_is_refused_at_the_end_of_the_run_with_what_to_use(tmp_path: Path) -> None:
    words = command("loops.py", "parallel")
    done = probe("record", "-o", str(tmp_path / "c"), "--", *words)
    assert done.returncode == NOTHING_RECORDED
    assert done.stderr.splitlines() == [
        f"Nothing was recorded in {str(tmp_path / 'c')!r}.",
        f"{words[1]}: optimizers constructed 1, models found 0, training forward passes 0, backward passes 3, "
        "optimizer steps 0.",
        "The model is wrapped in torch.nn.DataParallel, which copies it to every device in every step and runs the "
        "copies in threads: what a copy computes has no place in the model that is trained. Wrap it in "
        "torch.nn.parallel.DistributedDataParallel and launch one process for each device with torchrun.",
    ]


def test_a_fused_and_a_plain_update_under_a_scaler_give_the_same_rows(runs: Runs) -> None:
    for step in (1, 2, 3):
        same_values(runs("scaler").rows(0, step), runs("scaler_fused").rows(0, step), *(set(Kind) - {Kind.STATE}))
