"""Segments that somebody made to do harm, each refused before anything of it is read."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from step_rows import as_comparable, forward_keys, make_capture, make_rows, random_tensor

from probe.errors import CaptureError, CaptureFormatError
from probe.store.guard import open_segment
from probe.store.image import tables_digest
from probe.store.layout import TABLES, TABLES_HASH
from probe.store.reader import open_capture

KEYS = forward_keys(3)
TENSOR = random_tensor("bfloat16", (4, 5))
LINK = "tensors/forward%2Fblocks.1.attn"
AGAIN = "Record the run again, or delete the file to go on without the step."
Change = Callable[[h5py.File, Path], object]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    """Make a capture with one tensor; its segment is what the tests corrupt."""
    path = make_capture(tmp_path / "c", keys=KEYS, tensors={KEYS[1]: TENSOR})
    return path / "rank00000/step00000001.h5"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Make another HDF5 file, which a segment must not make its reader open."""
    file = tmp_path / "secret.h5"
    with h5py.File(file, "w") as opened:
        opened["value"] = np.full((1, 3), 7.0)
        opened["tensor"] = TENSOR.bits
    return file


def change(file: Path, how: Change, secret: Path) -> None:
    with h5py.File(file, "r+", locking=False) as opened:
        how(opened, secret)


def refusal(file: Path, *, tensor: bool = False) -> str:
    capture = open_capture(file.parent.parent)
    with pytest.raises(CaptureFormatError) as caught:
        _ = capture.tensor(0, 1, KEYS[1]) if tensor else capture.rows(0, 1)
    return str(caught.value)


def replaced(name: str, how: Change) -> Change:
    def delete_first(file: h5py.File, secret: Path) -> None:
        del file[name]
        how(file, secret)

    return delete_first


def external_storage(name: str, shape: tuple[int, ...], dtype: str) -> Change:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return replaced(
        name, lambda file, _: file.create_dataset(name, shape, dtype, external=[("/etc/passwd", 0, nbytes)])
    )


def virtual(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout((1, 3), "f8")
    layout[:] = h5py.VirtualSource(str(secret), "value", (1, 3))
    file.create_virtual_dataset("value", layout)


def link(name: str, to: object) -> Change:
    return replaced(name, lambda file, _: file.__setitem__(name, to))


def stored(file: h5py.File, name: str, shape: tuple[int, ...], dtype: object) -> None:
    """Make a dataset whose bytes are really in the file."""
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    file.create_dataset(name, shape, dtype, dcpl=made)


def of_type(dtype: object, shape: tuple[int, ...] = (1, 3)) -> Change:
    return replaced("value", lambda file, _: stored(file, "value", shape, dtype))


def unknown_filter(file: h5py.File, secret: Path) -> None:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_chunk((1, 3))
    made.set_filter(32015, h5py.h5z.FLAG_OPTIONAL)
    space = h5py.h5s.create_simple((1, 3))
    h5py.h5d.create(file.id, b"value", h5py.h5t.IEEE_F64LE, space, made)


def bomb(file: h5py.File, secret: Path) -> None:
    file.create_dataset("value", (1 << 20, 32), "f8", chunks=(1 << 20, 32), compression="gzip", data=None, fillvalue=0)


def absurd(file: h5py.File, secret: Path) -> None:
    made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    made.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    h5py.h5d.create(file.id, b"value", h5py.h5t.IEEE_F64LE, h5py.h5s.create_simple((1, 1 << 49)), made)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (external_storage("value", (1, 3), "f8"), "dataset 'value' keeps its data in another file"),
        (link("value", h5py.ExternalLink("../../../secret.h5", "value")), "dataset 'value' is a link to another file"),
        (link("value", h5py.SoftLink("/l2")), "dataset 'value' is a soft link"),
        (link("value", h5py.SoftLink("/value")), "dataset 'value' is a soft link"),
        (replaced("value", virtual), "dataset 'value' is stored virtual, in other files, and a segment's data lies"),
        (
            replaced("value", unknown_filter),
            "dataset 'value' is stored in chunks with filters 32015, and a segment's data lies contiguous",
        ),
        (
            replaced("value", bomb),
            "dataset 'value' is stored in chunks with filters 1, and a segment's data lies contiguous",
        ),
        (
            replaced("value", absurd),
            "dataset 'value' has shape (1, 562949953421312), 4503599627370496 bytes, and no data",
        ),
        (of_type(h5py.vlen_dtype("f8")), "dataset 'value' is variable length of 16 bytes, not floating point of 8"),
        (of_type(h5py.ref_dtype), "dataset 'value' is reference of 8 bytes, not floating point of 8 bytes"),
        (of_type("V8"), "dataset 'value' is opaque of 8 bytes, not floating point of 8 bytes"),
        (of_type(">f8"), "dataset 'value' is big-endian floating point of 8 bytes, not floating point of 8 bytes"),
        (of_type("u8"), "dataset 'value' is unsigned integer of 8 bytes, not floating point of 8 bytes"),
        (of_type("f4"), "dataset 'value' is floating point of 4 bytes, not floating point of 8 bytes"),
        (of_type([("a", "f8")]), "dataset 'value' is compound of 8 bytes, not floating point of 8 bytes"),
        (of_type("f8", (3,)), "dataset 'value' has shape (3,) instead of (1, 3)"),
        (of_type("f8", (2, 3)), "dataset 'value' has shape (2, 3) instead of (1, 3)"),
        (of_type("f8", (1, 4)), "dataset 'value' has shape (1, 4) instead of (1, 3)"),
        (link("value", 1.0), "dataset 'value' has shape () instead of (1, 3)"),
        (replaced("value", lambda file, _: None), "dataset 'value' is missing"),
        (replaced("value", lambda file, _: file.create_group("value")), "dataset 'value' is a group"),
        (
            replaced("name", lambda file, _: stored(file, "name", (3,), h5py.string_dtype())),
            "dataset 'name' is text of variable length, not text of fixed length",
        ),
        (
            replaced("name", lambda file, _: stored(file, "name", (3,), "i8")),
            "dataset 'name' is integer of 8 bytes, not text of fixed length",
        ),
        (
            lambda file, _: file.attrs.create("run_id", "a"),
            "attribute 'run_id' is text of variable length, not text of",
        ),
        (lambda file, _: file.attrs.create("rank", np.zeros(3, "i8")), "attribute 'rank' has shape (3,) and 8 bytes"),
        (lambda file, _: file.attrs.create("rank", 0.0), "attribute 'rank' is floating point of 8 bytes, not integer"),
        (lambda file, _: file.attrs.__delitem__("rank"), "attribute 'rank' is missing"),
        (lambda file, _: file.attrs.create("probe_format_version", 0), "attribute 'probe_format_version' is 0, which"),
    ],
)
def test_a_hostile_table_is_refused(segment: Path, secret: Path, how: Change, message: str) -> None:
    change(segment, how, secret)
    actual = refusal(segment)
    assert actual.startswith(f"Segment {segment} is not read: {message}")
    assert actual.endswith(AGAIN)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (external_storage(LINK, (4, 5), "u2"), "dataset 'forward%2Fblocks.1.attn' keeps its data in another file"),
        (
            link(LINK, h5py.ExternalLink("../../../secret.h5", "tensor")),
            "dataset 'forward%2Fblocks.1.attn' is a link to another file",
        ),
        (link(LINK, h5py.SoftLink("/value")), "dataset 'forward%2Fblocks.1.attn' is a soft link"),
        (link("tensors", h5py.ExternalLink("../../../secret.h5", "/")), "group 'tensors' is a link to another file"),
        (link("tensors", h5py.SoftLink("/")), "group 'tensors' is a soft link"),
        (replaced("tensors", lambda file, _: None), "group 'tensors' is missing"),
        (
            replaced("tensors", lambda file, _: file.create_dataset("tensors", (1,), "f8")),
            "group 'tensors' is a dataset",
        ),
        (replaced(LINK, lambda file, _: None), "dataset 'forward%2Fblocks.1.attn' is missing"),
        (
            replaced(LINK, lambda file, _: stored(file, LINK, (4, 5), "u2")),
            "attribute 'probe_dtype' is missing",
        ),
        (
            lambda file, _: file[LINK].attrs.create("probe_dtype", np.bytes_("float3")),
            "dataset 'forward%2Fblocks.1.attn' has dtype 'float3', which version 1 does not have",
        ),
        (
            lambda file, _: file[LINK].attrs.create("probe_dtype", np.bytes_("float64")),
            "dataset 'forward%2Fblocks.1.attn' is floating point of 2 bytes, not floating point of 8 bytes",
        ),
    ],
)
def test_a_hostile_tensor_is_refused_and_the_rows_still_come(
    segment: Path, secret: Path, how: Change, message: str
) -> None:
    change(segment, how, secret)
    assert refusal(segment, tensor=True) == f"Segment {segment} is not read: {message}. {AGAIN}"
    assert as_comparable(open_capture(segment.parent.parent).rows(0, 1)) == as_comparable(make_rows(KEYS))


def test_what_the_format_does_not_name_is_never_looked_at(segment: Path, secret: Path) -> None:
    def add(file: h5py.File, secret: Path) -> None:
        file["elsewhere"] = h5py.ExternalLink(str(secret), "value")
        file["loop"] = h5py.SoftLink("/loop")
        file["self"] = file["/"]
        file.create_dataset("passwd", (1,), "u1", external=[("/etc/passwd", 0, 1)])
        file.attrs["newer"] = [1, 2]
        file.attrs["probe_format_minor"] = 7

    change(segment, add, secret)
    capture = open_capture(segment.parent.parent)
    assert as_comparable(capture.rows(0, 1)) == as_comparable(make_rows(KEYS))
    assert capture.tensor(0, 1, KEYS[1]).bits.tobytes() == TENSOR.bits.tobytes()


def test_a_link_to_another_file_is_refused_without_opening_that_file(segment: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would hang
    change(segment, link("value", h5py.ExternalLink(str(tmp_path / "pipe"), "value")), tmp_path)
    assert "is a link to another file" in refusal(segment)


@pytest.mark.parametrize(
    ("table", "at", "value", "message"),
    [
        ("sketch_row", (0, 2), 99, "index 99 is out of bounds for axis 0 with size 2"),
        ("kind", 1, b"feeling", "'feeling'"),
        ("name", 1, b"blocks.0.attn", "the same key twice, 'forward/blocks.0.attn'"),
        ("shape", 1, b"2,x", "invalid literal for int() with base 10: b'x'"),
        ("where", 1, b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_tables_that_have_their_digest_and_contradict_each_other_are_refused(
    segment: Path, tmp_path: Path, table: str, at: Any, value: Any, message: str
) -> None:
    def corrupt(file: h5py.File, _: Path) -> None:
        whole = file[table][()]
        whole[at] = value
        file[table].id.write(h5py.h5s.ALL, h5py.h5s.ALL, whole, mtype=file[table].id.get_type())
        tables = {each.name: file[each.name][()] for each in TABLES}
        texts = {each.name for each in TABLES if each.code == "S"}
        digest = tables_digest({n: t.reshape(-1).tolist() if n in texts else t for n, t in tables.items()})
        file.attrs[TABLES_HASH] = np.bytes_(digest)

    change(segment, corrupt, tmp_path)
    assert refusal(segment) == f"Segment {segment} is not read: its tables contradict each other: {message}. {AGAIN}"


def test_data_that_claims_to_lie_beyond_the_end_of_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "made.h5"
    with h5py.File(file, "w") as opened:  # headers of this kind have no checksum, so the offset can be forged
        opened["value"] = np.zeros(1000)
        opened.attrs["probe_format"] = np.bytes_("probe-segment")
        opened.attrs["probe_format_version"] = 1
        offset = opened["value"].id.get_offset()
    content, size = file.read_bytes(), file.stat().st_size
    layout = b"\x03\x01" + struct.pack("<QQ", offset, 8000)
    assert content.count(layout) == 1
    file.write_bytes(content.replace(layout, b"\x03\x01" + struct.pack("<QQ", size - 800, 8000)))
    # HDF5 notices it itself from some version on, and then the segment is damaged.
    message = rf"Segment {re.escape(str(file))} is (damaged: .*|not read: dataset 'value' has 8000 bytes from .*)"
    with pytest.raises(CaptureFormatError, match=message), open_segment(file) as segment:
        segment.dataset(segment.root, b"value")


def test_data_beyond_the_end_of_a_file_cut_after_it_was_opened_is_refused(segment: Path) -> None:
    with open_segment(segment) as opened:
        offset = opened.dataset(opened.root, b"value").get_offset()
        cut = replace(opened, size=offset + 10)
        with pytest.raises(CaptureFormatError) as caught:
            cut.dataset(opened.root, b"value")
    assert str(caught.value) == (
        f"Segment {segment} is not read: dataset 'value' has 24 bytes from {offset}, and the file ends at "
        f"{offset + 10}. {AGAIN}"
    )


def test_a_lock_that_somebody_holds_on_a_segment_does_not_matter(segment: Path) -> None:
    with open(segment, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert as_comparable(open_capture(segment.parent.parent).rows(0, 1)) == as_comparable(make_rows(KEYS))


def test_a_segment_of_a_newer_version_asks_for_a_newer_probe(segment: Path, tmp_path: Path) -> None:
    change(segment, lambda file, _: file.attrs.create("probe_format_version", 2), tmp_path)
    assert refusal(segment) == (
        f"Segment {segment} has format version 2, and this probe reads up to 1. Install a newer trainprobe."
    )


def test_an_hdf5_file_of_another_kind_is_no_segment(segment: Path, secret: Path) -> None:
    os.replace(secret, segment)
    assert refusal(segment) == f"File {segment} is no segment of a capture. Remove it."


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_instead_of_a_segment_does_not_hang(segment: Path, make: Callable[[Path], None]) -> None:
    segment.unlink()
    make(segment)
    assert refusal(segment) == f"Segment {segment} is no regular file. Remove it."


def test_a_segment_that_may_not_be_read_says_so(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    capture = open_capture(segment.parent.parent)
    monkeypatch.setattr(os, "stat", denied)
    with pytest.raises(CaptureError, match=re.escape(f"Segment {segment} cannot be read: Permission denied.")):
        capture.rows(0, 1)
