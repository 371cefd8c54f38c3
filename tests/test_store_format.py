"""The format as README describes it, read and written without the package."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray
import xxhash
from step_rows import RUN_ID, as_comparable, forward_keys, make_capture, make_rows, random_tensor

from probe.point import Key, Kind
from probe.store.dtypes import BITS, widen
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K, StepRows
from probe.store.reader import open_capture

KEYS = (*forward_keys(5), Key(kind=Kind.GRAD, name="größe.weight"))
TENSORS = {key: random_tensor(dtype, (3, 4)) for key, dtype in zip(KEYS, ("bfloat16", "float32", "bool"), strict=False)}
SEGMENT = "captures/base-0/rank00000/step00000001.h5"
PLAIN_H5PY = """
import h5py

with h5py.File("captures/base-0/rank00000/step00000001.h5") as segment:
    for label, l2 in zip(segment["quantity"].asstr(), segment["l2"][0]):
        print(label, l2)
    tensors = {name: data[()] for name, data in segment.get("tensors", {}).items()}  # bf16 arrives as float32
"""
XARRAY = 'xarray.open_dataset("captures/base-0/rank00000/step00000001.h5", engine="h5netcdf", phony_dims="sort")'

TEXT_OF_Q = ("dtype", "item", "kind", "name", "quantity", "shape", "tensor", "where")
TYPES = {
    **dict.fromkeys(TEXT_OF_Q, ("S", ("Q",))),
    **dict.fromkeys(("microbatch", "call"), ("<i4", ("Q",))),
    **dict.fromkeys(("order", "text_row", "sketch_row", "sample_row"), ("<i4", (1, "Q"))),
    **dict.fromkeys(("numel", "nonfinite"), ("<i8", (1, "Q"))),
    **dict.fromkeys(("value", "l2", "mean", "mean_abs", "rms", "max_abs"), ("<f8", (1, "Q"))),
    "hash": ("<u8", (1, "Q", 2)),
    "text": ("S", (1, None)),
    "sketch": ("<f4", (1, None, 251)),
    "sample": ("<f4", (1, None, 64)),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder in which `captures/base-0` was recorded."""
    (tmp_path / "captures").mkdir()
    make_capture(tmp_path / "captures/base-0", keys=KEYS, tensors=TENSORS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_folder_holds_the_files_that_the_format_names(folder: Path) -> None:
    found = sorted(str(file.relative_to(folder / "captures/base-0")) for file in folder.rglob("*") if file.is_file())
    assert found == ["capture.json", "rank00000/end.json", "rank00000/step00000001.h5"]


def test_a_segment_has_the_attributes_that_the_format_names(folder: Path) -> None:
    with h5py.File(SEGMENT) as file:
        found = dict(file.attrs)
        types = {name: file.attrs.get_id(name).get_type() for name in found}
    assert all(isinstance(kind, h5py.h5t.TypeIntegerID) or not kind.is_variable_str() for kind in types.values())
    stamp, digest = found.pop("created_utc"), found.pop("tables_xxh3_128")
    assert (stamp[:2], len(digest)) == (b"20", 32)
    assert found == {
        "probe_format": b"probe-segment",
        "probe_format_version": 1,
        "probe_format_minor": 0,
        "run_id": RUN_ID.encode(),
        "rank": 0,
        "world_size": 1,
        "first_step": 1,
        "last_step": 1,
    }


def test_a_segment_has_the_tables_that_the_format_names_contiguous_and_unfiltered(folder: Path) -> None:
    with h5py.File(SEGMENT) as file:
        assert set(file) == {*TYPES, "tensors"}
        for name, (code, shape) in TYPES.items():
            dataset = file[name]
            assert (dataset.chunks, dataset.compression, dataset.external, dataset.is_virtual) == (None,) * 3 + (False,)
            assert dataset.dtype.str.startswith("|S" if code == "S" else code)
            wanted = tuple(len(KEYS) if length == "Q" else length for length in shape)
            assert tuple(w if w is None else g for w, g in zip(wanted, dataset.shape, strict=True)) == wanted


def test_plain_h5py_reads_the_rows_by_the_documented_names(folder: Path) -> None:
    expected = make_rows(KEYS)
    with h5py.File(SEGMENT) as file:
        assert file["quantity"].asstr()[:].tolist() == [key.label for key in KEYS]
        assert file["kind"].asstr()[:].tolist() == [key.kind.value for key in KEYS]
        assert file["name"].asstr()[:].tolist() == [key.name for key in KEYS]
        assert file["shape"].asstr()[:].tolist() == [",".join(map(str, shape)) for shape in expected.shape]
        for name in SCALARS:
            np.testing.assert_array_equal(file[name][0], expected.scalars[name])
        text, rows = file["text"].asstr()[0], file["text_row"][0]
        assert tuple(text[row] if row >= 0 else "" for row in rows) == expected.text
        for name in ("sketch", "sample"):
            stored, rows = file[name][0], file[f"{name}_row"][0]
            found = np.where(rows[:, None] >= 0, stored[rows], np.nan)
            np.testing.assert_array_equal(found, getattr(expected, name))


def test_plain_h5py_reads_a_tensor_as_the_values_torch_had(folder: Path) -> None:
    with h5py.File(SEGMENT) as file:
        for key, link in zip(KEYS, file["tensor"].asstr(), strict=True):
            assert bool(link) == (key in TENSORS)
            if link:
                tensor = TENSORS[key]
                dataset = file["tensors"][link]
                np.testing.assert_array_equal(dataset[()], widen(tensor.bits, tensor.dtype))
                assert dataset.attrs["probe_dtype"] == tensor.dtype.encode()
                assert dataset.attrs["xxh3_128"] == xxhash.xxh3_128_hexdigest(tensor.bits.tobytes()).encode()


def documented_digest(file: h5py.File) -> str:
    """Compute `tables_xxh3_128` from the words of the format alone."""
    content = b""
    for name in sorted(TYPES):
        content += name.encode() + b"\0"
        table = file[name][()]
        content += b"".join(text + b"\0" for text in table.flat) if table.dtype.kind == "S" else table.tobytes()
    return xxhash.xxh3_128_hexdigest(content)


def test_the_digest_of_the_tables_is_the_documented_one(folder: Path) -> None:
    with h5py.File(SEGMENT) as file:
        assert file.attrs["tables_xxh3_128"].decode() == documented_digest(file)


def test_the_example_with_plain_h5py_runs_as_written(folder: Path) -> None:
    output, names = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(output):
        exec(PLAIN_H5PY, names)
    l2 = make_rows(KEYS).scalars["l2"]
    assert output.getvalue() == "".join(f"{key.label} {norm}\n" for key, norm in zip(KEYS, l2, strict=True))
    assert {name: array.dtype.str for name, array in names["tensors"].items()} == {
        "forward%2Fblocks.0.attn": "<f4",
        "forward%2Fblocks.1.attn": "<f4",
        "forward%2Fblocks.2.attn": "|b1",
    }


def test_the_example_with_xarray_runs_as_written(folder: Path) -> None:
    with eval(XARRAY, {"xarray": xarray}) as dataset:
        np.testing.assert_array_equal(dataset.l2[0], make_rows(KEYS).scalars["l2"])
        assert dataset.quantity.values.tolist() == [key.label.encode() for key in KEYS]
        assert dataset.attrs["first_step"] == 1


@pytest.mark.parametrize("dtype", list(BITS))
def test_every_element_type_is_what_plain_h5py_shows(tmp_path: Path, dtype: str) -> None:
    tensor = random_tensor(dtype, (64,))
    path = make_capture(tmp_path / "c", keys=KEYS[:1], tensors={KEYS[0]: tensor})
    with h5py.File(path / "rank00000/step00000001.h5") as file, np.errstate(invalid="ignore"):
        found = file["tensors/forward%2Fblocks.0.attn"][:]
    native = dtype in ("bfloat16", "float8_e5m2")
    expected = widen(tensor.bits, dtype) if native else tensor.bits
    np.testing.assert_array_equal(found, expected)


def write_by_hand(path: Path, rows: StepRows) -> None:
    """Write a capture with nothing but h5py and the format's words."""
    folder = path / f"rank{rows.rank:05d}"
    folder.mkdir(parents=True)
    (path / "capture.json").write_text(
        json.dumps({"format": "probe-capture", "version": 1, "run_id": RUN_ID, "world_size": rows.world_size})
    )
    name = folder / f"step{rows.step:08d}.h5"
    with h5py.File(f"{name}.tmp", "w") as file:
        everywhere = np.arange(len(rows.keys), dtype="<i4")
        columns: dict[str, Any] = {
            "quantity": [f"row {at}" for at in everywhere],
            "kind": [key.kind.value for key in rows.keys],
            "name": [key.name for key in rows.keys],
            "item": [key.item for key in rows.keys],
            "dtype": rows.dtype,
            "shape": [",".join(map(str, shape)) for shape in rows.shape],
            "where": rows.where,
            "tensor": ["" for _ in rows.keys],
            "text": [rows.text],
            "microbatch": np.array([key.microbatch for key in rows.keys], dtype="<i4"),
            "call": np.array([key.call for key in rows.keys], dtype="<i4"),
            **dict.fromkeys(("text_row", "sketch_row", "sample_row"), everywhere[None]),
            **{each: getattr(rows, each)[None] for each in ("order", "numel", "nonfinite", "value", "hash")},
            **{each: rows.scalars[each][None] for each in SCALARS},
            "sketch": rows.sketch[None],
            "sample": rows.sample[None],
        }
        for column, data in columns.items():
            if TYPES[column][0] == "S":
                encoded = np.char.encode(np.array(data), "utf-8")
                width = h5py.string_dtype("utf-8", max(1, encoded.dtype.itemsize))
                file.create_dataset(column, data=encoded.astype(width))
            else:
                file.create_dataset(column, data=data)
        for attribute, value in {
            "probe_format": "probe-segment",
            "run_id": RUN_ID,
            "created_utc": "2026-01-01T00:00:00+00:00",
            "tables_xxh3_128": documented_digest(file),
        }.items():
            file.attrs[attribute] = np.bytes_(value)
        numbers = {"probe_format_version": 1, "probe_format_minor": 0, "rank": rows.rank, "world_size": rows.world_size}
        for attribute, number in {**numbers, "first_step": rows.step, "last_step": rows.step}.items():
            file.attrs[attribute] = np.int64(number)
    os.rename(f"{name}.tmp", name)


def test_what_others_write_by_the_format_s_words_is_read(tmp_path: Path) -> None:
    rows = make_rows(KEYS, step=3, rank=1, world_size=2)
    write_by_hand(tmp_path / "c", rows)
    capture = open_capture(tmp_path / "c")
    assert as_comparable(capture.rows(1, 3)) == as_comparable(rows)
    assert capture.tensor_keys(1, 3) == ()
    assert capture.problems == ("rank 0 of 2 is missing", "rank 1 was not closed cleanly, last step 3")


def test_the_widths_of_sketch_and_sample_come_from_the_file(tmp_path: Path) -> None:
    assert (SKETCH_K, SAMPLES) == (251, 64)
    random = np.random.default_rng(0)
    narrow = {name: random.standard_normal((6, width)).astype("f4") for name, width in (("sketch", 7), ("sample", 3))}
    path = make_capture(tmp_path / "c", keys=KEYS, **narrow)
    rows = open_capture(path).rows(0, 1)
    assert as_comparable(rows) == as_comparable(make_rows(KEYS, **narrow))
