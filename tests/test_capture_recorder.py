"""The recorder's rows, in process: shared buffers, repeated keys, and what replaces what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probe.capture import summary
from probe.capture.recorder import Recorder, step_key
from probe.plan import default_plan
from probe.point import Key, Kind
from probe.store.layout import StepRows
from tests.recording import by_label


@pytest.fixture
def steps() -> list[StepRows]:
    return []


@pytest.fixture
def recorder(steps: list[StepRows]) -> Recorder:
    def manifest(world_size: int, imported: tuple[str, ...] | None) -> dict[str, Any]:
        return {}

    return Recorder(
        output=Path("unused"), run_id="0", plan=default_plan(), strict=True, manifest=manifest, sink=steps.append
    )


def forward(name: str) -> Key:
    return Key(kind=Kind.FORWARD, name=name, microbatch=0)


def alone(tensor: torch.Tensor, name: str) -> tuple[Any, np.ndarray, np.ndarray]:
    sketch = np.zeros(summary.SKETCH_K, np.float32)
    sample = np.full(summary.SAMPLES, np.nan, np.float32)
    return summary.host_row(tensor, name, summary.Scratch(), sketch, sample), sketch, sample


def test_a_tensor_that_was_written_to_behind_torch_is_read_again(recorder: Recorder, steps: list[StepRows]) -> None:
    # A compiled graph reuses a buffer for another value: the same tensor object, and the same version of it.
    tensor = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    first = tensor.clone()
    recorder.tensor(forward("block.child"), tensor)
    version = tensor._version
    tensor.numpy()[3] += 1
    assert tensor._version == version
    recorder.tensor(forward("block"), tensor)
    recorder.next_step()
    rows, at = steps[0], by_label(steps[0])
    for name, expected in {"block.child": first, "block": tensor}.items():
        numbers, sketch, sample = alone(expected, name)
        row = at[f"forward/{name}"]
        assert rows.scalars["l2"][row] == numbers[1]
        np.testing.assert_array_equal(rows.sketch[row], sketch)
        np.testing.assert_array_equal(rows.sample[row], sample)


def test_a_repeated_key_becomes_the_next_call(recorder: Recorder, steps: list[StepRows]) -> None:
    for value in (1.0, 2.0, 3.0):
        recorder.tensor(forward("a"), torch.full((3,), value))
    recorder.next_step()
    assert [key.label for key in steps[0].keys] == ["forward/a", "forward/a#2", "forward/a#3"]
    assert steps[0].scalars["mean"].tolist() == [1.0, 2.0, 3.0]


def test_forgetting_a_kind_leaves_the_other_rows_whole(recorder: Recorder, steps: list[StepRows]) -> None:
    recorder.tensor(forward("a"), torch.full((300,), 2.0))
    recorder.tensor(step_key(Kind.GRAD, "w"), torch.full((300,), 5.0), exact=True)
    recorder.tensor(forward("b"), torch.full((300,), 3.0), exact=True)
    recorder.forget(Kind.GRAD)
    recorder.tensor(step_key(Kind.GRAD, "w"), torch.full((300,), 7.0))
    recorder.next_step()
    rows = steps[0]
    assert [key.label for key in rows.keys] == ["forward/a", "forward/b", "grad/w"]
    assert rows.scalars["mean"].tolist() == [2.0, 3.0, 7.0]
    assert rows.hash.any(axis=1).tolist() == [False, True, False]
    assert rows.order.tolist() == [0, 2, 3]
    np.testing.assert_array_equal(rows.sketch[1], alone(torch.full((300,), 3.0), "b")[1])
