"""Comparisons that the report tests render: one for each outcome."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from probe.judge.comparison import (
    Calibration,
    CheckResult,
    CodeChange,
    Comparison,
    Coverage,
    FirstDivergence,
    Origin,
    Outcome,
    PairSummary,
    Place,
    RunSummary,
    Shown,
    Verdict,
    Wanted,
    Worst,
)
from probe.judge.tolerance import CalibratedRun
from probe.point import Kind
from probe.report.grid import CellGrid

NAN = float("nan")
METRIC = "l2 norm of the difference / l2 norm of the baseline"

BATCH = CheckResult(
    what="batch",
    where="inputs of the root module",
    form="exact",
    metric="equal or not",
    verdict=Verdict.IDENTICAL,
    difference=0.0,
    unit="",
    tolerance=0.0,
    spread=0.0,
    worst=None,
    quantities=3,
    cells=30,
    above=0,
    not_compared=0,
)
ATTENTION = CheckResult(
    what="attention outputs",
    where="outputs of attention modules",
    form="calibrated",
    metric=METRIC,
    verdict=Verdict.WITHIN,
    difference=0.0041,
    unit="relative",
    tolerance=0.0123,
    spread=0.00777,
    worst=Worst(
        place=Place(step=4, rank=1, kind=Kind.FORWARD, name="blocks.3.attn", item="[0]", microbatch=0, order=117),
        expected=12.3456,
        actual=12.3391,
        difference=0.0041,
        tolerance=0.0123,
        spread=0.00411,
        shown=Shown.L2_NORM,
    ),
    quantities=4,
    cells=1240,
    above=0,
    not_compared=0,
    smallest_detectable=0.0061,
    finest_detectable=0.00012,
)
LOSS = CheckResult(
    what="loss",
    where="each microbatch's loss, unrounded, as backward gets it",
    form="calibrated",
    metric="|difference| / median of the baseline",
    verdict=Verdict.WITHIN,
    difference=4.1e-7,
    unit="relative",
    tolerance=9.5e-7,
    spread=NAN,
    worst=Worst(
        place=Place(step=2, rank=0, kind=Kind.LOSS, name="micro_loss", microbatch=1, order=140),
        expected=0.6931471,
        actual=0.6931474,
        difference=4.1e-7,
        tolerance=9.5e-7,
    ),
    quantities=1,
    cells=20,
    above=0,
    not_compared=0,
    assumed=True,
)
STATE = replace(
    BATCH,
    what="state, not judged",
    where="random state, optimizer class, attention kernel",
    form="record only",
    verdict=Verdict.RECORDED_ONLY,
    difference=NAN,
    tolerance=NAN,
    spread=NAN,
    quantities=2,
    cells=20,
)
LONG = replace(
    BATCH,
    what="LoRA parameters of every block after step",
    where="after `optimizer.step`",
    spread=NAN,
    verdict=Verdict.NOT_COMPARABLE,
    difference=NAN,
    tolerance=NAN,
    quantities=0,
    cells=0,
    not_compared=8,
    not_compared_why="no quantity of this check is in both arms",
)

RUN = RunSummary(
    arm="baseline",
    path="captures/base-0",
    run_id="b0",
    ranks=2,
    world_size=2,
    steps=(1, 2, 3, 4, 5),
    command="accelerate launch --num_processes 2 train.py --lr 1e-4",
    seed="42",
    commit="0391d1c7aa11223344",
    dirty=False,
    created_utc="2026-05-04T10:00:00Z",
    environment={"torch": "2.14.1", "device": "cpu"},
)
CANDIDATE = replace(
    RUN,
    command="accelerate launch --num_processes 2 train.py --lr 1e-4 --fused",
    arm="candidate",
    path="captures/opt-0",
    run_id="c0",
    commit="ce9f454b00aabbcc",
    dirty=True,
    environment={"torch": "2.14.1", "device": "cuda"},
)
COVERAGE = Coverage(matched=5040)
CODE = CodeChange(
    changed=("model/attention.py", "model/mlp.py"), added=("model/fused.py",), outside=("/opt/kernels/rope.py",)
)

PASSING = Comparison(
    outcome=Outcome.EQUIVALENT,
    reason="The closest call is attention outputs, at 33 % of its tolerance (step 4, rank 1, blocks.3.attn).",
    checks=(BATCH, ATTENTION, LOSS, STATE),
    first_divergence=None,
    coverage=COVERAGE,
    runs=(RUN, replace(RUN, path="captures/base-1", run_id="b1"), CANDIDATE),
    pairs=(
        PairSummary(
            first="captures/base-0",
            second="captures/opt-0",
            relation="cross pair",
            ratio=0.33,
            where="blocks.3.attn, step 4",
        ),
        PairSummary(first="captures/base-1", second="captures/opt-0", relation="cross pair", ratio=0.2, where="loss"),
        PairSummary(first="captures/base-0", second="captures/base-1", relation="baseline pair", ratio=0.31, where=""),
    ),
    code=CodeChange(),
    tolerances="tolerances/job.toml",
)

ABOVE = replace(
    ATTENTION,
    verdict=Verdict.ABOVE,
    difference=0.213,
    above=31,
    worst=Worst(
        place=Place(step=1, rank=1, kind=Kind.FORWARD, name="blocks.2.attn", microbatch=0, order=77),
        expected=12.3456,
        actual=12.6012,
        difference=0.213,
        tolerance=0.0123,
        spread=0.00411,
        shown=Shown.L2_NORM,
    ),
)
NOT_FINITE = replace(
    LOSS,
    verdict=Verdict.NOT_FINITE,
    difference=NAN,
    cells=18,
    above=2,
    not_compared=2,
    not_compared_why="2 not finite",
    unjudged_failures=2,
    assumed=False,
    worst=replace(LOSS.worst, actual=NAN, difference=NAN),
)
DIVERGENCE = FirstDivergence(
    place=Place(step=1, rank=1, kind=Kind.FORWARD, name="blocks.2.attn", microbatch=0, order=77),
    ranks=(1,),
    difference=0.213,
    tolerance=0.00411,
    expected=12.3456,
    actual=12.6012,
    origin=Origin.HERE,
    phase="forward",
    because="What entered it, blocks.2.norm1, is within tolerance.",
    after="After it, 30 of 100 values of step 1 are off.",
    keep=("forward/blocks.2", "forward/blocks.2.*"),
    shown=Shown.L2_NORM,
)
CALIBRATION = Calibration(
    k=3.0,
    runs=tuple(
        CalibratedRun(run_id=f"b{number}", path=f"base-{number}", command=RUN.command, commit="0391d1c7aa11")
        for number in range(3)
    ),
)
FAILING = Comparison(
    outcome=Outcome.DIFFERENT,
    reason="3 quantities are more than 10 times above tolerance. The first divergence is blocks.2.attn.",
    checks=(BATCH, ABOVE, NOT_FINITE, replace(ATTENTION, what="norm outputs", vacuous=True, horizon=3), STATE, LONG),
    first_divergence=DIVERGENCE,
    coverage=Coverage(
        matched=4000,
        missing=tuple(f"forward/blocks.{number}.mlp" for number in range(12)),
        unexpected=("forward/blocks.0.fused|mlp",),
        reshaped=("forward/(root)",),
        retyped=("grad/blocks.0.attn.qkv_proj.lora_A.weight",),
        missing_cells=60,
        unexpected_cells=5,
        reshaped_cells=5,
    ),
    runs=(RUN, replace(CANDIDATE, problems=("rank 1 was not closed cleanly, last step 5",))),
    provenance_changes=("env ATTN_BACKEND: 'fa2' in the baseline, 'sdpa' in the candidate",),
    notes=("The loss of step 5 is not finite in the candidate.", "1 * 2 | 3"),
    code=CODE,
    calibration=CALIBRATION,
    tolerances="tolerances/job.toml",
)
INCONCLUSIVE = replace(
    FAILING,
    outcome=Outcome.INCONCLUSIVE,
    reason="1 quantity is above its tolerance, by less than 10 x.",
    checks=(replace(ABOVE, difference=0.02, assumed=True), BATCH),
    coverage=COVERAGE,
    provenance_changes=(),
    notes=(),
    more_runs="Record two more baselines and one more candidate, calibrate with all baselines, and compare all.",
    wanted=Wanted(baselines=2, candidates=1, calibration=True),
)
NOT_COMPARABLE = replace(
    PASSING,
    outcome=Outcome.NOT_COMPARABLE,
    reason="No check compared anything.",
    checks=(LONG,),
    coverage=Coverage(matched=0),
    runs=(RUN, CANDIDATE),
    pairs=(),
    code=None,
    tolerances="",
)

GRID = CellGrid(
    labels=("batch/input", "forward/blocks.1.attn", "forward/blocks.2.attn", "forward/<odd>&|`name`"),
    steps=(1, 2, 5),
    families=("batch", "attention outputs", "norm outputs"),
    family=np.array([0, 1, 1, 2]),
    ratio=np.array([[0.0, 0.0, 0.0], [0.2, 0.25, 0.4], [0.5, 40.0, 2.5], [0.005, np.inf, NAN]]),
    spread_ratio=np.array([[NAN, NAN, NAN], [0.1, 0.2, NAN], [0.3, 0.3, NAN], [0.2, 0.2, 0.2]]),
    rank=np.array([[0, 0, 0], [0, 1, 1], [0, 1, 1], [0, 1, -1]], dtype=np.int32),
)
