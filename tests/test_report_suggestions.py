"""Suggested commands run as pasted: in the code of their arm, with names that are free, and only once each."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_cases import CALIBRATION, CANDIDATE, COVERAGE, DIVERGENCE, FAILING, INCONCLUSIVE, RUN

from probe.judge.comparison import Comparison, Coverage, FirstDivergence, RunSummary, Wanted
from probe.plan import load_plan
from probe.point import Kind
from probe.report.commands import ADD_RUNS, NARROW_DOWN, next_commands, perturbed_calibration, reproduce, script
from probe.report.free_names import FreeNames
from probe.report.headlines import headlines
from probe.report.html import to_html
from probe.report.markdown import to_markdown
from probe.report.narrowing import advice
from probe.report.text import to_text

BASE = replace(RUN, command="python t.py")
CAND = replace(CANDIDATE, command="python t.py", dirty=False)
BOTH = replace(FAILING, runs=(BASE, CAND))
ONE_CODE = (BASE, replace(CAND, commit=BASE.commit))
JOB = "--seed 42 --steps 1 --full forward/blocks.2 --full 'forward/blocks.2.*' -- python t.py"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


def stored(path: str, **manifest: Any) -> None:
    """Store as much of a capture as suggestions read."""
    Path(path, "rank00000").mkdir(parents=True)
    Path(path, "capture.json").write_text(json.dumps(manifest))


def tree(root: Path | str, commit: str, *, dirty: bool = False) -> dict[str, Any]:
    return {"trees": [{"root": str(root), "commit": commit, "dirty": dirty}]}


def hide(path: str, *names: str) -> None:
    """Write down that modules lie inside a compiled region."""
    Path(path, "rank00000").mkdir(parents=True, exist_ok=True)
    Path(path, "rank00000", "names.json").write_text(json.dumps({"names": [], "inside_compiled": names}))


def narrowed(comparison: Comparison) -> list[str]:
    return script(next_commands(comparison), NARROW_DOWN)


def added(comparison: Comparison) -> list[str]:
    return script(next_commands(comparison), ADD_RUNS)


# ------------------------------------------------------------------ the code of each arm
def test_a_checkout_that_is_somewhere_else_is_switched_where_it_is(folder: Path) -> None:
    other = folder / "elsewhere"
    other.mkdir()
    stored(BASE.path, provenance=tree(other, "a" * 40))
    stored(CAND.path, provenance=tree(other, "b" * 40))
    runs = (replace(BASE, commit="a" * 12), replace(CAND, commit="b" * 12))
    assert narrowed(replace(FAILING, runs=runs)) == [
        "# baseline, commit aaaaaaaaaa",
        f"git -C {other} switch --detach aaaaaaaaaa && probe record -o captures/full-base-0 {JOB}",
        "# candidate, commit bbbbbbbbbb",
        f"git -C {other} switch --detach bbbbbbbbbb && probe record -o captures/full-opt-0 {JOB}",
        "# compare again; `git switch BRANCH` brings you back to your branch",
        "probe diff captures/full-base-0 captures/full-opt-0 -t tolerances/job.toml",
    ]


def test_two_checkouts_are_entered_while_they_are_there(folder: Path) -> None:
    (folder / "main").mkdir()
    (folder / "branch").mkdir()
    stored(BASE.path, provenance=tree(folder / "main", "a" * 40))
    stored(CAND.path, provenance=tree(folder / "branch", "b" * 40))
    found = replace(BOTH, plan="plan.toml")
    assert [line for line in narrowed(found) if "record" in line] == [
        f"(cd {folder}/main && probe record -o {folder}/captures/full-base-0 --seed 42 --steps 1 --plan "
        f"{folder}/plan.toml --full forward/blocks.2 --full 'forward/blocks.2.*' -- python t.py)",
        f"(cd {folder}/branch && probe record -o {folder}/captures/full-opt-0 --seed 42 --steps 1 --plan "
        f"{folder}/plan.toml --full forward/blocks.2 --full 'forward/blocks.2.*' -- python t.py)",
    ]
    (folder / "branch").rmdir()
    assert [line.partition(" probe")[0] for line in narrowed(found) if "record -o" in line] == [
        f"(cd {folder}/main &&",
        "git switch --detach bbbbbbbbbb &&",
    ]


def test_the_trees_of_verify_are_entered_with_their_imports_and_in_the_folder_of_the_call(folder: Path) -> None:
    (folder / ".git").mkdir()
    (folder / "jobs").mkdir()
    for arm, run, commit in (("baseline", BASE, "a"), ("candidate", CAND, "b")):
        root = folder / "captures" / "trees" / arm
        (root / "src").mkdir(parents=True)
        stored(run.path, provenance=tree(root, commit * 40))
    Path("captures/verify.json").write_text(json.dumps({"request": {"folder": str(folder / "jobs")}}))
    inherited = '"${PYTHONPATH:+:$PYTHONPATH}"'
    roots = [folder / "captures" / "trees" / arm for arm in ("baseline", "candidate")]
    assert [line for line in narrowed(BOTH) if "record" in line] == [
        f"(cd {root}/jobs && PYTHONPATH={root}/src:{root}{inherited} "
        f"probe record -o {folder}/captures/full-{name} {JOB})"
        for root, name in zip(roots, ("base-0", "opt-0"), strict=True)
    ]


def test_uncommitted_changes_on_one_commit_are_spoken_of_without_a_switch() -> None:
    runs = (BASE, replace(CAND, commit=BASE.commit, dirty=True))
    assert [line for line in narrowed(replace(FAILING, runs=runs)) if line.startswith("#")] == [
        "# baseline, commit 0391d1c7aa; put uncommitted changes away first, such as with `git stash`",
        "# candidate, commit 0391d1c7aa + changes; the uncommitted changes of the recorded run are not in the commit: "
        "bring them back before recording",
        "# compare again",
    ]


# ------------------------------------------------------------------ names
def test_names_are_free_on_disk_and_no_glob_of_what_is_there_picks_them_up(folder: Path) -> None:
    for name in ("full-base-0", "full-opt-0", "full-opt-0-2", "base-3", "again-base-4", "again-opt-1"):
        stored(f"captures/{name}")
    Path("tolerances").mkdir()
    for name in ("job.toml", "job-2.toml"):
        Path("tolerances", name).touch()
    found = replace(INCONCLUSIVE, runs=ONE_CODE)
    assert [line for line in narrowed(found) if not line.startswith("#")][-1] == (
        "probe diff captures/full-base-0-2 captures/full-opt-0-3 -t tolerances/job.toml"
    )
    assert [line for line in added(found) if not line.startswith("#")] == [
        "probe record -o captures/again-base-5 --seed 42 --steps 1-5 -- python t.py",
        "probe record -o captures/again-base-6 --seed 42 --steps 1-5 -- python t.py",
        "probe calibrate captures/base-0 captures/base-1 captures/base-2 captures/again-base-5 captures/again-base-6 "
        "-o tolerances/job-3.toml",
        "probe record -o captures/again-opt-2 --seed 42 --steps 1-5 -- python t.py",
        "probe diff captures/base-0 --candidate captures/opt-0 captures/again-opt-2 -t tolerances/job-3.toml",
    ]


def test_perturbed_runs_do_not_take_the_place_of_those_of_another_command() -> None:
    stored("captures/ulp-1")
    wanted = Wanted(perturbed=("ulp:1", "ulp:2"), calibration=True)
    found = replace(INCONCLUSIVE, runs=ONE_CODE, wanted=wanted, calibration=None, tolerances="")
    assert [line for line in added(found) if not line.startswith("#")][:3] == [
        "probe record -o captures/again-ulp-1 --seed 42 --steps 1-5 --perturb ulp:1 -- python t.py",
        "probe record -o captures/ulp-2 --seed 42 --steps 1-5 --perturb ulp:2 -- python t.py",
        "probe calibrate captures/base-0 captures/again-ulp-1 captures/ulp-2 -o tolerances/job.toml",
    ]
    assert perturbed_calibration([BASE], ("ulp:1",), output="t.toml") == [
        "probe record -o captures/again-ulp-1 --seed 42 --steps 1-5 --perturb ulp:1 -- python t.py",
        "probe calibrate captures/base-0 captures/again-ulp-1 -o t-2.toml",
    ]


def test_runs_that_tolerances_come_from_are_recorded_again_where_they_are_gone_or_another_run_is_there() -> None:
    stored("captures/base-0", run_id="b0")
    stored("captures/base-1", run_id="of another command")
    found = replace(INCONCLUSIVE, runs=ONE_CODE, wanted=Wanted(baselines=1, calibration=True), calibration=CALIBRATION)
    assert [line for line in added(found) if not line.startswith("#")][:4] == [
        f"probe record -o captures/again-base-1 --seed 42 --steps 1-5 -- {RUN.command}",
        f"probe record -o captures/again-base-2 --seed 42 --steps 1-5 -- {RUN.command}",
        "probe record -o captures/again-base-3 --seed 42 --steps 1-5 -- python t.py",
        "probe calibrate captures/base-0 captures/again-base-1 captures/again-base-2 captures/again-base-3 "
        "-o tolerances/job-2.toml",
    ]


def test_a_repetition_writes_beside_what_is_there() -> None:
    stored("captures/again-opt-0")
    assert reproduce(replace(BOTH, runs=ONE_CODE, calibration=None)) == [
        "# baseline, commit 0391d1c7aa",
        "probe record -o captures/again-base-0 --seed 42 --steps 1-5 -- python t.py",
        "# candidate, commit 0391d1c7aa",
        "probe record -o captures/again-opt-0-2 --seed 42 --steps 1-5 -- python t.py",
        "probe diff captures/again-base-0 captures/again-opt-0-2 -t tolerances/job.toml",
    ]


def test_a_name_is_given_once() -> None:
    names = FreeNames(["c/job-2.toml"])
    given = [names.beside("c/base-0", "full-"), names.beside("c/base-0", "full-"), names.next("c/x-09", "again-")]
    given += [names.wanted("c/ulp-1", "again-"), names.wanted("c/ulp-1", "again-"), names.file("c/job.toml")]
    given += [names.new_file("c/job-2.toml"), names.new_file("c/other.toml")]
    assert given == [
        *["c/full-base-0", "c/full-base-0-2", "c/again-x-10", "c/ulp-1", "c/again-ulp-1", "c/job-3.toml"],
        *["c/job-4.toml", "c/other.toml"],
    ]


# ------------------------------------------------------------------ what narrows down
def test_what_both_arms_kept_whole_is_shown_and_not_kept_again() -> None:
    for number, run in enumerate(ONE_CODE):
        record = {"full": ["forward/blocks.2.*"], "steps": "1-2"}
        stored(run.path, config={"plan": {"record": record}})
        if not number:
            assert narrowed(replace(FAILING, runs=ONE_CODE))[1].startswith("probe record ")
    found = replace(FAILING, runs=ONE_CODE)
    assert advice(found) == "Both arms kept it whole: `Tensors kept whole` says which of its elements differ."
    assert narrowed(found) == [
        "probe show captures/base-0 forward/blocks.2.attn --step 1 --rank 1",
        "probe show captures/opt-0 forward/blocks.2.attn --step 1 --rank 1",
    ]
    later = replace(DIVERGENCE, place=replace(DIVERGENCE.place, step=3))
    assert advice(replace(found, first_divergence=later)).startswith("Keep the tensors around it whole")


def test_what_a_compiled_region_hides_is_asked_for_by_a_plan_that_the_lines_write(folder: Path) -> None:
    hide(CAND.path, "blocks.2.attn.q_norm", "blocks.2.attn.k_norm", "blocks.20.attn.q_norm")
    found = replace(FAILING, runs=ONE_CODE)
    assert advice(found) == (
        "Record inside the compiled region: 2 modules of 'blocks.2.attn' lie there, where nothing is recorded unless a "
        "plan asks for it (`inside_compiled`)."
    )
    lines = narrowed(found)
    assert lines == [
        "# a plan that looks inside",
        "cat > inside.toml <<'END'",
        "[record]",
        'inside_compiled = ["blocks.2.attn.*"]',
        "END",
        "# baseline, commit 0391d1c7aa",
        "probe record -o captures/inside-base-0 --seed 42 --steps 1 --plan inside.toml -- python t.py",
        "# candidate, commit 0391d1c7aa",
        "probe record -o captures/inside-opt-0 --seed 42 --steps 1 --plan inside.toml -- python t.py",
        "# compare again; without -t, for the tolerances know nothing of what is inside",
        "probe diff captures/inside-base-0 captures/inside-opt-0",
    ]
    for report in (to_text(found), to_markdown(found)):
        # A here-document must stand as it is: an indented word does not end it.
        assert "\n".join(lines) in report
    subprocess.run("\n".join(lines[:5]), shell=True, check=True, cwd=folder)
    assert load_plan(folder / "inside.toml").inside_compiled == ("blocks.2.attn.*",)
    assert narrowed(found)[1] == "cat > inside-2.toml <<'END'"


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (
            'default_checks = false\n[record]  # all\ninside_compiled = ["a"]\nsteps = "1-3"\n[[check]]\nwhat = "x"\n',
            'default_checks = false\n[record]  # all\ninside_compiled = ["a", "blocks.2.attn.*"]\nsteps = "1-3"\n'
            '[[check]]\nwhat = "x"',
        ),
        (
            '[[check]]\nwhat = "x"\n',
            '[[check]]\nwhat = "x"\n\n[record]\ninside_compiled = ["a", "blocks.2.attn.*"]',
        ),
        (
            'record = { steps = "1" }\n',
            '[record]\ninside_compiled = ["a", "blocks.2.attn.*"]',
        ),
    ],
)
def test_a_plan_of_the_readers_keeps_its_checks(folder: Path, text: str, made: str) -> None:
    Path("plan.toml").write_text(text)
    stored(BASE.path, config={"plan": {"record": {"inside_compiled": ["a"]}}})
    hide(BASE.path, "blocks.2.attn.norm")
    lines = narrowed(replace(FAILING, runs=ONE_CODE, plan="plan.toml"))
    assert lines[1 : lines.index("END")] == ["cat > plan-inside.toml <<'END'", *made.splitlines()]
    assert lines[-1] == "probe diff captures/inside-base-0 captures/inside-opt-0 --plan plan.toml"


def test_runs_that_were_recorded_by_a_plan_are_repeated_by_one(folder: Path) -> None:
    calls = {"attention": "model:attention"}
    record = {"kinds": ["forward"], "include": [], "exclude": ["*.drop"], "inside_compiled": ["a.*"], "calls": calls}
    stored(BASE.path, config={"plan": {"record": record}})
    found = replace(INCONCLUSIVE, runs=ONE_CODE, calibration=None)
    lines = narrowed(replace(found, wanted=Wanted()))
    text = [
        "cat > recorded.toml <<'END'",
        "[record]",
        'exclude = ["*.drop"]',
        'inside_compiled = ["a.*"]',
        'kinds = ["forward"]',
        "[record.calls]",
        '"attention" = "model:attention"',
        "END",
    ]
    assert lines[:9] == ["# the plan of the compared runs", *text]
    assert all("--plan recorded.toml" in line for line in lines if line.startswith("probe record"))
    assert [added(found)[1:9], reproduce(found)[1:9]] == [text, text]
    subprocess.run("\n".join(text), shell=True, check=True, cwd=folder)
    plan = load_plan(folder / "recorded.toml")
    assert (plan.kinds, plan.exclude, plan.inside_compiled, plan.calls) == (
        (Kind.FORWARD,),
        ("*.drop",),
        ("a.*",),
        (("attention", "model:attention"),),
    )
    hide(BASE.path, "blocks.2.attn.norm")
    assert narrowed(found)[2:6] == [
        "[record]",
        'inside_compiled = ["a.*", "blocks.2.attn.*"]',
        'exclude = ["*.drop"]',
        'kinds = ["forward"]',
    ]


def at(kind: Kind, name: str, ahead: str = "") -> FirstDivergence:
    return replace(DIVERGENCE, place=replace(DIVERGENCE.place, kind=kind, name=name), ahead=ahead)


@pytest.mark.parametrize(
    ("found", "selections"),
    [
        (at(Kind.FORWARD, "(root)"), ["*"]),
        (at(Kind.BACKWARD, "blocks.0", ahead="backward/blocks.1"), ["blocks.1.*"]),
        (at(Kind.LOSS, "micro_loss", ahead="forward/blocks.1@1"), ["blocks.1.*"]),
        (at(Kind.GRAD, "blocks.1.attn.weight"), ["blocks.1.attn", "blocks.1.attn.*"]),
        (at(Kind.FORWARD, "blocks.10", ahead="loss/micro_loss"), None),
        (at(Kind.FORWARD, "blocks.2"), None),
    ],
)
def test_it_is_the_module_or_the_one_before_it_that_is_opened(
    found: FirstDivergence, selections: list[str] | None
) -> None:
    hide(CAND.path, "blocks.1.attn", "blocks.1.mlp", "blocks.20.mlp")
    lines = narrowed(replace(FAILING, runs=ONE_CODE, first_divergence=found))
    opened = [line for line in lines if line.startswith("inside_compiled")]
    assert opened == ([] if selections is None else [f"inside_compiled = {json.dumps(selections)}"])


def test_the_page_has_the_same_lines() -> None:
    hide(CAND.path, "blocks.2.attn.q_norm")
    page = to_html(replace(FAILING, runs=ONE_CODE))
    assert "cat &gt; inside.toml &lt;&lt;&#x27;END&#x27;\n[record]\n" in page


# ------------------------------------------------------------------ what only one arm has
def lacking(runs: tuple[RunSummary, ...]) -> list[str]:
    coverage = Coverage(
        matched=1,
        missing=("forward/blocks.0.norm[0]", "backward/blocks.0.norm", "forward/blocks.1.norm", "forward/head"),
        unexpected=("forward/fused", "forward/tail"),
    )
    return headlines(replace(FAILING, coverage=coverage, runs=runs, checks=()))[1:]


def test_modules_inside_a_compiled_region_are_told_from_those_no_longer_called() -> None:
    hide(CAND.path, "blocks.0.norm", "blocks.1.norm")
    hide(BASE.path, "tail")
    assert lacking((BASE, CAND)) == [
        "Inside a compiled region in the candidate, where nothing is recorded unless asked for: `blocks.*.norm` (2).",
        "No longer called in the candidate: `head`.",
        "Inside a compiled region in the baseline, where nothing is recorded unless asked for: `tail`.",
        "Called in the candidate only: `fused`.",
    ]


def test_which_of_the_two_it_is_stays_open_where_a_capture_does_not_tell() -> None:
    assert lacking((BASE, CAND)) == [
        "Modules in the baseline only (no longer called, or inside a compiled region): `blocks.*.norm` (2), `head`.",
        "Modules in the candidate only: `fused`, `tail`.",
    ]
    assert headlines(replace(FAILING, coverage=COVERAGE, checks=()))[1:] == []
