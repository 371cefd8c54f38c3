from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from step_rows import RUN_ID, as_comparable, forward_keys, make_capture, make_rows, random_tensor

from probe.errors import CaptureError, CaptureFormatError
from probe.point import Key, Kind
from probe.store.problems import steps_in_words
from probe.store.reader import load, open_capture
from probe.store.writer import RankWriter, write_manifest


def record(path: Path, steps: dict[int, tuple[int, ...]], *, world_size: int = 2, **manifest: Any) -> Path:
    """Record the given steps on each rank, and close cleanly."""
    path.mkdir()
    write_manifest(path, {"run_id": RUN_ID, "world_size": world_size} | manifest)
    for rank, recorded in steps.items():
        writer = RankWriter(path, run_id=RUN_ID, rank=rank, world_size=world_size)
        for step in recorded:
            writer.write(make_rows(forward_keys(2), step=step, rank=rank, world_size=world_size))
        writer.close(error=None, dropped_steps=[])
    return path


def rewrite(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def test_a_capture_says_what_it_holds(tmp_path: Path) -> None:
    capture = open_capture(str(record(tmp_path / "c", {0: (1, 2), 1: (1, 2)}, config={"steps": "1-2"})))
    assert (capture.path, capture.run_id, capture.world_size) == (tmp_path / "c", RUN_ID, 2)
    assert (capture.ranks, capture.steps(0), capture.steps(1)) == ((0, 1), (1, 2), (1, 2))
    assert capture.manifest["config"] == {"steps": "1-2"}
    assert capture.problems == ()
    rows = capture.rows(1, 2)
    assert as_comparable(rows) == as_comparable(make_rows(forward_keys(2), step=2, rank=1, world_size=2))


def test_steps_that_share_their_names_share_the_objects(tmp_path: Path) -> None:
    capture = open_capture(record(tmp_path / "c", {0: (1, 2), 1: (1,)}))
    assert capture.rows(0, 1).keys is capture.rows(0, 2).keys is capture.rows(1, 1).keys


def test_a_capture_can_be_sent_to_another_process(tmp_path: Path) -> None:
    capture = pickle.loads(pickle.dumps(open_capture(make_capture(tmp_path / "c"))))
    assert as_comparable(capture.rows(0, 1)) == as_comparable(make_rows())


def test_a_capture_can_be_moved(tmp_path: Path) -> None:
    make_capture(tmp_path / "c").rename(tmp_path / "elsewhere")
    assert as_comparable(open_capture(tmp_path / "elsewhere").rows(0, 1)) == as_comparable(make_rows())


def test_what_has_another_name_is_no_part_of_the_capture(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c")
    for name in ("rank1", "rank000000", "packed"):
        (path / name).mkdir()
    for name in ("step00000002.h5.tmp", "step2.h5", "notes.txt"):
        (path / "rank00000" / name).write_text("")
    capture = open_capture(path)
    assert (capture.ranks, capture.steps(0), capture.problems) == ((0,), (1,), ())


@pytest.mark.parametrize(
    ("steps", "manifest", "problems"),
    [
        ({0: (1, 2), 1: (1, 2)}, {}, ()),
        (
            {0: (1, 2)},
            {"world_size": 4},
            ("rank 1 of 4 is missing", "rank 2 of 4 is missing", "rank 3 of 4 is missing"),
        ),
        ({0: (1, 2, 3), 1: (1, 3)}, {}, ("rank 1 lacks step 2",)),
        ({0: (1, 5), 1: (1, 5)}, {}, ("rank 0 lacks steps 2-4", "rank 1 lacks steps 2-4")),
        ({0: (1, 5), 1: (1, 5)}, {"config": {"steps": "1,5"}}, ()),
        ({0: (1, 2, 10), 1: (1, 2)}, {"config": {"steps": "1-2, 10"}}, ("rank 1 lacks step 10",)),
        ({0: (1, 2), 1: (1, 2)}, {"config": {"steps": "1-999999999"}}, ()),
        ({0: (1, 4), 1: (1,)}, {"config": {"steps": "all"}}, ("rank 1 lacks step 4",)),
        ({0: (1,), 1: ()}, {}, ("rank 1 lacks step 1",)),
        ({0: (), 1: ()}, {}, ("rank 0 recorded no step", "rank 1 recorded no step")),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, steps: dict[int, tuple[int, ...]], manifest: dict[str, Any], problems: tuple[str, ...]
) -> None:
    assert open_capture(record(tmp_path / "c", steps, **manifest)).problems == problems


def test_a_rank_that_was_not_closed_is_said_with_its_last_step(tmp_path: Path) -> None:
    path = record(tmp_path / "c", {0: (1, 2, 3), 1: (1, 2, 3)})
    (path / "rank00001/end.json").unlink()
    (path / "rank00001/step00000003.h5").unlink()
    assert open_capture(path).problems == ("rank 1 was not closed cleanly, last step 2",)
    for step in (1, 2):
        (path / f"rank00001/step0000000{step}.h5").unlink()
    assert open_capture(path).problems == ("rank 1 was not closed cleanly, no step",)


def test_a_segment_that_was_written_and_is_gone_is_said(tmp_path: Path) -> None:
    path = record(tmp_path / "c", {0: (1, 2, 3)}, world_size=1)
    (path / "rank00000/step00000003.h5").unlink()
    assert open_capture(path).problems == ("rank 0 lacks step 3",)


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        ({"dropped_steps": [2, 3, 7]}, ("rank 0 dropped steps 2-3, 7",)),
        ({"error": "disk full"}, ("rank 0 ended with an error: disk full",)),
        ({"run_id": "f" * 32}, (f"rank 0 has the end of another run, '{'f' * 32}'",)),
        ({"dropped_steps": "all", "segments": [1, {"first_step": None}]}, ()),
    ],
)
def test_what_the_end_of_a_rank_tells_is_said(
    tmp_path: Path, change: dict[str, Any], problems: tuple[str, ...]
) -> None:
    path = make_capture(tmp_path / "c")
    rewrite(path / "rank00000/end.json", **change)
    assert open_capture(path).problems == problems


def test_an_end_that_cannot_be_read_is_a_problem_and_no_error(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c")
    (path / "rank00000/end.json").write_text("[1]")
    assert open_capture(path).problems == (
        f"rank 0 has an end that cannot be read: File {path}/rank00000/end.json is damaged: it holds no JSON object. "
        "Record the run again.",
    )


def test_a_rank_beyond_the_world_is_said(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c")
    shutil.copytree(path / "rank00000", path / "rank00007")
    assert open_capture(path).problems == ("rank 7 is beyond the world size of 1",)


def test_a_folder_that_is_not_there_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, what in (("nothing", "does not exist"), ("file", "is a file")):
        with pytest.raises(CaptureError) as caught:
            open_capture(tmp_path / name)
        assert str(caught.value) == f"Capture {tmp_path}/{name} {what}. Name the folder that `probe record -o` made."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"version": 2},
            "Capture {path} has format version 2, and this probe reads up to 1. Install a newer trainprobe.",
        ),
        ({"format": "zip"}, "Folder {path} is no capture: capture.json has another format."),
        (
            {"run_id": ...},
            "File {path}/capture.json is damaged: version 1, run_id None, world_size 1. Record the run again.",
        ),
        (
            {"world_size": "1"},
            f"File {{path}}/capture.json is damaged: version 1, run_id '{RUN_ID}', world_size '1'. "
            "Record the run again.",
        ),
        (
            {"version": "1"},
            f"File {{path}}/capture.json is damaged: version '1', run_id '{RUN_ID}', world_size 1. "
            "Record the run again.",
        ),
    ],
)
def test_a_manifest_that_is_wrong_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = make_capture(tmp_path / "c")
    rewrite(path / "capture.json", **change)
    with pytest.raises(CaptureFormatError) as caught:
        open_capture(path)
    assert str(caught.value) == message.format(path=path)


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "3", "\xff"])
def test_a_manifest_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "capture.json").write_text(content, encoding="latin-1")
    with pytest.raises(CaptureFormatError, match=re.escape(f"File {tmp_path}/capture.json is damaged: ")):
        open_capture(tmp_path)


def test_a_pipe_instead_of_a_manifest_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "capture.json")
    with pytest.raises(CaptureFormatError, match="is no regular file"):
        open_capture(tmp_path)


def test_a_folder_without_a_manifest_is_no_capture(tmp_path: Path) -> None:
    with pytest.raises(CaptureFormatError) as caught:
        open_capture(tmp_path)
    assert str(caught.value) == (
        f"Folder {tmp_path} is no capture: capture.json is missing. Name the folder that `probe record -o` made; "
        "if this is it, the run ended before anything was recorded."
    )


def test_a_rank_a_step_or_a_tensor_that_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    keys = forward_keys(2)
    path = make_capture(tmp_path / "c", (1, 2, 5), keys=keys, tensors={keys[0]: random_tensor("int8", (2,))})
    capture, file = open_capture(path), path / "rank00000/step00000001.h5"
    with pytest.raises(CaptureError, match=re.escape(f"Capture {path} has no rank 3; it has 0.")):
        capture.rows(3, 1)
    with pytest.raises(CaptureError, match=re.escape(f"Rank 0 of capture {path} has no step 4; it has steps 1-2, 5.")):
        capture.rows(0, 4)
    kept = "it keeps 'forward/blocks.0.attn'."
    with pytest.raises(CaptureError) as caught:
        capture.tensor(0, 1, Key(kind=Kind.PARAM, name="w"))
    assert str(caught.value) == f"Segment {file} keeps no whole tensor of 'param/w'; {kept}"
    with pytest.raises(CaptureError) as caught:
        load(file, "forward/blocks.1.attn")
    assert str(caught.value) == f"Segment {file} keeps no whole tensor of 'forward/blocks.1.attn'; {kept}"
    with pytest.raises(CaptureError, match=re.escape(f"Segment {path}/x.h5 cannot be read: No such file")):
        load(path / "x.h5", "forward/blocks.0.attn")


def test_load_gives_values(tmp_path: Path) -> None:
    keys = forward_keys(3)
    tensors = {
        keys[0]: random_tensor("bfloat16", (3, 5)),
        keys[1]: random_tensor("float8_e4m3fn", ()),
        keys[2]: random_tensor("int64", (2, 0)),
    }
    file = make_capture(tmp_path / "c", keys=keys, tensors=tensors) / "rank00000/step00000001.h5"
    found = [load(str(file), key.label) for key in keys]
    assert [(array.dtype.str, array.shape) for array in found] == [("<f4", (3, 5)), ("<f4", ()), ("<i8", (2, 0))]
    assert found[0].view(np.uint32).tolist() == (tensors[keys[0]].bits.astype(np.uint32) << 16).tolist()


def test_a_segment_of_another_run_rank_or_step_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "c", {0: (1, 2), 1: (1,)})
    other = make_capture(tmp_path / "other", (2,))
    first, second = (path / f"rank00000/step0000000{step}.h5" for step in (1, 2))
    rewrite(other / "capture.json", run_id="f" * 32)
    with pytest.raises(CaptureFormatError) as caught:
        open_capture(other).rows(0, 2)
    assert str(caught.value) == (
        f"Segment {other}/rank00000/step00000002.h5 is of run '{RUN_ID}', and the capture is of run '{'f' * 32}'. "
        "Put it back where it belongs, or record again with --force."
    )
    again = "Record the run again, or delete the file to go on without the step."
    for source, target, what in (
        (first, second, "'first_step' is 1 instead of 2"),
        (path / "rank00001/step00000001.h5", first, "'rank' is 1 instead of 0"),
        (other / "rank00000/step00000002.h5", second, "'world_size' is 1 instead of 2"),
    ):
        shutil.copy(source, target)
        with pytest.raises(CaptureFormatError) as caught:
            open_capture(path).rows(0, int(target.stem[4:]))
        assert str(caught.value) == f"Segment {target} is not read: attribute {what}. {again}"


def test_steps_are_written_in_few_words() -> None:
    assert [steps_in_words(steps) for steps in ((), (4,), (1, 2), (9, 1, 2, 3), range(0, 40, 2))] == [
        "no step",
        "step 4",
        "steps 1-2",
        "steps 1-3, 9",
        "steps 0, 2, 4, 6, 8, 10, 12, 14, 16, 18 and 10 more",
    ]


def test_a_segment_that_this_process_holds_open_with_locks_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    file = make_capture(tmp_path / "c") / "rank00000" / "step00000001.h5"
    with (
        h5py.File(file),
        pytest.raises(CaptureError, match=r"is open in this process already, with file locks") as told,
    ):
        load(file, "forward/blocks.0")
    assert not isinstance(told.value, CaptureFormatError)


def test_the_names_of_a_first_step_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = open_capture(make_capture(tmp_path / "c", (3, 4)))
    for names in (capture.names(0), pickle.loads(pickle.dumps(capture)).names(0)):
        assert names == (make_rows(step=3).keys, make_rows(step=3).text)
    capture.rows(0, 4)
    monkeypatch.setattr(type(capture), "_rows", None)
    assert capture.names(0) == (make_rows(step=3).keys, make_rows(step=3).text)
