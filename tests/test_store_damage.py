"""What kills, full disks, forks and broken bits leave behind."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from step_rows import RUN_ID, as_comparable, forward_keys, make_capture, make_rows, random_tensor

from probe.errors import CaptureError, CaptureFormatError
from probe.point import Key
from probe.store.layout import FullTensor
from probe.store.reader import open_capture
from probe.store.writer import RankWriter, write_manifest

KEYS = forward_keys(12)
DTYPES = ("bfloat16", "float8_e5m2", "float8_e4m3fn", "bool", "complex64", "int64", "float32")
TENSORS = {key: random_tensor(dtype, (40, 11)) for key, dtype in zip(KEYS[2:], DTYPES, strict=False)}


def child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process that records; it finds the tests' rows."""
    prelude = """
        import os, signal, sys, threading, time
        from pathlib import Path
        from step_rows import RUN_ID, forward_keys, make_rows, random_tensor
        from probe.errors import CaptureError
        from probe.store.writer import RankWriter, write_manifest
        path = Path(sys.argv[1])
        keys = forward_keys(12)
        tensors = {key: random_tensor("bfloat16", (300, 300)) for key in keys[3:6]}
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def require_whole(path: Path) -> tuple[int, ...]:
    """Read every step that a child recorded, and compare it with what it should hold."""
    capture = open_capture(path)
    tensors = {key: random_tensor("bfloat16", (300, 300)) for key in KEYS[3:6]}
    for step in capture.steps(0):
        assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(KEYS, step=step))
        actual = {key: capture.tensor(0, step, key).bits.tobytes() for key in capture.tensor_keys(0, step)}
        assert actual == {key: tensor.bits.tobytes() for key, tensor in tensors.items()}
    return capture.steps(0)


RECORD = """
    writer = RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
    write_manifest(path, {"run_id": RUN_ID, "world_size": 1})
    for step in range(1, 100_000):
        writer.write(make_rows(keys, step=step, tensors=tensors))
"""


@pytest.mark.parametrize("attempt", range(5))
def test_a_process_killed_at_any_moment_leaves_every_completed_step_whole(tmp_path: Path, attempt: int) -> None:
    path = tmp_path / "c"
    process = child(RECORD, path)
    deadline = time.monotonic() + 60
    while not (path / "rank00000/step00000002.h5").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(float(np.random.default_rng(attempt).uniform(0, 0.06)))
    process.kill()
    process.communicate()
    steps = require_whole(path)
    assert steps == tuple(range(1, len(steps) + 1))
    assert len(steps) >= 2
    assert open_capture(path).problems == (f"rank 0 was not closed cleanly, last step {steps[-1]}",)


KILL_AT = """
    calls = 0
    def kill_at(name):
        call = getattr(os, name)
        def counted(*arguments, **options):
            global calls
            calls += 1
            if calls == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        setattr(os, name, counted)

    writer = RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
    write_manifest(path, {"run_id": RUN_ID, "world_size": 1})
    writer.write(make_rows(keys, step=1, tensors=tensors))
    for name in ("pwrite", "fsync", "rename", "ftruncate", "close"):
        kill_at(name)
    writer.write(make_rows(keys, step=2, tensors=tensors))
    print(calls)
"""


def test_a_process_killed_before_any_system_call_of_a_step_leaves_the_step_before_it_whole(tmp_path: Path) -> None:
    process = child(KILL_AT, tmp_path / "all", -1)
    calls = int(process.communicate()[0])
    assert calls > 20
    late = range(calls - 5, calls + 1)  # the last writes, ftruncate, fsync, close, rename, fsync of the folder
    for at in (1, calls // 3, 2 * calls // 3, *late):
        path = tmp_path / str(at)
        process = child(KILL_AT, path, at)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert require_whole(path) in {(1,), (1, 2)}, at


def test_processes_forked_while_a_thread_records_harm_nothing(tmp_path: Path) -> None:
    script = """
    writer = RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
    write_manifest(path, {"run_id": RUN_ID, "world_size": 1})
    def record():
        for step in range(1, 31):
            writer.write(make_rows(keys, step=step, tensors=tensors))
    thread = threading.Thread(target=record)
    thread.start()
    children = []
    while thread.is_alive() and len(children) < 12:
        process = os.fork()
        if process == 0:
            time.sleep(0.05)
            os._exit(0)
        children.append(process)
        time.sleep(0.004)
    thread.join()
    writer.close(error=None, dropped_steps=[])
    print(*{os.waitpid(process, 0)[1] for process in children})
    """
    process = child(script, tmp_path / "c")
    assert (process.communicate(timeout=120)[0], process.returncode) == ("0\n", 0)
    assert require_whole(tmp_path / "c") == tuple(range(1, 31))
    assert open_capture(tmp_path / "c").problems == ()


def test_a_process_forked_from_the_training_process_must_not_write(tmp_path: Path) -> None:
    script = """
    writer = RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
    print(os.getpid(), flush=True)
    if os.fork() == 0:
        try:
            writer.write(make_rows())
        except CaptureError as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
    """
    output, _ = child(script, tmp_path / "c").communicate(timeout=60)
    parent, message = output.splitlines()
    assert message == (
        f"Rank 0 of capture {tmp_path}/c is claimed by process {parent}, and a process forked from it must "
        "not write. Record in the training process alone."
    )


def test_only_one_of_many_processes_claims_a_rank(tmp_path: Path) -> None:
    script = """
    try:
        RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
        print("claimed")
    except CaptureError as error:
        print(str(error)[:31])
    """
    outputs = [process.communicate(timeout=60)[0] for process in [child(script, tmp_path) for _ in range(4)]]
    assert sorted(outputs) == sorted(["claimed\n"] + [f"Rank 0 of capture {tmp_path}"[:31] + "\n"] * 3)


@pytest.fixture
def writer(tmp_path: Path) -> RankWriter:
    writer = RankWriter(tmp_path / "c", run_id=RUN_ID, rank=0, world_size=1)
    writer.write(make_rows(KEYS, step=1))
    return writer


@pytest.mark.parametrize("name", ["pwrite", "fsync", "rename", "ftruncate"])
def test_any_call_that_fails_removes_the_segment_and_leaves_the_earlier_ones(
    writer: RankWriter, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = writer.path / "rank00000"
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr(os, name, full)
        with pytest.raises(CaptureError) as caught:
            writer.write(make_rows(KEYS, step=2, tensors=TENSORS))
    assert str(caught.value) == (
        f"Segment {folder}/step00000002.h5 could not be written: No space left on device. Step 2 is not recorded; "
        "1 earlier step of rank 0 can be read."
    )
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    writer.write(make_rows(KEYS, step=2, tensors=TENSORS))
    assert sorted(os.listdir(folder)) == ["step00000001.h5", "step00000002.h5"]


@pytest.mark.parametrize("nth", [2, 9, 23, 28, 36])
def test_a_disk_that_fills_up_in_between_leaves_no_part_of_a_segment(
    writer: RankWriter, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    pwrite, calls = os.pwrite, 0

    def full(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls >= nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CaptureError, match="No space left on device"):
        writer.write(make_rows(KEYS, step=2, tensors=TENSORS))
    assert calls == nth
    assert os.listdir(writer.path / "rank00000") == ["step00000001.h5"]


def test_writes_that_the_system_cuts_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:1000], offset))
    make_capture(tmp_path / "c", keys=KEYS, tensors=TENSORS)
    monkeypatch.undo()
    tensors = {key: tensor.bits.tobytes() for key, tensor in TENSORS.items()}
    assert contents(tmp_path / "c") == (as_comparable(make_rows(KEYS)), tensors)


def test_an_interrupt_while_writing_leaves_no_part_of_a_segment(
    writer: RankWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.write(make_rows(KEYS, step=2))
    assert os.listdir(writer.path / "rank00000") == ["step00000001.h5"]


def test_a_full_disk_costs_the_step_and_nothing_else(
    small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("700k")
    monkeypatch.setattr(RankWriter, "RESERVE", -(1 << 30))  # or the writer would not even try
    path = disk / "c"
    writer = RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
    write_manifest(path, {"run_id": RUN_ID, "world_size": 1})
    tensors = {KEYS[0]: random_tensor("int8", (100_000,))}
    with pytest.raises(CaptureError, match=r"could not be written: No space left on device. Step \d is not recorded"):
        write_steps(writer, tensors)
    capture = open_capture(path)
    assert 2 <= len(capture.steps(0)) <= 7
    assert not [name for name in os.listdir(path / "rank00000") if name.endswith(".tmp")]
    for step in capture.steps(0):
        assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(KEYS, step=step))
        assert capture.tensor(0, step, KEYS[0]).bits.tobytes() == tensors[KEYS[0]].bits.tobytes()


def write_steps(writer: RankWriter, tensors: dict[Key, FullTensor]) -> None:
    for step in range(1, 10):
        writer.write(make_rows(KEYS, step=step, tensors=tensors))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_capture(tmp_path_factory.mktemp("whole") / "c", keys=KEYS, tensors=TENSORS)


@pytest.fixture
def segment(whole: Path) -> Iterator[Path]:
    """Lend the segment to be damaged, and repair it."""
    file = whole / "rank00000/step00000001.h5"
    content = file.read_bytes()
    yield file
    file.write_bytes(content)


def contents(path: Path) -> tuple[dict[str, Any], dict[Key, bytes]]:
    capture = open_capture(path)
    tensors = {key: capture.tensor(0, 1, key) for key in capture.tensor_keys(0, 1)}
    return as_comparable(capture.rows(0, 1)), {key: tensor.bits.tobytes() for key, tensor in tensors.items()}


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.01, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_segment_is_refused_by_name(whole: Path, segment: Path, fraction: float) -> None:
    size = int(segment.stat().st_size * fraction)
    os.truncate(segment, size)
    with pytest.raises(CaptureFormatError) as caught:
        open_capture(whole).rows(0, 1)
    what = "empty" if not size else "no HDF5 file" if size < 8 else "truncated"
    assert str(caught.value).startswith(f"Segment {segment} is {what}")
    assert str(caught.value).endswith(". Record the run again, or delete the file to go on without the step.")


def test_a_segment_of_zeros_or_of_text_is_no_hdf5_file(whole: Path, segment: Path) -> None:
    for content in (bytes(5000), b"step,loss\n1,0.5\n"):
        segment.write_bytes(content)
        with pytest.raises(CaptureFormatError, match=re.escape(f"Segment {segment} is no HDF5 file.")):
            open_capture(whole).rows(0, 1)


def test_a_bit_that_flips_anywhere_is_detected_or_changes_nothing(whole: Path, segment: Path) -> None:
    good, content, detected = contents(whole), segment.read_bytes(), 0
    random = np.random.default_rng(7)
    for bit in random.integers(0, 8 * len(content), 80).tolist():
        flip(segment, content, bit)
        try:
            assert contents(whole) == good, bit
        except CaptureFormatError:
            detected += 1
    assert detected > 70


@pytest.mark.parametrize("table", ["quantity", "order", "value", "l2", "hash", "sketch", "sample", "where", "shape"])
def test_a_bit_that_flips_in_a_table_is_always_detected(whole: Path, segment: Path, table: str) -> None:
    content = segment.read_bytes()
    with h5py.File(segment) as file:
        start, length = file[table].id.get_offset(), file[table].id.get_storage_size()
    for bit in np.random.default_rng(0).integers(8 * start, 8 * (start + length), 5).tolist():
        flip(segment, content, bit)
        with pytest.raises(CaptureFormatError) as caught:
            open_capture(whole).rows(0, 1)
        assert str(caught.value) == (
            f"Segment {segment} is damaged: its tables do not have their digest. Record the run again, or delete the "
            "file to go on without the step."
        )


def test_a_bit_that_flips_in_a_tensor_is_detected_whole_or_in_blocks(whole: Path, segment: Path) -> None:
    key, content = KEYS[2], segment.read_bytes()
    with h5py.File(segment) as file:
        start = file["tensors/forward%2Fblocks.2.attn"].id.get_offset()
    flip(segment, content, 8 * start + 3)
    capture = open_capture(whole)
    assert as_comparable(capture.rows(0, 1)) == as_comparable(make_rows(KEYS))
    message = (
        f"Segment {segment} is damaged: tensor 'forward%2Fblocks.2.attn' does not have its digest. Record the run "
        "again, or delete the file to go on without the step."
    )
    with pytest.raises(CaptureFormatError, match=re.escape(message)):
        capture.tensor(0, 1, key)
    with pytest.raises(CaptureFormatError, match=re.escape(message)):
        list(capture.tensor_blocks(0, 1, key))


def flip(file: Path, content: bytes, bit: int) -> None:
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    file.write_bytes(damaged)
