"""Compiled regions: values at their boundary, nothing inside, and not one graph or recompilation more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from probe.point import Kind
from probe.store.reader import Capture, open_capture
from tests.recording import by_label, command, record, run


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return record(tmp_path_factory.mktemp("eager") / "c", command("compiled.py"))


def forward(capture: Capture, step: int) -> set[str]:
    return {key.name for key in capture.rows(0, step).keys if key.kind is Kind.FORWARD}


BLOCKS = {f"blocks.{i}" for i in range(12)}
AROUND = {"inp", "out", "(root)"}
INNER = {f"blocks.{i}.{part}" for i in range(12) for part in ("norm", "up", "down")}

TAKEN = {
    "model": {"(root)"},
    "method": {"(root)"},
    "block": AROUND | BLOCKS,
    "block-method": AROUND | BLOCKS,
    "forward": AROUND | BLOCKS,
    "method-of-class": AROUND | BLOCKS,
    "function": AROUND | BLOCKS | INNER,
}


@pytest.mark.parametrize("how", sorted(TAKEN))
def test_recording_compiles_nothing_more_and_takes_every_boundary_in_every_step(
    how: str, eager: Capture, tmp_path: Path
) -> None:
    bare = run(command("compiled.py", "--how", how))
    assert bare.returncode == 0, bare.stderr
    recorded = run(["probe", "record", "-o", str(tmp_path / "c"), "--", *command("compiled.py", "--how", how)])
    assert recorded.returncode == 0, recorded.stderr
    assert recorded.stdout == bare.stdout  # losses, weights, graphs, frames, breaks
    capture = open_capture(tmp_path / "c")
    for step in (1, 3):
        assert forward(capture, step) == TAKEN[how]
        rows, expected = capture.rows(0, step), eager.rows(0, step)
        at, expected_at = by_label(rows), by_label(expected)
        labels = [label for label in at if label.startswith(("forward/", "backward/", "grad/", "param/"))]
        assert {f"backward/{name}" for name in TAKEN[how]} <= set(labels)
        for label in labels:
            np.testing.assert_allclose(
                rows.sketch[at[label]], expected.sketch[expected_at[label]], rtol=1e-4, atol=1e-6, err_msg=label
            )


INSIDE = {"model": AROUND | BLOCKS | INNER, "block": AROUND | BLOCKS | INNER, "forward": AROUND | BLOCKS | INNER}


@pytest.mark.parametrize("how", sorted(INSIDE))
def test_a_plan_taps_every_module_inside_a_compiled_region_without_one_recompilation(
    how: str, eager: Capture, tmp_path: Path
) -> None:
    bare = run(command("compiled.py", "--how", how))
    plan = tmp_path / "plan.toml"
    plan.write_text('[record]\ninside_compiled = ["*"]\n')
    recorded = run(
        ["probe", "record", "-o", str(tmp_path / "c"), "--plan", str(plan), "--", *command("compiled.py", "--how", how)]
    )
    assert recorded.returncode == 0, recorded.stderr
    counted = [json.loads(done.stdout) for done in (bare, recorded)]
    for one in counted:
        del one["calls_captured"]  # the taps are operations of the graph
    assert counted[0] == counted[1]  # losses, weights, graphs, frames, breaks
    capture = open_capture(tmp_path / "c")
    for step in (1, 2, 3):
        rows, expected = capture.rows(0, step), eager.rows(0, step)
        at, expected_at = by_label(rows), by_label(expected)
        assert forward(capture, step) == INSIDE[how]
        wanted = {"forward", "backward"}
        assert {label for label in at if label.split("/")[0] in wanted} == {
            label for label in expected_at if label.split("/")[0] in wanted
        }
        for label in at:
            if label.split("/")[0] in wanted:
                np.testing.assert_allclose(
                    rows.sketch[at[label]], expected.sketch[expected_at[label]], rtol=1e-4, atol=1e-6, err_msg=label
                )
