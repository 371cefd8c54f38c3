from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from step_rows import RUN_ID, as_comparable, forward_keys, make_capture, make_rows, random_tensor

from probe.errors import CaptureError
from probe.point import Key, Kind
from probe.store.dtypes import BITS
from probe.store.layout import FullTensor
from probe.store.reader import load, open_capture
from probe.store.writer import RankWriter

ODD_NAMES = (
    "..",
    ".",
    "/",
    "a/../b",
    "esc\x1b[31mred",
    "tab\tnewline\nquote\"'",
    "größe.层.🙂",
    "%2F",
    "x" * 1500,
    "层" * 700,
    " leading and trailing ",
    "[0]",
    "",
)


@pytest.fixture
def writer(tmp_path: Path) -> RankWriter:
    return RankWriter(tmp_path / "capture", run_id=RUN_ID, rank=0, world_size=1)


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    capture = open_capture(make_capture(tmp_path / "c", (1, 2, 7)))
    assert capture.steps(0) == (1, 2, 7)
    for step in (1, 2, 7):
        assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(step=step))


@pytest.mark.parametrize("count", [0, 1, 2, 700])
def test_any_number_of_rows_comes_back(tmp_path: Path, count: int) -> None:
    keys = forward_keys(count)
    capture = open_capture(make_capture(tmp_path / "c", keys=keys))
    assert as_comparable(capture.rows(0, 1)) == as_comparable(make_rows(keys))


def test_keys_of_every_kind_microbatch_call_and_item_come_back(tmp_path: Path) -> None:
    keys = [
        Key(kind=kind, name="a.b", item=item, microbatch=microbatch, call=call)
        for kind in Kind
        for item in ("", "[0].sample", "before")
        for microbatch in (-1, 0, 3)
        for call in (0, 2)
    ]
    capture = open_capture(make_capture(tmp_path / "c", keys=keys))
    assert capture.rows(0, 1).keys == tuple(keys)


@pytest.mark.parametrize("dtype", list(BITS))
def test_tensors_of_every_dtype_and_shape_come_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 4, 5), (70001,)]
    keys = forward_keys(len(shapes))
    tensors = {key: random_tensor(dtype, shape) for key, shape in zip(keys, shapes, strict=True)}
    capture = open_capture(make_capture(tmp_path / "c", keys=keys, tensors=tensors))
    for key, shape in zip(keys, shapes, strict=True):
        actual, expected = capture.tensor(0, 1, key), tensors[key].bits.tobytes()
        assert (actual.dtype, actual.bits.dtype.str, actual.bits.shape) == (dtype, BITS[dtype], shape)
        assert actual.bits.tobytes() == expected
        blocks = list(capture.tensor_blocks(0, 1, key, nbytes=4096))
        assert b"".join(block.tobytes() for block in blocks) == expected
        assert all(block.nbytes <= 4096 for block in blocks)


def test_many_tensors_of_all_sizes_come_back(tmp_path: Path) -> None:
    keys = forward_keys(60)
    tensors = {key: random_tensor("bfloat16", (at * at * 41,), seed=at) for at, key in enumerate(keys)}
    capture = open_capture(make_capture(tmp_path / "c", keys=keys, tensors=tensors))
    assert capture.tensor_keys(0, 1) == keys
    for key in keys:
        assert capture.tensor(0, 1, key).bits.tobytes() == tensors[key].bits.tobytes()


def test_tensors_of_the_same_bits_and_type_are_stored_once_under_each_name(tmp_path: Path) -> None:
    keys = forward_keys(4)
    bits = np.arange(50_000, dtype=np.float32)
    tensors = {
        keys[0]: FullTensor(bits=bits, dtype="float32"),
        keys[1]: FullTensor(bits=bits.copy(), dtype="float32"),
        keys[2]: FullTensor(bits=bits.view(np.int32), dtype="int32"),
        keys[3]: FullTensor(bits=bits.reshape(500, 100), dtype="float32"),
    }
    folder = make_capture(tmp_path / "c", keys=keys, tensors=tensors)
    (segment,) = folder.glob("rank*/step*.h5")
    assert 3 * bits.nbytes < segment.stat().st_size < 3.5 * bits.nbytes
    capture = open_capture(folder)
    for key, tensor in tensors.items():
        found = capture.tensor(0, 1, key)
        assert (found.dtype, found.bits.shape) == (tensor.dtype, tensor.bits.shape)
        np.testing.assert_array_equal(found.bits, tensor.bits)


def test_a_tensor_that_is_no_contiguous_array_is_stored_in_c_order(tmp_path: Path) -> None:
    key = forward_keys(1)[0]
    bits = np.arange(24, dtype=np.float32).reshape(4, 6).T[::2]
    capture = open_capture(
        make_capture(tmp_path / "c", keys=[key], tensors={key: FullTensor(bits=bits, dtype="float32")})
    )
    np.testing.assert_array_equal(capture.tensor(0, 1, key).bits, bits)


def test_odd_names_come_back_and_name_their_tensors(tmp_path: Path) -> None:
    keys = tuple(Key(kind=Kind.EXPLICIT, name=name) for name in ODD_NAMES)
    tensors = {key: random_tensor("float32", (at + 1,), seed=at) for at, key in enumerate(keys)}
    path = make_capture(tmp_path / "c", keys=keys, tensors=tensors, where=ODD_NAMES, text=ODD_NAMES)
    capture = open_capture(path)
    rows = capture.rows(0, 1)
    assert (rows.keys, rows.text, rows.where) == (keys, ODD_NAMES, ODD_NAMES)
    assert capture.tensor_keys(0, 1) == keys
    for key in keys:
        assert capture.tensor(0, 1, key).bits.tobytes() == tensors[key].bits.tobytes()
        assert load(path / "rank00000/step00000001.h5", key.label).tobytes() == tensors[key].bits.tobytes()


def test_text_that_hdf5_cannot_hold_is_stored_as_what_stands_for_it(tmp_path: Path) -> None:
    capture = open_capture(make_capture(tmp_path / "c", keys=forward_keys(2), text=("a\0b\0", "\udcff")))
    assert capture.rows(0, 1).text == ("a␀b␀", "\\udcff")


def test_one_long_text_does_not_widen_every_row(tmp_path: Path) -> None:
    keys = forward_keys(500)
    text = ("", "层" * 20_000) + ("short",) * 498
    path = make_capture(tmp_path / "c", keys=keys, text=text)
    assert open_capture(path).rows(0, 1).text == text
    assert (path / "rank00000/step00000001.h5").stat().st_size < 2_000_000


def test_text_beyond_the_longest_is_cut_and_still_equal_only_to_itself(tmp_path: Path) -> None:
    name, text = "层" * 30_000, "x" * 1_000_000
    keys = tuple(Key(kind=Kind.EXPLICIT, name=name + end) for end in ("a", "b"))
    path = make_capture(tmp_path / "c", keys=keys, text=(text + "a", text + "b"))
    rows = open_capture(path).rows(0, 1)
    assert len({key.name for key in rows.keys}) == len(set(rows.text)) == 2
    end = f"… (1000001 bytes, xxh3_128 {xxhash.xxh3_128_hexdigest((text + 'a').encode())})"
    assert rows.text[0] == "x" * (65536 - len(end.encode())) + end
    assert [len(key.name.encode()) <= 4096 for key in rows.keys] == [True, True]


def test_two_keys_with_one_label_are_told_apart(tmp_path: Path) -> None:
    keys = tuple(Key(kind=Kind.EXPLICIT, name="a", microbatch=microbatch) for microbatch in (-1, 0))
    tensors = {key: random_tensor("int8", (3,), seed=at) for at, key in enumerate(keys)}
    path = make_capture(tmp_path / "c", keys=keys, tensors=tensors)
    assert open_capture(path).tensor(0, 1, keys[1]).bits.tobytes() == tensors[keys[1]].bits.tobytes()
    actual = load(path / "rank00000/step00000001.h5", "explicit/a (2)")
    assert actual.tobytes() == tensors[keys[1]].bits.tobytes()


def test_columns_that_change_between_steps_are_not_confused(tmp_path: Path) -> None:
    writer = RankWriter(tmp_path / "c", run_id=RUN_ID, rank=0, world_size=1)
    (tmp_path / "c/capture.json").write_text(
        json.dumps({"format": "probe-capture", "version": 1, "run_id": RUN_ID, "world_size": 1})
    )
    steps = [
        make_rows(forward_keys(3), step=1),
        make_rows(forward_keys(4), step=2),
        make_rows(forward_keys(3), step=3, where=("x", "y", "z"), shape=((1,), (2,), (3,))),
        make_rows(forward_keys(3), step=4),
    ]
    for rows in steps:
        writer.write(rows)
    capture = open_capture(tmp_path / "c")
    for rows in steps:
        assert as_comparable(capture.rows(0, rows.step)) == as_comparable(rows)


def test_write_returns_the_size_and_leaves_one_file(writer: RankWriter) -> None:
    nbytes = writer.write(make_rows())
    files = {file.name: file.stat().st_size for file in (writer.path / "rank00000").iterdir()}
    assert files == {"step00000001.h5": nbytes}


def test_close_writes_what_was_written(writer: RankWriter) -> None:
    sizes = [writer.write(make_rows(step=step)) for step in (1, 4)]
    writer.close(error="the queue broke", dropped_steps=[3, 2])
    assert json.loads((writer.path / "rank00000/end.json").read_text()) == {
        "run_id": RUN_ID,
        "rank": 0,
        "segments": [
            {"file": "step00000001.h5", "first_step": 1, "last_step": 1, "bytes": sizes[0]},
            {"file": "step00000004.h5", "first_step": 4, "last_step": 4, "bytes": sizes[1]},
        ],
        "dropped_steps": [2, 3],
        "error": "the queue broke",
    }


def test_a_rank_is_claimed_once(writer: RankWriter) -> None:
    with pytest.raises(CaptureError) as caught:
        RankWriter(writer.path, run_id=RUN_ID, rank=0, world_size=1)
    assert str(caught.value) == (
        f"Rank 0 of capture {writer.path} is claimed already, by another process or an earlier attempt. "
        "Record into a new folder, or replace the capture with --force."
    )


def test_a_step_is_written_once(writer: RankWriter) -> None:
    writer.write(make_rows())
    file = writer.path / "rank00000/step00000001.h5"
    before = file.read_bytes()
    with pytest.raises(CaptureError, match=re.escape(f"Step 1 of rank 0 is written already: {file}.")):
        writer.write(make_rows(seed=5))
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 1, "world_size": 2}, "Step 1 is of rank 1 of 2, and this writer is for rank 0 of 1."),
        ({"step": 10**8}, "Step 100000000 cannot be stored; steps go from 0 to 99999999."),
        ({"text": ("a",)}, "Step 1 has 9 keys and other numbers of rows: text 1."),
        (
            {"scalars": {"l2": np.zeros(9)}},
            "Step 1 has the scalars l2; expected l2, max_abs, mean, mean_abs, rms.",
        ),
        ({"keys": forward_keys(1) * 2}, "Step 1 has the same key twice: 'forward/blocks.0.attn'."),
        (
            {"tensors": {Key(kind=Kind.PARAM, name="w"): random_tensor("int8", (1,))}},
            "Step 1 has tensors without a row: 'param/w'.",
        ),
        (
            {"tensors": {forward_keys(1)[0]: FullTensor(bits=np.zeros(2, np.uint32), dtype="complex32")}},
            "Tensor 'forward/blocks.0.attn' has dtype 'complex32', which a capture cannot hold; it holds "
            f"{', '.join(BITS)}.",
        ),
        (
            {"tensors": {forward_keys(1)[0]: FullTensor(bits=np.zeros(2, np.float32), dtype="bfloat16")}},
            "Tensor 'forward/blocks.0.attn' of dtype 'bfloat16' comes in bits of float32; expected uint16.",
        ),
    ],
)
def test_rows_that_contradict_each_other_are_refused(writer: RankWriter, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        writer.write(make_rows(**change))
    assert str(caught.value) == message
    assert list((writer.path / "rank00000").iterdir()) == []


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 1), (1, 1), (0, 0)])
def test_a_rank_outside_the_world_is_refused(tmp_path: Path, rank: int, world_size: int) -> None:
    message = f"Rank {rank} of world size {world_size} cannot be recorded; ranks count from 0."
    with pytest.raises(CaptureError, match=re.escape(message)):
        RankWriter(tmp_path, run_id=RUN_ID, rank=rank, world_size=world_size)


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError) as caught:
        RankWriter(tmp_path / "file/c", run_id=RUN_ID, rank=0, world_size=1)
    assert str(caught.value) == f"Folder {tmp_path}/file/c/rank00000 cannot be made: Not a directory."


def test_too_little_space_is_seen_before_anything_is_written(
    writer: RankWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = forward_keys(1)[0]
    rows = make_rows([key], tensors={key: random_tensor("int8", (3 << 20,))})
    disk = SimpleNamespace(f_bavail=66 * 256, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    with pytest.raises(CaptureError) as caught:
        writer.write(rows)
    assert str(caught.value) == (
        f"Step 1 of rank 0 is not written to {writer.path}/rank00000: it needs 68 MiB, 64 MiB of them to stay free, "
        "and 66 MiB are left. Free space, or record fewer tensors."
    )
    assert list((writer.path / "rank00000").iterdir()) == []
    disk.f_bavail = 68 * 256
    assert writer.write(rows) > 3 << 20


def test_tensors_that_look_alike_at_both_ends_are_stored_each(tmp_path: Path) -> None:
    keys = forward_keys(4)
    one = np.arange(1000, dtype="<f4")
    other = one.copy()
    other[500] += 1
    bits = dict(zip(keys, (one, other, one, other), strict=True))
    tensors = {key: FullTensor(bits=each, dtype="float32") for key, each in bits.items()}
    path = make_capture(tmp_path / "c", keys=keys, tensors=tensors)
    capture = open_capture(path)
    assert [capture.tensor(0, 1, key).bits.tobytes() for key in keys] == [each.tobytes() for each in bits.values()]
    size = (path / "rank00000/step00000001.h5").stat().st_size
    assert size - (make_capture(tmp_path / "bare", keys=keys) / "rank00000/step00000001.h5").stat().st_size < 12_000
