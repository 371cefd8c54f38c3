from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from recording import command, probe, record
from step_rows import RUN_ID, as_comparable, forward_keys, make_rows, random_tensor

from probe.capture.launch import RecordOptions, make_request
from probe.errors import CaptureFormatError, PlanError
from probe.plan import Plan, load_plan, plan_from_dict
from probe.store import folding, packed
from probe.store.folding import FoldingWriter
from probe.store.reader import Capture, open_capture
from probe.store.writer import RankWriter, write_manifest


def names_in(path: Path, rank: int = 0) -> list[str]:
    return sorted(os.listdir(path / f"rank{rank:05d}"))


def folding_writer(path: Path, steps_per_file: int, told: list[str]) -> FoldingWriter:
    writer = RankWriter(path, run_id=RUN_ID, rank=0, world_size=1)
    write_manifest(path, {"run_id": RUN_ID, "world_size": 1})
    return FoldingWriter(writer, steps_per_file, told.append)


def written(path: Path, steps: tuple[int, ...], steps_per_file: int) -> list[str]:
    told: list[str] = []
    writer = folding_writer(path, steps_per_file, told)
    for step in steps:
        writer.write(make_rows(step=step))
        if writer._child is not None:
            writer._child.wait()
    writer.close(error=None, dropped_steps=[])
    return told


def test_every_n_steps_become_a_file_and_the_end_says_which(tmp_path: Path) -> None:
    steps = (1, 2, 3, 10, 11, 12, 13, 14)
    assert written(tmp_path / "c", steps, 3) == []
    assert names_in(tmp_path / "c") == [
        "end.json",
        "packed00000001.h5",
        "packed00000010.h5",
        "packed00000013.h5",
    ]
    capture = open_capture(tmp_path / "c")
    assert [each.steps for each in capture.packed(0)] == [(1, 2, 3), (10, 11, 12), (13, 14)]
    assert (capture.steps(0), [p for p in capture.problems if "lacks" not in p]) == (steps, [])
    for step in steps:
        assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(step=step))
    end = json.loads((tmp_path / "c/rank00000/end.json").read_text())
    sizes = [(tmp_path / f"c/rank00000/packed000000{first}.h5").stat().st_size for first in ("01", "10", "13")]
    assert end["segments"] == [
        {"file": "packed00000001.h5", "first_step": 1, "last_step": 3, "bytes": sizes[0], "steps": [1, 2, 3]},
        {"file": "packed00000010.h5", "first_step": 10, "last_step": 12, "bytes": sizes[1], "steps": [10, 11, 12]},
        {"file": "packed00000013.h5", "first_step": 13, "last_step": 14, "bytes": sizes[2], "steps": [13, 14]},
    ]


def test_opening_goes_by_what_the_end_says_of_files_of_that_size_and_reading_finds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    written(path, (1, 2, 3, 4), 2)
    opened: list[str] = []
    real = packed.open_segment
    monkeypatch.setattr(packed, "open_segment", lambda file, sort: opened.append(file.name) or real(file, sort))
    capture = open_capture(path)
    assert (capture.steps(0), capture.problems, opened) == ((1, 2, 3, 4), (), [])
    assert as_comparable(capture.rows(0, 4)) == as_comparable(make_rows(step=4))
    end = json.loads((path / "rank00000/end.json").read_text())
    end["segments"][0]["steps"] = [1, 7]
    end["segments"][1]["bytes"] += 1
    (path / "rank00000/end.json").write_text(json.dumps(end))
    capture = open_capture(path)
    assert (capture.steps(0), opened) == ((1, 3, 4, 7), ["packed00000003.h5"])
    message = (
        f"Packed file {path}/rank00000/packed00000001.h5 is not read: dataset 'step' lacks step 7, which end.json "
        "names. Record the run again, or delete the file to go on without its steps."
    )
    with pytest.raises(CaptureFormatError, match=f"^{re.escape(message)}$"):
        capture.rows(0, 7)
    for wrong in ("1-2", [2, 1], [True, 2], [1.0, 2]):
        end["segments"][0]["steps"] = wrong
        (path / "rank00000/end.json").write_text(json.dumps(end))
        assert open_capture(path).steps(0) == (1, 2, 3, 4)
    (path / "rank00000/end.json").write_text(json.dumps(end | {"run_id": "another"}))
    assert open_capture(path).steps(0) == (1, 2, 3, 4)


def test_a_step_that_is_left_alone_stays_a_segment(tmp_path: Path) -> None:
    assert written(tmp_path / "c", (1, 2, 3, 4), 3) == []
    assert names_in(tmp_path / "c") == ["end.json", "packed00000001.h5", "step00000004.h5"]
    end = json.loads((tmp_path / "c/rank00000/end.json").read_text())
    assert [each["file"] for each in end["segments"]] == ["packed00000001.h5", "step00000004.h5"]
    assert open_capture(tmp_path / "c").problems == ()


def test_one_step_for_each_file_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert written(tmp_path / "c", (1, 2, 3), 1) == []
    assert names_in(tmp_path / "c") == ["end.json", "step00000001.h5", "step00000002.h5", "step00000003.h5"]


def test_when_recording_failed_what_is_left_is_not_folded(tmp_path: Path) -> None:
    writer = folding_writer(tmp_path / "c", 3, [])
    for step in (1, 2):
        writer.write(make_rows(step=step))
    writer.close(error="the disk is full", dropped_steps=[3])
    assert names_in(tmp_path / "c") == ["end.json", "step00000001.h5", "step00000002.h5"]


def require_segments(path: Path, steps: tuple[int, ...]) -> None:
    assert names_in(path) == ["end.json", *(f"step{step:08d}.h5" for step in steps)]
    capture = open_capture(path)
    assert capture.problems == ()
    for step in steps:
        assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(step=step))


def test_a_process_that_cannot_be_started_leaves_segments_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    told = written(tmp_path / "c", (1, 2, 3, 4), 2)
    assert told == [
        "Rank 0 keeps some steps one to a file: no process to fold them can be started: No such file or directory. "
        "Recording goes on."
    ]
    require_segments(tmp_path / "c", (1, 2, 3, 4))


@pytest.mark.parametrize(
    ("child", "why"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "folding ended by signal 9"),
        ("import sys; sys.exit(3)", "folding ended with status 3"),
        ("import sys; sys.exit('Traceback:\\nOSError: it broke.')", "OSError: it broke"),
    ],
)
def test_a_process_that_fails_leaves_segments_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: str, why: str
) -> None:
    monkeypatch.setattr(folding, "_CHILD", child)
    told = written(tmp_path / "c", (1, 2, 3, 4), 2)
    assert told == [f"Rank 0 keeps some steps one to a file: {why}. Recording goes on."]
    require_segments(tmp_path / "c", (1, 2, 3, 4))


def test_a_process_killed_while_it_writes_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = "import os, signal; os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL); "
    monkeypatch.setattr(folding, "_CHILD", kill + folding._CHILD)
    (why,) = written(tmp_path / "c", (1, 2, 3, 4), 2)
    assert "folding ended by signal 9" in why
    require_segments(tmp_path / "c", (1, 2, 3, 4))


def test_a_process_killed_after_its_file_has_its_name_has_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = "import os, signal; os.unlink = lambda _: os.kill(os.getpid(), signal.SIGKILL); "
    monkeypatch.setattr(folding, "_CHILD", kill + folding._CHILD)
    assert written(tmp_path / "c", (1, 2), 2) == []
    assert names_in(tmp_path / "c") == ["end.json", "packed00000001.h5", "step00000001.h5", "step00000002.h5"]
    assert open_capture(tmp_path / "c").problems == ()


def test_folding_that_goes_wrong_here_does_not_cost_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    writer = folding_writer(tmp_path / "c", 2, told)

    def wrong() -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr(writer, "_start", wrong)
    for step in (1, 2, 3):
        assert writer.write(make_rows(step=step)) > 0
    monkeypatch.undo()
    assert len(told) == 1
    writer.close(error=None, dropped_steps=[])
    assert open_capture(tmp_path / "c").steps(0) == (1, 2, 3)


def test_the_process_that_folds_reads_no_variable_and_no_folder_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sitecustomize.py", "json.py", "numpy.py", "h5py.py"):
        (tmp_path / name).write_text("raise SystemExit('the job its own')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert written(tmp_path / "c", (1, 2), 2) == []
    assert names_in(tmp_path / "c") == ["end.json", "packed00000001.h5"]


RECORD = """
    import sys
    from pathlib import Path
    from step_rows import RUN_ID, forward_keys, make_rows, random_tensor
    from probe.store.folding import FoldingWriter
    from probe.store.writer import RankWriter, write_manifest
    path, keys = Path(sys.argv[1]), forward_keys(12)
    tensors = {key: random_tensor("bfloat16", (300, 300)) for key in keys[3:6]}
    writer = FoldingWriter(RankWriter(path, run_id=RUN_ID, rank=0, world_size=1), 4, print)
    write_manifest(path, {"run_id": RUN_ID, "world_size": 1})
    for step in range(1, 100_000):
        writer.write(make_rows(keys, step=step, tensors=tensors if step % 3 else {}))
        print(step, flush=True)
"""


@pytest.mark.parametrize("attempt", range(4))
def test_killed_at_any_moment_with_the_process_that_folds_no_step_is_lost(tmp_path: Path, attempt: int) -> None:
    path, chance = tmp_path / "c", random.Random(attempt)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(RECORD), str(path)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    finished = 0
    # Until something was folded, and then some steps into what is folded next.
    while not (path / "rank00000/packed00000001.h5").exists() or finished % 4 != attempt:
        finished = int(process.stdout.readline())
    time.sleep(chance.random() * 0.05)
    if attempt == 3:
        process.kill()  # the process that folds sees it, and stops
    else:
        os.killpg(process.pid, signal.SIGKILL)
    rest = process.communicate()[0].split()
    finished = int(rest[-1]) if rest else finished
    keys = forward_keys(12)
    tensors = {key: random_tensor("bfloat16", (300, 300)).bits.tobytes() for key in keys[3:6]}
    for _ in range(2):
        capture = open_capture(path)
        steps = capture.steps(0)
        assert steps == tuple(range(1, len(steps) + 1))
        assert len(steps) in (finished, finished + 1)
        assert capture.problems == (f"rank 0 was not closed cleanly, last step {steps[-1]}",)
        for step in steps:
            assert as_comparable(capture.rows(0, step)) == as_comparable(make_rows(keys, step=step))
            actual = {key: capture.tensor(0, step, key).bits.tobytes() for key in capture.tensor_keys(0, step)}
            assert actual == (tensors if step % 3 else {})
        time.sleep(0.5)


def same_rows(one: Capture, two: Capture) -> None:
    assert one.ranks == two.ranks
    for rank in one.ranks:
        assert one.steps(rank) == two.steps(rank)
        for step in one.steps(rank):
            a, b = one.rows(rank, step), two.rows(rank, step)
            assert as_comparable(a) == as_comparable(b)
            assert one.tensor_keys(rank, step) == two.tensor_keys(rank, step)
            for key in one.tensor_keys(rank, step):
                assert one.tensor(rank, step, key).bits.tobytes() == two.tensor(rank, step, key).bits.tobytes()


def test_a_run_recorded_with_files_of_several_steps_is_the_same_run(tmp_path: Path) -> None:
    words = command("tiny.py", "--steps", "14")
    options = ("--seed", "1", "--steps", "101-103,107,110-", "--step-offset", "100", "--full", "forward/head")
    plain = record(tmp_path / "plain", words, *options)
    folded = record(tmp_path / "folded", words, *options, "--steps-per-file", "4")
    assert names_in(tmp_path / "folded") == [
        "end.json",
        "names.json",
        "packed00000101.h5",
        "packed00000110.h5",
        "step00000114.h5",
    ]
    assert folded.problems == plain.problems == ()
    same_rows(plain, folded)
    assert (folded.manifest["config"].pop("steps_per_file"), plain.manifest["config"].pop("steps_per_file")) == (4, 1)
    for capture in (plain, folded):
        capture.manifest["config"].pop("command")
    assert folded.manifest["config"] == plain.manifest["config"]
    done = probe("diff", str(tmp_path / "plain"), str(tmp_path / "folded"), "--same-code", "--json")
    told = json.loads(done.stdout)
    assert (told["verdict"], done.returncode) == ("equivalent", 0)
    assert {run["problems"] for run in told["runs"] if run.get("problems")} == set()


def test_each_rank_folds_its_own_and_a_plan_may_ask_for_it(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("[record]\nsteps_per_file = 2\n")
    folded = record(
        tmp_path / "c",
        command("tiny.py", "--steps", "4", ranks=2),
        "--seed",
        "1",
        "--plan",
        str(tmp_path / "plan.toml"),
    )
    assert folded.problems == ()
    for rank in (0, 1):
        assert names_in(tmp_path / "c", rank)[-2:] == ["packed00000001.h5", "packed00000003.h5"]
    plain = record(tmp_path / "plain", command("tiny.py", "--steps", "4", ranks=2), "--seed", "1")
    same_rows(plain, folded)


def test_a_disk_too_full_to_fold_is_told_once_and_recording_goes_on(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("67m")
    done = probe("record", "-o", str(disk / "c"), "--steps-per-file", "5", "--", *command("tiny.py", "--steps", "10"))
    assert done.returncode == 0
    # As it happens, and again at the end of the launch.
    lines = {line for line in done.stderr.splitlines() if "one to a file" in line}
    assert len(lines) == 1, done.stderr
    message = (
        r"probe: Rank 0 keeps some steps one to a file: Rank 0 is not packed into .*: it needs up to \d+ MiB, "
        r"\d+ MiB of them to stay free, and \d+ MiB are left\. Free space, or move the capture to a larger disk\. "
        r"Recording goes on\."
    )
    assert re.fullmatch(message, lines.pop())
    capture = open_capture(disk / "c")
    assert (capture.steps(0), capture.problems) == (tuple(range(1, 11)), ())
    assert not list(disk.rglob("*.tmp"))


def test_the_key_of_a_plan_is_a_number_from_1_and_travels_beside_the_plan(tmp_path: Path) -> None:
    assert Plan().as_dict() == Plan(steps_per_file=1).as_dict()
    plan = plan_from_dict({"record": {"steps_per_file": 100}})
    assert plan_from_dict(plan.as_dict()) == plan
    assert plan.narrowed(steps_per_file=7).steps_per_file == 7
    request = make_request(RecordOptions(output=tmp_path, command=("true",)), plan)
    alone = make_request(RecordOptions(output=tmp_path, command=("true",)), Plan(checks=plan.checks))
    assert (request.steps_per_file, request.plan) == (100, alone.plan)
    (tmp_path / "plan.toml").write_text("[record]\nsteps_per_file = 0\n")
    with pytest.raises(PlanError, match=r"^Key 'steps_per_file' of \[record\] is 0; it must be a number from 1\."):
        load_plan(tmp_path / "plan.toml")
