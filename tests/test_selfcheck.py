"""Recording leaves a run as it is, or the points that disturb it are named."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import command, probe, run
from synthetic import run as synthetic_run

from probe.capture import launch
from probe.capture.session import Request
from probe.errors import CaptureError
from probe.plan import Plan, plan_from_dict
from probe.point import Kind
from probe.protocol.bisect import OutOfRuns, Part, smallest
from probe.protocol.selfcheck import Selfcheck, SelfcheckOptions, selfcheck, verdict_lines
from probe.store.reader import open_capture
from probe.store.writer import RankWriter, write_manifest


@dataclass
class Job:
    """Stands in for launching: a run that ends in other losses when `disturbed` says so of what is recorded."""

    disturbed: Callable[[Plan], bool]
    repeats: bool = True
    records: bool = True
    steps: int = 3
    compiles_again: bool = False
    launched: list[bool] = field(default_factory=list)
    """Of each launch: whether it was bare."""

    def launch(self, request: Request, surroundings: launch.Surroundings) -> launch.Ended:
        self.launched.append(request.bare)
        plan = plan_from_dict(request.plan)
        shifted = (not request.bare and self.disturbed(plan)) or (not self.repeats and len(self.launched) == 2)
        losses = [f"float32[] {1.5 + shifted} {'f' * 31}{int(shifted)}", f"float32[] 2 {'0' * 32}"]
        compiled = {"frames": 2, "graphs": 1 + (self.compiles_again and not request.bare)}
        digest = {
            "rank": 0,
            "steps": self.steps,
            "losses": losses,
            "parameters": [f"float32[2] {'a' * 32}"],
            "compiled": compiled,
        }
        if self.steps:
            (Path(request.digest) / "rank00000-0.json").write_text(json.dumps(digest))
        if request.bare or not self.records or "*" in plan.exclude:
            return launch.Ended(status=0, signal=0, capture=None, notes=())
        output = Path(request.output)
        writer = RankWriter(output, run_id=request.run_id, rank=0, world_size=1)
        writer.write(synthetic_run("run", steps=(1,)).rows(0, 1))
        writer.close(error=None, dropped_steps=[])
        write_manifest(output, {"run_id": request.run_id, "world_size": 1})
        return launch.Ended(status=0, signal=0, capture=open_capture(output), notes=())


def check(job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Selfcheck:
    monkeypatch.setattr("probe.protocol.selfcheck.launch.launch", job.launch)
    options = SelfcheckOptions(command=(sys.executable, "train.py"), output=folder / "out")
    return selfcheck(replace(options, **changes), tell=lambda line: None)


def hooked(plan: Plan, module: str) -> bool:
    """Tell whether recording hooks a module."""
    return not (plan.ignores(Kind.FORWARD, module) and plan.ignores(Kind.BACKWARD, module))


LOSS = "the loss of backward pass 1 on rank 0: 1.5 and 2.5"
SIZE = "1 trained parameters and 2 losses on 1 rank"


def test_a_run_that_recording_leaves_alone_passes_after_three_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(lambda plan: False)
    result = check(job, tmp_path, monkeypatch)
    assert result == Selfcheck(difference="", size=SIZE, runs=3)
    assert (result.exit_status, job.launched) == (0, [True, True, False])
    assert verdict_lines(result) == [f"Recording changes nothing: {SIZE} are bit-identical with and without it."]


def test_a_module_that_notices_its_hook_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(Job(lambda plan: hooked(plan, "blocks.1.attn")), tmp_path, monkeypatch)
    exclude = ("forward/blocks.1.attn", "backward/blocks.1.attn")
    assert result == Selfcheck(
        difference=LOSS, points=("forward/blocks.1.attn",), exclude=exclude, size=SIZE, runs=result.runs
    )
    assert (result.exit_status, result.runs <= 20) == (1, True)
    assert verdict_lines(result) == [
        f"Recording changes the run, which differs in {LOSS}.",
        "This point disturbs:",
        "  forward/blocks.1.attn",
        "Without recording them nothing changes. Leave them out in both arms, with a plan that has",
        "  [record]",
        '  exclude = ["forward/blocks.1.attn", "backward/blocks.1.attn"]',
    ]
    assert not Plan(exclude=exclude).records(Kind.BACKWARD, "blocks.1.attn")


def test_every_module_that_disturbs_by_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda plan: hooked(plan, "blocks.0") or hooked(plan, "blocks.2.attn"))
    result = check(job, tmp_path, monkeypatch)
    assert (sorted(result.points), result.complete) == (["forward/blocks.0", "forward/blocks.2.attn"], True)


def test_points_that_disturb_only_together_are_named_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(plan: Plan) -> bool:
        return hooked(plan, "blocks.0.attn") and plan.records(Kind.GRAD, "blocks.2.lora_A.weight")

    result = check(Job(both), tmp_path, monkeypatch)
    assert [set(point.split(" with ")) for point in result.points] == [
        {"forward/blocks.0.attn", "grad/blocks.2.lora_A.weight"}
    ]


def test_a_kind_with_one_point_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(Job(lambda plan: plan.records(Kind.GRAD_NORM, "grad_norm")), tmp_path, monkeypatch)
    assert result.points == ("grad_norm/grad_norm",)


def test_an_attachment_that_disturbs_by_itself_is_told_from_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = check(Job(lambda plan: True), tmp_path, monkeypatch)
    assert result == Selfcheck(difference=LOSS, attachment=True, size=SIZE, runs=4)
    assert verdict_lines(result)[1] == (
        "It does so even when every point is left out: what disturbs is the attachment itself, which wraps backward, "
        "clipping and the optimizer's step."
    )


def test_the_search_ends_when_its_runs_are_used_up_and_says_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = check(Job(lambda plan: hooked(plan, "blocks.1.attn")), tmp_path, monkeypatch, runs=8)
    assert (result.exit_status, result.complete, result.runs) == (1, False, 8)
    assert result.points[0].startswith("forward/")
    assert verdict_lines(result)[1] == "After 8 runs, these are known to disturb, and what else does is not:"
    assert verdict_lines(result)[-1] == "Raise --runs to search on."


def test_a_run_that_does_not_repeat_cannot_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(lambda plan: False, repeats=False)
    with pytest.raises(CaptureError) as error:
        check(job, tmp_path, monkeypatch)
    assert str(error.value) == (
        f"The command does not repeat: two runs without recording differ in {LOSS}. Whether recording changes it "
        "cannot be told. Seed it with --seed, and choose deterministic algorithms."
    )
    assert job.launched == [True, True]


def test_a_run_that_was_not_recorded_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError) as error:
        check(Job(lambda plan: False, records=False), tmp_path, monkeypatch)
    assert str(error.value).splitlines()[0] == f"Nothing was recorded in {str(tmp_path / 'out' / 'run-3')!r}."


def test_a_command_that_trains_nothing_cannot_be_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CaptureError) as error:
        check(Job(lambda plan: False, steps=0), tmp_path, monkeypatch)
    assert str(error.value) == (
        f"No optimizer stepped in '{sys.executable} train.py', so there is nothing to compare. "
        "Name a command that trains with torch."
    )


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    job = Job(lambda plan: False)
    with pytest.raises(CaptureError) as error:
        check(job, tmp_path, monkeypatch)
    assert str(error.value) == f"Output {tmp_path}/out is not an empty folder. Choose another one with -o."
    assert job.launched == []


def test_an_interrupt_ends_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = launch.Ended(status=130, signal=signal.SIGINT, capture=None, notes=())
    monkeypatch.setattr("probe.protocol.selfcheck.launch.launch", lambda request, surroundings: ended)
    with pytest.raises(KeyboardInterrupt):
        selfcheck(SelfcheckOptions(command=(sys.executable,), output=tmp_path / "out"), tell=lambda line: None)


# ---------------------------------------------------------------------- the search
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.data())
def test_the_smallest_set_is_found_in_few_trials(count: int, data: st.DataObject) -> None:
    parts = [Part(kind=Kind.FORWARD, name=f"m{number}") for number in range(count)]
    needed = set(data.draw(st.lists(st.sampled_from(range(count)), min_size=1, max_size=3, unique=True)))
    trials = 0

    def works(chosen: Sequence[Part]) -> bool:
        nonlocal trials
        trials += 1
        return needed <= {parts.index(part) for part in chosen}

    assert {parts.index(part) for part in smallest(parts, works)} == needed
    assert trials <= len(needed) * (count.bit_length() + 1)


def test_a_search_that_is_cut_short_gives_the_smallest_set_that_is_known_to_work() -> None:
    parts = [Part(kind=Kind.FORWARD, name=f"m{number}") for number in range(8)]
    trials = 0

    def works(chosen: Sequence[Part]) -> bool:
        nonlocal trials
        trials += 1
        if trials == 3:
            raise OutOfRuns
        return parts[1] in chosen

    with pytest.raises(OutOfRuns) as stop:
        smallest(parts, works)
    assert list(stop.value.parts) == parts[:2]


def test_a_part_splits_by_the_components_of_names() -> None:
    names = ["embed", "blocks.0.attn", "blocks.0", "blocks.10", "head"]
    top = Part(kind=Kind.FORWARD).inner(names)
    assert [part.label for part in top] == ["forward/embed", "forward/blocks*", "forward/head"]
    inner = top[1].inner(names)
    assert [part.label for part in inner] == ["forward/blocks.0*", "forward/blocks.10"]
    assert [part.label for part in inner[0].inner(names)] == ["forward/blocks.0.attn", "forward/blocks.0"]
    assert inner[0].globs == ("forward/blocks.0", "forward/blocks.0.*")
    assert top[0].inner(names) == [top[0]]


def test_a_recording_that_makes_the_compiler_compile_again_changes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = check(Job(disturbed=lambda plan: False, compiles_again=True), tmp_path, monkeypatch)
    assert found.difference == "the number of compiled graphs on rank 0: 1 and 2"


# ---------------------------------------------------------------------- real runs
DISTURBED = """
import torch
from torch import nn


class Shy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        if self._forward_hooks:
            torch.rand(1)
        return self.inner(x)


torch.manual_seed(0)
net = nn.ModuleDict({"plain": nn.Linear(8, 8), "shy": Shy(), "drop": nn.Dropout(0.5)})
net.forward = lambda x: net["drop"](net["shy"](net["plain"](x)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    net(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

BARE = """
import torch
from torch import nn

call, init = nn.Module.__call__, torch.optim.Optimizer.__init__
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(1, 4)).sum().backward()
optimizer.step()
assert nn.Module.__call__ is call and call.__module__ == "torch.nn.modules.module", call.__module__
assert not hasattr(init, "__wrapped__"), init
assert not (net._forward_hooks or net._forward_pre_hooks or net._backward_hooks)
assert not any(parameter._backward_hooks for parameter in net.parameters())
"""


def bare(words: Sequence[str], folder: Path) -> tuple[dict[str, Any], str]:
    """Run a command for its digest alone; returns that and what the command printed."""
    folder.mkdir()
    request = Request(
        output=str(folder / "capture"), run_id="0" * 32, plan=Plan().as_dict(), digest=str(folder), bare=True, seed=3
    )
    capture = Path(launch.__file__).parent
    path = f"{capture / 'bootstrap'}{os.pathsep}{capture.parents[1]}"
    done = run(words, PROBE_REQUEST=request.to_json(), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in folder.iterdir()] == ["rank00000-0.json"]
    digest: dict[str, Any] = json.loads((folder / "rank00000-0.json").read_text())
    return digest, done.stdout


def test_a_bare_run_is_watched_without_touching_any_module(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(BARE)
    digest, _ = bare([sys.executable, str(tmp_path / "job.py")], tmp_path / "digest")
    assert (digest["rank"], digest["steps"], len(digest["losses"])) == (0, 1, 1)
    assert [text.rsplit(" ", 1)[0] for text in digest["parameters"]] == ["float32[4, 4]", "float32[4]"]


def test_the_digest_holds_the_losses_that_were_printed_and_the_bits_that_were_saved(tmp_path: Path) -> None:
    import torch

    from probe.capture import summary

    weights = tmp_path / "weights.pt"
    digest, printed = bare(command("tiny.py", "--weights", str(weights)), tmp_path / "digest")
    saved = torch.load(weights, weights_only=True)
    expected = []
    for tensor in saved.values():
        high, low = summary.fingerprint(tensor)
        expected.append(f"float32{list(tensor.shape)} {high:016x}{low:016x}")
    assert sorted(digest["parameters"]) == sorted(expected)
    losses = [json.loads(line)["loss"] for line in printed.splitlines()]
    assert [float(text.split()[1]) for text in digest["losses"]] == losses
    assert (digest["steps"], len(losses)) == (3, 3)


def test_a_real_module_that_draws_random_numbers_when_it_is_hooked_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(DISTURBED)
    (tmp_path / "plan.toml").write_text('[record]\nkinds = ["forward"]\n')
    words = ["selfcheck", "--plan", str(tmp_path / "plan.toml"), "--", sys.executable, str(tmp_path / "job.py")]
    done = probe(*words)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Recording changes the run, which differs in the loss of backward pass 1 on rank 0: ")
    assert lines[1:] == [
        "This point disturbs:",
        "  forward/shy",
        "Without recording them nothing changes. Leave them out in both arms, with a plan that has",
        "  [record]",
        '  exclude = ["forward/shy", "backward/shy"]',
    ]


def test_a_real_run_with_dropout_accumulation_and_checkpointing_is_left_alone() -> None:
    done = probe(
        "selfcheck", "--seed", "5", "--", *command("tiny.py", "--accum", "2", "--ckpt", "nonreentrant", "--clip", "0.5")
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "Recording changes nothing: 22 trained parameters and 6 losses on 1 rank are bit-identical with and without "
        "it.\n"
    )
