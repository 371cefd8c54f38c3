"""Compare candidates with baselines: captures and tolerances in, a `Comparison` out.

The first baseline gives the expected values and every candidate is judged against it; all other pairs of runs are shown
beside them. This module must not print, and must not exit.

Shapes: S steps, R ranks, C cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from probe.check import NO_CHECK, Check, default_checks, owner, owners
from probe.errors import IncomparableError, ToleranceError, listed
from probe.judge import check_rows, provenance_changes
from probe.judge.cells import Judgement, assign, judge, spread_seen
from probe.judge.comparison import Calibration, Comparison, FirstDivergence, Outcome, PairSummary
from probe.judge.coverage import count_coverage
from probe.judge.fit import edits, fit_notes
from probe.judge.kernels import kernel_changes
from probe.judge.limits import Limits, edited, lay_out
from probe.judge.locate import locate
from probe.judge.outcome import Baselines, Gaps, decide
from probe.judge.tolerance import Tolerances
from probe.measure.differences import MISSING, Axes
from probe.measure.distance import ASSUMED_EPSILONS, EPSILON_FLOAT32
from probe.measure.loss_scale import MICRO_LOSS
from probe.measure.pairs import PairsMeasured, Runs, Spread, measure_pairs
from probe.measure.reduced import reduced
from probe.measure.series import BoolArray, CaptureLike, SeriesIndex
from probe.measure.whole import whole
from probe.point import Key, Kind


def compare(
    baselines: Sequence[CaptureLike],
    candidates: Sequence[CaptureLike],
    tolerances: Tolerances | None,
    *,
    checks: Sequence[Check] | None = None,
    same_code: bool = False,
) -> Comparison:
    """Judge candidates against the first baseline.

    Args:
        baselines: Runs of the unmodified code; the first gives the expected values.
        candidates: Runs of the branch. Only what is above tolerance in all of them is above.
        tolerances: From `probe.judge.calibrate`; None: assumed floors, by which nothing but bit-identity is equivalent.
        checks: Rows of the table; None: the default ones.
        same_code: Allow both arms to have run the same code with the same command.

    Raises:
        IncomparableError: The runs share no step, have different world sizes, or ran the same code.
        ToleranceError: The tolerances are of another job.
    """
    return compare_cells(baselines, candidates, tolerances, checks=checks, same_code=same_code)[0]


def compare_cells(
    baselines: Sequence[CaptureLike],
    candidates: Sequence[CaptureLike],
    tolerances: Tolerances | None,
    *,
    checks: Sequence[Check] | None = None,
    same_code: bool = False,
    spread: Spread | None = None,
    progress: Callable[[float], None] | None = None,
) -> tuple[Comparison, tuple[Judgement, ...]]:
    """Compare as `compare` does, and return the judgement of each candidate beside it, for plots of every cell.

    Args:
        spread: Where captures are read and measured; None: in this process.
        progress: Is told which part of that is done, from 0 to 1.
    """
    if not baselines or not candidates:
        raise IncomparableError(
            f"A comparison needs at least one run of each arm, and got {len(baselines)} baselines and "
            f"{len(candidates)} candidates."
        )
    provenance_changes.check_comparable(baselines, candidates, same_code=same_code)
    if tolerances is not None and not same_code:
        provenance_changes.check_not_calibrated_from(candidates, tolerances)
    checks = default_checks() if checks is None else checks
    runs = reduced([whole(run) for run in (*baselines, *candidates)], checks)
    axes = _axes(baselines, candidates)
    work = Runs(
        captures=tuple(runs),
        baselines=len(baselines),
        axes=axes,
        loss_tolerances=_loss_tolerances(tolerances, axes),
    )
    measured = measure_pairs(work, spread, progress)
    index = measured.pairs[0, len(baselines)].index
    limits = None if tolerances is None else _limits(tolerances, index, axes, checks, baselines[0])
    flaky = _flaky(measured, len(baselines), index, checks)
    seen = spread_seen([d for (_, two), d in measured.pairs.items() if two < len(baselines)], checks)
    known = _known_of(baselines, measured)
    assigned = assign(index, axes.steps, checks)
    judgements: list[Judgement] = []
    summaries_of_pairs: list[PairSummary] = []
    for one, two in list(measured.pairs):
        # A judgement of all cells is large: only the candidates' are kept.
        judgement = judge(measured.pairs.pop((one, two)), limits, checks, flaky, seen, assigned)
        summaries_of_pairs.append(_pair(runs, len(baselines), (one, two), judgement))
        if one == 0 and two >= len(baselines):
            judgements.append(judgement)
    rows = check_rows.rows(checks, judgements, limits)
    coverage = count_coverage([judgement.differences for judgement in judgements])
    decision = decide(
        judgements,
        rows,
        tolerances,
        _gaps(baselines[0], candidates, judgements),
        known,
    )
    located = locate(judgements) if decision.outcome in (Outcome.DIFFERENT, Outcome.INCONCLUSIVE) else None
    summaries = tuple(
        provenance_changes.run_summary(run, "baseline" if number < len(baselines) else "candidate")
        for number, run in enumerate([*baselines, *candidates])
    )
    comparison = Comparison(
        outcome=decision.outcome,
        reason=_reason(decision.reason, decision.outcome, located),
        checks=rows,
        first_divergence=located,
        coverage=coverage,
        runs=summaries,
        pairs=tuple(summaries_of_pairs),
        provenance_changes=(
            *provenance_changes.changes(baselines[0], candidates[0]),
            *kernel_changes(summaries[0].attention, summaries[len(baselines)].attention),
        ),
        notes=(
            *decision.notes,
            *fit_notes(rows),
            *_notes(baselines, candidates, judgements, measured, tolerances, index, flaky, checks),
        ),
        more_runs=decision.more_runs,
        wanted=decision.wanted,
        code=provenance_changes.code_change(baselines[0], candidates[0]),
        calibration=None if tolerances is None else Calibration(k=tolerances.k, runs=tolerances.runs),
    )
    return comparison, tuple(judgements)


def _known_of(baselines: Sequence[CaptureLike], measured: PairsMeasured) -> Baselines:
    of_pairs = [d for (_, two), d in measured.pairs.items() if two < len(baselines)]
    same = all(bool((d.identical | d.exact)[d.present].all()) and not d.absent.any() for d in of_pairs)
    return Baselines(
        count=len(baselines),
        repeat=same if of_pairs else None,
        perturbations=provenance_changes.perturbations(baselines[0]),
    )


def _axes(baselines: Sequence[CaptureLike], candidates: Sequence[CaptureLike]) -> Axes:
    axes = Axes.shared([*baselines, *candidates])
    if not axes.steps:
        one, two = baselines[0], candidates[0]
        raise IncomparableError(
            f"The runs have no step in common on any rank: {str(one.path)!r} has steps {_steps(one)} and "
            f"{str(two.path)!r} has {_steps(two)}. Record the same --steps in both."
        )
    return axes


def _steps(capture: CaptureLike) -> str:
    found = sorted({step for rank in capture.ranks for step in capture.steps(rank)})
    if not found:
        return "none"
    return f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0])


def _loss_tolerances(tolerances: Tolerances | None, axes: Axes) -> dict[int, float]:
    """Return the relative difference at which two losses agree, by step."""
    member = tolerances.members().get(f"loss/{MICRO_LOSS}") if tolerances else None
    assumed = ASSUMED_EPSILONS * EPSILON_FLOAT32
    if tolerances is None or member is None:
        return dict.fromkeys(axes.steps, assumed)
    at = np.minimum(np.searchsorted(np.array(tolerances.steps), np.array(axes.steps)), len(tolerances.steps) - 1)
    return {step: max(member.tolerance[int(i)], assumed) for step, i in zip(axes.steps, at, strict=True)}


def _limits(
    tolerances: Tolerances, index: SeriesIndex, axes: Axes, checks: Sequence[Check], baseline: CaptureLike
) -> Limits:
    if tolerances.world_size != baseline.world_size:
        raise ToleranceError(
            f"The tolerances are of another job: they were calibrated with {tolerances.world_size} ranks, and "
            f"{str(baseline.path)!r} has {baseline.world_size}. Calibrate with runs of this job."
        )
    factors = [None if one == NO_CHECK else checks[one].k for one in owners(checks, index.keys)]
    limits = lay_out(tolerances, index.keys, axes.steps, factors)
    if len(index) and not limits.known.any():
        raise ToleranceError(
            f"The tolerances are of another job: none of their {len(tolerances.members())} series is among the "
            f"{len(index)} of {str(baseline.path)!r}. Calibrate with runs of this job."
        )
    return limits


def _form(key: Key, checks: Sequence[Check]) -> str:
    number = owner(checks, key)
    return "record only" if number == NO_CHECK else checks[number].form


def _flaky(measured: PairsMeasured, baselines: int, index: SeriesIndex, checks: Sequence[Check]) -> BoolArray:
    """Find exact kinds that differ among the baselines themselves, [series]."""
    flaky = np.zeros(len(index), dtype=bool)
    for (_, two), d in measured.pairs.items():
        if two < baselines:
            unequal = (d.exact & d.present & ~d.identical).any(axis=(0, 1))
            np.logical_or.at(flaky, index.of_cell, unequal)
    for series in np.flatnonzero(flaky):
        key = index.keys[int(series)]
        flaky[series] = key.kind is not Kind.BATCH and _form(key, checks) != "record only"
    return flaky


def _gaps(baseline: CaptureLike, candidates: Sequence[CaptureLike], judgements: Sequence[Judgement]) -> Gaps:
    share = 1.0
    for judgement in judgements:
        d = judgement.differences
        there = int((d.present | (d.absent == MISSING)).sum())
        share = min(share, float((d.present & ~d.reshaped).sum()) / there if there else 0.0)
    stopped = interrupted = other_steps = ranks = ""
    for candidate in candidates:
        absent = sorted(set(baseline.ranks) - set(candidate.ranks))
        if absent:
            ranks = f"The candidate {str(candidate.path)!r} lacks rank {', '.join(map(str, absent))} of the baseline."
        lacking = {step for rank in baseline.ranks if rank in candidate.ranks for step in baseline.steps(rank)} - {
            step for rank in candidate.ranks for step in candidate.steps(rank)
        }
        if not lacking:
            continue
        text = (
            f"The candidate {str(candidate.path)!r} lacks step {', '.join(map(str, sorted(lacking)))} of the baseline"
        )
        wanted = [run.manifest.get("config", {}).get("steps") for run in (baseline, candidate)]
        status = candidate.manifest.get("exit_status")
        if status or candidate.problems:
            how = f"ended with status {status}" if status else "was interrupted"
            interrupted = f"{text}: its run {how}. Record it again."
        elif wanted[0] == wanted[1]:
            stopped = f"{text}: it stopped early."
        else:
            other_steps = f"{text}: it was told to record {wanted[1]!r}, not {wanted[0]!r}."
    return Gaps(matched_share=share, stopped=stopped, interrupted=interrupted, other_steps=other_steps, ranks=ranks)


def _pair(runs: Sequence[CaptureLike], baselines: int, pair: tuple[int, int], judgement: Judgement) -> PairSummary:
    one, two = pair
    relations = {(True, True): "baseline pair", (False, False): "candidate pair", (True, False): "cross pair"}
    excess = np.where(judgement.exact, np.nan, judgement.excess)
    where, ratio = "", float("nan")
    if not np.isnan(excess).all():
        s, r, cell = (int(i) for i in np.unravel_index(int(np.nanargmax(excess)), excess.shape))
        d = judgement.differences
        ratio = float(excess[s, r, cell])
        where = f"{d.keys[cell].label}, step {d.steps[s]}, rank {d.ranks[r]}" if ratio > 0 else ""
    return PairSummary(
        first=str(runs[one].path),
        second=str(runs[two].path),
        relation=relations[one < baselines, two < baselines],
        ratio=ratio,
        where=where,
    )


def _reason(reason: str, outcome: Outcome, located: FirstDivergence | None) -> str:
    if located is None:
        return reason
    place = located.place
    ranks = f"ranks {', '.join(map(str, located.ranks))}" if len(located.ranks) > 1 else f"rank {place.rank}"
    first = f"{place.kind.value} of {place.name} at step {place.step}, {ranks}"
    word = "The first divergence is" if outcome is Outcome.DIFFERENT else "Provisionally, the first divergence is"
    return f"{reason} {word} {first} ({located.phase})."


def _notes(
    baselines: Sequence[CaptureLike],
    candidates: Sequence[CaptureLike],
    judgements: Sequence[Judgement],
    measured: PairsMeasured,
    tolerances: Tolerances | None,
    index: SeriesIndex,
    flaky: BoolArray,
    checks: Sequence[Check],
) -> list[str]:
    notes = []
    if tolerances is None:
        notes.append("Nothing was calibrated: all tolerances are assumed floors. Give tolerances with -t.")
    else:
        if tolerances.assumed:
            notes.append("The baselines are bit-identical and none was perturbed: tolerances are assumed floors.")
        code = provenance_changes.code_hash(baselines[0])
        if code and any(run.code and run.code != code for run in tolerances.runs):
            notes.append("The tolerances were calibrated from other code than the baseline's.")
        if len(tolerances.runs) == provenance_changes.FEW_RUNS and not tolerances.assumed:
            notes.append(provenance_changes.few_runs(repeatable=tolerances.repeatable))
        changed = edited(tolerances, dict(zip(index.labels, index.keys, strict=True)))
        if changed:
            notes.append(f"Tolerances edited since calibration: {listed(changed)}.")
        if tolerances.declared:
            notes += edits(tolerances.declared, checks)
        for name, result in tolerances.self_test.items():
            if result == "not told apart":
                notes.append(f"The self-test failed: a baseline scrambled by {name} is not told from the baseline.")
    for scale, count in measured.scales.items():
        notes.append(
            f"The candidate's loss is scaled by {scale:.6g} in {count} microbatches; gradients before clipping are "
            "compared after dividing by it."
        )
    for (of_baseline, of_candidate), count in measured.cuts.items():
        notes.append(
            f"The candidate has {of_candidate} microbatches a step against {of_baseline}: outputs of modules and their "
            "gradients are compared by their norms over the step, which see a change of size and none of direction, "
            f"losses as sums over the step, and {count} values of single microbatches are not compared."
        )
    names = [index.labels[int(series)] for series in np.flatnonzero(flaky)]
    if names:
        notes.append(f"Exact values that differ among the baselines are not judged: {listed(names)}.")
    if any(judgement.after_data.any() for judgement in judgements):
        notes.append("The data differ, so that everything from that step on is not comparable.")
    unselected = check_rows.unselected(judgements[0], checks)
    if unselected:
        notes.append(f"{unselected} quantities belong to no check and were not judged.")
    code_differs = provenance_changes.code_hash(baselines[0]) != provenance_changes.code_hash(candidates[0])
    everything = judgements[0].differences
    if code_differs and everything.present.any() and bool(everything.identical[everything.present].all()):
        notes.append("The code differs, and every recorded value is bit-identical. Did the changed code run?")
    return notes
