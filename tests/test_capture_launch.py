"""The launcher: exit statuses, what is said when something goes wrong, and what survives it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from probe.store.reader import open_capture
from tests.recording import ENVIRONMENT, command, probe, record, run


def test_the_last_line_says_how_much_was_recorded(tmp_path: Path) -> None:
    done = probe("record", "-o", str(tmp_path / "c"), "--", *command("tiny.py", "--steps", "2"))
    assert done.returncode == 0
    last = done.stderr.splitlines()[-1]
    assert last.startswith("probe: recorded 1 rank, 2 steps, ")
    assert last.endswith((f"MB in {tmp_path / 'c'}", f"kB in {tmp_path / 'c'}"))
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [1, 2]


def test_a_script_that_raises_keeps_its_traceback_its_status_and_what_was_recorded(tmp_path: Path) -> None:
    done = probe("record", "-o", str(tmp_path / "c"), "--", *command("tiny.py", "--fault", "raise"))
    assert done.returncode == 1
    assert "ValueError: the training script failed" in done.stderr
    capture = open_capture(tmp_path / "c")
    assert capture.steps(0) == (1,)
    assert capture.manifest["exit_status"] == 1


def test_an_exit_status_is_passed_on(tmp_path: Path) -> None:
    done = probe("record", "-o", str(tmp_path / "c"), "--", sys.executable, "-c", "raise SystemExit(7)")
    assert done.returncode == 7


def test_a_script_that_never_steps_exits_2_and_says_what_was_not_found(tmp_path: Path) -> None:
    words = command("tiny.py", "--fault", "no-step", "--steps", "1")
    done = probe("record", "-o", str(tmp_path / "c"), "--", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"Nothing was recorded in {str(tmp_path / 'c')!r}.",
        f"{words[1]}: optimizers constructed 1, models found 1, training forward passes 1, backward passes 1, "
        "optimizer steps 0.",
        "Looked for and not found: optimizer steps.",
    ]
    assert not (tmp_path / "c").exists()


def test_a_command_that_is_no_python_exits_2_and_says_so(tmp_path: Path) -> None:
    done = probe("record", "-o", str(tmp_path / "c"), "--", "true")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"Nothing was recorded in {str(tmp_path / 'c')!r}.",
        "No Python process below the command imported torch with recording on; "
        "a process started with -I, -E or -S, or killed by a signal, leaves no trace.",
    ]


def test_steps_outside_the_run_exit_2_and_say_so(tmp_path: Path) -> None:
    done = probe("record", "-o", str(tmp_path / "c"), "--steps", "9", "--", *command("tiny.py", "--steps", "1"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "Training steps were seen, but none among the steps to record; widen --steps."
    )


def test_a_command_that_does_not_exist_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    done = probe("record", "-o", str(tmp_path / "c"), "--", "no-such-trainer", "x")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "Command 'no-such-trainer' was not found on PATH. Write the training command after `--` as it is run by hand."
    ]
    assert not (tmp_path / "c").exists()


def test_an_existing_capture_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    words = command("tiny.py", "--steps", "1")
    capture = record(tmp_path / "c", words)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")}
    done = probe("record", "-o", str(tmp_path / "c"), "--", *words)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"Capture {tmp_path / 'c'} exists: 1 rank, 1 step. Choose another folder, or replace it with --force."
    ]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")} == before
    again = record(tmp_path / "c", words, "--force")
    assert again.run_id != capture.run_id


def test_python_m_and_a_users_own_sitecustomize_still_work(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = 'yes'\n")
    (tmp_path / "trainer.py").write_text(
        f"import os, runpy\nprint(os.environ['SEEN'])\nrunpy.run_path({command('tiny.py')[1]!r}, run_name='__main__')\n"
    )
    words = ["probe", "record", "-o", "c", "--", sys.executable, "-m", "trainer", "--steps", "1"]
    done = run(words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "yes"
    assert open_capture(tmp_path / "c").steps(0) == (1,)


def test_every_step_completed_before_a_kill_is_whole(tmp_path: Path) -> None:
    """SIGKILL at random moments; `benchmarks/kill.py` does the same sixty times."""
    rng = random.Random(0)
    whole = record(tmp_path / "whole", command("tiny.py", "--steps", "40"), "--seed", "1")
    for trial in range(3):
        folder = tmp_path / str(trial)
        words = [
            "-m",
            "probe",
            "record",
            "-o",
            str(folder),
            "--seed",
            "1",
            "--",
            *command("tiny.py", "--steps", "1000"),
        ]
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
        )
        assert process.stdout is not None
        first = folder / "rank00000" / "step00000001.h5"
        while not first.exists() and process.poll() is None:
            process.stdout.readline()
        for _ in range(rng.randint(0, 20)):
            process.stdout.readline()
        time.sleep(rng.random() * 0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        capture = open_capture(folder)
        steps = capture.steps(0)
        assert steps == tuple(range(1, len(steps) + 1))
        assert capture.problems == (f"rank 0 was not closed cleanly, last step {steps[-1]}",)
        for step in steps[:40]:
            assert (capture.rows(0, step).sketch == whole.rows(0, step).sketch)[capture.rows(0, step).numel > 1].all()


def test_a_full_disk_ends_recording_with_one_warning_and_not_the_training(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("65m")
    words = command("tiny.py", "--steps", "12", "--width", "48")
    done = probe("record", "-o", str(disk / "c"), "--", *words)
    steps = [json.loads(line)["step"] for line in done.stdout.splitlines()]
    assert steps == list(range(1, 13))
    assert done.returncode == 2
    warnings = [line for line in done.stderr.splitlines() if "could not be stored" in line]
    assert len(warnings) == 1
    assert "recording stops here; training goes on" in warnings[0]
    capture = open_capture(disk / "c")
    assert 1 <= len(capture.steps(0)) < 12
    for step in capture.steps(0):
        assert len(capture.rows(0, step).keys) > 50
    assert not list(disk.rglob("*.tmp"))


def test_strict_stops_the_training_when_a_step_cannot_be_stored(tmp_path: Path) -> None:
    (tmp_path / "c" / "rank00000").mkdir(parents=True)
    words = command("tiny.py", "--steps", "3", "--sleep", "0.3")
    request = {
        "output": str(tmp_path / "c"),
        "run_id": "0" * 32,
        "plan": {"record": {"steps": "1-"}, "default_checks": True},
        "strict": True,
    }
    import probe as package

    bootstrap = Path(package.__file__).parent / "capture" / "bootstrap"
    done = run(words, PROBE_REQUEST=json.dumps(request), PYTHONPATH=str(bootstrap))
    assert done.returncode == 1
    assert "CaptureError: Step 1 on rank 0 could not be stored" in done.stderr


def test_a_forked_worker_and_a_second_process_do_not_write_into_the_rank(tmp_path: Path) -> None:
    (tmp_path / "twice.sh").write_text(
        f"{' '.join(command('tiny.py', '--steps', '1'))} && {' '.join(command('tiny.py', '--steps', '2'))}\n"
    )
    done = probe("record", "-o", str(tmp_path / "c"), "--", "sh", str(tmp_path / "twice.sh"))
    assert done.returncode == 2
    assert "could not be stored" in done.stderr
    assert open_capture(tmp_path / "c").steps(0) == (1,)
