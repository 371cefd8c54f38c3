"""Unmodified scripts of the trainers that people use have the quantities of the plain loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from probe.point import Key, Kind
from probe.store.reader import Capture
from tests.recording import command, probe, record

Runs = Callable[[str], Capture]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Record `trainers.py` once under each trainer."""
    folder = tmp_path_factory.mktemp("trainers")
    made: dict[str, Capture] = {}

    def one(trainer: str) -> Capture:
        if trainer not in made:
            words = command("trainers.py", trainer, "--folder", str(folder / "out"))
            made[trainer] = record(folder / trainer, words, "--seed", "1")
        return made[trainer]

    return one


def values(capture: Capture, step: int, prefix: str = "", root: str = "") -> dict[str, list[float]]:
    """Map labels to sketches, or values of numbers; the names of a model that the trainer holds lose its prefix."""
    rows = capture.rows(0, step)
    found = {}
    for row, key in enumerate(rows.keys):
        if key.kind is Kind.STATE:
            continue
        name = root if key.name == prefix.rstrip(".") and root else key.name.removeprefix(prefix)
        renamed = Key(kind=key.kind, name=name, item=key.item, microbatch=key.microbatch, call=key.call)
        numbers = rows.sketch[row] if rows.numel[row] != 1 else rows.value[row : row + 1]
        found[renamed.label] = numbers.tolist()
    return found


def assert_same(expected: dict[str, list[float]], actual: dict[str, list[float]]) -> None:
    assert list(actual) == list(expected)
    for label, numbers in expected.items():
        np.testing.assert_allclose(actual[label], numbers, rtol=1e-5, atol=1e-7, err_msg=label)


@pytest.mark.parametrize("step", [1, 3])
def test_accelerate_accumulates_and_clips_as_the_plain_loop_does(runs: Runs, step: int) -> None:
    pytest.importorskip("accelerate")
    assert_same(values(runs("plain"), step), values(runs("accelerate"), step))


@pytest.mark.parametrize("step", [1, 3])
def test_lightning_takes_its_batch_and_its_steps_inside_a_closure(runs: Runs, step: int) -> None:
    pytest.importorskip("lightning")
    assert_same(values(runs("plain"), step), values(runs("lightning"), step, "net.", "(root)"))


@pytest.mark.parametrize("step", [1, 3])
def test_the_trainer_of_transformers_differs_only_in_what_its_model_returns(runs: Runs, step: int) -> None:
    pytest.importorskip("transformers")
    expected, actual = values(runs("plain"), step), values(runs("transformers"), step)
    root = {label for label in expected if "(root)" in label}
    returned = {label for label in actual if "(root)" in label}
    assert actual.keys() - returned == (expected.keys() - root) | {"lr/lr[1]"}
    assert returned == {
        f"{kind}/(root).{item}{microbatch}"
        for kind in ("forward", "backward")
        for item in ("loss", "logits")
        for microbatch in ("", "@1")
    }
    for label in expected.keys() - root:
        np.testing.assert_allclose(actual[label], expected[label], rtol=1e-5, atol=1e-7, err_msg=label)


def test_both_ways_to_inject_adapters_give_the_same_names_and_values(runs: Runs) -> None:
    pytest.importorskip("peft")
    for step in (1, 3):
        expected = values(runs("peft_injected"), step)
        assert_same(expected, values(runs("peft_model"), step))
        assert [label for label in expected if label.startswith("grad/")] == [
            f"grad/{layer}.lora_{half}.default.weight" for layer in ("up", "down") for half in ("A", "B")
        ]


def test_show_tells_from_which_path_each_name_was_derived_and_what_was_left_out(runs: Runs) -> None:
    pytest.importorskip("peft")
    done = probe("show", "--names", str(runs("peft_model").path), "grad/up*")
    assert done.stdout.splitlines() == [
        f"grad/up.lora_{half}.default.weight\tbase_model.model.up.lora_{half}.default.weight\t"
        "without base_model (PeftModel), model (LoraModel)"
        for half in ("A", "B")
    ]


def test_show_tells_which_optimized_parameter_has_no_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    capture = record(tmp_path_factory.mktemp("loose") / "c", command("loops.py", "loose"))
    done = probe("show", "--names", str(capture.path))
    assert done.stdout.splitlines()[-1] == "Parameter float32[2] of an optimizer is in no module that was called."
    assert "param/(unnamed).0" in done.stdout.splitlines()
