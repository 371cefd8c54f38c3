"""Recording an unmodified script: what is taken, when, and that the run does not notice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from probe.capture import summary
from probe.point import STEP_CLOCK, Key, Kind
from probe.store.layout import SAMPLES, SKETCH_K, StepRows
from probe.store.reader import Capture
from tests.recording import by_label, command, record, run


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    folder = tmp_path_factory.mktemp("plain")
    return record(folder / "capture", command("tiny.py", "--clip", "0.5"), "--seed", "7")


def labels(rows: StepRows, kind: Kind) -> list[str]:
    return [key.label for key in rows.keys if key.kind is kind]


MODULES = [
    "embed",
    *(f"blocks.{i}{part}" for i in range(3) for part in (".norm", ".attn.qkv", ".attn.out", ".attn", ".drop", "")),
    "head",
    "(root)",
]


def test_every_module_is_taken_in_execution_order_and_its_gradient_in_reverse(plain: Capture) -> None:
    rows = plain.rows(0, 2)
    assert labels(rows, Kind.FORWARD) == [f"forward/{name}" for name in MODULES]
    backward = labels(rows, Kind.BACKWARD)
    assert sorted(backward) == sorted(f"backward/{name}" for name in MODULES)
    assert backward[0] == "backward/(root)"
    assert (
        backward.index("backward/blocks.2")
        < backward.index("backward/blocks.2.attn.qkv")
        < backward.index("backward/blocks.1")
    )


def test_the_default_plan_records_each_kind_at_its_clock(plain: Capture) -> None:
    rows = plain.rows(0, 2)
    parameters = [n for n, _ in torch.nn.Module.named_parameters(_net())]
    assert labels(rows, Kind.BATCH) == ["batch/x", "batch/scale"]
    assert labels(rows, Kind.LOSS) == ["loss/micro_loss", "loss/loss_scale"]
    assert labels(rows, Kind.GRAD) == [f"grad/{n}" for n in parameters] + [f"grad/{n}:clipped" for n in parameters]
    assert labels(rows, Kind.GRAD_NORM) == ["grad_norm/grad_norm"]
    assert labels(rows, Kind.LR) == ["lr/lr"]
    assert labels(rows, Kind.PARAM) == [f"param/{n}" for n in parameters]
    assert labels(plain.rows(0, 1), Kind.PARAM)[: len(parameters)] == [f"param/{n}:before" for n in parameters]
    at = by_label(rows)
    assert rows.value[at["lr/lr"]] == 0.01
    assert rows.value[at["state/trainable_parameters"]] == rows.value[at["state/gradients"]] == len(parameters)
    assert rows.value[at["state/dropouts_in_train_mode"]] == 3
    clocks = {key.kind: key.microbatch for key in rows.keys}
    step_clock = {Kind.GRAD, Kind.GRAD_NORM, Kind.LR, Kind.PARAM, Kind.STATE}
    assert {kind for kind, microbatch in clocks.items() if microbatch == STEP_CLOCK} == step_clock


def _net() -> torch.nn.Module:
    from tests.jobs.tiny import Net

    return Net(16, "none")


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_equal_what_an_explicit_dump_at_the_optimizer_sees_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    dump = tmp_path / "dump"
    words = command("tiny.py", "--accum", "2", "--dump", str(dump), ranks=ranks)
    capture = record(tmp_path / "capture", words, "--seed", "1")
    assert capture.ranks == tuple(range(ranks))
    for rank in range(ranks):
        dumps = torch.load(f"{dump}.{rank}")
        for step, gradients in enumerate(dumps, start=1):
            rows = capture.rows(rank, step)
            at = by_label(rows)
            for name, gradient in gradients.items():
                sketch, sample = np.zeros(SKETCH_K, np.float32), np.full(SAMPLES, np.nan, np.float32)
                numbers = summary.host_row(gradient, name, summary.Scratch(), sketch, sample)
                row = at[f"grad/{name}"]
                assert rows.scalars["l2"][row] == numbers[1]
                assert rows.scalars["max_abs"][row] == numbers[3]
                np.testing.assert_array_equal(rows.sketch[row], sketch)
                np.testing.assert_array_equal(rows.sample[row], sample)
    if ranks == 2:
        first, second = (capture.rows(rank, 3) for rank in (0, 1))
        gradients_at = [i for i, key in enumerate(first.keys) if key.kind is Kind.GRAD]
        losses_at = [i for i, key in enumerate(first.keys) if key.kind is Kind.LOSS and key.name == "micro_loss"]
        np.testing.assert_array_equal(first.sketch[gradients_at], second.sketch[gradients_at])
        assert (first.value[losses_at] != second.value[losses_at]).all()


def test_gradients_that_are_not_reduced_differ_between_ranks_in_the_data(tmp_path: Path) -> None:
    words = command("tiny.py", "--steps", "1", "--fault", "no-sync", ranks=2)
    capture = record(tmp_path / "capture", words, "--seed", "1")
    first, second = (capture.rows(rank, 1) for rank in (0, 1))
    row = by_label(first)["grad/head.weight"]
    assert not np.array_equal(first.sketch[row], second.sketch[row])


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_loss_is_told_undivided_and_the_factor_beside_it(tmp_path: Path, scale: float) -> None:
    words = command("tiny.py", "--accum", "4", "--steps", "1", "--loss-scale", str(scale))
    capture = record(tmp_path / "capture", words, "--seed", "1")
    rows = capture.rows(0, 1)
    at = by_label(rows)
    suffixes = ["", "@1", "@2", "@3"]
    losses = [rows.value[at[f"loss/micro_loss{s}"]] for s in suffixes]
    assert [rows.value[at[f"loss/loss_scale{s}"]] for s in suffixes] == [scale / 4] * 4
    assert all(0.5 < loss < 3 for loss in losses)
    assert len({float(loss) for loss in losses}) == 4


@pytest.mark.parametrize("how", ["nonreentrant", "reentrant"])
def test_a_recompute_is_neither_a_second_call_nor_a_missing_record(tmp_path: Path, how: str, plain: Capture) -> None:
    capture = record(tmp_path / "capture", command("tiny.py", "--clip", "0.5", "--ckpt", how), "--seed", "7")
    rows, expected = capture.rows(0, 2), plain.rows(0, 2)
    assert labels(rows, Kind.FORWARD) == labels(expected, Kind.FORWARD)
    forward = [i for i, key in enumerate(rows.keys) if key.kind is Kind.FORWARD]
    at = by_label(expected)
    np.testing.assert_array_equal(rows.sketch[forward], expected.sketch[[at[rows.keys[i].label] for i in forward]])


def test_an_evaluation_between_steps_is_not_recorded(tmp_path: Path, plain: Capture) -> None:
    capture = record(tmp_path / "capture", command("tiny.py", "--clip", "0.5", "--eval"), "--seed", "7")
    for step in (1, 2, 3):
        rows, expected = capture.rows(0, step), plain.rows(0, step)
        assert [k for k in rows.keys if k.kind is not Kind.STATE] == [
            k for k in expected.keys if k.kind is not Kind.STATE
        ]
        np.testing.assert_array_equal(rows.sketch, expected.sketch)


VARIANTS = [
    (),
    ("--accum", "2", "--clip", "0.5"),
    ("--ckpt", "nonreentrant"),
    ("--ckpt", "reentrant"),
    ("--bf16", "--ckpt", "nonreentrant"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_recording_leaves_losses_and_final_weights_bit_identical(tmp_path: Path, variant: tuple[str, ...]) -> None:
    def weights(name: str) -> list[str]:
        return ["--weights", str(tmp_path / name), "--seed", "5"]

    bare = run(command("tiny.py", *variant, *weights("bare.pt")))
    assert bare.returncode == 0, bare.stderr
    recorded = run(
        [
            "probe",
            "record",
            "-o",
            str(tmp_path / "c"),
            "--full",
            "*attn*",
            "--",
            *command("tiny.py", *variant, *weights("on.pt")),
        ]
    )
    assert recorded.returncode == 0, recorded.stderr
    assert recorded.stdout == bare.stdout
    expected, actual = torch.load(tmp_path / "bare.pt"), torch.load(tmp_path / "on.pt")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_the_seed_option_makes_an_unseeded_script_repeat_and_ranks_differ(tmp_path: Path) -> None:
    first, again = (record(tmp_path / name, command("tiny.py", "--steps", "1"), "--seed", "3") for name in ("a", "b"))
    other = record(tmp_path / "c", command("tiny.py", "--steps", "1"), "--seed", "4")
    np.testing.assert_array_equal(first.rows(0, 1).sketch, again.rows(0, 1).sketch)
    row = by_label(first.rows(0, 1))["forward/head"]
    assert not np.array_equal(first.rows(0, 1).sketch[row], other.rows(0, 1).sketch[row])


def test_only_the_wanted_steps_are_recorded_and_each_stretch_begins_with_its_parameters(tmp_path: Path) -> None:
    capture = record(tmp_path / "capture", command("tiny.py", "--steps", "5"), "--seed", "1", "--steps", "2,4-5")
    assert capture.steps(0) == (2, 4, 5)
    before = [sum(key.item == "before" for key in capture.rows(0, step).keys) for step in (2, 4, 5)]
    parameters = len(labels(capture.rows(0, 5), Kind.PARAM))
    assert before == [parameters, parameters, 0]


def test_a_tensor_kept_whole_equals_the_one_that_was_summarised(tmp_path: Path) -> None:
    words = command("tiny.py", "--steps", "1", "--bf16")
    capture = record(tmp_path / "capture", words, "--seed", "1", "--full", "blocks.1.attn")
    rows = capture.rows(0, 1)
    key = Key(kind=Kind.FORWARD, name="blocks.1.attn", microbatch=0)
    assert set(capture.tensor_keys(0, 1)) == {key, Key(kind=Kind.BACKWARD, name="blocks.1.attn", microbatch=0)}
    full = capture.tensor(0, 1, key)
    assert (full.dtype, full.bits.dtype, full.bits.shape) == ("bfloat16", np.uint16, (4, 6, 16))
    values = (full.bits.astype(np.uint32) << 16).view(np.float32)
    row = by_label(rows)[key.label]
    assert np.linalg.norm(values.astype(np.float64)) == pytest.approx(rows.scalars["l2"][row], rel=1e-6)
    index = summary.sample_index(key.name, values.size)
    np.testing.assert_array_equal(rows.sample[row][: len(index)], values.reshape(-1)[index])


def test_reentrant_checkpointing_keeps_the_gradients_of_inner_outputs(tmp_path: Path, plain: Capture) -> None:
    capture = record(tmp_path / "capture", command("tiny.py", "--clip", "0.5", "--ckpt", "reentrant"), "--seed", "7")
    rows, expected = capture.rows(0, 1), plain.rows(0, 1)
    # The output of the first checkpoint's own inputs aside, every gradient of the plain run is there, bit for bit.
    at, expected_at = by_label(rows), by_label(expected)
    assert sorted(labels(rows, Kind.BACKWARD)) == sorted(labels(expected, Kind.BACKWARD))
    for label in labels(rows, Kind.BACKWARD):
        np.testing.assert_allclose(rows.sketch[at[label]], expected.sketch[expected_at[label]], rtol=1e-5, atol=1e-7)
