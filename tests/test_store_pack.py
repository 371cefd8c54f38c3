from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xxhash
from click.testing import CliRunner
from killed import killed_script
from step_rows import RUN_ID, as_comparable, forward_keys, make_capture, make_rows, random_tensor

from probe import cli
from probe.errors import CaptureError, CaptureFormatError
from probe.point import Key, Kind
from probe.store import pack_steps as packing
from probe.store import pack_tensors
from probe.store.folder import create_capture
from probe.store.layout import FullTensor
from probe.store.pack import PackedRank, pack
from probe.store.reader import open_capture
from probe.store.sink import Sink
from probe.store.writer import RankWriter, write_manifest

KEYS = forward_keys(9)
SHAPES: dict[str, tuple[int, ...]] = {
    "bfloat16": (300, 500),
    "float32": (7, 300, 401),
    "float8_e5m2": (50_000,),
    "float8_e4m3fn": (0, 4),
    "bool": (),
    "complex64": (3, 500),
    "float64": (2, 3, 2, 200_000),
    "int64": (300_001,),
}
TENSORS = {
    key: random_tensor(dtype, shape, at)
    for at, (key, (dtype, shape)) in enumerate(zip(KEYS, SHAPES.items(), strict=False))
}


def capture_of_all(path: Path) -> Path:
    """Record steps that differ in names, shapes, texts, and in what is kept whole."""
    create_capture(path)
    write_manifest(path, {"run_id": RUN_ID, "world_size": 1, "config": {"steps": "1,2,4"}})
    writer = RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
    for rows in rows_of_all():
        writer.write(rows)
    writer.close(error=None, dropped_steps=[])
    return path


def rows_of_all() -> list[Any]:
    more = (Key(kind=Kind.PARAM, name="weight", item="before"), *reversed(KEYS))
    return [
        make_rows(more, step=1, shape=((3,),) * 10, text=("ä" * 300, "", *("b",) * 8)),
        make_rows(KEYS, step=2, tensors=TENSORS),
        make_rows(KEYS[:4], step=4, tensors={KEYS[1]: TENSORS[KEYS[0]]}, where=("other.py:1",) * 4),
    ]


def same_as_recorded(path: Path) -> None:
    capture = open_capture(path)
    assert (capture.ranks, capture.steps(0), capture.problems) == ((0,), (1, 2, 4), ())
    for rows in rows_of_all():
        assert as_comparable(capture.rows(0, rows.step)) == as_comparable(rows)
        assert capture.tensor_keys(0, rows.step) == tuple(key for key in rows.keys if key in rows.tensors)
        for key, tensor in rows.tensors.items():
            same_tensor(capture.tensor(0, rows.step, key), tensor)
            blocks = list(capture.tensor_blocks(0, rows.step, key, 1000))
            assert b"".join(block.tobytes() for block in blocks) == tensor.bits.tobytes()


def same_tensor(one: FullTensor, two: FullTensor) -> None:
    assert (one.dtype, one.bits.dtype, one.bits.shape) == (two.dtype, two.bits.dtype, two.bits.shape)
    assert one.bits.tobytes() == two.bits.tobytes()


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
def test_a_packed_capture_holds_the_same_bits_with_and_without_its_segments(tmp_path: Path, compress: bool) -> None:
    path = capture_of_all(tmp_path / "c")
    (packed,) = pack(open_capture(path), compress=compress)
    assert (packed.rank, packed.steps, packed.removed, packed.fresh) == (0, 3, 0, True)
    assert sorted(os.listdir(path / "packed")) == ["rank00000.h5"]
    same_as_recorded(path)
    (again,) = pack(open_capture(path), compress=compress, remove=True)
    assert again == PackedRank(
        rank=0, steps=3, before=packed.before, after=packed.after, removed=3, merged=0, fresh=False
    )
    assert sorted(os.listdir(path / "rank00000")) == ["end.json"]
    same_as_recorded(path)
    assert list(pack(open_capture(path), remove=True)) == []


def test_packed_and_unpacked_steps_are_read_alike_and_packed_together(tmp_path: Path) -> None:
    path = capture_of_all(tmp_path / "c")
    list(pack(open_capture(path)))
    (path / "rank00000/step00000002.h5").unlink()
    capture = open_capture(path)
    assert (capture.segments(0), [each.steps for each in capture.packed(0)]) == ((1, 4), [(1, 2, 4)])
    same_as_recorded(path)
    # A step that was recorded after packing.
    late = make_capture(tmp_path / "late", (9,)) / "rank00000/step00000009.h5"
    shutil.copy(late, path / "rank00000")
    (packed,) = pack(open_capture(path), compress=True, remove=True)
    assert (packed.steps, packed.removed, packed.fresh) == (4, 3, True)
    assert open_capture(path).steps(0) == (1, 2, 4, 9)
    assert as_comparable(open_capture(path).rows(0, 9)) == as_comparable(make_rows(step=9))


@pytest.mark.parametrize("with_isal", [True, False])
def test_compressed_tensors_get_smaller_and_any_hdf5_tool_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_isal: bool
) -> None:
    if not with_isal:
        monkeypatch.setitem(sys.modules, "isal", None)
    values = np.arange(3_000_000, dtype="<f4").reshape(3, 1000, 1000)
    tensors = {KEYS[0]: FullTensor(bits=values, dtype="float32"), KEYS[1]: random_tensor("float32", (1_000_000,))}
    path = make_capture(tmp_path / "c", (1,), keys=KEYS, tensors=tensors)
    (packed,) = pack(open_capture(path), compress=True)
    assert packed.after < 0.6 * packed.before
    with h5py.File(path / "packed/rank00000.h5") as file:
        group = file["tensors/step00000001"]
        first, second = (group[each.label.replace("/", "%2F")] for each in KEYS[:2])
        np.testing.assert_array_equal(first[()], values)
        np.testing.assert_array_equal(second[()].view(np.uint32), tensors[KEYS[1]].bits.view(np.uint32))
        assert (first.chunks, first.shuffle, first.compression) == ((1, 262, 1000), True, "gzip")
        assert file["l2"].fletcher32


def test_tables_of_a_packed_file_are_labelled_for_xarray(tmp_path: Path) -> None:
    import xarray

    path = make_capture(tmp_path / "c", (1, 2))
    list(pack(open_capture(path)))
    with xarray.open_dataset(path / "packed/rank00000.h5", engine="h5netcdf", phony_dims="sort") as data:
        l2 = data.l2.sel(step=2, quantity=KEYS[3].label.encode())
        assert float(l2) == make_rows(step=2).scalars["l2"][3]


def test_any_number_of_rows_can_be_packed(tmp_path: Path) -> None:
    for count in (0, 1):
        path = make_capture(tmp_path / str(count), (1, 2), keys=forward_keys(count))
        list(pack(open_capture(path), remove=True))
        assert as_comparable(open_capture(path).rows(0, 2)) == as_comparable(make_rows(forward_keys(count), step=2))


def test_chunks_are_runs_of_elements_of_at_most_a_mebibyte() -> None:
    assert pack_tensors._chunk((), 4) is None
    assert pack_tensors._chunk((10,), 4) == (10,)
    assert pack_tensors._chunk((1_000_000,), 4) == (262_144,)
    assert pack_tensors._chunk((64, 1024, 4096), 2) == (1, 128, 4096)
    assert pack_tensors._chunk((3, 5, 1_000_000), 8) == (1, 1, 131_072)


def test_a_damaged_segment_is_not_packed_and_nothing_is_removed(tmp_path: Path) -> None:
    path = capture_of_all(tmp_path / "c")
    segment = path / "rank00000/step00000002.h5"
    flip(segment, offset_of(segment, f"tensors/{KEYS[1].label.replace('/', '%2F')}") + 1000)
    with pytest.raises(CaptureFormatError, match=r"step00000002\.h5 is damaged: tensor "):
        list(pack(open_capture(path), remove=True))
    assert sorted(os.listdir(path / "rank00000")) == [
        "end.json",
        "step00000001.h5",
        "step00000002.h5",
        "step00000004.h5",
    ]
    assert os.listdir(path / "packed") == []


def flip(file: Path, at: int) -> None:
    with open(file, "r+b") as raw:
        raw.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = raw.read(1)
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte[0] ^ 16]))


def offset_of(file: Path, name: str) -> int:
    with h5py.File(file) as opened:
        dataset = opened[name]
        return dataset.id.get_chunk_info(0).byte_offset if dataset.chunks else dataset.id.get_offset()


@pytest.mark.parametrize("name", ["quantity", "shape", "l2", "row", "sketch", "stored", "text", "where_row", "step"])
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
def test_a_changed_byte_in_a_packed_table_is_never_a_value(tmp_path: Path, name: str, compress: bool) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    list(pack(open_capture(path), compress=compress, remove=True))
    flip(path / "packed/rank00000.h5", offset_of(path / "packed/rank00000.h5", name))

    def read() -> None:
        capture = open_capture(path)
        if capture.problems:
            raise CaptureFormatError(capture.problems[0])
        for step in (1, 2):
            capture.rows(0, step)

    with pytest.raises(CaptureFormatError):
        read()


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
def test_a_changed_byte_in_a_packed_tensor_is_damage(tmp_path: Path, compress: bool) -> None:
    tensors = {KEYS[0]: FullTensor(bits=np.arange(10_000, dtype="<i4"), dtype="int32")}
    path = make_capture(tmp_path / "c", (1,), keys=KEYS, tensors=tensors)
    list(pack(open_capture(path), compress=compress, remove=True))
    file = path / "packed/rank00000.h5"
    flip(file, offset_of(file, f"tensors/step00000001/{KEYS[0].label.replace('/', '%2F')}") + 300)
    with pytest.raises(CaptureFormatError, match=f"^Packed file {re.escape(str(file))} is damaged: "):
        open_capture(path).tensor(0, 1, KEYS[0])


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_truncated_packed_file_is_a_problem_of_its_rank_and_segments_are_still_read(
    tmp_path: Path, part: float
) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    list(pack(open_capture(path)))
    file = path / "packed/rank00000.h5"
    os.truncate(file, int(part * file.stat().st_size))
    capture = open_capture(path)
    what = "truncated" if part else "empty"
    (problem,) = capture.problems
    assert problem.startswith(f"rank 0 has a packed file that cannot be read: Packed file {file} is {what}")
    assert problem.endswith("Pack its segments again if they are still there, or delete it.")
    assert as_comparable(capture.rows(0, 2)) == as_comparable(make_rows(step=2))
    (packed,) = pack(capture)
    assert packed.fresh
    assert open_capture(path).problems == ()


def test_a_packed_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path, other = make_capture(tmp_path / "c", (1,)), make_capture(tmp_path / "other", (1,))
    list(pack(open_capture(other)))
    with h5py.File(other / "packed/rank00000.h5", "r+") as file:
        file.attrs.modify("run_id", np.bytes_("f" * 32))
    shutil.copytree(other / "packed", path / "packed")
    assert open_capture(path).problems == (
        f"rank 0 has a packed file that cannot be read: Packed file {path}/packed/rank00000.h5 is not read: attribute "
        f"'run_id' is '{'f' * 32}' instead of '{RUN_ID}'. Pack its segments again if they are still there, or delete "
        "it.",
    )


def test_a_packed_file_with_a_foreign_filter_or_huge_chunks_is_refused(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1,))
    list(pack(open_capture(path), remove=True))
    file = path / "packed/rank00000.h5"

    def replaced(**options: Any) -> str:
        with h5py.File(file, "r+") as opened:
            del opened["l2"]
            opened.create_dataset("l2", dtype="<f8", **options)
        with pytest.raises(CaptureFormatError) as caught:
            open_capture(path).rows(0, 1)
        return str(caught.value)

    start = f"Packed file {file} is not read: dataset 'l2' "
    end = ". Pack its segments again if they are still there, or delete it."
    assert replaced(shape=(1, 9), chunks=(1, 9), compression="lzf") == (
        f"{start}is stored in chunks with filters 32000, and a packed file's data lies contiguous, or in chunks with "
        f"filters 1, 2 and 3{end}"
    )
    assert replaced(shape=(1, 3_000_000), chunks=(1, 3_000_000)) == (
        f"{start}has chunks of 24000000 bytes, and at most 16777216 are read{end}"
    )
    assert replaced(shape=(1, 2_000_000), chunks=(1, 2_000_000), compression="gzip") == (
        f"{start}has 16000000 bytes of 0 that are stored{end}"
    )


def test_what_was_read_back_wrong_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    real = packing._write_step

    def wrong(datasets: Any, plan: Any, s: int, tables: Any) -> None:
        real(datasets, plan, s, {**tables, "l2": tables["l2"] + 1})

    monkeypatch.setattr(packing, "_write_step", wrong)
    with pytest.raises(CaptureFormatError, match=r"tmp is damaged: the tables of step 1 do not have their digest"):
        list(pack(open_capture(path), remove=True))
    assert os.listdir(path / "packed") == []
    assert len(list(path.glob("rank00000/step*.h5"))) == 2


def test_a_packed_file_that_differs_from_its_segments_removes_none(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    list(pack(open_capture(path)))
    other = make_capture(tmp_path / "other", (2,), seed=7)
    shutil.copy(other / "rank00000/step00000002.h5", path / "rank00000")
    message = (
        f"Packed file {path}/packed/rank00000.h5 does not hold what step 2 of rank 0 does. The segments are kept; "
        "remove the packed file and pack again."
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        list(pack(open_capture(path), remove=True))
    assert len(list(path.glob("rank00000/step*.h5"))) == 2


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_capture(tmp_path / "c", (1,))
    real = os.statvfs(path)
    values = list(real)
    values[4] = (50 << 20) // real.f_frsize  # f_bavail
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    message = (
        f"Rank 0 is not packed into {path}/packed: it needs up to 65 MiB, 64 MiB of them to stay free, and 49 MiB are "
        "left. Free space, or move the capture to a larger disk."
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$".replace("49", "(49|50)")):
        list(pack(open_capture(path), remove=True))


def test_a_disk_that_fills_up_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = capture_of_all(tmp_path / "c")
    real, written = os.pwrite, 0

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 1_000_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    message = (
        f"Packed file {path}/packed/rank00000.h5 could not be written: No space left on device. The segments are all "
        "there."
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        list(pack(open_capture(path), remove=True))
    assert os.listdir(path / "packed") == []
    same_as_recorded(path)


KILLED = killed_script(
    "from probe.store.pack import pack\nfrom probe.store.reader import open_capture",
    "list(pack(open_capture(sys.argv[1]), remove=True))",
)


def test_killed_at_any_call_it_loses_nothing_and_goes_on(tmp_path: Path) -> None:
    whole = make_capture(tmp_path / "c", (1, 2))
    shutil.copytree(whole, tmp_path / "dry")
    dry = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "dry"), "0"], capture_output=True, text=True, check=True
    )
    calls = int(dry.stdout)
    for at in sorted({1, 2, calls // 2, *range(calls - 6, calls + 1)}):
        path = tmp_path / f"killed-{at}"
        shutil.copytree(whole, path)
        done = subprocess.run([sys.executable, "-c", KILLED, str(path), str(at)], check=False)
        assert done.returncode == -signal.SIGKILL
        for _ in range(2):
            capture = open_capture(path)
            assert capture.problems == ()
            for step in (1, 2):
                assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(step=step))
            list(pack(capture, remove=True))
        assert not list(path.glob("rank00000/step*"))
        assert os.listdir(path / "packed") == ["rank00000.h5"]


def test_a_sink_keeps_the_first_error_and_reads_what_was_written(tmp_path: Path) -> None:
    with Sink(tmp_path / "f") as sink:
        assert (sink.write(b"abcdef"), sink.seek(2), sink.read(3), sink.tell()) == (6, 2, b"cde", 5)
        assert (sink.seek(-1, os.SEEK_END), sink.truncate(4), sink.seek(0, os.SEEK_END)) == (5, 4, 4)
        sink.finish()
    assert (tmp_path / "f").read_bytes() == b"abcd"


def test_a_packed_capture_is_replaced_by_force_and_kept_without(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1,))
    list(pack(open_capture(path)))
    create_capture(path, force=True)
    assert os.listdir(path) == []
    make_capture(path, (1,))
    list(pack(open_capture(path)))
    (path / "packed/notes.txt").write_text("mine")
    with pytest.raises(CaptureError, match=r"it holds what is no part of a capture: packed/notes\.txt\."):
        create_capture(path, force=True)


def test_the_command_says_what_became_of_the_bytes(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2))

    def run(*options: str) -> list[str]:
        return CliRunner().invoke(cli.main, ["pack", str(path), *options], standalone_mode=False).output.splitlines()

    first = run()
    assert re.fullmatch(rf"Packed 1 rank of up to 2 steps into {path}/packed: [\d.]+ kB became [\d.]+ kB\.", first[0])
    assert first[1:] == ["The segments are still there; --remove removes them."]
    assert run("--remove")[1:] == ["2 segments removed."]
    assert run() == [f"Capture {path} holds nothing that is not packed."]


def test_a_comparison_of_packed_captures_prints_the_same(tmp_path: Path) -> None:
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"run-{number}")
        create_capture(paths[-1])
        write_manifest(paths[-1], {"run_id": f"run-{number}", "world_size": 1})
        writer = RankWriter(paths[-1], run_id=f"run-{number}", rank=0, world_size=1)
        for step in (1, 2):
            writer.write(make_rows(step=step, seed=number))
        writer.close(error=None, dropped_steps=[])
    arguments = ["diff", *map(str, paths), "--same-code", "--json"]
    before = CliRunner().invoke(cli.main, arguments, standalone_mode=False).output
    list(pack(open_capture(paths[1]), compress=True, remove=True))
    assert CliRunner().invoke(cli.main, arguments, standalone_mode=False).output == before
    assert '"verdict"' in before


def test_h5dump_and_plain_h5py_show_the_numbers(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    list(pack(open_capture(path), compress=True))
    file = path / "packed/rank00000.h5"
    expected = make_rows(step=2)
    with h5py.File(file) as opened:
        names = opened["quantity"].asstr()[()].tolist()
        at = opened["row"][1].argsort()
        assert [names[row] for row in at] == [key.label for key in expected.keys]
        np.testing.assert_array_equal(opened["l2"][1][at], expected.scalars["l2"])
    if shutil.which("h5dump") is None:
        pytest.skip("h5dump is not installed")
    dumped = subprocess.run(["h5dump", "-d", "/order", str(file)], capture_output=True, text=True, check=True).stdout
    assert ", ".join(map(str, expected.order)) in " ".join(dumped.split())


def test_the_documented_layout_is_enough_to_put_a_step_together_with_plain_h5py(tmp_path: Path) -> None:
    """Follow README's words for a packed file, with h5py and xxhash alone, to the digest that the segment had."""
    path = capture_of_all(tmp_path / "c")
    with h5py.File(path / "rank00000/step00000002.h5") as segment:
        names, digest = sorted(set(segment) - {"tensors"}), segment.attrs["tables_xxh3_128"]
    list(pack(open_capture(path), compress=True, remove=True))
    with h5py.File(path / "packed/rank00000.h5") as file:
        assert {name: file.attrs[name] for name in ("probe_format", "probe_format_version", "run_id", "rank")} == {
            "probe_format": b"probe-packed",
            "probe_format_version": 1,
            "run_id": RUN_ID.encode(),
            "rank": 0,
        }
        s = file["step"][()].tolist().index(2)
        row = file["row"][s]
        order = [q for q in np.argsort(row, kind="stable") if row[q] >= 0]
        count = dict(zip(("text", "sketch", "sample"), file["stored"][s], strict=True))
        content = b""
        for name in names:
            if name in count:
                table = file[name][s][: count[name]]
            elif name in ("dtype", "shape", "where", "tensor"):
                table = file[name][()][file[f"{name}_row"][s][order]]
            elif name in ("quantity", "kind", "name", "item", "microbatch", "call"):
                table = file[name][()][order]
            else:
                table = file[name][s][order]
            content += name.encode() + b"\0"
            content += b"".join(text + b"\0" for text in table) if table.dtype.kind in "SO" else table.tobytes()
        assert file["tables_xxh3_128"][s] == digest == xxhash.xxh3_128_hexdigest(content).encode()
        assert len(file["tensors/step00000002"]) == len(TENSORS)
