"""The command lines that reports suggest: they parse as the command line would, and one of them is run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from report_cases import CANDIDATE, DIVERGENCE, FAILING, INCONCLUSIVE, PASSING, RUN

from probe import cli
from probe.judge.comparison import Calibration, Comparison, Wanted
from probe.point import Kind
from probe.report.commands import (
    ADD_RUNS,
    NARROW_DOWN,
    next_commands,
    perturbed_calibration,
    record_command,
    reproduce,
    script,
)

QUOTED = replace(
    FAILING,
    runs=(
        replace(RUN, path="my captures/base 0", command=shlex.join(["python", "-c", "print('$HOME')"])),
        replace(CANDIDATE, path="my captures/opt"),
    ),
    tolerances="my tolerances/job.toml",
    plan="my plan.toml",
)


TO_BASE, TO_OPT = (f"git switch --detach {commit} && " for commit in ("0391d1c7aa", "ce9f454b00"))
PUT_AWAY = "put uncommitted changes away first, such as with `git stash`"
PUT_BACK = "the uncommitted changes of the recorded run are not in the commit: bring them back before recording"
BRANCH = "compare again; `git switch BRANCH` brings you back to your branch"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def narrowing(comparison: Comparison) -> list[str]:
    return [each.line for each in next_commands(comparison) if each.purpose == NARROW_DOWN]


def adding(comparison: Comparison) -> list[str]:
    return [each.line for each in next_commands(comparison) if each.purpose == ADD_RUNS]


def parsed(line: str) -> dict[str, object]:
    """Parse a line as a shell and `probe` would, without running it or switching to its commit."""
    program, name, *arguments = shlex.split(line.removeprefix(TO_BASE).removeprefix(TO_OPT))
    assert program == "probe"
    command = cli.main.commands[name]
    with command.make_context(name, arguments, parent=click.Context(cli.main, info_name="probe")) as context:
        return dict(context.params)


def test_a_divergence_is_narrowed_down_by_recording_both_arms_again_with_whole_tensors() -> None:
    assert script(next_commands(FAILING), NARROW_DOWN) == [
        f"# baseline, commit 0391d1c7aa; {PUT_AWAY}",
        f"{TO_BASE}probe record -o captures/full-base-0 --seed 42 --steps 1 --full forward/blocks.2 "
        "--full 'forward/blocks.2.*' -- accelerate launch --num_processes 2 train.py --lr 1e-4",
        f"# candidate, commit ce9f454b00 + changes; {PUT_BACK}",
        f"{TO_OPT}probe record -o captures/full-opt-0 --seed 42 --steps 1 --full forward/blocks.2 "
        "--full 'forward/blocks.2.*' -- accelerate launch --num_processes 2 train.py --lr 1e-4 --fused",
        f"# {BRANCH}",
        "probe diff captures/full-base-0 captures/full-opt-0 -t tolerances/job.toml",
    ]


def test_what_is_suggested_parses_word_for_word_whatever_needs_quoting() -> None:
    baseline, _, diff = map(parsed, narrowing(QUOTED))
    assert {name: value for name, value in baseline.items() if value} == {
        "output": Path("my captures/full-base 0"),
        "seed": 42,
        "steps": "1",
        "plan": Path("my plan.toml"),
        "full": ("forward/blocks.2", "forward/blocks.2.*"),
        "command": ("python", "-c", "print('$HOME')"),
    }
    assert (diff["captures"], diff["tolerances"], diff["plan"]) == (
        (Path("my captures/full-base 0"), Path("my captures/full-opt")),
        Path("my tolerances/job.toml"),
        Path("my plan.toml"),
    )


@pytest.mark.parametrize("comparison", [FAILING, INCONCLUSIVE, QUOTED, replace(INCONCLUSIVE, plan="p.toml")])
def test_every_line_that_is_suggested_parses(comparison: Comparison) -> None:
    lines = [*(command.line for command in next_commands(comparison)), *reproduce(comparison)]
    found = [parsed(line) for line in lines if not line.startswith("#")]
    assert len(found) >= 6
    assert not any("--force" in line for line in lines)


def test_a_second_narrowing_has_a_folder_of_its_own() -> None:
    runs = (replace(RUN, path="c/full-base-0"), replace(CANDIDATE, path="c/full-opt-0-2"))
    outputs = [parsed(line)["output"] for line in narrowing(replace(FAILING, runs=runs))[:2]]
    assert outputs == [Path("c/full-base-0-2"), Path("c/full-opt-0-3")]


def test_the_values_are_shown_where_whole_tensors_would_not_tell_more() -> None:
    place = replace(DIVERGENCE.place, kind=Kind.LR, name="lr", step=2)
    schedule = replace(DIVERGENCE, place=place, keep=())
    assert narrowing(replace(FAILING, first_divergence=schedule)) == [
        "probe show captures/base-0 lr/lr --step 2 --rank 1",
        "probe show captures/opt-0 lr/lr --step 2 --rank 1",
    ]
    lost = replace(schedule, actual="missing")
    assert narrowing(replace(FAILING, first_divergence=lost))[1] == (
        "probe show captures/opt-0 --names --step 2 --rank 1"
    )


def test_nothing_is_suggested_for_runs_that_no_command_started() -> None:
    assert next_commands(replace(INCONCLUSIVE, runs=(replace(RUN, command=""), CANDIDATE))) == []
    assert next_commands(PASSING) == []


def test_what_a_test_computed_in_its_own_process_is_repeated_by_the_test() -> None:
    test = "pytest test_norm.py::test_fused"
    runs = tuple(replace(run, command=test, in_process=True) for run in (RUN, CANDIDATE))
    found = replace(INCONCLUSIVE, runs=runs)
    assert (next_commands(found), reproduce(found)) == ([], [test])


def test_runs_to_add_have_the_next_free_names_and_are_calibrated_and_compared_with() -> None:
    job = "accelerate launch --num_processes 2 train.py --lr 1e-4"
    assert script(next_commands(INCONCLUSIVE), ADD_RUNS) == [
        f"# baseline, commit 0391d1c7aa; {PUT_AWAY}",
        f"{TO_BASE}probe record -o captures/again-base-3 --seed 42 --steps 1-5 -- {job}",
        f"{TO_BASE}probe record -o captures/again-base-4 --seed 42 --steps 1-5 -- {job}",
        "probe calibrate captures/base-0 captures/base-1 captures/base-2 captures/again-base-3 captures/again-base-4 "
        "-o tolerances/job-2.toml",
        f"# candidate, commit ce9f454b00 + changes; {PUT_BACK}",
        f"{TO_OPT}probe record -o captures/again-opt-1 --seed 42 --steps 1-5 -- {job} --fused",
        f"# {BRANCH}",
        "probe diff captures/base-0 --candidate captures/opt-0 captures/again-opt-1 -t tolerances/job-2.toml",
    ]


def test_a_run_to_add_comes_after_the_one_it_is_like_and_a_name_without_a_number_gets_one() -> None:
    for path, added in (("c/opt-4", "c/again-opt-5"), ("c/fused", "c/again-fused-1")):
        runs = (*INCONCLUSIVE.runs[:1], replace(CANDIDATE, path=path))
        assert parsed(adding(replace(INCONCLUSIVE, runs=runs))[3])["output"] == Path(added)


def test_without_tolerances_repeats_come_first_and_perturbed_runs_where_these_are_identical() -> None:
    wanted = Wanted(baselines=2, if_identical=("ulp:1", "ulp:2"), calibration=True)
    short = [replace(RUN, command="python t.py"), replace(CANDIDATE, command="python t.py", commit=RUN.commit)]
    short[1] = replace(short[1], dirty=False)
    none = replace(
        INCONCLUSIVE, runs=tuple(short), wanted=wanted, calibration=None, tolerances="", first_divergence=None
    )
    assert script(next_commands(none), ADD_RUNS) == [
        "# baseline, commit 0391d1c7aa",
        "probe record -o captures/again-base-1 --seed 42 --steps 1-5 -- python t.py",
        "probe record -o captures/again-base-2 --seed 42 --steps 1-5 -- python t.py",
        "probe calibrate captures/base-0 captures/again-base-1 captures/again-base-2 -o tolerances/job.toml",
        "# baseline, commit 0391d1c7aa; only where these repeats are bit-identical",
        "probe record -o captures/ulp-1 --seed 42 --steps 1-5 --perturb ulp:1 -- python t.py",
        "probe record -o captures/ulp-2 --seed 42 --steps 1-5 --perturb ulp:2 -- python t.py",
        "probe calibrate captures/base-0 captures/again-base-1 captures/again-base-2 captures/ulp-1 captures/ulp-2 "
        "-o tolerances/job-2.toml",
        "# compare again; where the repeats were bit-identical, with -t tolerances/job-2.toml",
        "probe diff captures/base-0 captures/opt-0 -t tolerances/job.toml",
    ]


def test_another_multiple_of_the_spread_is_kept() -> None:
    five = replace(INCONCLUSIVE, calibration=Calibration(k=5.0, runs=()))
    assert parsed(adding(five)[2])["k"] == 5.0


def test_bit_identical_runs_get_the_lines_that_measure_them() -> None:
    runs = [replace(RUN, command="python t.py"), replace(RUN, path="captures/base-1", command="python t.py")]
    assert perturbed_calibration(runs, ("layer:1", "layer:2"), output="t.toml") == [
        "probe record -o captures/layer-1 --seed 42 --steps 1-5 --perturb layer:1 -- python t.py",
        "probe record -o captures/layer-2 --seed 42 --steps 1-5 --perturb layer:2 -- python t.py",
        "probe calibrate captures/base-0 captures/base-1 captures/layer-1 captures/layer-2 -o t-2.toml",
    ]
    assert perturbed_calibration([replace(RUN, command="")], ("ulp:1",), output="t.toml") == []


def test_the_record_command_has_seed_steps_offset_and_perturbation() -> None:
    perturbed = replace(RUN, path="my captures/u", perturb="ulp:3", steps=(101, 103), step_offset=100)
    assert record_command(perturbed) == (
        "probe record -o 'my captures/u' --seed 42 --steps 101,103 --step-offset 100 --perturb ulp:3 -- "
        "accelerate launch --num_processes 2 train.py --lr 1e-4"
    )
    assert record_command(replace(CANDIDATE, seed="", steps=(), command="")) == "probe record -o captures/opt-0 -- ..."


SCRIPT = """
import sys
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    inputs = torch.randn(6, 4)
    if "--scaled" in sys.argv:
        model[0].weight.data *= 1.01
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_lines_of_a_real_comparison_run_as_they_are_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def shell(line: str, *allowed: int) -> str:
        done = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode in (allowed or (0,)), done.stderr
        return done.stdout

    python = shlex.quote(sys.executable)
    for name, more in (("base-0", ""), ("base-1", ""), ("opt-0", " --scaled")):
        shell(f"probe record -o 'c d/{name}' --seed 1 --steps 1-3 -- {python} train.py{more}")
    calibrated = shell("probe calibrate 'c d/base-0' 'c d/base-1' -o t.toml")
    advice = [line for line in calibrated.splitlines() if line.startswith("  probe ")]
    assert [line.partition(" --perturb ")[2].partition(" ")[0] for line in advice] == ["ulp:1", "ulp:2", "ulp:3", ""]
    assert "hree are recommended" not in calibrated
    shell(advice[0])
    assert "Assumed" not in shell("probe calibrate 'c d/base-0' 'c d/ulp-1' -o t.toml --force")
    report = shell("probe diff 'c d/base-0' 'c d/opt-0' -t t.toml", 1)
    at = next(number for number, line in enumerate(report.splitlines()) if line.startswith("  Next: "))
    block = [line for line in report.splitlines()[at:] if line.startswith("    ")]
    lines = [line for line in block if line.startswith("    probe ")]
    assert len(lines) == 3
    for line in lines[:2]:
        shell(line)
    again = shell(lines[2], 1)
    assert "First divergence: step 1" in again
    names = shell("probe show 'c d/full-base-0' --json")
    assert '"full": [' in names
    assert "Both arms kept it whole: `Tensors kept whole` says which of its elements differ." in " ".join(again.split())
    assert "probe record" not in again.partition("First divergence")[2]
