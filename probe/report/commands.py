"""Whole command lines that a reader pastes: to repeat a comparison, to add runs, to narrow a divergence down.

They are made from what the captures recorded about themselves, quoted for a shell. A run that was not started by a
command has none, and then nothing is suggested rather than half a line. This module must not know which report it
writes for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from probe.judge.tolerance import K
from probe.report import words

if TYPE_CHECKING:
    from probe.judge.comparison import Comparison, FirstDivergence, RunSummary, Wanted

ADD_RUNS, NARROW_DOWN = "add runs", "narrow down"
FIRST_TOLERANCES = "tolerances/job.toml"
"""Where tolerances are suggested to go when there are none yet."""
_KEPT = "-full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One line to paste."""

    purpose: str
    """`add runs` or `narrow down`."""
    line: str
    arm: str = ""
    """`baseline` or `candidate`, whose code must be at hand; empty where that does not matter."""
    remark: str = ""
    """What to know before running it; empty: nothing new."""


def record_command(
    run: RunSummary,
    *,
    output: str = "",
    steps: str = "",
    full: Iterable[str] = (),
    perturb: str = "",
    plan: str = "",
) -> str:
    """Return the command line that records a run again.

    Args:
        run: What was recorded.
        output: Another folder than the run's own.
        steps: Other steps than the run's own.
        full: Selections of tensors to keep whole.
        perturb: Another perturbation than the run's own.
        plan: Plan file to record by.
    """
    steps, perturb = steps or words.steps(run.steps), perturb or run.perturb
    options = ["probe", "record", "-o", output or run.path]
    options += ["--seed", run.seed] if run.seed else []
    options += ["--steps", steps] if steps else []
    options += ["--step-offset", str(run.step_offset)] if run.step_offset else []
    options += ["--plan", plan] if plan else []
    for selection in full:
        options += ["--full", selection]
    options += ["--perturb", perturb] if perturb else []
    return f"{shlex.join(options)} -- {run.command or '...'}"


def reproduce(comparison: Comparison) -> list[str]:
    """Return the command lines that repeat the comparison, with a comment before each arm."""
    baselines = [run.path for run in comparison.runs if run.arm == "baseline"]
    candidates = [run.path for run in comparison.runs if run.arm == "candidate"]
    if not baselines or not candidates:
        return []
    if any(run.in_process for run in comparison.runs):
        return list(dict.fromkeys(run.command for run in comparison.runs if run.arm == "candidate" and run.command))
    lines = []
    for arm in ("baseline", "candidate"):
        runs = [run for run in comparison.runs if run.arm == arm]
        lines.append(f"# {arm}, commit {', '.join(dict.fromkeys(words.commit(run) for run in runs))}")
        lines += [record_command(run, plan=comparison.plan) for run in runs]
        calibrated = _calibrated_from(comparison)
        if arm == "baseline" and comparison.tolerances and len(calibrated) > 1:
            lines += [record_command(run, plan=comparison.plan) for run in _only_calibrated(comparison, runs[0])]
            lines.append(_calibrate(comparison, calibrated))
    return [*lines, _diff(comparison, baselines, candidates, comparison.tolerances)]


def next_commands(comparison: Comparison) -> list[Command]:
    """Return what to run next: the runs that would settle the verdict, then what narrows the divergence down."""
    found = comparison.first_divergence
    return [
        *(_added(comparison, comparison.wanted) if comparison.wanted else ()),
        *(_narrowing(comparison, found) if found is not None else ()),
    ]


def perturbed_calibration(
    runs: Sequence[RunSummary], perturbations: Iterable[str], *, output: str, plan: str = "", k: float = K
) -> list[str]:
    """Return the lines that measure what bit-identical runs do not show: perturbed runs, and a calibration with them.

    Args:
        runs: Runs of the unmodified code; nothing is returned where the first one was not started by a command.
        perturbations: Such as `ulp:1`.
        output: Tolerance file to replace.
        plan: Plan file whose checks name the families.
        k: Multiple of the spread.
    """
    if not runs or not runs[0].command:
        return []
    added = list(perturbed_runs(runs[0], perturbations, plan=plan))
    captures = [*(run.path for run in runs), *(path for path, _ in added)]
    return [*(line for _, line in added), calibrate_command(captures, output=output, plan=plan, k=k, force=True)]


def script(commands: Iterable[Command], purpose: str) -> list[str]:
    """Return the lines of one purpose, each remark as a comment before what it speaks of."""
    lines, said = [], ""
    for command in commands:
        if command.purpose != purpose:
            continue
        if command.remark and command.remark != said:
            lines.append(f"# {command.remark}")
        said = command.remark
        lines.append(command.line)
    return lines


def perturbed_runs(run: RunSummary, perturbations: Iterable[str], *, plan: str = "") -> Iterator[tuple[str, str]]:
    """Yield the folder and the command line of each perturbed run of the unmodified code."""
    for how in perturbations:
        output = str(PurePath(run.path).with_name(how.replace(":", "-")))
        yield output, record_command(run, output=output, perturb=how, plan=plan)


def _first(comparison: Comparison, arm: str) -> RunSummary | None:
    """Return an arm's first run, if it can be started again."""
    run = next((run for run in comparison.runs if run.arm == arm), None)
    return run if run is not None and run.command and not run.in_process else None


def _remark(run: RunSummary) -> str:
    return f"{run.arm}, commit {words.commit(run)}" if run.commit else f"the {run.arm}'s code"


def _calibrated_from(comparison: Comparison) -> list[str]:
    """Return the paths of the baselines that are compared and of the runs that the tolerances come from."""
    compared = {run.run_id: run.path for run in comparison.runs if run.arm == "baseline"}
    if comparison.calibration is None or not compared:
        return list(compared.values())
    # A tolerance file keeps names only: runs of one job lie beside each other.
    folder = PurePath(next(iter(compared.values())))
    paths = [compared.get(run.run_id, str(folder.with_name(run.path))) for run in comparison.calibration.runs]
    return list(dict.fromkeys([*compared.values(), *paths]))


def _only_calibrated(comparison: Comparison, like: RunSummary) -> Iterator[RunSummary]:
    """Yield the runs that the tolerances come from and that are not compared: seed and steps are those of one job."""
    for run, compared in words.calibration_runs(comparison):
        if not compared and run.command:
            path = str(PurePath(like.path).with_name(run.path))
            yield replace(like, path=path, run_id=run.run_id, command=run.command, perturb=run.perturb)


def _calibrate(comparison: Comparison, captures: Iterable[str], *, force: bool = False) -> str:
    return calibrate_command(
        captures,
        output=comparison.tolerances or FIRST_TOLERANCES,
        plan=comparison.plan,
        k=K if comparison.calibration is None else comparison.calibration.k,
        force=force or bool(comparison.tolerances),
    )


def calibrate_command(
    captures: Iterable[str], *, output: str, plan: str = "", k: float = K, force: bool = False
) -> str:
    """Return the command line that measures tolerances."""
    parts = ["probe", "calibrate", *captures, "-o", output]
    parts += ["--plan", plan] if plan else []
    parts += ["-k", f"{k:g}"] if k != K else []
    return shlex.join([*parts, *(["--force"] if force else [])])


def _diff(comparison: Comparison, baselines: list[str], candidates: list[str], tolerances: str) -> str:
    two = len(baselines) + len(candidates) == 2
    parts = ["probe", "diff", *baselines, *([] if two else ["--candidate"]), *candidates]
    parts += ["-t", tolerances] if tolerances else []
    return shlex.join([*parts, *(["--plan", comparison.plan] if comparison.plan else [])])


def _added(comparison: Comparison, wanted: Wanted) -> Iterator[Command]:
    baseline, candidate = _first(comparison, "baseline"), _first(comparison, "candidate")
    if baseline is None or candidate is None:
        return
    plan, remark = comparison.plan, _remark(baseline)
    baselines = _calibrated_from(comparison)
    candidates = [run.path for run in comparison.runs if run.arm == "candidate"]
    taken = {*baselines, *candidates}
    for _ in range(wanted.baselines):
        baselines.append(_numbered(baseline.path, taken))
        line = record_command(baseline, output=baselines[-1], plan=plan)
        yield Command(purpose=ADD_RUNS, line=line, arm="baseline", remark=remark)
    for output, line in perturbed_runs(baseline, wanted.perturbed, plan=plan):
        baselines.append(output)
        yield Command(purpose=ADD_RUNS, line=line, arm="baseline", remark=remark)
    if wanted.calibration:
        yield Command(purpose=ADD_RUNS, line=_calibrate(comparison, baselines), remark=remark)
    if wanted.if_identical:
        where = f"{remark}; only where these repeats are bit-identical"
        for output, line in perturbed_runs(baseline, wanted.if_identical, plan=plan):
            baselines.append(output)
            yield Command(purpose=ADD_RUNS, line=line, arm="baseline", remark=where)
        yield Command(purpose=ADD_RUNS, line=_calibrate(comparison, baselines, force=True), remark=where)
    for _ in range(wanted.candidates):
        candidates.append(_numbered(candidate.path, taken))
        line = record_command(candidate, output=candidates[-1], plan=plan)
        yield Command(purpose=ADD_RUNS, line=line, arm="candidate", remark=_remark(candidate))
    compared = [run.path for run in comparison.runs if run.arm == "baseline"]
    tolerances = comparison.tolerances or (FIRST_TOLERANCES if wanted.calibration else "")
    yield Command(purpose=ADD_RUNS, line=_diff(comparison, compared, candidates, tolerances), remark="compare again")


def _numbered(path: str, taken: set[str]) -> str:
    """Return the next free path with a number at its end: `base-3` after `base-0` to `base-2`."""
    digits = re.search(r"[0-9]*$", path)
    own = digits[0] if digits else ""
    stem = path.removesuffix(own) if own else f"{path}-"
    first = int(own or 0) + 1
    number = next(number for number in range(first, first + len(taken) + 1) if f"{stem}{number}" not in taken)
    taken.add(f"{stem}{number}")
    return f"{stem}{number}"


def _narrowing(comparison: Comparison, found: FirstDivergence) -> Iterator[Command]:
    baseline, candidate = _first(comparison, "baseline"), _first(comparison, "candidate")
    if baseline is None or candidate is None:
        return
    if not found.keep:
        yield from _shown(found, baseline, candidate)
        return
    kept = []
    for run in (baseline, candidate):
        kept.append(_beside(run.path))
        line = record_command(run, output=kept[-1], steps=str(found.place.step), full=found.keep, plan=comparison.plan)
        yield Command(purpose=NARROW_DOWN, line=line, arm=run.arm, remark=_remark(run))
    line = _diff(comparison, kept[:1], kept[1:], comparison.tolerances)
    yield Command(purpose=NARROW_DOWN, line=line, remark="compare again")


def _shown(found: FirstDivergence, baseline: RunSummary, candidate: RunSummary) -> Iterator[Command]:
    """Look at the values where recording more would not tell more."""
    name = f"{found.place.kind.value}/{found.place.name}"
    at = ["--step", str(found.place.step), "--rank", str(found.place.rank)]
    for run in (baseline, candidate):
        missing = run.arm == "candidate" and found.actual == "missing"
        parts = ["probe", "show", run.path, *(["--names"] if missing else [name]), *at]
        yield Command(purpose=NARROW_DOWN, line=shlex.join(parts))


def _beside(path: str) -> str:
    """Return a folder beside a capture for the same run with whole tensors: `base-0-full`, then `base-0-full-2`."""
    found = re.fullmatch(rf"(.*{_KEPT})(?:-([0-9]+))?", path)
    return f"{path}{_KEPT}" if found is None else f"{found[1]}-{int(found[2] or 1) + 1}"
