"""The command line: arguments, exit statuses, outputs, and what it must not import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from report_cases import FAILING, INCONCLUSIVE, NOT_COMPARABLE, PASSING

from probe import cli
from probe.errors import CaptureError, IncomparableError, NotEquivalentError
from probe.judge.comparison import Comparison

COMMANDS = ("calibrate", "diff", "pack", "prune", "record", "selfcheck", "show", "verify")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for reading and judging: `result` is what the comparison gives; what was asked is noted."""
    noted: dict[str, Any] = {"result": PASSING}

    def compare(
        baselines: Sequence[str], candidates: Sequence[str], tolerances: object, **options: Any
    ) -> tuple[Comparison, tuple[()]]:
        noted.update(baselines=baselines, candidates=candidates, tolerances=tolerances, options=options)
        if isinstance(noted["result"], Exception):
            raise noted["result"]
        found: Comparison = noted["result"]
        return found, ()

    monkeypatch.setattr("probe.cli.compare_captures", compare)
    monkeypatch.setattr("probe.store.reader.open_capture", str)
    monkeypatch.setattr("probe.judge.tolerance.load", lambda path: f"loaded {path}")
    return noted


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.status_of(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.mark.parametrize(("result", "status"), [(PASSING, 0), (FAILING, 1), (INCONCLUSIVE, 2), (NOT_COMPARABLE, 2)])
def test_diff_exits_with_the_outcome(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], result: Comparison, status: int
) -> None:
    answers["result"] = result
    found, out, err = run(capsys, "diff", "base", "cand")
    assert (found, err) == (status, "")
    assert out.splitlines()[-1].startswith(result.outcome.value.capitalize())


def test_diff_takes_one_baseline_and_one_candidate(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "diff", "base", "cand", "-t", "t.toml", "--same-code")
    assert (answers["baselines"], answers["candidates"], answers["tolerances"]) == (["base"], ["cand"], "loaded t.toml")
    assert answers["options"]["same_code"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        ["a", "b", "--candidate", "c", "d", "-t", "t.toml"],
        ["a", "b", "--candidate", "c", "--candidate", "d"],
        ["a", "b", "--candidate=c", "d"],
        ["--candidate", "c", "d", "--json", "a", "b"],
    ],
)
def test_diff_takes_run_sets(answers: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(capsys, "diff", *arguments)[0] == 0
    assert (answers["baselines"], answers["candidates"]) == (["a", "b"], ["c", "d"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "Only one capture is given: a. Add the candidate's capture."),
        (
            ["a", "b", "c"],
            "3 captures are given, and nothing says which are candidates. "
            "Write 'probe diff BASE... --candidate CAND...'.",
        ),
        (["a", "--candidate"], "Option '--candidate' requires at least one capture."),
        (["a", "--candidate", "--json", "b"], "Option '--candidate' requires at least one capture."),
        ([], "Missing argument 'BASE... [CAND]'."),
    ],
)
def test_diff_says_what_is_wrong_with_its_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(capsys, "diff", *arguments) == (2, "", f"{message}\nSee 'probe diff -h'.\n")


def test_diff_prints_one_json_object(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers["result"] = FAILING
    status, out, err = run(capsys, "diff", "a", "b", "--json")
    assert (status, json.loads(out)["verdict"], err) == (1, "different", "")


def test_captures_that_share_nothing_give_an_object_and_a_message(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answers["result"] = IncomparableError("Captures a and b share no step.")
    status, out, err = run(capsys, "diff", "a", "b", "--json")
    assert (status, json.loads(out)["verdict"], err) == (2, "not comparable", "Captures a and b share no step.\n")
    assert run(capsys, "diff", "a", "b") == (2, "", "Captures a and b share no step.\n")


def test_diff_writes_each_report_it_is_asked_for(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    markdown, junit = tmp_path / "new" / "table.md", tmp_path / "junit.xml"
    status, _, err = run(capsys, "diff", "a", "b", "--markdown", str(markdown), "--junit", str(junit))
    assert (status, err) == (0, f"Report is in {markdown}.\nReport is in {junit}.\n")
    assert markdown.read_text().startswith("### Numerical comparison: equivalent\n")
    assert junit.read_text().startswith("<?xml")


def test_diff_overwrites_nothing_without_force(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "table.md"
    table.write_text("mine")
    refused = f"File {table} exists already. Choose another name, or replace it with --force.\n"
    assert run(capsys, "diff", "a", "b", "--markdown", str(table)) == (2, "", refused)
    assert (table.read_text(), "baselines" in answers) == ("mine", False)
    assert run(capsys, "diff", "a", "b", "--markdown", str(table), "--force")[0] == 0
    assert table.read_text() != "mine"
    folder = f"Output {tmp_path} is a folder. Name a file.\n"
    assert run(capsys, "diff", "a", "b", "--junit", str(tmp_path), "--force") == (2, "", folder)


def test_a_report_that_cannot_be_written_is_no_difference(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "table.md"
    answers["result"] = FAILING
    status, _, err = run(capsys, "diff", "a", "b", "--markdown", str(target))
    assert (status, err) == (2, f"Report {target} cannot be written: File exists.\n")


def test_github_gets_the_markdown_appended(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert run(capsys, "diff", "a", "b", "--github")[0] == 0
    assert summary.read_text().startswith("before\n### Numerical comparison: equivalent\n")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    message = (
        "Option --github needs the environment variable GITHUB_STEP_SUMMARY, which is not set. "
        "GitHub Actions sets it; elsewhere use --markdown FILE.\n"
    )
    assert run(capsys, "diff", "a", "b", "--github") == (2, "", message)


def test_a_plan_with_an_unknown_key_is_refused_before_anything_runs(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[record]\nstps = '1'")
    message = (
        "Key 'stps' of [record] is unknown. Did you mean 'steps'? Allowed: calls, exclude, full, include, "
        "inside_compiled, kinds, steps, steps_per_file.\n"
        f"The plan is {str(plan)!r}.\n"
    )
    assert run(capsys, "diff", "a", "b", "--plan", str(plan)) == (2, "", message)
    assert run(capsys, "record", "--plan", str(plan), "-o", str(tmp_path / "c"), "--", "true") == (2, "", message)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record"], "Missing argument '-- CMD...'.\nSee 'probe record -h'.\n"),
        (
            ["record", "--perturb", "ulps", "--", "true"],
            "Invalid value for '--perturb': 'ulps' is no perturbation. "
            "Write 'ulp', 'ulp:SEED', 'layer' or 'layer:SEED'.\nSee 'probe record -h'.\n",
        ),
        (
            ["record", "--seed", "-1", "--", "true"],
            "Invalid value for '--seed': -1 is not in the range 0<=x<=4294967295.\nSee 'probe record -h'.\n",
        ),
        (["record", "--steps", "5-1", "--", "true"], "Steps '5-1' cannot be used at '5-1': 1 comes before 5.\n"),
        (["difff"], "No such command 'difff'. Did you mean 'diff'?\nSee 'probe -h'.\n"),
        (["calibrate", "a"], "Missing option '-o' / '--output'.\nSee 'probe calibrate -h'.\n"),
    ],
)
def test_wrong_arguments_exit_2_with_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(capsys, *arguments) == (2, "", message)


def test_record_hands_its_options_to_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from probe.capture.launch import RecordOptions

    asked: list[RecordOptions] = []
    monkeypatch.setattr("probe.capture.launch.record", lambda options: asked.append(options) or 7)
    status, _, err = run(
        capsys,
        *["record", "-o", "out", "--steps", "1-5,10", "--seed", "42", "--full", "forward/a", "--full", "b"],
        *["--perturb", "ulp:3", "--strict", "--force", "--", "torchrun", "-o", "x", "train.py", "-h"],
    )
    assert (status, err) == (7, "")
    assert asked == [
        RecordOptions(
            output=Path("out"),
            steps="1-5,10",
            seed=42,
            plan=None,
            full=("forward/a", "b"),
            perturb="ulp:3",
            strict=True,
            force=True,
            command=("torchrun", "-o", "x", "train.py", "-h"),
        )
    ]


def test_record_without_an_output_says_where_it_records(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("probe.capture.launch.record", lambda options: asked.append(options) or 0)
    monkeypatch.setattr("time.strftime", lambda _format: "20260504-100000")
    assert run(capsys, "record", "python", "train.py", "--lr", "1") == (
        0,
        "",
        "Recording to captures/20260504-100000.\n",
    )
    assert asked[0].command == ("python", "train.py", "--lr", "1")
    assert asked[0].output == Path("captures/20260504-100000")


def test_notes_of_outer_layers_follow_the_message(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    error = CaptureError("Segment s is truncated.")
    error.__notes__ = ["It belongs to capture a.", "Record again."]  # type: ignore[attr-defined]
    answers["result"] = error
    assert run(capsys, "diff", "a", "b") == (
        2,
        "",
        "Segment s is truncated.\nIt belongs to capture a.\nRecord again.\n",
    )


def test_what_is_raised_becomes_a_status(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    answers["result"] = NotEquivalentError("Attention outputs are above their tolerance.")
    assert run(capsys, "diff", "a", "b") == (1, "", "Attention outputs are above their tolerance.\n")
    answers["result"] = ZeroDivisionError("a fault of the tool itself")
    status, _, err = run(capsys, "diff", "a", "b")
    assert (status, err.splitlines()[0]) == (2, "Traceback (most recent call last):")


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("probe.capture.launch.record", interrupted)
    status, _, err = run(capsys, "record", "-o", "x", "--", "true")
    assert (status, err.splitlines()[-1]) == (130, "Interrupted.")


def test_help_has_a_summary_and_an_example_for_every_command() -> None:
    assert sorted(cli.main.commands) == list(COMMANDS)
    summaries = CliRunner().invoke(cli.main, ["-h"]).output.partition("Commands:\n")[2]
    assert summaries == (
        "  calibrate  Turn repeated runs of the unmodified code into tolerances.\n"
        "  diff       Compare runs: is the candidate equivalent to the baseline?\n"
        "  pack       Pack the segments of each rank into one file.\n"
        "  prune      Delete old captures; say only which, unless --yes is given.\n"
        "  record     Run a training command and record what it computes.\n"
        "  selfcheck  Show that recording leaves a run's numbers alone.\n"
        "  show       Show what a capture holds: ranks, steps, quantities, values.\n"
        "  verify     Run two versions of the code, and compare them.\n"
    )
    for command in COMMANDS:
        text = CliRunner().invoke(cli.main, [command, "-h"])
        assert text.exit_code == 0
        assert f"\n  probe {command} " in text.output.partition("Options:")[0]
        assert max(map(len, text.output.splitlines())) <= 100


def test_the_exit_status_of_a_real_process_is_2_when_it_could_not_tell(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "probe", "diff", "none-0", "none-1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Capture none-0 does not exist. Name the folder that `probe record -o` made.\n"


HEAVY = ("torch", "h5py", "numpy", "rich")
WATCH = """
import sys
{before}
import probe.cli
try:
    probe.cli.run({arguments})
except SystemExit:
    pass
print(sorted({heavy} & set(sys.modules)), file=sys.stderr)
"""


def heavy_imports(arguments: Sequence[str], *, before: str = "") -> str:
    """Run the command line in a process of its own and return which heavy packages it imported."""
    code = WATCH.format(before=before, arguments=list(arguments), heavy=set(HEAVY))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--help"], ["diff", "--help"], ["record", "-h"], ["difff"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    assert heavy_imports(arguments) == "[]"


def test_the_import_rule_can_fail() -> None:
    assert heavy_imports(["--help"], before="import numpy") == "['numpy']"
