from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import pytest
from click.testing import CliRunner
from killed import killed_script
from step_rows import RUN_ID, as_comparable, forward_keys, make_capture, make_rows, random_tensor

from probe import cli
from probe.errors import CaptureError, CaptureFormatError
from probe.point import Key, Kind
from probe.store import fold as folding
from probe.store import pack_steps, packed_chunks, reader
from probe.store import packed as packed_files
from probe.store.fold import fold
from probe.store.folder import create_capture
from probe.store.layout import StepRows
from probe.store.pack import pack
from probe.store.prune import find_captures
from probe.store.reader import Capture, open_capture
from probe.store.writer import RankWriter, write_manifest

KEYS = forward_keys(9)
DTYPES = ("bfloat16", "float8_e4m3fn", "bool", "complex64", "float64")
TENSORS = {key: random_tensor(dtype, (30, 40), at) for at, (key, dtype) in enumerate(zip(KEYS, DTYPES, strict=False))}
STEPS = (1, 2, 3, 10, 20, 21, 22)


def rows_of(step: int) -> StepRows:
    """Steps that differ in names, texts, and in what is kept whole; what only some of them have comes and goes."""
    if step == 1:
        more = (Key(kind=Kind.PARAM, name="weight", item="before"), *reversed(KEYS))
        return make_rows(more, step=1, text=("ä" * 300, "", *("b",) * 8))
    if step in (3, 21):
        return make_rows(KEYS, step=step, tensors=TENSORS)
    return make_rows(KEYS[: 4 + step % 3], step=step, where=(f"train.py:{step}",) * (4 + step % 3))


def capture_of_all(path: Path, run_id: str = RUN_ID) -> Path:
    create_capture(path)
    write_manifest(path, {"run_id": run_id, "world_size": 1, "config": {"steps": "1-3,10,20-"}})
    writer = RankWriter(path, run_id=run_id, rank=0, world_size=1)
    for step in STEPS:
        writer.write(rows_of(step))
    writer.close(error=None, dropped_steps=[])
    return path


def fold_in(path: Path, *steps: int) -> Path:
    return fold(path / "rank00000", steps, run_id=RUN_ID, rank=0, world_size=1)


def contents(capture: Capture) -> dict[int, Any]:
    return {step: _content(capture, step) for step in capture.steps(0)}


def _content(capture: Capture, step: int) -> Any:
    tensors = {
        key: (tensor.dtype, tensor.bits.shape, tensor.bits.tobytes())
        for key in capture.tensor_keys(0, step)
        for tensor in (capture.tensor(0, step, key),)
    }
    return as_comparable(capture.rows(0, step)), tensors, any(capture.tables(0, step)["tensor"])


def names_in(path: Path) -> list[str]:
    return sorted(os.listdir(path / "rank00000"))


def test_folded_steps_hold_the_same_bits_whatever_only_some_of_them_have(tmp_path: Path) -> None:
    path = capture_of_all(tmp_path / "c")
    before = contents(open_capture(path))
    assert fold_in(path, 1, 2, 3, 10) == path / "rank00000/packed00000001.h5"
    fold_in(path, 20, 21)
    assert names_in(path) == ["end.json", "packed00000001.h5", "packed00000020.h5", "step00000022.h5"]
    capture = open_capture(path)
    assert (capture.steps(0), capture.segments(0), capture.problems) == (STEPS, (22,), ())
    assert [each.steps for each in capture.packed(0)] == [(1, 2, 3, 10), (20, 21)]
    assert contents(capture) == before
    assert contents(pickle.loads(pickle.dumps(capture))) == before


def test_a_folded_capture_is_shown_and_compared_as_before(tmp_path: Path) -> None:
    path, other = capture_of_all(tmp_path / "c"), capture_of_all(tmp_path / "other", "another run")

    def said() -> list[str]:
        commands = (
            ["diff", str(path), str(other), "--same-code", "--json"],
            ["show", str(path), "--json", "forward/*"],
            ["show", str(path), "--names"],
            ["calibrate", str(path), str(other), "-o", str(tmp_path / "t.toml"), "--force"],
        )
        outputs = [CliRunner().invoke(cli.main, words, standalone_mode=False).output for words in commands]
        return [*outputs, re.sub(r"created = .*", "", (tmp_path / "t.toml").read_text())]

    before = said()
    assert '"checks"' in before[0]
    assert '"differences"' in before[0]  # of tensors kept whole
    assert "forward/blocks.0.attn" in before[-1]
    fold_in(path, 1, 2, 3)
    fold_in(path, 10, 20, 21, 22)
    assert said() == before


def test_a_step_that_is_folded_and_a_segment_is_read_from_its_segment(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    other = make_capture(tmp_path / "other", (2,), seed=7)
    fold_in(path, 1, 2)
    shutil.copy(other / "rank00000/step00000002.h5", path / "rank00000")
    capture = open_capture(path)
    assert capture.steps(0) == (1, 2)
    assert as_comparable(capture.rows(0, 2)) == as_comparable(make_rows(step=2, seed=7))


def test_a_capture_that_was_open_before_its_segments_were_folded_is_read_on(tmp_path: Path) -> None:
    path = capture_of_all(tmp_path / "c")
    capture = open_capture(path)
    before = contents(open_capture(path))
    fold_in(path, 1, 2, 3, 10)
    assert capture.nbytes == sum((path / f"rank00000/step000000{step}.h5").stat().st_size for step in (20, 21, 22))
    assert contents(capture) == before
    list(pack(open_capture(path), remove=True))
    assert contents(capture) == before
    (path / "packed/rank00000.h5").unlink()
    with pytest.raises(
        CaptureError, match=r"^Packed file .*rank00000\.h5 cannot be read: No such file or directory\.$"
    ):
        capture.rows(0, 1)


def test_steps_that_are_folded_while_a_capture_is_opened_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = capture_of_all(tmp_path / "c")
    before = contents(open_capture(path))
    real, calls = os.listdir, 0

    def listdir(folder: Any) -> list[str]:
        nonlocal calls
        names = real(folder)
        if Path(folder).name == "rank00000":
            calls += 1
            if calls == 1:
                fold_in(path, 1, 2, 3, 10)
        return names

    monkeypatch.setattr(os, "listdir", listdir)
    capture = open_capture(path)
    assert calls > 1
    assert (capture.steps(0), capture.problems) == (STEPS, ())
    assert contents(capture) == before


def test_names_of_many_files_are_the_same_objects(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", range(1, 9))
    for step in (1, 3, 5, 7):
        fold_in(path, step, step + 1)
    capture = open_capture(path)
    for step in (1, 3, 5, 7):
        capture.rows(0, step)
    indices = [each._index for each in capture.packed(0)]
    assert len({id(index.names["quantity"]) for index in indices if index}) == 1
    assert len({id(index.listed["where"]) for index in indices if index}) == 1
    assert len(packed_files._KNOWN) <= packed_files.KEPT


def test_most_steps_of_a_file_are_read_without_hdf5_and_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = capture_of_all(tmp_path / "c")
    before = contents(open_capture(path))
    file = fold_in(path, *STEPS)
    capture = open_capture(path)
    assert contents(capture) == before
    (packed,) = capture.packed(0)

    def refuse(*_: object) -> None:
        raise AssertionError("HDF5 is asked")

    with monkeypatch.context() as patch:
        patch.setattr(reader, "open_segment", refuse)
        assert [as_comparable(capture.rows(0, step)) for step in STEPS] == [before[step][0] for step in STEPS]
        patch.setattr(packed_chunks, "_SPREAD", -(1 << 40))  # every chunk by itself
        assert [as_comparable(capture.rows(0, step)) for step in STEPS] == [before[step][0] for step in STEPS]
        with pytest.raises(AssertionError, match="HDF5 is asked"):
            pickle.loads(pickle.dumps(capture)).rows(0, 1)
    # What is written over shows by its digest; HDF5 says what is wrong. Its time is put back, as rot would.
    status = file.stat()
    with h5py.File(file) as opened:
        at = opened["l2"].id.get_chunk_info(0).byte_offset
    with open(file, "r+b") as raw:
        raw.seek(at)
        raw.write(b"\xff")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert packed.known_tables(STEPS[0]) is None
    assert packed.known_tables(STEPS[1]) is not None
    with pytest.raises(CaptureFormatError, match=r"packed00000001\.h5 is damaged: "):
        capture.rows(0, STEPS[0])
    os.truncate(file, status.st_size // 2)
    assert {packed.known_tables(step) is None for step in STEPS} == {True}
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert packed.known_tables(STEPS[-1]) is None


def test_vectors_in_several_chunks_are_put_together_without_hdf5(tmp_path: Path) -> None:
    keys = forward_keys(800)
    path = make_capture(tmp_path / "c", range(1, 6), keys=keys)
    file = fold_in(path, 1, 2, 3, 4, 5)
    with h5py.File(file) as opened:
        assert (opened["sketch"].shape, opened["sketch"].chunks) == ((5, 533, 251), (1, 178, 251))
    capture = open_capture(path)
    for _ in range(2):
        for step in range(1, 6):
            assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(keys, step=step))
    assert capture.packed(0)[0].known_tables(5) is not None


def test_compressed_steps_are_left_to_hdf5(tmp_path: Path) -> None:
    path = capture_of_all(tmp_path / "c")
    before = contents(open_capture(path))
    list(pack(open_capture(path), compress=True, remove=True))
    capture = open_capture(path)
    for _ in range(2):
        assert contents(capture) == before
    (packed,) = capture.packed(0)
    assert [packed.known_tables(step) for step in STEPS] == [None] * len(STEPS)


def test_packing_merges_folded_steps_and_segments_into_one_file(tmp_path: Path) -> None:
    path = capture_of_all(tmp_path / "c")
    before = contents(open_capture(path))
    fold_in(path, 1, 2, 3)
    fold_in(path, 10, 20)
    done = CliRunner().invoke(cli.main, ["pack", str(path)], standalone_mode=False).output.splitlines()
    assert done[1:] == ["The segments are still there; --remove removes them."]
    assert contents(open_capture(path)) == before
    assert len(names_in(path)) == 5
    done = CliRunner().invoke(cli.main, ["pack", str(path), "--remove"], standalone_mode=False).output.splitlines()
    assert done[0].startswith(f"Packed 1 rank of up to 7 steps into {path}/packed: ")
    assert done[1:] == ["2 segments and 2 files of several steps removed."]
    assert (names_in(path), os.listdir(path / "packed")) == (["end.json"], ["rank00000.h5"])
    assert contents(open_capture(path)) == before
    assert list(pack(open_capture(path), remove=True)) == []


def test_a_packed_file_that_differs_from_a_folded_one_removes_nothing(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    list(pack(open_capture(path)))
    other = make_capture(tmp_path / "other", (1, 2), seed=7)
    shutil.rmtree(path / "rank00000")
    fold_in(other, 1, 2)
    shutil.copytree(other / "rank00000", path / "rank00000")
    with pytest.raises(CaptureError, match=r"rank00000\.h5 does not hold what step 1 of rank 0 does\."):
        list(pack(open_capture(path), remove=True))
    assert names_in(path) == ["end.json", "packed00000001.h5"]


def test_a_damaged_segment_is_not_folded_and_nothing_is_removed(tmp_path: Path) -> None:
    path = capture_of_all(tmp_path / "c")
    segment = path / "rank00000/step00000003.h5"
    content = bytearray(segment.read_bytes())
    content[content.index(TENSORS[KEYS[0]].bits.tobytes()) + 5] ^= 16
    segment.write_bytes(content)
    before = names_in(path)
    with pytest.raises(CaptureFormatError, match=r"step00000003\.h5 is damaged: tensor "):
        fold_in(path, 1, 2, 3, 10)
    assert names_in(path) == before
    with pytest.raises(CaptureError, match=r"^Segments in .*rank00000 cannot be folded: No such file or directory\.$"):
        fold_in(path, 1, 2, 4)
    assert names_in(path) == before


def test_what_was_read_back_wrong_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    real = pack_steps._write_step

    def wrong(columns: Any, plan: Any, s: int, tables: Any) -> None:
        real(columns, plan, s, {**tables, "l2": tables["l2"] + 1})

    monkeypatch.setattr(pack_steps, "_write_step", wrong)
    with pytest.raises(CaptureFormatError, match=r"tmp is damaged: the tables of step 1 do not have their digest"):
        fold_in(path, 1, 2)
    assert names_in(path) == ["end.json", "step00000001.h5", "step00000002.h5"]


def test_a_file_of_several_steps_is_never_replaced(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2, 3))
    file = fold_in(path, 1, 2)
    shutil.copy(make_capture(tmp_path / "other", (1,)) / "rank00000/step00000001.h5", path / "rank00000")
    with pytest.raises(CaptureError, match=f"^Packed file {re.escape(str(file))} exists already. The segments are kep"):
        fold_in(path, 1, 3)
    assert open_capture(path).steps(0) == (1, 2, 3)


def test_a_full_disk_is_foreseen_with_room_for_the_steps_that_come_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {KEYS[0]: random_tensor("int8", (8 << 20,))}
    path = make_capture(tmp_path / "c", (1, 2), keys=KEYS, tensors=tensors)
    real = os.statvfs(path)
    free = 90 << 20

    def statvfs(_: object) -> os.statvfs_result:
        values = list(real)
        values[4] = free // real.f_frsize  # f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", statvfs)
    message = (
        f"Rank 0 is not packed into {path}/rank00000: it needs up to 98 MiB, 80 MiB of them to stay free, and 90 MiB "
        "are left. Free space, or move the capture to a larger disk."
    )
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        fold_in(path, 1, 2)
    assert names_in(path) == ["end.json", "step00000001.h5", "step00000002.h5"]
    free = 100 << 20
    fold_in(path, 1, 2)


def test_a_disk_that_fills_up_leaves_the_segments_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = capture_of_all(tmp_path / "c")
    before, held = names_in(path), contents(open_capture(path))
    real, written = os.pwrite, 0

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 60_000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(CaptureError, match=r"packed00000001\.h5 could not be written: No space left on device\."):
        fold_in(path, *STEPS)
    assert names_in(path) == before
    assert contents(open_capture(path)) == held


KILLED = killed_script(
    "from probe.store.fold import fold",
    'fold(Path(sys.argv[1]) / "rank00000", (1, 2, 3), run_id=sys.argv[3], rank=0, world_size=1)',
)


def test_killed_at_any_call_it_loses_nothing(tmp_path: Path) -> None:
    whole = make_capture(tmp_path / "c", (1, 2, 3))

    def run(path: Path, at: int) -> subprocess.CompletedProcess[str]:
        shutil.copytree(whole, path)
        return subprocess.run(
            [sys.executable, "-c", KILLED, str(path), str(at), RUN_ID], capture_output=True, text=True, check=False
        )

    calls = int(run(tmp_path / "dry", 0).stdout)
    left = set()
    # The last of them: fsync, rename, fsync of the folder, a call for each segment, fsync of the folder.
    for at in sorted({1, 2, calls // 2, *range(calls - 7, calls + 1)}):
        path = tmp_path / f"killed-{at}"
        assert run(path, at).returncode == -signal.SIGKILL
        capture = open_capture(path)
        assert (capture.steps(0), capture.problems) == ((1, 2, 3), ())
        for step in (1, 2, 3):
            assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(step=step))
        left.add(len(capture.segments(0)))
        list(pack(capture, remove=True))
        assert [name for name in names_in(path) if not name.endswith(".tmp")] == ["end.json"]
        assert open_capture(path).steps(0) == (1, 2, 3)
    assert left == {0, 1, 2, 3}


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_truncated_file_of_several_steps_is_a_problem_and_the_others_are_read(tmp_path: Path, part: float) -> None:
    path = make_capture(tmp_path / "c", (1, 2, 3))
    file = fold_in(path, 1, 2)
    os.truncate(file, int(part * file.stat().st_size))
    capture = open_capture(path)
    unreadable, lacking = capture.problems
    what = "truncated" if part else "empty"
    assert unreadable.startswith(f"rank 0 has a packed file that cannot be read: Packed file {file} is {what}")
    assert unreadable.endswith("Record the run again, or delete the file to go on without its steps.")
    assert lacking == "rank 0 lacks steps 1-2"
    assert as_comparable(capture.rows(0, 3)) == as_comparable(make_rows(step=3))


def test_a_file_of_several_steps_of_another_run_or_rank_is_refused(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2), world_size=1)
    fold_in(path, 1, 2)
    shutil.copytree(path / "rank00000", path / "rank00001")
    assert any("attribute 'rank' is 0 instead of 1" in problem for problem in open_capture(path).problems)


def test_a_step_of_a_file_that_was_deleted_is_missing_by_what_the_end_says(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2, 5, 6), closed=False)
    file = fold_in(path, 1, 2, 5)
    end = {
        "run_id": RUN_ID,
        "segments": [
            {"file": file.name, "first_step": 1, "last_step": 5, "bytes": 1, "steps": [1, 2, 5]},
            {"file": "step00000006.h5", "first_step": 6, "last_step": 6, "bytes": 1},
        ],
    }
    (path / "rank00000/end.json").write_text(json.dumps(end))
    (path / "capture.json").write_text(
        json.dumps(json.loads((path / "capture.json").read_text()) | {"config": {"steps": "6"}})
    )
    assert open_capture(path).problems == ()
    file.unlink()
    assert open_capture(path).problems == ("rank 0 lacks steps 1-2, 5",)


def test_a_folded_capture_is_replaced_by_force_and_pruned_as_a_whole(tmp_path: Path) -> None:
    path = make_capture(tmp_path / "c", (1, 2, 3))
    fold_in(path, 1, 2)
    (path / "rank00000/packed00000007.h5.tmp").write_bytes(b"killed")
    assert [each.kept_for for each in find_captures(tmp_path, 0.0)] == [""]
    with pytest.raises(CaptureError, match=r"exists: 1 rank, 1 step, 1 file of several steps\. "):
        create_capture(path)
    (path / "rank00000/packed1.h5").write_bytes(b"mine")
    with pytest.raises(CaptureError, match=r"no part of a capture: rank00000/packed1\.h5\."):
        create_capture(path, force=True)
    (path / "rank00000/packed1.h5").unlink()
    create_capture(path, force=True)
    assert os.listdir(path) == []


def asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = {"folder": str(path / "rank00000"), "steps": [1, 2], "run_id": RUN_ID, "rank": 0, "world_size": 1}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def test_the_process_that_folds_stops_when_the_one_that_records_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    asked(path, monkeypatch)
    parents = iter((17, 17, 1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    with pytest.raises(SystemExit) as ended:
        folding.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "The process that recorded has ended. The segments are kept.\n"
    assert names_in(path) == ["end.json", "step00000001.h5", "step00000002.h5"]


def test_the_process_that_folds_does_what_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_capture(tmp_path / "c", (1, 2))
    asked(path, monkeypatch)
    folding.main()
    assert names_in(path) == ["end.json", "packed00000001.h5"]


FOLDED = """
import sys
from pathlib import Path
from probe.store.fold import fold
def peak():  # not `ru_maxrss`, which begins with what the parent had
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
fold(Path(sys.argv[1]) / "rank00000", (1, 2), run_id=sys.argv[2], rank=0, world_size=1)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_tensors_pass_through_in_pieces_whatever_their_size(tmp_path: Path) -> None:
    tensors = {key: random_tensor("float32", (24 << 20,), at) for at, key in enumerate(KEYS[:1])}
    path = make_capture(tmp_path / "c", (1, 2), keys=KEYS, tensors=tensors)
    done = subprocess.run([sys.executable, "-c", FOLDED, str(path), RUN_ID], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 80 << 10  # KiB; each tensor has 96 MiB
    assert names_in(path) == ["end.json", "packed00000001.h5"]
