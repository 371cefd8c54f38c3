"""The life of a stored baseline, from the command line that a user types to the words that are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch  # noqa: F401 - the inner runs share it: it cannot be imported twice

import probe.equivalence.checker
import probe.equivalence.close
import probe.equivalence.github
import probe.equivalence.protocol
import probe.equivalence.stored
import probe.report.grid
import probe.report.html
from probe.judge.tolerance import load
from probe.store.reader import open_capture

pytest_plugins = ["pytester"]

DOUBLE = """
    import os
    import torch

    def double(x):
        return x * float(os.environ.get("FACTOR", "2"))

    def test_double(probe_check):
        probe_check(double, name="y", inputs=(torch.ones(4),))
"""
BASELINE = "captures/test_double.test_double/y"


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with one test that compares with a stored baseline."""
    pytester.makepyfile(test_double=DOUBLE)
    return pytester


def errors(result: pytest.RunResult) -> list[str]:
    """Give the lines of the exception that reached pytest, as printed."""
    lines: list[str] = []
    for line in result.outlines:
        if line.startswith("E   ") and not line.startswith("E    "):
            lines = [] if line.startswith("E   probe.") else lines
        if line.startswith("E "):
            lines.append(line.removeprefix("E").strip())
    return lines


def test_a_missing_baseline_fails_and_prints_the_command_that_records_it(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    assert errors(result) == [
        "probe.equivalence.stored.NoBaselineError: No baseline 'y' of this test is stored: "
        "captures/test_double.test_double/y does not exist. Record it with the code that is known to be right:",
        "pytest 'test_double.py::test_double' --probe-record",
    ]
    assert not (project.path / "captures").exists()


def test_recording_writes_and_still_fails_then_the_test_is_green(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--probe-record")
    result.assert_outcomes(failed=1)
    assert errors(result) == [
        f"probe.equivalence.stored.RecordedError: Baseline {BASELINE} was recorded just now, so this run shows "
        f"nothing. Look at it (`probe show {BASELINE}`), commit it with what lies beside it, and run the test again "
        "without --probe-record.",
    ]
    result.stdout.fnmatch_lines(["*= probe =*", f"recorded: {BASELINE}"])
    capture = open_capture(project.path / BASELINE)
    assert (capture.ranks, capture.steps(0), capture.problems) == ((0,), (1,), ())
    labels = [key.label for key in capture.rows(0, 1).keys]
    assert labels == ["batch/(input)[0]", "forward/(output)", "loss/micro_loss", "grad/(input)[0]"]
    assert load(project.path / f"{BASELINE}.toml").perturbed_runs == 5
    project.runpytest_inprocess().assert_outcomes(passed=1)


def test_recording_again_leaves_a_baseline_that_is_met_alone(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--probe-record")
    run_id = open_capture(project.path / BASELINE).run_id
    project.runpytest_inprocess("--probe-record").assert_outcomes(passed=1)
    assert open_capture(project.path / BASELINE).run_id == run_id


def test_record_all_writes_every_baseline_anew_and_passes(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--probe-record-all").assert_outcomes(passed=1)
    run_id = open_capture(project.path / BASELINE).run_id
    project.runpytest_inprocess("--probe-record-all").assert_outcomes(passed=1)
    assert open_capture(project.path / BASELINE).run_id != run_id


def test_a_candidate_that_departs_fails_and_says_where_and_how_to_accept_it(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.runpytest_inprocess("--probe-record")
    monkeypatch.setenv("FACTOR", "4")
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    lines = [re.sub(r"recorded \d{4}-\S+\.", "recorded TIME.", line) for line in errors(result)]
    assert lines == [
        "probe.errors.NotEquivalentError: Different: 3 quantities are more than 10 times above tolerance. The first "
        "divergence is forward of (output) at step 1, rank 0 (forward).",
        "First divergence: step 1, microbatch 0, rank 0: forward/(output)",
        "difference 100 %, 1.05e+06 x its tight tolerance (9.54e-07), l2 norm expected 4, actual 8",
        "origin here (forward): Everything compared before it in the step is within tolerance, last batch/(input)[0] "
        "(0 x its tight tolerance).",
        "Worst: output, step 1, rank 0, (output): l2 norm expected 4, actual 8",
        "difference 100 %, allowed 9.54e-07 (the baseline, perturbed by one ulp, moves by up to 1.55e-07)",
        "Would have passed: tolerances 1.05e+06 times as wide.",
        f"Baseline: {BASELINE}, recorded TIME.",
        "If the change is meant, record the baseline anew:",
        "pytest 'test_double.py::test_double' --probe-record",
    ]
    result.stdout.fnmatch_lines(["*Captured probe_check, y call*", "What is recorded*Verdict", "output *above 1 of 1"])
    assert not any("tensor(" in line for line in result.outlines)


def test_recording_replaces_a_baseline_that_is_no_longer_met(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.runpytest_inprocess("--probe-record")
    monkeypatch.setenv("FACTOR", "4")
    project.runpytest_inprocess("--probe-record").assert_outcomes(failed=1)
    project.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_baseline_from_another_torch_or_device_says_so(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.runpytest_inprocess("--probe-record")
    file = project.path / BASELINE / "capture.json"
    manifest = json.loads(file.read_text())
    here = manifest["provenance"]
    manifest["provenance"] = {**here, "versions": {**here["versions"], "torch": "1.0"}, "device": "abacus"}
    file.write_text(json.dumps(manifest))
    project.runpytest_inprocess().assert_outcomes(passed=1)
    monkeypatch.setenv("FACTOR", "4")
    wanted = (
        f"The baseline was recorded with torch 1.0 on abacus; this run has torch {here['versions']['torch']} "
        f"{here['device']}."
    )
    assert wanted in errors(project.runpytest_inprocess())


def test_baselines_whose_test_is_gone_are_listed_and_others_are_not(project: pytest.Pytester) -> None:
    project.makepyfile(test_other="def test_nothing():\n    pass")
    for folder in ("test_double.test_gone", "test_double.test_double", "test_deleted.test_x", "test_other.test_gone"):
        (project.path / "captures" / folder / "y").mkdir(parents=True)
    stale = [
        f"stale: captures/{folder} (its test is gone; remove it)"
        for folder in ("test_deleted.test_x", "test_double.test_gone", "test_other.test_gone")
    ]

    def listed(*arguments: str) -> list[str]:
        return [line for line in project.runpytest_inprocess(*arguments).outlines if line.startswith("stale")]

    assert listed() == stale
    assert listed("-k", "nothing") == stale
    assert listed("test_double.py::test_double") == []
    assert listed("test_double.py") == stale[:2]


def test_parameters_and_classes_have_baselines_of_their_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_many="""
        import pytest
        import torch

        class TestScale:
            @pytest.mark.parametrize("factor", [2.0, 3.0])
            def test_scale(self, probe_check, factor):
                probe_check(lambda x: x * factor, name="y", inputs=(torch.ones(4),))
                probe_check(lambda x: x + factor, name="z", inputs=(torch.ones(4),))
        """
    )
    pytester.runpytest_inprocess("--probe-record-all").assert_outcomes(passed=2)
    folders = sorted(path.name for path in (pytester.path / "captures").iterdir())
    names = [re.sub(r"-[0-9a-f]{8}$", "", folder) for folder in folders]
    assert names == ["test_many.TestScale.test_scale-2.0", "test_many.TestScale.test_scale-3.0"]
    assert [sorted(path.name for path in (pytester.path / "captures" / folder).iterdir()) for folder in folders] == [
        ["y", "y.toml", "y.ulp-1", "y.ulp-2", "z", "z.toml", "z.ulp-1", "z.ulp-2"]
    ] * 2
    pytester.runpytest_inprocess().assert_outcomes(passed=2)


def test_a_baseline_without_its_tolerances_says_which_file_is_missing(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--probe-record")
    (project.path / f"{BASELINE}.toml").unlink()
    assert errors(project.runpytest_inprocess()) == [
        "probe.equivalence.stored.NoBaselineError: No baseline 'y' of this test is stored: "
        f"{BASELINE}.toml does not exist. Record it with the code that is known to be right:",
        "pytest 'test_double.py::test_double' --probe-record",
    ]


def test_a_name_with_any_characters_stays_inside_the_folder() -> None:
    file = Path("/t/test_a.py")
    found = [probe.equivalence.stored.baseline_of(file, "test_b", name).capture for name in ("../x", "x/y", ".", "x")]
    assert all(path.parent == Path("/t/captures/test_a.test_b") for path in found)
    assert len(set(found)) == 4
    assert found[-1].name == "x"


def test_a_stored_baseline_keeps_neighbours_for_what_is_red_by_little(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_near="""
        import os
        import torch

        def test_near(probe_check):
            x = torch.ones(4)
            at_x = float(os.environ.get("AT_X", "2"))
            found = probe_check(lambda y: y * (at_x if torch.equal(y, x) else 2.0), name="y", inputs=(x,))
            assert at_x == 2 or "(escalated)" in found.notes[-1]
        """
    )
    pytester.runpytest_inprocess("--probe-record-all").assert_outcomes(passed=1)
    with pytest.MonkeyPatch.context() as patch:
        for factor, outcome in ((2 + 4e-6, "passed"), (2 + 1e-3, "failed")):
            patch.setenv("AT_X", repr(factor))
            pytester.runpytest_inprocess().assert_outcomes(**{outcome: 1})
