"""The whole protocol in one process: baseline, perturbed repeats, calibration, candidate, verdict.

Where a red result could be chance, more repeats are run at once, so that a test is either red or green. This module
must not know pytest, and must not print.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from probe.capture.perturb import Perturbation, parse
from probe.check import Check
from probe.equivalence.arm import Arm, undisturbed
from probe.equivalence.explain import times_allowed
from probe.equivalence.memory import MemoryCapture
from probe.equivalence.noise import allow_noise, noise_check, noise_of
from probe.equivalence.options import OWN
from probe.equivalence.run import Job, is_low_precision, run
from probe.errors import listed
from probe.judge.calibrate import calibrate
from probe.judge.cells import Judgement
from probe.judge.compare import compare_cells
from probe.judge.comparison import Comparison, Outcome
from probe.judge.outcome import ENOUGH_BASELINES, ENOUGH_CANDIDATES, FAR
from probe.judge.tolerance import Tolerances
from probe.measure.series import CaptureLike, perturbation
from probe.point import Key, Kind

REPEATS = 3
"""Perturbed repeats to begin with, as many as the runs that are asked of a training job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A baseline and what was calibrated from it."""

    plain: tuple[MemoryCapture, ...]
    perturbed: tuple[MemoryCapture, ...]
    tolerances: Tolerances


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a check found."""

    comparison: Comparison
    judgements: tuple[Judgement, ...]
    checks: tuple[Check, ...]
    tolerances: Tolerances
    recorded: Recorded | None = None
    """The baseline, where it was recorded for this check."""

    def with_note(self, note: str) -> Result:
        """Return the result with one more note."""
        return replace(self, comparison=replace(self.comparison, notes=(*self.comparison.notes, note)))


def record_baseline(
    make: Callable[[str, Perturbation | None], MemoryCapture],
    *,
    repeats: int,
    k: float,
    checks: Sequence[Check],
    known: Recorded | None = None,
) -> Recorded:
    """Run the baseline plainly, perturb it, and calibrate.

    Args:
        make: Runs the baseline under a name.
        repeats: Perturbed repeats; as many plain ones are made where plain runs are not bit-identical.
        k: Multiple of the spread.
        checks: Rows of the table.
        known: What was run before, and is not run again.
    """
    plain = list(known.plain) if known else [make("baseline", None), make("baseline again", None)]
    # Noise of the weights alone under-covers 16-bit types, where every layer rounds (the notes of the fault zoo).
    form = "layer" if is_low_precision(plain[0]) else "ulp"
    perturbed = list(known.perturbed) if known else []
    perturbed += [
        make(f"baseline {form}:{seed}", Perturbation(form=form, seed=seed))
        for seed in range(len(perturbed) + 1, repeats + 1)
    ]
    tolerances = calibrate([*plain, *perturbed], k=k, checks=checks)
    if not tolerances.repeatable and len(plain) < repeats:
        plain += [make(f"baseline again {count}", None) for count in range(len(plain), repeats)]
        tolerances = calibrate([*plain, *perturbed], k=k, checks=checks)
    # A test may well have the same data on all ranks and in all steps: that scrambled runs are not told apart is no
    # news there.
    tolerances = replace(allow_noise(tolerances, plain[0].keys()), self_test={})
    return Recorded(plain=tuple(plain), perturbed=tuple(perturbed), tolerances=tolerances)


def check_in_process(
    baseline: Arm,
    candidate: Arm,
    job: Job,
    *,
    k: float,
    checks: tuple[Check, ...],
    tolerances: Tolerances | None,
    known: Recorded | None = None,
) -> Result:
    """Compare two callables.

    Args:
        baseline: The unmodified code.
        candidate: The changed code.
        job: What both do.
        k: Multiple of the spread.
        checks: Rows of the table.
        tolerances: Judge by these; None: calibrate.
        known: The baseline from an earlier check with the same state and job, which is not recorded again.
    """
    with undisturbed([baseline, candidate]) as state:

        def make(name: str, how: Perturbation | None) -> MemoryCapture:
            return run(baseline, job, state, name=name, how=how)

        if tolerances is not None:
            plain = make("baseline", None)
            return judged([plain], [run(candidate, job, state, name="candidate")], tolerances, checks)
        recorded = known or record_baseline(make, repeats=REPEATS, k=k, checks=checks)
        candidates = [run(candidate, job, state, name="candidate")]
        result = judged(recorded.plain[:1], candidates, recorded.tolerances, checks)
        if result.comparison.outcome is Outcome.INCONCLUSIVE:
            recorded = record_baseline(make, repeats=ENOUGH_BASELINES, k=k, checks=checks, known=recorded)
            if not recorded.tolerances.repeatable:
                candidates += [
                    run(candidate, job, state, name=f"candidate {count}") for count in range(2, ENOUGH_CANDIDATES + 1)
                ]
            result = judged(recorded.plain[:1], candidates, recorded.tolerances, checks)

            def perturbed(how: Perturbation) -> MemoryCapture:
                return run(candidate, job, state, name=f"candidate {how}", how=how)

            result = elsewhere(result, recorded.perturbed, perturbed)
        return replace(result, recorded=recorded)


def elsewhere(
    result: Result, baselines: Sequence[CaptureLike], make: Callable[[Perturbation], MemoryCapture]
) -> Result:
    """Compare again with both arms perturbed alike: a result that is red by little counts only if it repeats.

    A sound kernel whose rounding is just as large as what is allowed is above once in a few hundred weights, and not
    at their neighbours; a fault is above at all of them. Repeating the same weights says nothing: it is bit-identical.

    Source: "both of two candidates fail", the project's statistics study, section 1.6; benchmarks/equivalence.py.

    Args:
        result: Returned as it is, unless something is above tolerance and nothing by more than `FAR` times.
        baselines: Perturbed runs of the baseline.
        make: Runs the candidate, perturbed.
    """
    if result.comparison.outcome in (Outcome.EQUIVALENT, Outcome.NOT_COMPARABLE):
        return result
    if result.comparison.coverage.reshaped or max(map(times_allowed, result.comparison.checks), default=0.0) > FAR:
        return result
    for baseline in baselines:
        how = parse(perturbation(baseline))
        if how is None:
            continue
        again = judged([baseline], [make(how)], result.tolerances, result.checks)
        if again.comparison.outcome is Outcome.EQUIVALENT:
            return again.with_note(
                f"Without perturbation it was not: {result.comparison.reason} With both moved by {how} everything is "
                "within (escalated)."
            )
    return result


def judged(
    baselines: Sequence[CaptureLike],
    candidates: Sequence[MemoryCapture],
    tolerances: Tolerances,
    checks: tuple[Check, ...],
) -> Result:
    """Compare, and let a candidate that has other insides than the baseline be judged by what both have."""
    checks = _rows(checks, noise_of(tolerances), [*baselines, *candidates])
    comparison, judgements = compare_cells(baselines, candidates, tolerances, checks=checks, same_code=True)
    if comparison.outcome is Outcome.NOT_COMPARABLE and comparison.coverage.missing:
        hidden = _hidden(baselines[0], candidates[0])
        if hidden:
            kept = [_in_memory(each, hidden, comparison) for each in baselines]
            comparison, judgements = compare_cells(kept, candidates, tolerances, checks=checks, same_code=True)
            note = (
                f"{len(hidden)} modules of the baseline are no modules of the candidate, or lie inside its compiled "
                f"regions, and are not compared: {listed(hidden)}."
            )
            comparison = replace(comparison, notes=(*comparison.notes, note))
    if comparison.first_divergence is not None:
        # What to record next is said for a training job, which this is not.
        comparison = replace(comparison, first_divergence=replace(comparison.first_divergence, next=""))
    return Result(comparison=comparison, judgements=judgements, checks=checks, tolerances=tolerances)


def _rows(checks: tuple[Check, ...], noise: tuple[str, ...], runs: Sequence[CaptureLike]) -> tuple[Check, ...]:
    """Put rounding first, and leave out rows of our own that have nothing left to judge."""
    own: tuple[Check, ...] = OWN
    if noise:
        own = (noise_check(noise), *OWN)
        checks = (own[0], *(check for check in checks if check != own[0]))
    keys = {key for run in runs for key in _keys(run)}
    used = {next((check for check in checks if check.selects(key)), None) for key in keys}
    return tuple(check for check in checks if check in used or check not in own)


def _keys(capture: CaptureLike) -> set[Key]:
    return {key for rank in capture.ranks for step in capture.steps(rank) for key in capture.rows(rank, step).keys}


def _hidden(baseline: CaptureLike, candidate: MemoryCapture) -> set[str]:
    """Name the modules whose outputs the baseline has and the candidate has not."""
    there, names = ({key.name for key in _keys(run) if key.kind is Kind.FORWARD} for run in (candidate, baseline))
    return names - there


def _in_memory(capture: CaptureLike, hidden: set[str], comparison: Comparison) -> MemoryCapture:
    whole = MemoryCapture(
        path=capture.path,
        manifest=capture.manifest,
        run_id=capture.run_id,
        world_size=capture.world_size,
        segments={(rank, step): capture.rows(rank, step) for rank in capture.ranks for step in capture.steps(rank)},
        problems=capture.problems,
    )
    inner = (Kind.FORWARD, Kind.BACKWARD)
    return whole.without({key for key in whole.keys() if key.kind in inner and key.name in hidden})  # noqa: SIM118
