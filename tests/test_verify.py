"""The whole protocol: which runs are made, what is kept, what is refused, and two commits of a real repository."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from git_repos import commit, editable_finder, editable_path, environment, git, python, repository
from recording import ENVIRONMENT
from synthetic import breaks
from synthetic import run as synthetic_run

from probe.capture import launch
from probe.capture.session import Request
from probe.errors import CaptureError, IncomparableError
from probe.judge.comparison import Outcome
from probe.point import Kind
from probe.protocol.verify import VerifyOptions, verify
from probe.protocol.verify_state import locked
from probe.store.layout import StepRows
from probe.store.reader import open_capture
from probe.store.writer import RankWriter, write_manifest

TRAIN = "noise = 1e-5\n"
FAULTY = "noise = 1e-5\nfault = 1e-2\n"


@dataclass
class Job:
    """Stands in for launching: a capture made of numbers that follow from what the tree's train.py says."""

    noise: float = 1e-5
    seed: int = 10
    edit: Callable[[StepRows], StepRows] | None = None
    launched: list[str] = field(default_factory=list)
    """What was launched, as `NAME` or `NAME PERTURBATION`."""
    fails: dict[int, launch.Ended] = field(default_factory=dict)
    """Launch by number (from 1) to how it ends without a capture."""

    def launch(self, request: Request, surroundings: launch.Surroundings) -> launch.Ended:
        output = Path(request.output)
        self.launched.append(" ".join(filter(None, [output.name, request.perturb])))
        number = len(self.launched)
        assert surroundings.log is not None
        surroundings.log.write_text("first line\nlast line\n")
        if number in self.fails:
            (output / "notes").mkdir()
            return self.fails[number]
        assert surroundings.folder is not None
        script = surroundings.folder / "train.py"
        size = float(next((line.split()[-1] for line in script.read_text().splitlines() if "fault" in line), 0))
        made = synthetic_run(
            output.name,
            noise=1e-6 if request.perturb else self.noise,
            run_seed=self.seed + number,
            fault=breaks(Kind.FORWARD, "blocks.1", size=size, spreads=size > 1e-3) if size else None,
            code=script.read_text(),
            perturb=request.perturb,
        )
        if self.edit is not None:
            made = made.edited(self.edit)
        writer = RankWriter(output, run_id=request.run_id, rank=0, world_size=1)
        for step in made.steps(0):
            writer.write(made.rows(0, step))
        writer.close(error=None, dropped_steps=[])
        provenance = {"code": {"hash": script.read_text(), "files": {str(script): script.read_text()}}, "trees": []}
        config = {**made.manifest["config"], "command": list(request.command), "steps": "1-3"}
        write_manifest(output, {"run_id": request.run_id, "world_size": 1, "config": config, "provenance": provenance})
        return launch.Ended(status=0, signal=0, capture=open_capture(output), notes=())


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    made = Job()
    monkeypatch.setattr("probe.protocol.verify.launch.launch", made.launch)
    return made


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = repository(tmp_path / "repo", {"train.py": TRAIN})
    commit(made, "sound", {"train.py": TRAIN + "# faster\n"})
    commit(made, "faulty", {"train.py": FAULTY})
    monkeypatch.chdir(made)
    return made


def options(output: Path, candidate: str = "sound", **changes: Any) -> VerifyOptions:
    made = VerifyOptions(
        baseline="base", candidate=candidate, command=(sys.executable, "train.py"), output=output, steps="1-3"
    )
    return replace(made, **changes)


def ignore(_line: str) -> None:
    pass


def test_three_baselines_and_a_candidate_are_recorded_and_compared(job: Job, repo: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    result = verify(options(tmp_path / "out"), tell=lines.append)
    assert result.comparison.outcome is Outcome.EQUIVALENT
    assert job.launched == ["base-0", "cand-0", "base-1", "base-2"]
    assert [run.arm for run in result.comparison.runs] == ["baseline"] * 3 + ["candidate"]
    assert (tmp_path / "out" / "tolerances.toml").read_text().startswith("# Tolerances of one job")
    assert lines[:2] == [
        f"[0:00] base-0: recording in {tmp_path}/out/trees/baseline",
        f"[0:00] base-0: {launch.summary_line(open_capture(tmp_path / 'out' / 'base-0'))}",
    ]


def test_a_faulty_candidate_is_different(job: Job, repo: Path, tmp_path: Path) -> None:
    result = verify(options(tmp_path / "out", "faulty"), tell=ignore)
    assert result.comparison.outcome is Outcome.DIFFERENT
    assert result.comparison.first_divergence is not None
    assert result.comparison.first_divergence.place.name == "blocks.1"


def test_perturbed_baselines_are_recorded_when_the_plain_ones_are_bit_identical(
    job: Job, repo: Path, tmp_path: Path
) -> None:
    job.noise = 0.0
    result = verify(options(tmp_path / "out", baselines=2), tell=ignore)
    perturbed = [f"base-ulp-{seed} ulp:{seed}" for seed in (1, 2, 3)]
    assert job.launched == ["base-0", "cand-0", "base-1", *perturbed]
    assert result.comparison.outcome is Outcome.EQUIVALENT


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_perturbed_in_every_layer(job: Job, repo: Path, tmp_path: Path, dtype: str) -> None:
    def half(rows: StepRows) -> StepRows:
        return replace(rows, dtype=tuple(dtype if key.kind is Kind.FORWARD else "float32" for key in rows.keys))

    job.noise, job.edit = 0.0, half
    verify(options(tmp_path / "out", baselines=2), tell=ignore)
    assert job.launched[-3:] == [f"base-layer-{seed} layer:{seed}" for seed in (1, 2, 3)]


def test_runs_are_added_while_the_result_is_inconclusive_and_then_it_is_decided(
    job: Job, repo: Path, tmp_path: Path
) -> None:
    commit(repo, "slight", {"train.py": "fault = 1e-4\n"})
    lines: list[str] = []
    result = verify(options(tmp_path / "out", "slight"), tell=lines.append)
    assert job.launched == ["base-0", "cand-0", "base-1", "base-2", "base-3", "base-4", "cand-1"]
    assert result.comparison.outcome is Outcome.DIFFERENT
    assert [line for line in lines if "inconclusive so far: " in line]


def test_perturbed_runs_are_added_where_repeats_say_nothing(job: Job, repo: Path, tmp_path: Path) -> None:
    commit(repo, "slight", {"train.py": "fault = 1e-5\n"})
    job.noise = 0.0
    result = verify(options(tmp_path / "out", "slight", baselines=2), tell=ignore)
    assert job.launched[3:] == [f"base-ulp-{seed} ulp:{seed}" for seed in range(1, 6)]
    assert result.comparison.outcome is Outcome.DIFFERENT


def test_interrupted_it_goes_on_where_it_stopped(job: Job, repo: Path, tmp_path: Path) -> None:
    job.fails[3] = launch.Ended(status=130, signal=signal.SIGINT, capture=None, notes=())
    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        verify(options(tmp_path / "out"), tell=lines.append)
    assert lines[-1].endswith("base-1: interrupted; the same command goes on from here")
    first = open_capture(tmp_path / "out" / "base-0").run_id
    result = verify(options(tmp_path / "out", baselines=4), tell=lines.append)
    assert job.launched == ["base-0", "cand-0", "base-1", "base-1", "base-2", "base-3"]
    assert open_capture(tmp_path / "out" / "base-0").run_id == first
    assert result.comparison.outcome is Outcome.EQUIVALENT
    assert [line.partition("] ")[2] for line in lines if "kept" in line] == [
        "base-0: kept from before",
        "cand-0: kept from before",
    ]


def test_a_capture_that_is_not_whole_is_recorded_again(job: Job, repo: Path, tmp_path: Path) -> None:
    verify(options(tmp_path / "out"), tell=ignore)
    (tmp_path / "out" / "base-1" / "rank00000" / "end.json").unlink()
    manifest = tmp_path / "out" / "base-2" / "capture.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "exit_status": 1}))
    (tmp_path / "out" / "cand-0" / "notes").mkdir()
    (tmp_path / "out" / "cand-0" / "rank00000" / "step00000002.h5").unlink()
    job.launched.clear()
    verify(options(tmp_path / "out"), tell=ignore)
    assert job.launched == ["cand-0", "base-1", "base-2"]


def test_a_capture_of_another_run_is_not_taken_for_its_own(job: Job, repo: Path, tmp_path: Path) -> None:
    """Recorded by hand into the same folder, or left by a launch that was killed before its end was noted."""
    verify(options(tmp_path / "out"), tell=ignore)
    state = tmp_path / "out" / "verify.json"
    content = json.loads(state.read_text())
    content["done"].pop("base-1")
    content["done"]["base-2"] = "0" * 32
    state.write_text(json.dumps(content))
    job.launched.clear()
    verify(options(tmp_path / "out"), tell=ignore)
    assert job.launched == ["base-1", "base-2"]


def test_another_request_in_the_same_folder_is_refused_without_force(job: Job, repo: Path, tmp_path: Path) -> None:
    verify(options(tmp_path / "out"), tell=ignore)
    job.launched.clear()
    with pytest.raises(CaptureError) as error:
        verify(options(tmp_path / "out", "faulty", seed=3), tell=ignore)
    assert str(error.value) == (
        f"Folder {tmp_path}/out holds the runs of another request; what is different: candidate, seed. "
        "Choose another folder with -o, or start over with --force."
    )
    assert job.launched == []
    result = verify(options(tmp_path / "out", "faulty", seed=3, force=True), tell=ignore)
    assert job.launched == ["base-0", "cand-0", "base-1", "base-2"]
    assert result.comparison.outcome is Outcome.DIFFERENT


def test_a_folder_that_holds_something_else_is_refused(job: Job, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(CaptureError) as error:
        verify(options(tmp_path / "out"), tell=ignore)
    assert str(error.value) == (
        f"Folder {tmp_path}/out holds thesis.tex, and nothing that says it is of `probe verify`. "
        "Choose another folder with -o."
    )


def test_a_folder_that_another_command_uses_is_refused(job: Job, repo: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out"), pytest.raises(CaptureError) as error:
        verify(options(tmp_path / "out"), tell=ignore)
    assert str(error.value) == (
        f"Folder {tmp_path}/out is in use by another `probe verify`, or by a training run that outlived one. "
        "Wait for it to end, or end it."
    )


def test_a_run_that_outlives_a_killed_verification_keeps_the_folder(tmp_path: Path) -> None:
    with locked(tmp_path) as descriptor:
        child = subprocess.Popen(["sleep", "60"], pass_fds=(descriptor,))
    try:
        with pytest.raises(CaptureError), locked(tmp_path):
            pass
    finally:
        child.kill()
        child.wait()
    with locked(tmp_path):
        pass


def test_a_run_that_fails_shows_the_end_of_what_it_printed(job: Job, repo: Path, tmp_path: Path) -> None:
    job.fails[2] = launch.Ended(status=3, signal=0, capture=None, notes=())
    with pytest.raises(CaptureError) as error:
        verify(options(tmp_path / "out"), tell=ignore)
    assert str(error.value).splitlines() == [
        "Run cand-0 ended with status 3.",
        f"Its output is in {tmp_path}/out/logs/cand-0.log, and ends with:",
        "  first line",
        "  last line",
        "A worktree holds what git holds: give data and checkpoints by absolute paths, or with --link.",
    ]


def test_both_arms_naming_the_same_code_is_an_error_before_anything_runs(job: Job, repo: Path, tmp_path: Path) -> None:
    with pytest.raises(IncomparableError) as error:
        verify(options(tmp_path / "out", "base"), tell=ignore)
    assert str(error.value) == (
        f"The baseline 'base' and the candidate 'base' are the same code: {git(repo, 'rev-parse', 'base')}. "
        "Name another revision or folder, or give --same-code if this is meant."
    )
    assert job.launched == []
    result = verify(options(tmp_path / "out", "base", same_code=True), tell=ignore)
    assert result.comparison.outcome is Outcome.EQUIVALENT


def test_both_arms_importing_the_same_code_is_an_error_after_one_run_of_each(
    job: Job, repo: Path, tmp_path: Path
) -> None:
    git(repo, "checkout", "--quiet", "base")
    commit(repo, "elsewhere", {"kernel.cu": "// faster\n"})
    with pytest.raises(IncomparableError) as error:
        verify(options(tmp_path / "out", "elsewhere"), tell=ignore)
    assert str(error.value) == (
        f"Both arms imported the same code (hash {TRAIN!r}), so the branch never ran. The revisions differ in "
        "kernel.cu, which was not imported. Check the command and what it imports; give --same-code if the change is "
        "in no Python file."
    )
    assert job.launched == ["base-0", "cand-0"]
    result = verify(options(tmp_path / "out", "elsewhere", same_code=True), tell=ignore)
    assert result.comparison.outcome is Outcome.EQUIVALENT


def test_a_folder_runs_as_it_is_with_its_changes(job: Job, repo: Path, tmp_path: Path) -> None:
    (repo / "train.py").write_text(FAULTY + "# not committed\n")
    result = verify(options(tmp_path / "out", "."), tell=ignore)
    assert result.comparison.outcome is Outcome.DIFFERENT
    assert (repo / "train.py").read_text() == FAULTY + "# not committed\n"


def test_a_folder_that_is_edited_between_its_runs_is_noticed(job: Job, repo: Path, tmp_path: Path) -> None:
    (repo / "train.py").write_text("fault = 1e-4\n")
    launched = job.launch

    def editing(request: Request, surroundings: launch.Surroundings) -> launch.Ended:
        ended = launched(request, surroundings)
        if request.output.endswith("base-2"):
            (repo / "train.py").write_text("fault = 2e-4\n")
        return ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("probe.protocol.verify.launch.launch", editing)
        with pytest.raises(CaptureError) as error:
            verify(options(tmp_path / "out", "."), tell=ignore)
    assert str(error.value) == (
        f"The candidate's tree {repo} was edited between its runs cand-0 and cand-1. Start over with --force."
    )


def test_the_command_runs_in_the_same_inner_folder_of_each_arm(
    job: Job, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repo / "..")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "train.py").write_text(TRAIN)
    verify(options(tmp_path / "out", "repo", baseline="one"), tell=ignore)
    monkeypatch.chdir(repo)
    (repo / "inner").mkdir()
    monkeypatch.chdir(repo / "inner")
    with pytest.raises(CaptureError) as error:
        verify(options(tmp_path / "out2"), tell=ignore)
    assert str(error.value) == (
        f"The baseline has no folder {tmp_path}/out2/trees/baseline/inner, where the command would run. "
        "Call probe from a folder that both arms have."
    )


# ---------------------------------------------------------------------- real runs
MODEL = """
import torch
from torch import nn


class Mix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return {mix}


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Mix(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
SCRIPT = """
import torch
from tinynet.model import Net

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(2):
    net(torch.randn(8, 16)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def source(mix: str) -> dict[str, str]:
    return {"src/tinynet/model.py": MODEL.format(mix=mix)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose checkout, at the sound commit, is what every environment has installed."""
    tmp = tmp_path_factory.mktemp("trained")
    files = {
        "src/tinynet/__init__.py": "",
        "scripts/train.py": SCRIPT,
        **source("(x + torch.tanh(self.a(x))) + self.b(x)"),
    }
    made = repository(tmp / "repo", files)
    commit(made, "faulty", source("(x + torch.tanh(self.a(x))) + 0.999 * self.b(x)"))
    git(made, "checkout", "--quiet", "base")
    commit(made, "sound", source("x + (torch.tanh(self.a(x)) + self.b(x))"))
    return made


def probe_verify(repo: Path, site: Path, candidate: str, output: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "probe", "verify", "--baseline", "base", "--candidate", candidate, "-n", "2"]
    done = subprocess.run(
        [*command, "-o", str(output), "--json", "--", python(site), *(words or ["train.py"])],
        capture_output=True,
        text=True,
        cwd=repo / "scripts",
        env=ENVIRONMENT,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def imports_of(output: Path, runs: Sequence[str]) -> set[str]:
    """Return the files that runs imported, relative to the trees' folder."""
    found: set[str] = set()
    for name in runs:
        files = open_capture(output / name).manifest["provenance"]["code"]["files"]
        found |= {str(Path(file).relative_to((output / "trees").resolve())) for file in files}
    return found


def test_a_sound_commit_is_equivalent_under_an_editable_install_of_itself(trained: Path, tmp_path: Path) -> None:
    site = environment(tmp_path / "env")
    editable_path(site, trained / "src")
    status, told, errors = probe_verify(trained, site, "sound", tmp_path / "out")
    assert (status, told.get("verdict")) == (0, "equivalent"), errors
    files = ("scripts/train.py", "src/tinynet/__init__.py", "src/tinynet/model.py")
    assert imports_of(tmp_path / "out", ["base-0", "base-1"]) == {f"baseline/{file}" for file in files}
    assert imports_of(tmp_path / "out", ["cand-0"]) == {f"candidate/{file}" for file in files}
    assert [run["commit"] for run in told["runs"]] == [
        git(trained, "rev-parse", name)[:12] for name in ("base", "base", "sound")
    ]


def test_a_faulty_commit_is_different_under_an_editable_finder_that_points_at_a_sound_one(
    trained: Path, tmp_path: Path
) -> None:
    site = environment(tmp_path / "env")
    editable_finder(site, {"tinynet": str(trained / "src" / "tinynet")})
    status, told, errors = probe_verify(trained, site, "faulty", tmp_path / "out")
    assert (status, told.get("verdict")) == (1, "different"), errors
    assert told["first_divergence"]["name"] == "blocks.0"
    assert imports_of(tmp_path / "out", ["cand-0"]) == {
        f"candidate/{file}" for file in ("scripts/train.py", "src/tinynet/__init__.py", "src/tinynet/model.py")
    }


def test_both_arms_importing_the_installed_checkout_is_an_error(trained: Path, tmp_path: Path) -> None:
    site = environment(tmp_path / "env")
    editable_finder(site, {"tinynet": str(trained / "src" / "tinynet")}, first=True)
    status, told, errors = probe_verify(trained, site, "faulty", tmp_path / "out")
    assert (status, told) == (2, {})
    assert errors.splitlines()[-1] == (
        f"The baseline imported {trained}/src/tinynet/__init__.py from another tree, and should have imported "
        f"{tmp_path}/out/trees/baseline/src/tinynet/__init__.py. 2 of 3 files did. An absolute path in the command "
        "leads there, or an editable install that goes before PYTHONPATH. Write paths relative to the tree, and "
        "uninstall the package or install it where each arm can import its own."
    )
