"""Functions named by import path: their arguments, results and gradients, wherever the training code binds them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from probe.point import Kind
from probe.store.reader import Capture, open_capture
from tests.recording import by_label, command, probe, record

PLAN = """
[record]
kinds = ["call", "forward", "backward", "loss"]
[record.calls]
attention = "functions_library:attention"
targets = "functions_library:Targets.zeros"
loss = "__main__:loss_of"
scale = "__main__:Scale.apply"
sdpa = "torch.nn.functional:scaled_dot_product_attention"
"""


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    folder = tmp_path_factory.mktemp("calls")
    (folder / "plan.toml").write_text(PLAN)
    return record(folder / "c", command("functions.py"), "--plan", str(folder / "plan.toml"))


def test_arguments_result_and_gradient_are_recorded_once_for_each_call_of_a_training_pass(capture: Capture) -> None:
    for step in (1, 2):
        labels = [key.label for key in capture.rows(0, step).keys if key.kind is Kind.CALL]
        of_block = [key for key in capture.rows(0, step).keys if key.kind is Kind.CALL and key.name[0] in "01"]
        assert Counter(key.name for key in of_block) == {
            f"{block}.{name}": count
            for block in (0, 1)
            for name, count in (("attention", 6), ("scale", 3), ("sdpa", 6))
        }
        assert [label for label in labels if label.startswith(("call/targets", "call/loss"))] == [
            "call/targets.like",
            "call/targets(result)",
            "call/loss.output",
            "call/loss.target",
            "call/loss(result)",
            "call/loss(gradient)",
        ]
        assert [label for label in labels if "1.attention" in label] == [
            "call/1.attention.q",
            "call/1.attention.k",
            "call/1.attention.v",
            "call/1.attention.causal",
            "call/1.attention(result)",
            "call/1.attention(gradient)",
        ]


def test_values_are_those_of_the_modules_around_and_the_place_is_told(capture: Capture) -> None:
    rows = capture.rows(0, 1)
    at = by_label(rows)
    for call, forward in (("call/1.scale(result)", "forward/1"), ("call/loss.output", "forward/(root)")):
        np.testing.assert_array_equal(rows.sketch[at[call]], rows.sketch[at[forward]])
    np.testing.assert_array_equal(rows.sketch[at["call/0.scale(gradient)"]], rows.sketch[at["backward/0"]])
    assert rows.value[at["call/loss(result)"]] == rows.value[at["loss/micro_loss"]]
    places = [rows.where[at[label]] for label in ("call/1.attention.q", "call/loss.output", "call/0.attention.causal")]
    assert places == ["called in 1", "called outside of any module", "called in 0"]


def test_a_function_that_does_not_exist_or_is_never_called_is_told_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        '[record]\ncalls = ["functions_library:atention", "functions_library:Targets.ones",'
        ' "functions_library:unused", "wave:open"]\n'
    )
    words = command("functions.py")
    done = probe("record", "-o", str(tmp_path / "c"), "--plan", str(tmp_path / "plan.toml"), "--", *words)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    # At once, and again at the end, which is where one looks after a long run.
    assert lines[:2] == lines[3:5]
    assert lines[3:] == [
        "probe: Function 'functions_library:atention' of the plan does not exist. "
        "Did you mean 'functions_library:attention'?",
        "probe: Function 'functions_library:Targets.ones' of the plan does not exist. "
        "Did you mean 'functions_library:Targets'?",
        "probe: Function 'functions_library:unused' of the plan was never called eagerly in a recorded step: "
        "nothing of it is recorded.",
        "probe: Function 'wave:open' of the plan is in 'wave', never imported: nothing of it is recorded.",
    ]


def test_selections_that_match_nothing_are_told_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(
        "[record]\n"
        'include = ["forward/#.qkv", "forward/#.kqv"]\n'
        'exclude = ["*.dorpout", "grad/1.qkv.bias", "backward/1.qkv[0]"]\n'
        'full = ["forward/0.qkv", "forward/0.qvk"]\n'
        'inside_compiled = ["0.qkv", "2.qkv"]\n'
    )
    words = command("functions.py")
    done = probe("record", "-o", str(tmp_path / "c"), "--plan", str(tmp_path / "plan.toml"), "--", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[1:] == [
        "probe: Selection 'forward/#.kqv' of include matches nothing that was recorded.",
        "probe: Selection '*.dorpout' of exclude matches no module, and nothing that was recorded.",
        "probe: Selection 'forward/0.qvk' of full matches nothing that was recorded.",
        "probe: Selection '2.qkv' of inside_compiled matches no module, and nothing that was recorded.",
    ]


def test_inside_a_compiled_region_a_function_is_left_alone_and_around_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    words = command("functions.py", "--compile")
    done = probe("record", "-o", str(tmp_path / "c"), "--plan", str(tmp_path / "plan.toml"), "--", *words)
    assert done.returncode == 0, done.stderr
    labels = [key.label for key in open_capture(tmp_path / "c").rows(0, 1).keys if key.kind is Kind.CALL]
    assert {label.split("/")[1].split(".")[0].split("(")[0] for label in labels} == {"targets", "loss"}
    assert [line.split("'")[1] for line in done.stderr.splitlines()[1:]] == [
        "functions_library:attention",
        "__main__:Scale.apply",
        "torch.nn.functional:scaled_dot_product_attention",
    ]
