"""What takes the way of an accelerator arrives as what is read in host memory; the device is the CPU's stand-in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from probe.capture import reducer, summary
from probe.capture.device import device_row
from probe.capture.recorder import Recorder, step_key
from probe.capture.shards import Part, part_row
from probe.capture.transfer import Transfer
from probe.plan import Plan
from probe.point import Key, Kind
from probe.store.layout import SCALARS, StepRows


def recorded(tmp_path: Path) -> StepRows:
    generator = torch.Generator().manual_seed(0)
    steps: list[StepRows] = []
    recorder = Recorder(
        output=tmp_path / "c",
        run_id="r",
        plan=Plan(full=("forward/*",)),
        strict=True,
        manifest=lambda *_: {},
        sink=steps.append,
    )
    tensors = {
        "long": torch.randn(300_000, generator=generator),
        "strided": torch.randn(30, 40, generator=generator).t(),
        "bf16": torch.randn(7, 11, generator=generator).bfloat16(),
        "short": torch.randn(3, generator=generator),
        "single": torch.randn((), generator=generator),
        "empty": torch.empty(0, 3),
        "bad": torch.tensor([1.0, float("nan"), float("inf")]),
        "whole numbers": torch.arange(1000),
        "conjugated": torch.randn(5, 5, dtype=torch.complex64, generator=generator).conj(),
    }
    recorder.tensor(step_key(Kind.GRAD, "dropped"), torch.ones(5))
    for name, tensor in tensors.items():
        recorder.tensor(Key(kind=Kind.FORWARD, name=name, microbatch=0), tensor)
        recorder.tensor(Key(kind=Kind.BATCH, name=name, microbatch=0), tensor, exact=True)
    recorder.forget(Kind.GRAD)
    recorder.tensor(step_key(Kind.PARAM, "small"), tensors["short"], exact=True)
    recorder.tensor(
        step_key(Kind.PARAM, "part"), tensors["short"], part=Part(shape=(9,), local=(3,), start=3, ranks=(0, 1, 2))
    )
    for tensor in tensors.values():
        if tensor.numel() > 1:
            tensor.zero_()
    recorder.next_step()
    (rows,) = steps
    return rows


def test_rows_digests_and_whole_tensors_are_those_of_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = recorded(tmp_path)
    monkeypatch.setattr(summary, "compiled", None)
    monkeypatch.setattr(reducer, "_on_host", lambda tensor: False)
    device = recorded(tmp_path)
    assert (device.keys, device.dtype, device.shape, device.text) == (host.keys, host.dtype, host.shape, host.text)
    np.testing.assert_array_equal(device.numel, host.numel)
    np.testing.assert_array_equal(device.nonfinite, host.nonfinite)
    np.testing.assert_array_equal(device.hash, host.hash)
    assert (host.hash != 0).any(axis=1).sum() == 10
    np.testing.assert_allclose(device.value, host.value)
    for name in SCALARS:
        np.testing.assert_allclose(device.scalars[name], host.scalars[name], rtol=2e-6, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(device.sketch, host.sketch, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(device.sample, host.sample)
    assert device.tensors.keys() == host.tensors.keys()
    assert len(host.tensors) == 9
    for key, tensor in host.tensors.items():
        assert device.tensors[key].dtype == tensor.dtype
        np.testing.assert_array_equal(device.tensors[key].bits, tensor.bits)


def test_a_long_parameter_is_not_brought_to_the_host_for_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "compiled", None)
    monkeypatch.setattr(reducer, "_on_host", lambda tensor: False)
    monkeypatch.setattr(reducer, "DIGESTED", 8)
    rows = recorded(tmp_path)
    digested = {key.label for key, digest in zip(rows.keys, rows.hash, strict=True) if digest.any()}
    assert digested == {key.label for key in rows.keys if key.kind is Kind.BATCH}


def test_nothing_is_left_to_matrix_products_which_tf32_would_round() -> None:
    asked: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(str(operation))
            return operation(*args, **(kwargs or {}))

    with Watching():
        device_row(torch.randn(600, 251), "x", summary.Scratch())
        part_row(
            torch.randn(600), "x", Part(shape=(1800,), local=(600,), start=600, ranks=(0, 1, 2)), summary.Scratch()
        )
    assert any("index_select" in operation for operation in asked)
    assert [operation for operation in asked if re.search(r"mm|mv|matmul|dot|einsum|linear", operation)] == []


def test_all_is_sent_at_the_end_of_a_step_and_waited_for_by_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Stream(torch.cpu.Stream):
        def wait_stream(self, stream: torch.cpu.Stream) -> None:
            told.append("wait for a stream")

    class Event(torch.cpu.Event):
        def record(self, stream: torch.cpu.Stream | None = None) -> None:
            told.append("event")

        def synchronize(self) -> None:
            told.append("synchronize")

    streams = [Stream(), Stream()]
    monkeypatch.setattr(torch.cpu, "Event", Event)
    transfer = Transfer()
    for number, stream in enumerate(streams):
        monkeypatch.setattr(torch.cpu, "current_stream", lambda device=None, stream=stream: stream)
        transfer.add_row(number, torch.full((3,), float(number)))
    assert told == []
    transfer.send()
    assert told == ["wait for a stream", "wait for a stream", "event"]
    transfer.wait()
    assert told[3:] == ["synchronize"]
    assert [(row, numbers.tolist()) for row, numbers in transfer.rows] == [(0, [0.0] * 3), (1, [1.0] * 3)]
