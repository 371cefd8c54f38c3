"""Whether checks flag a known change, and whether that is what was calculated."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from synthetic import SyntheticCapture
from test_compare import BASE, TOLERANCES, candidate
from test_inject import with_tensors

from probe.check import Check, default_checks
from probe.cli import status_of
from probe.errors import IncomparableError
from probe.judge.calibrate import calibrate
from probe.judge.compare import compare
from probe.judge.inject import parse_injection
from probe.judge.power import CheckPower, Power, measure_power, unexpected
from probe.judge.tolerance import save
from probe.point import Kind
from probe.report.power import to_json, to_text
from probe.selection import parse_steps
from probe.store.layout import StepRows
from probe.store.writer import RankWriter, create_capture, write_manifest


def power(text: str, *checks: Check, itself: bool = False) -> Power:
    tolerances = calibrate(BASE, checks=checks) if checks else TOLERANCES
    into = BASE[0] if itself else candidate()
    return measure_power(BASE[:1], into, tolerances, parse_injection(text), checks=checks or default_checks())


def flagged(found: Power) -> list[str]:
    return [one.what for one in found.checks if one.flagged]


CALIBRATED = [
    "block outputs",
    "attention outputs",
    "loss",
    "gradients of block outputs",
    "gradients of other outputs",
    "LoRA gradients",
    "gradient norm",
    "learning rate",
    "LoRA parameters after step",
]
EXACT = ["batch", "initial parameters", "state"]


def test_a_large_factor_is_flagged_by_all_checks_and_a_small_one_by_those_that_are_exact() -> None:
    assert sorted(flagged(power("scale:1.01"))) == sorted(EXACT + CALIBRATED)
    assert sorted(flagged(power("scale:1.0000001"))) == EXACT


@pytest.mark.parametrize("itself", [False, True])
def test_the_judge_agrees_with_smallest_detectable_in_every_check(itself: bool) -> None:
    rows = {row.what: row.smallest_detectable for row in compare(BASE[:1], [candidate()], TOLERANCES).checks}
    for factor in (3.0, 1.6, 0.4, 0.1):
        for what in CALIBRATED:
            found = power(f"scale:{1 + factor * rows[what]:.12f}", itself=itself)
            one = next(one for one in found.checks if one.what == what)
            assert one.as_calculated, (what, factor, one)
            if what not in ("loss", "gradient norm", "learning rate"):  # A tensor is allowed a part of itself.
                assert one.flagged is (factor > 1)
        assert unexpected(found) == ""


def test_what_is_zero_is_passed_over_for_the_next_quantity() -> None:
    def zeroed(names: tuple[str, ...]) -> SyntheticCapture:
        def edit(rows: StepRows) -> StepRows:
            zero = np.array([key.kind is Kind.LR or key.name in names for key in rows.keys])
            scalars = {name: np.where(zero, 0.0, values) for name, values in rows.scalars.items()}
            sketch = np.where(zero[:, None], 0.0, rows.sketch).astype(np.float32)
            return replace(rows, value=np.where(zero, 0.0, rows.value), scalars=scalars, sketch=sketch)

        return candidate().edited(edit)

    def scaled(into: SyntheticCapture, what: str) -> CheckPower:
        found = measure_power([into], into, TOLERANCES, parse_injection("scale:1.01"), checks=default_checks())
        return next(one for one in found.checks if one.what == what)

    first = scaled(zeroed(()), "block outputs").label
    after = scaled(zeroed((first.partition("/")[2],)), "block outputs")
    assert (after.label != first, after.label.startswith("forward/blocks."), after.flagged) == (True, True, True)
    assert (scaled(zeroed(()), "learning rate").flagged, scaled(zeroed(()), "learning rate").why_not) == (
        None,
        "all of its values are zero",
    )


def test_a_disagreement_is_named() -> None:
    one = CheckPower(
        what="loss", label="loss/x", step=1, change=0.1, flagged=False, ratio=0.5, smallest_detectable=0.01, limit=0.01
    )
    found = Power(injection=parse_injection("scale:1.1"), into="opt", checks=(one,))
    assert one.as_calculated is False
    assert "The judge and the calculation disagree in 'loss'." in to_text(found)


def test_a_run_that_is_a_step_ahead_is_flagged_by_all_that_training_computes() -> None:
    found = power("shift-step")
    assert sorted(flagged(found)) == sorted(CALIBRATED)
    assert found.outcome == "different"


def test_a_dropped_rank_is_seen_by_the_comparison_as_a_whole() -> None:
    found = power("drop-rank")
    assert (found.outcome, found.checks) == ("not comparable", ())
    assert to_text(found) == (
        "Injected drop-rank:1 into opt-0.\n"
        "With the change, the comparison is not comparable. The candidate 'opt-0' lacks rank 1 of the baseline."
    )
    with pytest.raises(IncomparableError, match=r"leaves nothing of 'opt-0', which has 2 ranks\. Record more\."):
        power("drop-rank:2")


@pytest.mark.parametrize(
    ("fields", "at_1_percent"),
    [
        ({"metric": ("mean_abs",), "select": ("forward/*",)}, 0.01),
        ({"reduce": "norm", "select": ("grad/*",)}, 0.01),
        ({"reduce": "sum_squares", "select": ("grad/*",)}, 0.0201),
        ({"window": 2, "select": ("loss/micro_loss",)}, 0.01),
        ({"over_ranks": "mean", "select": ("loss/micro_loss",)}, 0.01),
        ({"window": 3, "over_ranks": "mean", "select": ("loss/micro_loss",)}, 0.01),
    ],
)
@pytest.mark.parametrize("rel", [0.015, 0.005])
def test_a_number_is_changed_through_all_that_it_is_made_of(
    fields: dict[str, object], at_1_percent: float, rel: float
) -> None:
    check = Check(what="x", where="", form="rel", rel=rel, **fields)  # type: ignore[arg-type]
    one = power("scale:1.01", check).checks[0]
    assert one.change == pytest.approx(at_1_percent)
    assert one.ratio == pytest.approx(at_1_percent / rel, rel=1e-3)
    assert (one.flagged, one.as_calculated) == (at_1_percent > rel, True)


def test_a_change_of_rows_needs_a_tensor_that_was_kept_whole() -> None:
    base = with_tensors()
    blocks = Check(what="blocks", where="", select=("forward/blocks.#",), form="rel", rel=0.1)
    late = Check(what="late", where="", select=("loss/*",), form="rel", rel=0.1, steps=parse_steps("2-"))
    found = measure_power([base], base, None, parse_injection("swap-tokens"), checks=(blocks, late))
    changed, untouched = found.checks
    assert (changed.label, changed.step, changed.flagged) == ("forward/blocks.1", 1, True)
    # Two tokens of forty trade places: each moves by sqrt(2) of its norm.
    assert changed.change == pytest.approx(math.sqrt(2) * math.sqrt(2 / 40), rel=0.3)
    assert changed.ratio * 0.1 == pytest.approx(changed.change, rel=0.2)
    assert (untouched.flagged, untouched.why_not) == (
        None,
        "no tensor is kept whole",
    )
    assert to_text(found).endswith(
        "\nTensors are kept whole with `probe record --full GLOB`.\n1 of 1 checks would have flagged it."
    )


def test_the_table_reads_like_this() -> None:
    check = Check(what="norm", where="", select=("grad_norm/*",), form="rel", rel=0.02)
    exact = Check(what="state", where="", select=("state/*",), form="exact")
    text = Check(what="text", where="", select=("loss/*",), form="record only")
    assert to_text(power("scale:1.01", check, exact, text)) == (
        "Injected scale:1.01 into opt-0.\n"
        "\n"
        "Check  Changed                      Change  Flagged  Difference / tolerance  Sees\n"
        "norm   grad_norm/grad_norm, step 1  1 %     no       0.5                     2 %\n"
        "state  state/train_mode, step 1     1 %     yes      unequal                 any\n"
        "\n"
        "Sees: a relative change by this much would be flagged in any quantity of the row, by calculation.\n"
        "1 of 2 checks would have flagged it."
    )
    assert json.loads(to_json(power("scale:1.01", check)))["checks"][0] == {
        "what": "norm",
        "label": "grad_norm/grad_norm",
        "step": 1,
        "change": pytest.approx(0.01),
        "flagged": False,
        "ratio": pytest.approx(0.5, rel=1e-3),
        "smallest_detectable": pytest.approx(0.02),
        "limit": pytest.approx(0.02),
        "why_not": "",
        "as_calculated": True,
    }


def written(capture: SyntheticCapture, folder: Path) -> Path:
    create_capture(folder)
    write_manifest(folder, {**capture.manifest, "run_id": capture.run_id, "world_size": capture.world_size})
    for rank in capture.ranks:
        writer = RankWriter(folder, run_id=capture.run_id, rank=rank, world_size=capture.world_size)
        for step in capture.steps(rank):
            writer.write(capture.rows(rank, step))
        writer.close(error=None, dropped_steps=[])
    return folder


def test_the_command_injects_into_a_candidate_or_into_a_capture_against_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, opt = written(BASE[0], tmp_path / "base-0"), written(candidate(), tmp_path / "opt-0")
    save(TOLERANCES, tmp_path / "t.toml")
    arguments = ["-t", str(tmp_path / "t.toml"), "--inject", "scale:1.01"]
    for captures, into in (([base, opt], opt), ([base], base)):
        assert status_of(["diff", *map(str, captures), *arguments]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"Injected scale:1.01 into {into}.\n")
        assert out.endswith("\n12 of 12 checks would have flagged it.\n")
    assert status_of(["diff", str(base), "--inject", "scael"]) == 2
    assert capsys.readouterr().err.startswith("Injection 'scael' has kind 'scael'. Did you mean 'scale'?")


def test_the_capture_itself_is_left_as_it_was() -> None:
    into = candidate()
    before = {place: rows.value.copy() for place, rows in into.segments.items()}
    measure_power(BASE[:1], into, TOLERANCES, parse_injection("scale:2"), checks=default_checks())
    assert all(np.array_equal(rows.value, before[place], equal_nan=True) for place, rows in into.segments.items())
