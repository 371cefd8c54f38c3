"""The commands as processes, on captures on disk: calibrate, compare, report, and the exit status of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic import SyntheticCapture, run

from probe.point import Key, Kind
from probe.store.folder import create_capture, write_manifest
from probe.store.writer import RankWriter


def attention_of_block_1(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
    """Scale an attention output, and what follows from it, from step 2 on."""
    after = key.kind in (Kind.GRAD, Kind.LOSS) or key.name == "blocks.1"
    wrong = (key.kind, key.name) == (Kind.FORWARD, "blocks.1.attn") or after
    return value * 1.5 if wrong and step >= 2 and key.name != "loss_scale" else value


def write(capture: SyntheticCapture, path: Path) -> None:
    create_capture(path)
    manifest = {**capture.manifest, "run_id": capture.run_id, "world_size": capture.world_size}
    write_manifest(path, manifest)
    for rank in capture.ranks:
        writer = RankWriter(path, run_id=capture.run_id, rank=rank, world_size=capture.world_size)
        for step in capture.steps(rank):
            writer.write(capture.rows(rank, step))
        writer.close(error=None, dropped_steps=[])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    for number in range(3):
        write(run(f"base-{number}", run_seed=number, ranks=2), folder / f"base-{number}")
    write(run("sound", run_seed=9, ranks=2, code="bbbb"), folder / "sound")
    write(run("faulty", run_seed=9, ranks=2, code="bbbb", fault=attention_of_block_1), folder / "faulty")
    done = probe(folder, "calibrate", "base-0", "base-1", "base-2", "-o", "new/job.toml")
    assert (done.returncode, done.stderr) == (0, "Tolerances of 3 runs are in new/job.toml.\n")
    assert done.stdout.startswith("Family ")
    return folder


def probe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "probe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


def test_a_sound_branch_is_equivalent_and_exits_0(job: Path) -> None:
    done = probe(job, "diff", "base-0", "sound", "-t", "new/job.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("Equivalent: ")


def test_a_faulty_branch_is_different_exits_1_and_is_located(job: Path) -> None:
    done = probe(job, "diff", "base-0", "base-1", "--candidate", "faulty", "-t", "new/job.toml", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["verdict"]) == (1, "", "different")
    place = {name: found["first_divergence"][name] for name in ("step", "kind", "name", "origin")}
    assert place == {"step": 2, "kind": "forward", "name": "blocks.1.attn", "origin": "here"}
    assert [run["arm"] for run in found["runs"]] == ["baseline", "baseline", "candidate"]


def test_without_tolerances_it_cannot_be_told(job: Path) -> None:
    done = probe(job, "diff", "base-0", "sound")
    assert (done.returncode, done.stdout.splitlines()[-1].split(":")[0]) == (2, "Inconclusive")


def test_the_same_code_in_both_arms_is_refused(job: Path) -> None:
    done = probe(job, "diff", "base-0", "base-1", "-t", "new/job.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--same-code" in done.stderr


def test_all_reports_are_written_at_once(job: Path) -> None:
    names = ("page.html", "table.md", "junit.xml")
    options = [option for pair in zip(("--report", "--markdown", "--junit"), names, strict=True) for option in pair]
    done = probe(job, "diff", "base-0", "faulty", "-t", "new/job.toml", *options)
    assert done.returncode == 1
    assert sorted(done.stderr.splitlines()) == sorted(f"Report is in {name}." for name in names)
    page, table, junit = ((job / name).read_text() for name in names)
    assert 'id="map"' in page
    assert "| What is recorded | Where | Unmodified vs itself | Actual difference to baseline | Tolerance |" in table
    assert '<failure message="different">' in junit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "base-0", "none", "-o", "x.toml"], "none does not exist"),
        (["calibrate", "base-0", "-o", "x.toml"], "run"),
        (["calibrate", "base-0", "base-1", "-o", "new/job.toml"], "File new/job.toml exists already."),
        (["diff", "base-0", "sound", "-t", "none.toml"], "Tolerance file 'none.toml' cannot be read"),
        (["show", "new"], "new is no capture"),
    ],
)
def test_what_cannot_be_read_exits_2_with_one_message(job: Path, arguments: list[str], message: str) -> None:
    done = probe(job, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (job / "x.toml").exists()


def test_comparing_imports_no_torch(job: Path) -> None:
    code = (
        "import sys\nfrom probe import cli\n"
        "status = cli.status_of(['diff', 'base-0', 'sound', '-t', 'new/job.toml', '--report', 'torchless.html'])\n"
        "print(status, sorted({'torch', 'h5py', 'numpy'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=job, check=True)
    assert done.stderr.splitlines()[-1] == "0 ['h5py', 'numpy']"
