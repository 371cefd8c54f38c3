"""The first divergence, its origin and the sentences about it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from synthetic import Fault, SyntheticCapture, breaks, run
from test_calibrate import baselines
from test_compare import BASE, candidate, judged, only

from probe.judge.calibrate import calibrate
from probe.judge.compare import compare
from probe.judge.comparison import FirstDivergence, Origin, Place, Shown
from probe.point import Key, Kind
from probe.store.layout import StepRows


def located(*candidates: SyntheticCapture) -> FirstDivergence:
    found = judged(*candidates).first_divergence
    assert found is not None
    return found


def both(*faults: Fault) -> Fault:
    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> object:
        for one in faults:
            value = one(key, step, rank, value)  # type: ignore[assignment]
        return value

    return fault


def test_the_inner_module_is_named_and_not_the_one_that_contains_it() -> None:
    found = located(candidate(fault=breaks(Kind.FORWARD, "blocks.1.attn", step=2)))
    assert found.place == Place(step=2, rank=0, kind=Kind.FORWARD, name="blocks.1.attn", microbatch=0, order=3)
    assert (found.ranks, found.phase, found.origin) == ((0, 1), "forward", Origin.HERE)
    assert found.difference == pytest.approx(0.01, rel=0.2)
    assert found.because.startswith(
        "Everything compared before it in the step is within tolerance, last forward/blocks.0 ("
    )
    assert found.after == "After it, 34 of 38 values of step 2 are off, and 40 of 46 in later steps."
    assert found.next == (
        "Look at the code that feeds 'blocks.1.attn' (what is no module there can be named with `probe.tap`; new "
        "values have no tolerance until you calibrate with them: compare without -t)."
    )
    assert found.keep == ("forward/blocks.0", "forward/blocks.1", "forward/blocks.1.*")
    assert found.ahead == "forward/blocks.0"
    assert found.shown is Shown.L2_NORM


@pytest.mark.parametrize(
    ("kind", "name", "keep"),
    [
        (Kind.LOSS, "micro_loss", ("forward/blocks.2", "loss/micro_loss")),
        (Kind.BACKWARD, "blocks.1.attn", ("backward/blocks.1", "backward/blocks.1.*")),
        (Kind.FORWARD, "blocks.1", ("forward/blocks.1.attn", "forward/blocks.1", "forward/blocks.1.*")),
        (
            Kind.GRAD,
            "blocks.0.lora_A.weight",
            (
                "backward/blocks.0.attn",
                "grad/blocks.0.lora_A.weight",
            ),
        ),
        (Kind.PARAM, "blocks.1.lora_A.weight", ("param/blocks.1.lora_A.weight", "grad/blocks.1.lora_A.weight")),
        (Kind.GRAD_NORM, "grad_norm", ()),
    ],
)
def test_what_is_worth_keeping_whole_is_what_enters_the_place_and_what_surrounds_it(
    kind: Kind, name: str, keep: tuple[str, ...]
) -> None:
    assert located(candidate(fault=breaks(kind, name, step=2))).keep == keep


def test_a_wrong_loss_says_how_its_function_can_be_recorded() -> None:
    assert located(candidate(fault=breaks(Kind.LOSS, "micro_loss", step=2))).next == (
        "Look at the code between the model's output and 'micro_loss' (functions there can be recorded by name, "
        "`calls` in a plan; new values have no tolerance until you calibrate with them: compare without -t)."
    )


def test_something_that_the_candidate_lacks_is_looked_for_and_not_kept_whole() -> None:
    lost = located(candidate(fault=only(Kind.GRAD, "blocks.1.lora_A.weight", lambda value: None)))
    assert (lost.actual, lost.keep, lost.next) == (
        "missing",
        (),
        "Find out why the candidate has no grad of 'blocks.1.lora_A.weight' at step 1.",
    )


@pytest.mark.parametrize(
    ("kind", "name", "phase"),
    [
        (Kind.LOSS, "micro_loss", "loss"),
        (Kind.BACKWARD, "blocks.2", "backward"),
        (Kind.GRAD, "blocks.0.lora_A.weight", "backward"),
        (Kind.GRAD_NORM, "grad_norm", "clipping"),
        (Kind.PARAM, "blocks.1.lora_A.weight", "optimizer update"),
    ],
)
def test_the_phase_says_where_in_the_step(kind: Kind, name: str, phase: str) -> None:
    found = located(candidate(fault=breaks(kind, name, step=2)))
    assert (found.place.kind, found.place.name, found.place.step, found.phase) == (kind, name, 2, phase)


def test_a_wrong_schedule_is_found_at_its_first_step() -> None:
    found = located(candidate(fault=only(Kind.LR, "lr", lambda value: value * 1.1, step=2)))
    assert (found.place.kind, found.place.step, found.phase) == (Kind.LR, 2, "schedule")
    assert found.next == "Compare how 'lr' is set in the two arms before step 2."


def test_a_fault_on_one_rank_names_the_rank() -> None:
    found = located(candidate(fault=breaks(Kind.FORWARD, "blocks.0.attn", ranks=[1])))
    assert (found.place.rank, found.ranks) == (1, (1,))


def test_gradients_that_ranks_do_not_agree_on_were_reduced_wrongly() -> None:
    def unreduced(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        if key.kind is not Kind.GRAD or key.name != "blocks.2.lora_A.weight":
            return value
        return value * (1.5 + rank)

    found = located(candidate(fault=unreduced))
    assert (found.place.kind, found.place.name, found.phase) == (
        Kind.GRAD,
        "blocks.2.lora_A.weight",
        "gradient reduction",
    )


def test_clipping_that_only_the_candidate_does_comes_after_the_gradients_and_their_norm() -> None:
    def clipped(rows: StepRows) -> StepRows:
        grads = [n for n, key in enumerate(rows.keys) if key.kind is Kind.GRAD]
        pick = np.array([*range(len(rows.keys)), *grads])
        keys = (*rows.keys, *(replace(rows.keys[n], item="clipped") for n in grads))
        by = np.where(np.arange(len(pick)) < len(rows.keys), 1.0, 0.5)
        return replace(
            rows,
            keys=keys,
            **{name: tuple(getattr(rows, name)[i] for i in pick) for name in ("dtype", "shape", "text", "where")},
            **{name: getattr(rows, name)[pick] for name in ("numel", "nonfinite", "sample", "hash")},
            order=np.arange(len(pick), dtype=np.int32),
            value=rows.value[pick] * by,
            sketch=(rows.sketch[pick] * by[:, None]).astype(np.float32),
            scalars={name: values[pick] * by for name, values in rows.scalars.items()},
        )

    found = located(candidate().edited(clipped))
    assert (found.place.kind, found.place.item, found.phase) == (Kind.GRAD, "clipped", "clipping")
    also_norm = candidate(fault=breaks(Kind.GRAD_NORM, "grad_norm", spreads=False)).edited(clipped)
    assert located(also_norm).place.kind is Kind.GRAD_NORM


def test_a_difference_of_state_explains_the_first_divergence() -> None:
    def state_first(rows: StepRows) -> StepRows:
        return replace(rows, order=np.array([-1 if k.kind is Kind.STATE else n for n, k in enumerate(rows.keys)]) + 1)

    fault = both(
        only(Kind.STATE, "train_mode", lambda value: value - 7, step=2), breaks(Kind.FORWARD, "blocks.1", step=2)
    )
    base = [each.edited(state_first) for each in BASE]
    found = compare(base, [candidate(fault=fault).edited(state_first)], calibrate(base)).first_divergence
    assert found is not None
    assert (found.place.kind, found.place.name, found.phase) == (Kind.FORWARD, "blocks.1", "state")
    assert found.because.endswith(" State differs in the same step: train_mode is 0, expected 7.")


def test_state_alone_is_its_own_place() -> None:
    found = located(candidate(fault=only(Kind.STATE, "train_mode", lambda value: value - 7)))
    assert (found.place.kind, found.place.name, found.phase) == (Kind.STATE, "train_mode", "state")


def test_what_could_not_be_compared_just_before_makes_the_origin_unknown() -> None:
    fault = both(breaks(Kind.FORWARD, "blocks.1", step=2), only(Kind.FORWARD, "blocks.1.attn", lambda value: None))
    found = located(candidate(fault=fault))
    assert (found.place.name, found.origin) == ("blocks.1", Origin.UNKNOWN)
    assert re.fullmatch(
        r"forward/blocks\.0 is within tolerance \([0-9.]+ x its tight tolerance\)\. Between it and this place, 1 value "
        r"that the baseline has could not be compared: forward/blocks\.1\.attn\.",
        found.because,
    )


def test_a_quantity_slightly_off_just_before_is_said_to_be_the_origin() -> None:
    tight = calibrate(BASE).members()["forward/blocks.0"].spread[1]

    def slightly(value: np.ndarray) -> np.ndarray:
        return value * (1 + 5 * tight)

    fault = both(breaks(Kind.FORWARD, "blocks.1.attn", step=2), only(Kind.FORWARD, "blocks.0", slightly, step=2))
    found = located(candidate(fault=fault))
    assert (found.place.name, found.origin) == ("blocks.1.attn", Origin.BEFORE)
    assert found.because.startswith("forward/blocks.0, recorded just before it, is slightly off already (")


def test_luck_ahead_of_an_overwhelming_fault_is_not_the_first_divergence() -> None:
    tight = calibrate(BASE).members()["forward/blocks.0.attn"].spread[0]
    lucky = only(Kind.FORWARD, "blocks.0.attn", lambda value: value * (1 + 4 * tight), step=1)
    found = located(candidate(fault=both(lucky, breaks(Kind.FORWARD, "blocks.2.attn", step=2, size=0.3))))
    assert (found.place.name, found.place.step) == ("blocks.2.attn", 2)


def test_what_may_be_luck_ahead_of_the_place_is_said() -> None:
    tight = calibrate(BASE).members()["forward/blocks.0.attn"].spread[0]
    lucky = only(Kind.FORWARD, "blocks.0.attn", lambda value: value * (1 + 5 * tight), step=1)
    found = located(candidate(fault=both(lucky, breaks(Kind.FORWARD, "blocks.2.attn", step=1, size=0.3))))
    assert (found.place.name, found.origin) == ("blocks.2.attn", Origin.HERE)
    assert re.fullmatch(
        r"The last compared before it, forward/blocks\.1, is within tolerance \([0-9.]+ x its tight tolerance\); the "
        r"highest before it, forward/blocks\.0\.attn, is at [12]\.?[0-9]* x, which may be chance\.",
        found.because,
    )


def test_only_what_all_candidates_share_is_located() -> None:
    shared = breaks(Kind.FORWARD, "blocks.2", step=2)
    alone = both(breaks(Kind.FORWARD, "blocks.0", step=1, spreads=False), breaks(Kind.FORWARD, "blocks.2", step=2))
    found = located(candidate("opt-0", fault=shared), candidate("opt-1", seed=101, fault=alone))
    assert (found.place.name, found.place.step) == ("blocks.2", 2)


def test_initial_parameters_that_differ_come_first() -> None:
    def other(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        return value + 1e-3 if key.item == "before" or key.kind is Kind.PARAM else value

    found = located(candidate(fault=other))
    assert (found.place.item, found.phase, found.origin) == ("before", "state", Origin.HERE)
    assert found.because == "The parameter differs before the first recorded step."


def test_the_second_microbatch_is_named() -> None:
    base = baselines(microbatches=2)

    def fault(key: Key, step: int, rank: int, value: np.ndarray) -> np.ndarray:
        wrong = key.microbatch == 1 and key.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.LOSS)
        return value * 1.01 if wrong and key.name != "loss_scale" else value

    opt = run("opt", run_seed=9, microbatches=2, code="bbbb", fault=fault)
    found = compare(base, [opt], calibrate(base)).first_divergence
    assert found is not None
    assert (found.place.microbatch, found.place.name) == (1, "blocks.0.attn")


def test_nothing_is_located_when_everything_is_within() -> None:
    assert judged(candidate()).first_divergence is None
