from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_rows import as_comparable, forward_keys, make_capture, make_rows, random_tensor

from probe.errors import CaptureFormatError
from probe.store import reader, twins
from probe.store.layout import TABLES
from probe.store.reader import Capture, open_capture

OTHER = tuple(f"texu {at}" if at % 3 == 2 else "" for at in range(9))


def refuse(path: Path) -> Any:
    raise AssertionError(f"{path} was opened with HDF5")


def read_first(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the first step; from then on HDF5 must not be needed."""
    capture.rows(0, 1)
    monkeypatch.setattr(reader, "open_segment", refuse)
    capture.rows(0, 1)


@pytest.mark.parametrize("count", [1, 2, 9, 3 * twins._RUNS + 9], ids=lambda count: f"{count} rows")
def test_later_steps_are_read_without_hdf5_and_bit_by_bit_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    capture = open_capture(make_capture(tmp_path / "c", (1, 2, 3), keys=forward_keys(count)))
    read_first(capture, monkeypatch)
    for step in (1, 2, 3):
        assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(forward_keys(count), step=step))


def test_rows_of_which_all_or_none_have_vectors_are_read_without_hdf5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, sketch in (("all", np.ones((9, 251), np.float32)), ("none", np.full((9, 251), np.nan, np.float32))):
        with monkeypatch.context() as patched:
            capture = open_capture(make_capture(tmp_path / name, (1, 2), sketch=sketch))
            read_first(capture, patched)
            assert as_comparable(capture.rows(0, 2)) == as_comparable(make_rows(step=2, sketch=sketch))


def test_names_and_texts_of_the_same_length_are_not_taken_from_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_capture(tmp_path / "c", (1,))
    other = make_capture(tmp_path / "other", (2,), keys=tuple(reversed(forward_keys(9))), text=OTHER)
    shutil.copy(other / "rank00000/step00000002.h5", tmp_path / "c/rank00000")
    capture = open_capture(tmp_path / "c")
    read_first(capture, monkeypatch)
    expected = make_rows(tuple(reversed(forward_keys(9))), step=2, text=OTHER)
    assert as_comparable(capture.rows(0, 2)) == as_comparable(expected)


def test_a_step_of_another_layout_is_read_with_hdf5_and_the_next_one_like_it_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_capture(tmp_path / "c", (1,))
    other = make_capture(tmp_path / "other", (2, 3), keys=forward_keys(5))
    for file in other.glob("rank00000/step*"):
        shutil.copy(file, tmp_path / "c/rank00000")
    capture = open_capture(tmp_path / "c")
    capture.rows(0, 1)
    capture.rows(0, 2)
    monkeypatch.setattr(reader, "open_segment", refuse)
    assert as_comparable(capture.rows(0, 3)) == as_comparable(make_rows(forward_keys(5), step=3))


def test_segments_with_whole_tensors_are_read_without_hdf5_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = forward_keys(4)
    tensors = {key: random_tensor("bfloat16", (300, 500)) for key in keys}
    capture = open_capture(make_capture(tmp_path / "c", (1, 2), keys=keys, tensors=tensors))
    read_first(capture, monkeypatch)
    assert as_comparable(capture.rows(0, 2)) == as_comparable(make_rows(keys, step=2))


@pytest.mark.parametrize("table", [table.name for table in TABLES])
def test_a_changed_byte_of_any_table_is_damage(tmp_path: Path, table: str) -> None:
    import h5py

    capture = open_capture(make_capture(tmp_path / "c", (1, 2)))
    capture.rows(0, 1)
    file = tmp_path / "c/rank00000/step00000002.h5"
    with h5py.File(file, "r", locking=False) as segment:
        place = segment[table].id.get_offset()
    with open(file, "r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)
        raw.seek(place)
        raw.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CaptureFormatError, match=f"^Segment {re.escape(str(file))} is damaged: its tables do not have"):
        capture.rows(0, 2)


@pytest.mark.parametrize("name", ["run_id", "rank", "world_size", "first_step", "last_step", "probe_format_version"])
def test_what_another_segment_says_of_itself_is_refused(tmp_path: Path, name: str) -> None:
    import h5py

    capture = open_capture(make_capture(tmp_path / "c", (1, 2)))
    capture.rows(0, 1)
    file = tmp_path / "c/rank00000/step00000002.h5"
    size = os.path.getsize(file)
    with h5py.File(file, "r+", locking=False) as segment:
        old = segment.attrs[name]
        segment.attrs.modify(name, "f" * 32 if name == "run_id" else old + 7)
    assert os.path.getsize(file) == size
    with pytest.raises(CaptureFormatError):
        capture.rows(0, 2)


def test_a_step_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    capture = open_capture(make_capture(tmp_path / "c", (1, 2)))
    capture.rows(0, 1)
    file = tmp_path / "c/rank00000/step00000002.h5"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CaptureFormatError, match=re.escape(f"Segment {file} is no regular file. Remove it.")):
        capture.rows(0, 2)


def test_no_more_layouts_are_learned_of_a_run_than_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "KEPT", 1)
    make_capture(tmp_path / "c", (1,))
    other = make_capture(tmp_path / "other", (2,), keys=forward_keys(5))
    shutil.copy(other / "rank00000/step00000002.h5", tmp_path / "c/rank00000")
    capture = open_capture(tmp_path / "c")
    for step in (1, 2, 2):
        capture.rows(0, step)
    assert len(twins._known) == 1
    open_capture(other).rows(0, 2)
    assert len(twins._known) == 2


def test_the_oldest_layout_is_forgotten_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "REMEMBERED", 2)
    paths = [make_capture(tmp_path / str(count), (1,), keys=forward_keys(count)) for count in (3, 40, 90)]
    for path in paths:
        open_capture(path).rows(0, 1)
    assert [size for size, _ in twins._known] == [
        (path / "rank00000/step00000001.h5").stat().st_size for path in paths[1:]
    ]


def test_another_run_of_the_same_layout_is_read_without_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = open_capture(make_capture(tmp_path / "one", (1, 2), seed=1))
    two = open_capture(make_capture(tmp_path / "two", (1, 2), seed=2))
    read_first(one, monkeypatch)
    for step in (1, 2):
        assert as_comparable(two.rows(0, step)) == as_comparable(make_rows(step=step, seed=2))
