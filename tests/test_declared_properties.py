"""What holds of declared checks whatever the numbers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import SyntheticCapture, breaks, run
from test_compare import BASE, candidate

from probe.check import Check
from probe.judge.compare import compare
from probe.judge.comparison import Comparison, Outcome, Verdict
from probe.point import Kind
from probe.selection import parse_steps
from probe.store.layout import StepRows

few = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def check(what: str, select: str, **fields: object) -> Check:
    return Check(what=what, where="", select=(select,), **({"form": "rel", "rel": 1e-3} | fields))  # type: ignore[arg-type]


PLAN = (
    check("data", "batch/*", form="exact", rel=None),
    check("outputs", "forward/*"),
    check("mean outputs", "forward/*", metric=("mean_abs",)),
    check("first loss", "loss/micro_loss", steps=parse_steps("1")),
    check("later loss", "loss/micro_loss", steps=parse_steps("2-"), form="rel or abs", abs=1e-4),
    check("mean loss", "loss/micro_loss", over_ranks="mean"),
    check("window of losses", "loss/micro_loss", window=3),
    check("norm of gradients", "grad/*lora*", reduce="norm"),
    check("number of gradients", "grad/*lora*", reduce="count", form="exact", rel=None),
    check("blow-up", "grad_norm/*", form="ratio", rel=None, ratio=1.001),
    check("shown", "backward/*", form="record only", rel=None),
)
RELATIVE = tuple(one for one in PLAN if one.form != "rel or abs")


def judged(opt: SyntheticCapture, base: SyntheticCapture = BASE[0], checks: Sequence[Check] = PLAN) -> Comparison:
    return compare([base], [opt], None, checks=checks)


def test_sound_code_passes_the_plan_and_a_fault_does_not() -> None:
    assert judged(candidate()).outcome is Outcome.EQUIVALENT
    faulty = judged(candidate(fault=breaks(Kind.FORWARD, "blocks.1")))
    assert faulty.outcome is Outcome.DIFFERENT
    assert faulty.first_divergence is not None
    assert faulty.first_divergence.place.name == "blocks.1"


@few
@given(st.randoms(use_true_random=False), st.sampled_from([1e-6, 1e-3, 1e-1]))
def test_permuting_rows_and_ranks_changes_no_row_of_the_table(random: object, size: float) -> None:
    opt = candidate(fault=breaks(Kind.FORWARD, "blocks.1", step=2, size=size))

    def shuffled(rows: StepRows) -> StepRows:
        order = list(range(len(rows.keys)))
        random.shuffle(order)  # type: ignore[attr-defined]
        pick = np.array(order)
        names = ("keys", "dtype", "shape", "text", "where")
        arrays = ("order", "numel", "nonfinite", "value", "sketch", "sample", "hash")
        return replace(
            rows,
            **{name: tuple(getattr(rows, name)[row] for row in order) for name in names},
            **{name: getattr(rows, name)[pick] for name in arrays},
            scalars={name: values[pick] for name, values in rows.scalars.items()},
        )

    mixed = replace(opt, segments=dict(reversed(opt.segments.items()))).edited(shuffled)

    def told(found: Comparison) -> list[tuple[object, ...]]:
        # Sums in another order differ in the last bits.
        return [(row.what, row.verdict, row.cells, row.above, float(f"{row.difference:.6e}")) for row in found.checks]

    assert told(judged(mixed)) == told(judged(opt))


@few
@given(st.sampled_from([2.0**-30, 0.5, 8.0, 2.0**30]), st.sampled_from([1e-6, 5e-4, 1e-1]))
def test_scaling_every_value_of_both_arms_leaves_relative_verdicts(factor: float, size: float) -> None:
    def scaled(rows: StepRows) -> StepRows:
        by = np.where([key.name == "loss_scale" for key in rows.keys], 1.0, factor)
        return replace(
            rows,
            value=rows.value * by,
            scalars={name: values * by for name, values in rows.scalars.items()},
            sketch=(rows.sketch * by[:, None]).astype(np.float32),
        )

    opt = candidate(fault=breaks(Kind.LOSS, "micro_loss", size=size))
    plain, by_factor = (
        judged(opt, checks=RELATIVE),
        judged(opt.edited(scaled), BASE[0].edited(scaled), checks=RELATIVE),
    )
    assert [(row.what, row.verdict, row.above) for row in by_factor.checks] == [
        (row.what, row.verdict, row.above) for row in plain.checks
    ]


@few
@given(st.integers(0, 40), st.integers(1, 3), st.integers(0, 1), st.booleans())
def test_one_value_that_is_not_finite_never_passes(number: int, step: int, rank: int, infinite: bool) -> None:
    def spoiled(rows: StepRows) -> StepRows:
        if (rows.step, rows.rank) != (step, rank):
            return rows
        row = number % len(rows.keys)
        nonfinite, value = rows.nonfinite.copy(), rows.value.copy()
        nonfinite[row] = 1
        if rows.numel[row] == 1:
            value[row] = np.inf if infinite else np.nan
        return replace(rows, nonfinite=nonfinite, value=value)

    found = judged(candidate().edited(spoiled))
    assert found.outcome is Outcome.DIFFERENT
    assert judged(candidate(), BASE[0].edited(spoiled)).outcome is not Outcome.EQUIVALENT


@few
@given(st.floats(1e-9, 10.0), st.floats(1e-9, 10.0), st.floats(1e-5, 1.0), st.floats(1e-5, 1.0))
def test_the_forms_are_what_their_formulas_say(a: float, b: float, rel: float, bound: float) -> None:
    def norm(name: str, value: float, code: str) -> SyntheticCapture:
        def put(rows: StepRows) -> StepRows:
            return replace(rows, value=np.where([k.kind is Kind.GRAD_NORM for k in rows.keys], value, rows.value))

        return run(name, noise=0.0, steps=(1,), code=code).edited(put)

    off = abs(a - b)
    allowed = {
        "rel": off <= rel * b,
        "abs": off <= bound,
        "rel or abs": off <= rel * b or off <= bound,
        "rel + abs": off <= rel * b + bound,
        "ratio": max(a, b) / min(a, b) <= 1 + rel,
    }
    edges = (rel * b, bound, rel * b + bound, rel * min(a, b))
    if any(abs(off - edge) <= 1e-9 * max(off, edge) for edge in edges):
        return
    needs = {"rel": {"rel": rel}, "abs": {"abs": bound}, "ratio": {"ratio": 1 + rel}}
    both = {"rel": rel, "abs": bound}
    for form, passes in allowed.items():
        one = Check(what="x", where="", select=("grad_norm/*",), form=form, **needs.get(form, both))  # type: ignore[arg-type]
        row = judged(norm("c", a, "c"), norm("b", b, "b"), [one]).checks[0]
        assert (row.verdict in (Verdict.WITHIN, Verdict.IDENTICAL)) is passes, form


def test_a_scrambled_run_never_passes_the_plan() -> None:
    def early(rows: StepRows) -> StepRows:
        later = opt.segments[rows.rank, rows.step % 3 + 1]
        return replace(later, step=rows.step)

    def swapped(rows: StepRows) -> StepRows:
        return replace(opt.segments[1 - rows.rank, rows.step], rank=rows.rank)

    opt = candidate()
    scrambled = [
        opt.edited(early),
        opt.edited(swapped),
        candidate(data_seed=5),
        candidate(noise=1.0),
    ]
    assert all(judged(one).outcome in (Outcome.DIFFERENT, Outcome.NOT_COMPARABLE) for one in scrambled)
