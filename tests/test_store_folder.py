from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from step_rows import RUN_ID, make_capture

from probe.errors import CaptureError
from probe.store.folder import create_capture, write_manifest


def test_a_capture_is_made_with_its_parents_or_in_an_empty_folder(tmp_path: Path) -> None:
    create_capture(tmp_path / "captures/base-0")
    create_capture(tmp_path / "captures/base-0")
    assert os.listdir(tmp_path / "captures/base-0") == []


def test_a_capture_that_exists_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    before = sorted(path.rglob("*"))
    with pytest.raises(CaptureError) as caught:
        create_capture(path)
    assert str(caught.value) == (
        f"Capture {path} exists: 1 rank, 2 steps. Choose another folder, or replace it with --force."
    )
    assert sorted(path.rglob("*")) == before


def test_a_folder_of_other_things_is_refused_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(CaptureError) as caught:
        create_capture(tmp_path)
    assert str(caught.value) == (
        f"Capture {tmp_path} exists: 0 ranks, 0 steps. Choose another folder, or replace it with --force."
    )


def test_force_removes_a_capture_and_what_a_crash_left_of_it(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    (path / "rank00000/step00000003.h5.tmp").write_text("half")
    (path / "capture.json.tmp").write_text("half")
    (path / "rank00001").mkdir()
    (path / "rank00000" / "names.json").write_text("{}")
    create_capture(path, force=True)
    assert os.listdir(path) == []


@pytest.mark.parametrize("name", ["notes.txt", "rank00000/model.pt", "rank0/step00000001.h5", "rank00000/capture.json"])
def test_force_removes_nothing_where_anything_else_lies(tmp_path: Path, name: str) -> None:
    path = make_capture(tmp_path / "c")
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_text("precious")
    before = sorted(path.rglob("*"))
    with pytest.raises(CaptureError) as caught:
        create_capture(path, force=True)
    assert str(caught.value) == (
        f"Capture {path} is not replaced: it holds what is no part of a capture: {name.split('/step')[0]}. "
        "Move that away, or choose another folder."
    )
    assert sorted(path.rglob("*")) == before


def test_force_never_follows_a_link(tmp_path: Path) -> None:
    precious = make_capture(tmp_path / "precious")
    path = tmp_path / "c"
    path.mkdir()
    (path / "rank00000").symlink_to(precious / "rank00000")
    (path / "capture.json").symlink_to(precious / "capture.json")
    with pytest.raises(CaptureError, match=r"no part of a capture: capture.json, rank00000\."):
        create_capture(path, force=True)
    assert len(list(precious.rglob("*"))) == 4


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(CaptureError) as caught:
        create_capture(tmp_path / "c", force=True)
    assert str(caught.value) == (
        f"Capture {tmp_path}/c cannot be made: a file of that name exists. Choose another folder."
    )


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError) as caught:
        create_capture(tmp_path / "file/c")
    assert str(caught.value) == f"Capture {tmp_path}/file/c cannot be made: Not a directory."


def test_the_manifest_says_what_it_is_and_keeps_what_it_was_given(tmp_path: Path) -> None:
    given = {
        "run_id": RUN_ID,
        "world_size": 2,
        "created_utc": "2026-01-01T00:00:00+00:00",
        "config": {"steps": "1-5", "command": ["python", "größe.py"]},
    }
    write_manifest(tmp_path, given)
    assert os.listdir(tmp_path) == ["capture.json"]
    written = json.loads((tmp_path / "capture.json").read_text(encoding="utf-8"))
    assert written == given | {"format": "probe-capture", "version": 1}


def test_a_manifest_without_a_time_gets_one(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"run_id": RUN_ID, "world_size": 1})
    written = json.loads((tmp_path / "capture.json").read_text())
    assert written.pop("created_utc").startswith("20")
    assert written == {"run_id": RUN_ID, "world_size": 1, "format": "probe-capture", "version": 1}


def test_bytes_in_the_environment_that_are_no_utf_8_do_not_lose_the_manifest(tmp_path: Path) -> None:
    write_manifest(tmp_path, {"run_id": RUN_ID, "world_size": 1, "env": {"X": "a\udcff"}})
    assert json.loads((tmp_path / "capture.json").read_text(encoding="utf-8"))["env"] == {"X": "a\udcff"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_id": ""}, "Manifest has run_id ''; it must be a text that is not empty."),
        ({"run_id": None}, "Manifest has run_id None; it must be a text that is not empty."),
        ({"world_size": 0}, "Manifest has world_size 0; it must be a number from 1."),
        ({"world_size": True}, "Manifest has world_size True; it must be a number from 1."),
        (
            {"config": {"lr": float("nan")}},
            "File {path}/capture.json could not be written: Out of range float values are not JSON compliant: nan.",
        ),
        (
            {"config": {"plan": Path("x")}},
            "File {path}/capture.json could not be written: Object of type PosixPath is not JSON serializable.",
        ),
    ],
)
def test_a_manifest_that_could_not_be_read_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        write_manifest(tmp_path, {"run_id": RUN_ID, "world_size": 1} | change)
    assert str(caught.value).startswith(message.format(path=tmp_path).removesuffix(": nan."))
    assert os.listdir(tmp_path) == []


def test_what_a_killed_launcher_leaves_is_replaced_and_a_stranger_in_its_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "c" / "notes").mkdir(parents=True)
    (tmp_path / "c" / "notes" / "4711.json").write_text("{}")
    create_capture(tmp_path / "c", force=True)
    assert list((tmp_path / "c").iterdir()) == []
    (tmp_path / "c" / "notes").mkdir()
    (tmp_path / "c" / "notes" / "thesis.txt").write_text("mine")
    with pytest.raises(CaptureError, match=r"holds what is no part of a capture: notes/thesis.txt"):
        create_capture(tmp_path / "c", force=True)
