"""The table that `probe calibrate` prints."""

from __future__ import annotations

from dataclasses import replace

from probe.judge.tolerance import CalibratedRun, Tolerance, Tolerances
from probe.report.calibration import NOT_INFORMATIVE, SELF_TEST, calibration_table

MEMBER = Tolerance(spread=(0.001, 0.002), floor=(1e-6, 1e-6), tolerance=(0.003, 0.006), control=1.2)
QUIET = Tolerance(spread=(0.0, 0.0), floor=(1e-6, 1e-6), tolerance=(1e-6, 1e-6), mark="insensitive")
RUN = CalibratedRun(run_id="a", path="base-0")
TOLERANCES = Tolerances(
    k=3.0,
    created_utc="2026-05-04T10:00:00Z",
    steps=(1, 2),
    world_size=2,
    runs=(RUN, replace(RUN, run_id="b"), replace(RUN, run_id="c", perturb="ulp:1")),
    families={
        "attention outputs": {"forward/a": MEMBER, "forward/b": QUIET},
        "learning rate": {"lr/lr": QUIET},
        "calls": {},
    },
    self_test={"step shift": "different", "rank rotation": "not run"},
    notes=("The runs' commands differ.",),
)


def test_each_family_is_a_line_with_spread_tolerance_and_zero_spread() -> None:
    assert (
        calibration_table(TOLERANCES)
        == f"""\
Family             Members  Largest spread     Tolerance       Zero spread  Not informative
attention outputs  2        0.2 %              1e-06 to 0.6 %  1            1
learning rate      1        0 (bit-identical)  1e-06           1            1

Runs: 2 plain and 1 perturbed; steps 1-2; tolerance = 3 x spread.
{NOT_INFORMATIVE}
Self-test, step shift: different.
Self-test, rank rotation: not run (it takes two ranks).
{SELF_TEST}
Note: The runs' commands differ."""
    )


def test_the_words_of_the_table_are_explained() -> None:
    assert NOT_INFORMATIVE == (
        "Not informative: members whose passing proves little: a scrambled run is within the tolerance, or hardly "
        "above it, or nothing was measured for it."
    )
    assert SELF_TEST == (
        "Self-test: the first baseline against itself, scrambled; tolerances that do not find it different would find "
        "no fault either."
    )
    telling = replace(TOLERANCES, families={"attention outputs": {"forward/a": MEMBER}}, self_test={})
    assert not any(text in calibration_table(telling) for text in (NOT_INFORMATIVE, SELF_TEST))


def test_assumed_tolerances_are_called_assumed_and_the_runs_to_add_are_named() -> None:
    assumed = replace(TOLERANCES, assumed=True, runs=(RUN,), notes=())
    assert calibration_table(assumed, ["probe record -o ulp-1 --perturb ulp:1 -- CMD"]).splitlines()[-8:-4] == [
        "Runs: 1 plain; steps 1-2; tolerance = 3 x spread.",
        "Assumed: the runs are bit-identical, so these tolerances are floors that nothing was measured for.",
        "To measure them, record the unmodified code perturbed (--perturb) and calibrate again:",
        "  probe record -o ulp-1 --perturb ulp:1 -- CMD",
    ]
    assert "To measure them" not in calibration_table(assumed)
