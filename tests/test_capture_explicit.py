"""The explicit API: values named by the training code, with and without the launcher, eager and compiled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from probe.point import Kind
from probe.store.reader import Capture, open_capture
from tests.recording import by_label, command, record, run


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    return record(tmp_path_factory.mktemp("explicit") / "c", command("explicit.py"))


def test_numbers_texts_tensors_and_a_repeated_name_are_kept_with_their_call_site(eager: Capture) -> None:
    assert eager.steps(0) == (1, 2, 3)
    rows = eager.rows(0, 2)
    at = by_label(rows)
    explicit = [key.label for key in rows.keys if key.kind is Kind.EXPLICIT]
    assert explicit == [
        "explicit/hidden",
        "explicit/out",
        "explicit/out.gradient",
        "explicit/hidden.gradient",
        "explicit/loss@1",
        "explicit/loss@1#2",
        "explicit/facts.tokens@1",
        "explicit/facts.name@1",
        "explicit/facts.ready@1",
        "explicit/facts.shape@1",
        "explicit/facts.ids@1",
        "explicit/norm@1",
    ]
    assert rows.value[at["explicit/loss@1#2"]] == pytest.approx(2 * rows.value[at["explicit/loss@1"]])
    kinds = [
        (rows.dtype[at[f"explicit/facts.{n}@1"]], rows.text[at[f"explicit/facts.{n}@1"]])
        for n in ("tokens", "name", "ready", "shape")
    ]
    assert kinds == [("int", ""), ("str", "batch"), ("bool", ""), ("str", "(4, 8)")]
    assert rows.hash[at["explicit/facts.ids@1"]].any()
    where = [rows.where[at[label]] for label in ("explicit/hidden", "explicit/loss@1#2")]
    assert where == ["explicit.py:16", "explicit.py:32 (again)"]


def test_a_tap_survives_compilation_with_its_gradient_in_one_graph(eager: Capture, tmp_path: Path) -> None:
    compiled = record(tmp_path / "c", command("explicit.py", "--compile"))
    for step in (1, 3):
        rows, expected = compiled.rows(0, step), eager.rows(0, step)
        at, expected_at = by_label(rows), by_label(expected)
        for name in ("hidden", "out", "out.gradient", "hidden.gradient"):
            label = f"explicit/{name}"
            np.testing.assert_allclose(
                rows.sketch[at[label]], expected.sketch[expected_at[label]], rtol=1e-5, atol=1e-6
            )


def test_two_environment_variables_record_without_the_launcher(eager: Capture, tmp_path: Path) -> None:
    done = run(command("explicit.py"), PROBE="1", PROBE_OUT=str(tmp_path / "c"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("enabled")
    np.testing.assert_array_equal(open_capture(tmp_path / "c").rows(0, 2).value, eager.rows(0, 2).value)


def test_without_them_nothing_is_recorded_and_the_numbers_are_the_same(tmp_path: Path) -> None:
    off = run(command("explicit.py"), cwd=tmp_path)
    assert off.stdout.startswith("off")
    on = run(command("explicit.py"), PROBE="1", PROBE_OUT=str(tmp_path / "c"), cwd=tmp_path)
    assert off.stdout.split()[1] == on.stdout.split()[1]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
