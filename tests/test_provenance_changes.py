"""Whose code, data and settings the captures are of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from synthetic import SyntheticCapture, run

from probe.errors import IncomparableError, ToleranceError
from probe.judge.comparison import CodeChange, RunSummary
from probe.judge.provenance_changes import (
    calibrated_run,
    changes,
    check_comparable,
    check_same_job,
    code_change,
    perturbations,
    run_summary,
)
from probe.judge.tolerance import CalibratedRun


def with_provenance(capture: SyntheticCapture, **parts: object) -> SyntheticCapture:
    return replace(capture, manifest={**capture.manifest, "provenance": {**capture.manifest["provenance"], **parts}})


def tree(commit: str, *, dirty: bool = False, root: str = "/src") -> dict[str, object]:
    return {"root": root, "commit": commit, "dirty": dirty, "diff_hash": ""}


def test_a_run_is_summarised_for_the_report() -> None:
    capture = with_provenance(run("c", steps=(1, 2)), trees=[tree("0123456789abcdef", dirty=True)])
    assert run_summary(capture, "candidate") == RunSummary(
        arm="candidate",
        path="c",
        run_id="run-c",
        ranks=1,
        world_size=1,
        steps=(1, 2),
        command="python train.py",
        seed="42",
        commit="0123456789ab",
        dirty=True,
        created_utc="2026-01-01T00:00:00Z",
        environment={"versions.torch": "2.14.1", "device": "cpu"},
    )


def test_a_run_is_summarised_for_the_tolerance_file() -> None:
    assert calibrated_run(run("folder/c", perturb="ulp:1")) == CalibratedRun(
        run_id="run-folder/c",
        path="c",
        created_utc="2026-01-01T00:00:00Z",
        command="python train.py",
        code="aaaa",
        perturb="ulp:1",
    )


def test_a_capture_with_an_empty_manifest_is_summarised_too() -> None:
    bare = replace(run("c", steps=(1,)), manifest={})
    assert run_summary(bare, "baseline").command == ""
    assert changes(bare, bare) == ()


def test_all_that_differs_between_the_arms_is_listed() -> None:
    one = with_provenance(run("a"), trees=[tree("a" * 40)], versions={"torch": "2.14.1", "numpy": "2"})
    two = with_provenance(
        run("b", code="bbbb", command=("python", "train.py", "--fused attention"), perturb="ulp:1"),
        trees=[tree("b" * 40)],
        versions={"torch": "2.15.0"},
    )
    assert changes(one, two) == (
        "command: with '--fused attention'",
        "perturb: '' -> 'ulp:1'",
        "code: 1 file differs: train.py",
        "commit: aaaaaaaaaaaa -> bbbbbbbbbbbb",
        "versions.numpy: 2 -> absent",
        "versions.torch: 2.14.1 -> 2.15.0",
    )


def test_files_are_compared_by_their_path_inside_the_tree() -> None:
    one = with_provenance(
        run("a"), trees=[tree("a", root="/one")], code={"hash": "1", "files": {"/one/m.py": "x", "/one/n.py": "y"}}
    )
    two = with_provenance(
        run("b"), trees=[tree("a", root="/two")], code={"hash": "2", "files": {"/two/m.py": "x", "/two/n.py": "z"}}
    )
    assert changes(one, two) == ("code: 1 file differs: n.py",)


def test_files_outside_the_trees_are_counted_after_those_inside() -> None:
    outside = {f"/generated/{number}.py": "x" for number in range(4)}
    one = with_provenance(run("a"), trees=[tree("a", root="/src")], code={"hash": "1", "files": {"/src/m.py": "x"}})
    two = with_provenance(
        run("b"), trees=[tree("a", root="/src")], code={"hash": "2", "files": {"/src/m.py": "y", **outside}}
    )
    assert changes(one, two) == (
        "code: 5 files differ: m.py; 4 outside the source trees (/generated/0.py, /generated/1.py and 2 more)",
    )


def test_what_a_launcher_makes_up_for_each_launch_is_no_difference() -> None:
    one, two = (
        replace(
            run("a"),
            manifest={**run("a").manifest, "env": {"TORCHELASTIC_ERROR_FILE": path, "ATTN": kernel}},
        )
        for path, kernel in (("/tmp/1", "fa2"), ("/tmp/2", "sdpa"))
    )
    assert changes(one, two) == ("env.ATTN: fa2 -> sdpa",)


def test_files_that_differ_are_told_apart_by_which_arm_ran_them_and_where_they_lie() -> None:
    files = {"/one/same.py": "x", "/one/m.py": "x", "/one/gone.py": "y", "/opt/tool.py": "1"}
    others = {"/two/same.py": "x", "/two/m.py": "z", "/two/new.py": "y", "/opt/tool.py": "2"}
    one = with_provenance(run("a"), trees=[tree("a", root="/one")], code={"hash": "1", "files": files})
    two = with_provenance(run("b"), trees=[tree("a", root="/two")], code={"hash": "2", "files": others})
    assert code_change(one, two) == CodeChange(
        changed=("m.py",), added=("new.py",), removed=("gone.py",), outside=("/opt/tool.py",)
    )
    assert code_change(one, one) == CodeChange()
    assert code_change(one, replace(two, manifest={})) is None


def test_a_run_in_half_precision_is_perturbed_layer_by_layer() -> None:
    capture = run("a", steps=(1,))
    half = capture.edited(lambda rows: replace(rows, dtype=("bfloat16",) * len(rows.dtype)))
    assert [perturbations(each) for each in (capture, half)] == [
        ("ulp:1", "ulp:2", "ulp:3"),
        ("layer:1", "layer:2", "layer:3"),
    ]
    assert perturbations(capture, 4, 2) == ("ulp:4", "ulp:5")


def test_repeats_of_one_job_need_no_warning() -> None:
    assert check_same_job([run(name) for name in "abc"]) == ()


@pytest.mark.parametrize(
    ("captures", "message"),
    [
        (
            [run("a")],
            "A calibration needs repeated runs and got 1. Record the unmodified code three times (two at the least) as "
            "separate launches.",
        ),
        (
            [run("a"), replace(run("b"), run_id="run-a")],
            "The captures 'a' and 'b' are the same run 'run-a'. Record each baseline as a launch of its own.",
        ),
        (
            [run("a"), run("b", ranks=2)],
            "The runs have different world sizes: 1 in 'a' and 2 in 'b'. Calibrate runs of one job.",
        ),
        (
            [run("a"), run("b", code="bbbb")],
            "The runs are of different code: 'a' and 'b' differ in train.py. Calibrate runs of one unmodified code.",
        ),
    ],
)
def test_runs_that_are_no_repeats_of_one_job_are_refused(captures: list[SyntheticCapture], message: str) -> None:
    with pytest.raises(ToleranceError) as raised:
        check_same_job(captures)
    assert str(raised.value) == message


def test_doubts_about_repeats_are_warnings() -> None:
    runs = [
        run("a"),
        replace(run("b", command=("python", "train.py", "--run-id", "1")), problems=("rank 3 is missing",)),
    ]
    assert check_same_job(runs) == (
        "The command of b differs from that of a: with --run-id 1.",
        "b: rank 3 is missing",
    )


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (
            run("c"),
            "The captures 'a' and 'c' ran the same code (hash 'aaaa') with the same command, so the branch never ran. "
            "Check which tree the candidate imported; give --same-code if this is meant.",
        ),
        (
            run("c", code="bbbb", ranks=2),
            "The world sizes differ: 1 in 'a' and 2 in 'c'. Record both with the same number of ranks.",
        ),
        (
            replace(run("c", code="bbbb"), run_id="run-a"),
            "The captures 'a' and 'c' are the same run 'run-a'. Give the capture of another launch.",
        ),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(candidate: SyntheticCapture, message: str) -> None:
    with pytest.raises(IncomparableError) as raised:
        check_comparable([run("a")], [candidate], same_code=False)
    assert str(raised.value) == message


def test_the_same_code_may_be_compared_when_asked_for_or_when_its_arguments_differ() -> None:
    check_comparable([run("a")], [run("c")], same_code=True)
    check_comparable([run("a")], [run("c", command=("python", "train.py", "--fused"))], same_code=False)
