"""Declared tolerances beside the measured noise, and beside what was declared before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import SyntheticCapture, run
from test_compare import only

from probe.check import Check
from probe.judge.calibrate import calibrate
from probe.judge.compare import compare
from probe.judge.comparison import Comparison, Outcome, Verdict
from probe.judge.fit import bounds_of, edits
from probe.judge.tolerance import load, save
from probe.point import Kind
from probe.report.markdown import to_markdown
from probe.report.text import to_text
from probe.selection import parse_steps


def norm_run(name: str, value: float, code: str = "aaaa") -> SyntheticCapture:
    return run(name, noise=0.0, code=code, fault=only(Kind.GRAD_NORM, "grad_norm", lambda _: np.array(value)))


BASES = [norm_run("base-0", 2.0), norm_run("base-1", 2.002)]
"""Their norms are 0.1 % apart."""


def declared(form: str, opt: float = 2.0, *, from_file: bool = False, **bounds: float) -> Comparison:
    checks = [Check(what="norm", where="clip", kinds=(Kind.GRAD_NORM,), form=form, **bounds)]  # type: ignore[arg-type]
    tolerances = calibrate(BASES, checks=checks) if from_file else None
    baselines = BASES[:1] if from_file else BASES
    return compare(baselines, [norm_run("opt-0", opt, "bbbb")], tolerances, checks=checks)


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize(
    ("form", "bounds", "fit", "spread"),
    [
        ("rel", {"rel": 0.05}, "vacuous", 0.001),
        ("rel", {"rel": 0.02}, "", 0.001),
        ("rel", {"rel": 0.0005}, "flaky", 0.001),
        ("abs", {"abs": 0.07}, "vacuous", 0.002),
        ("abs", {"abs": 0.05}, "", 0.002),
        ("abs", {"abs": 0.0019}, "flaky", 0.002),
        ("rel or abs", {"rel": 0.0001, "abs": 0.05}, "", 0.002),
        ("rel + abs", {"rel": 0.01, "abs": 0.05}, "vacuous", 0.002),
        ("ratio", {"ratio": 20.0}, "vacuous", 1.001),
        ("ratio", {"ratio": 1.02}, "", 1.001),
        ("ratio", {"ratio": 1.0001}, "flaky", 1.001),
    ],
)
def test_a_declared_bound_is_held_against_the_noise(
    form: str, bounds: dict[str, float], fit: str, spread: float, from_file: bool
) -> None:
    found = declared(form, from_file=from_file, **bounds).checks[0]
    assert (found.fit, found.spread) == (fit, pytest.approx(spread, rel=1e-5))


def test_a_vacuous_and_a_flaky_bound_are_named_in_the_row_and_in_a_note() -> None:
    wide, narrow = declared("rel", rel=0.05), declared("rel", rel=0.0005)
    assert wide.notes[0] == (
        "Check 'norm' is vacuous: it allows 5 %, more than 10 times what calibration would allow (0.3 %)."
    )
    assert narrow.notes[0] == (
        "Check 'norm' is flaky: it allows 0.05 %, and the unmodified code differs from itself by up to 0.1 %."
    )
    assert "| 5 % (vacuous, sees 5 %) |" in to_markdown(wide)
    assert "| 0.05 % (flaky, sees 0.05 %) |" in to_markdown(narrow)
    assert "  5 %~ " in to_text(wide)
    assert " 0.05 %! " in to_text(narrow)


def test_one_baseline_says_nothing_of_noise() -> None:
    checks = [Check(what="norm", where="clip", kinds=(Kind.GRAD_NORM,), form="rel", rel=0.5)]
    comparison = compare(BASES[:1], [norm_run("opt-0", 2.1, "bbbb")], None, checks=checks)
    assert (comparison.checks[0].fit, comparison.outcome) == ("", Outcome.EQUIVALENT)


def test_what_is_above_a_declared_bound_is_different_without_calibration() -> None:
    comparison = declared("rel", 2.1, rel=0.01)
    assert (comparison.outcome, comparison.checks[0].verdict) == (Outcome.DIFFERENT, Verdict.ABOVE)
    assert comparison.reason.startswith(
        "1 quantity is above a declared tolerance: grad_norm/grad_norm is 5 times its tolerance. "
    )


@pytest.mark.parametrize(
    ("form", "bounds", "values"),
    [
        ("rel", {"rel": 0.01}, "difference 5 %, tolerance 1 %, expected 2, actual 2.1"),
        ("abs", {"abs": 0.01}, "difference 0.1 abs, tolerance 0.01 abs, expected 2, actual 2.1"),
        ("ratio", {"ratio": 1.02}, "difference 1.05x, tolerance 1.02x, expected 2, actual 2.1"),
    ],
)
def test_the_first_divergence_is_told_in_the_unit_of_the_form(form: str, bounds: dict[str, float], values: str) -> None:
    assert f"  {values}\n" in to_text(declared(form, 2.1, **bounds))


def test_what_is_above_a_bound_that_the_unmodified_code_exceeds_is_inconclusive() -> None:
    comparison = declared("rel", 2.004, rel=0.0005)
    assert (comparison.outcome, comparison.checks[0].verdict) == (Outcome.INCONCLUSIVE, Verdict.ABOVE)
    assert comparison.reason.startswith(
        "1 quantity is above a declared tolerance that the unmodified code exceeds by itself: "
        "grad_norm/grad_norm is 4 times its tolerance. "
    )
    assert comparison.more_runs == (
        "Declare a tolerance above the spread, or leave the check to calibration (form = 'calibrated')."
    )


def test_candidates_that_disagree_about_a_declared_bound_are_inconclusive() -> None:
    checks = [Check(what="norm", where="clip", kinds=(Kind.GRAD_NORM,), form="rel", rel=0.01)]
    opts = [norm_run("opt-0", 2.1, "bbbb"), norm_run("opt-1", 2.0, "bbbb")]
    comparison = compare(BASES[:1], opts, None, checks=checks)
    assert comparison.outcome is Outcome.INCONCLUSIVE
    assert comparison.reason.startswith(
        "1 quantity is above a declared tolerance in one candidate and within in another: "
    )
    assert compare(BASES[:1], opts[:1] * 2, None, checks=checks).outcome is Outcome.DIFFERENT


def test_edits_of_a_plan_since_calibration_are_listed(tmp_path: Path) -> None:
    def check(what: str, **fields: object) -> Check:
        return Check(what=what, where="", select=("grad_norm/*",), **fields)  # type: ignore[arg-type]

    before = [
        check("norm", form="rel", rel=0.02),
        check("norm", form="abs", abs=0.1, steps=parse_steps("2-")),
        check("gone", form="ratio", ratio=20.0),
        check("same", form="abs", abs=1.0),
        check("calibrated"),
    ]
    now = [check("norm", form="rel", rel=0.05), check("same", form="abs", abs=1.0), check("new", form="rel", rel=0.5)]
    save(calibrate(BASES, checks=before), tmp_path / "t.toml")
    tolerances = load(tmp_path / "t.toml")
    assert tolerances.declared == bounds_of(before)
    assert edits(tolerances.declared, before) == []
    listed = [
        "Check 'gone' allowed 20x when the tolerances were calibrated, and is not declared now.",
        "Check 'new' allows 50 %, and was not declared when the tolerances were calibrated.",
        "Check 'norm' allows 5 %, and allowed 2 %; 0.1 abs at steps 2- when the tolerances were calibrated.",
    ]
    assert edits(tolerances.declared, now) == listed
    # The plan's edits are notes of the comparison.
    plan = [*now, Check(what="rest", where="", select=("*",))]
    comparison = compare(
        BASES[:1], [norm_run("opt-0", 2.0, "bbbb")], calibrate(BASES, checks=[*before, plan[-1]]), checks=plan
    )
    assert [note for note in comparison.notes if "when the tolerances were calibrated" in note] == listed
