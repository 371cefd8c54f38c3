"""Whole command lines that a reader pastes: to repeat a comparison, to add runs, to narrow a divergence down.

They are made from what the captures recorded about themselves, quoted for a shell. A run that was not started by a
command has none, and then nothing is suggested rather than half a line. This module must not know which report it
writes for.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from probe.judge.tolerance import K
from probe.report import recorded, words
from probe.report.checkouts import Checkout, checkout
from probe.report.free_names import FreeNames
from probe.report.narrowing import INSIDE, KEEP, narrowing, recorded_plan

if TYPE_CHECKING:
    from probe.judge.comparison import Comparison, FirstDivergence, RunSummary, Wanted

ADD_RUNS, NARROW_DOWN = "add runs", "narrow down"
FIRST_TOLERANCES = "tolerances/job.toml"
"""Where tolerances are suggested to go when there are none yet."""
RECORDED_PLAN = "recorded.toml"
"""Where a plan is written that records what was recorded, where the compared runs had one and its file is not known."""
AGAIN, KEPT, OPENED = "again-", "full-", "inside-"
"""Beginnings of the names of new captures: the globs that name the compared ones do not pick them up."""
_HERE_DOCUMENT = "END"


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
    """Return the command lines that repeat the comparison in new folders, with a comment before each arm."""
    arms = {arm: [run for run in comparison.runs if run.arm == arm] for arm in ("baseline", "candidate")}
    if not all(arms.values()):
        return []
    if any(run.in_process for run in comparison.runs):
        return list(dict.fromkeys(run.command for run in arms["candidate"] if run.command))
    names, outputs, tolerances = _names(comparison), {}, comparison.tolerances
    written, plan = _plan(comparison, names, "")
    lines = script(written, "")
    for arm, other in (("baseline", "candidate"), ("candidate", "baseline")):
        runs = list(arms[arm])
        code = checkout(runs[0], arms[other][0])
        calibrated = _calibrated_from(comparison) if arm == "baseline" and comparison.tolerances else []
        if len(calibrated) > 1:
            runs += _only_calibrated(comparison, runs[0])
        lines.append(f"# {code.remark}")
        for run in runs:
            outputs[run.path] = names.beside(run.path, AGAIN)
            lines.append(_recorded(run, code, output=outputs[run.path], plan=plan))
        if len(calibrated) > 1:
            tolerances = names.beside(comparison.tolerances, AGAIN)
            lines.append(_calibrate(comparison, [outputs.get(path, path) for path in calibrated], tolerances))
    baselines, candidates = ([outputs[run.path] for run in runs] for runs in arms.values())
    return [*lines, _diff(comparison, baselines, candidates, tolerances)]


def next_commands(comparison: Comparison) -> list[Command]:
    """Return what to run next: the runs that would settle the verdict, then what narrows the divergence down."""
    found, names = comparison.first_divergence, _names(comparison)
    return [
        *(_added(comparison, comparison.wanted, names) if comparison.wanted else ()),
        *(_narrowing(comparison, found, names) if found is not None else ()),
    ]


def perturbed_calibration(
    runs: Sequence[RunSummary], perturbations: Iterable[str], *, output: str, plan: str = "", k: float = K
) -> list[str]:
    """Return the lines that measure what bit-identical runs do not show: perturbed runs, and a calibration with them.

    Args:
        runs: Runs of the unmodified code; nothing is returned where the first one was not started by a command.
        perturbations: Such as `ulp:1`.
        output: Tolerance file that there is; the new one is written beside it.
        plan: Plan file whose checks name the families.
        k: Multiple of the spread.
    """
    if not runs or not runs[0].command:
        return []
    names = FreeNames([*(run.path for run in runs), output])
    code = Checkout(remark="")
    added = list(_perturbed(runs[0], code, perturbations, names, plan=plan))
    captures = [*(run.path for run in runs), *(path for path, _ in added)]
    return [*(line for _, line in added), calibrate_command(captures, output=names.file(output), plan=plan, k=k)]


def script(commands: Iterable[Command], purpose: str) -> list[str]:
    """Return the lines of one purpose, each remark as a comment before what it speaks of."""
    lines, said = [], ""
    for command in commands:
        if command.purpose != purpose:
            continue
        if command.remark and command.remark != said:
            lines.append(f"# {command.remark}")
        said = command.remark
        lines += command.line.splitlines()
    return lines


def _perturbed(
    run: RunSummary, code: Checkout, perturbations: Iterable[str], names: FreeNames, *, plan: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the folder and the command line of each perturbed run of the unmodified code."""
    for how in perturbations:
        output = names.wanted(str(PurePath(run.path).with_name(how.replace(":", "-"))), AGAIN)
        yield output, _recorded(run, code, output=output, perturb=how, plan=plan)


def _recorded(
    run: RunSummary,
    code: Checkout,
    *,
    output: str,
    steps: str = "",
    full: Iterable[str] = (),
    perturb: str = "",
    plan: str = "",
) -> str:
    """Return the command line that records a run again in the code of its arm."""
    output, plan = code.path(output), code.path(plan)
    return code(record_command(run, output=output, steps=steps, full=full, perturb=perturb, plan=plan))


def _names(comparison: Comparison) -> FreeNames:
    """Return free names: what the comparison is made of is taken even where it is not on this machine."""
    taken = [*(run.path for run in comparison.runs), *_calibrated_from(comparison)]
    return FreeNames([*taken, *([comparison.tolerances] if comparison.tolerances else [])])


def _first(comparison: Comparison, arm: str) -> RunSummary | None:
    """Return an arm's first run, if it can be started again."""
    run = next((run for run in comparison.runs if run.arm == arm), None)
    return run if run is not None and run.command and not run.in_process else None


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


def _calibrate(comparison: Comparison, captures: Iterable[str], output: str) -> str:
    k = K if comparison.calibration is None else comparison.calibration.k
    return calibrate_command(captures, output=output, plan=comparison.plan, k=k)


def calibrate_command(captures: Iterable[str], *, output: str, plan: str = "", k: float = K) -> str:
    """Return the command line that measures tolerances."""
    parts = ["probe", "calibrate", *captures, "-o", output]
    parts += ["--plan", plan] if plan else []
    return shlex.join([*parts, *(["-k", f"{k:g}"] if k != K else [])])


def _diff(comparison: Comparison, baselines: list[str], candidates: list[str], tolerances: str) -> str:
    two = len(baselines) + len(candidates) == 2
    parts = ["probe", "diff", *baselines, *([] if two else ["--candidate"]), *candidates]
    parts += ["-t", tolerances] if tolerances else []
    return shlex.join([*parts, *(["--plan", comparison.plan] if comparison.plan else [])])


def _compare_again(*codes: Checkout) -> str:
    switched = any(code.switch and not code.folder for code in codes)
    return "compare again; `git switch BRANCH` brings you back to your branch" if switched else "compare again"


def _added(comparison: Comparison, wanted: Wanted, names: FreeNames) -> Iterator[Command]:
    baseline, candidate = _first(comparison, "baseline"), _first(comparison, "candidate")
    if baseline is None or candidate is None:
        return
    code, changed = checkout(baseline, candidate), checkout(candidate, baseline)
    written, plan = _plan(comparison, names, ADD_RUNS)
    yield from written
    calibrated = _calibrated_from(comparison)
    lost = {run.path: run for run in _only_calibrated(comparison, baseline) if _is_lost(run, baseline)}
    baselines = [path for path in calibrated if path not in lost]
    candidates = [run.path for run in comparison.runs if run.arm == "candidate"]

    def of_baseline(line: str, remark: str = "") -> Command:
        return Command(purpose=ADD_RUNS, line=line, arm="baseline", remark=remark or code.remark)

    for run in lost.values() if wanted.calibration else ():
        baselines.append(names.beside(run.path, AGAIN))
        yield of_baseline(_recorded(run, code, output=baselines[-1], plan=plan))
    for _ in range(wanted.baselines):
        baselines.append(names.next(baseline.path, AGAIN))
        yield of_baseline(_recorded(baseline, code, output=baselines[-1], plan=plan))
    for output, line in _perturbed(baseline, code, wanted.perturbed, names, plan=plan):
        baselines.append(output)
        yield of_baseline(line)
    tolerances = comparison.tolerances
    if wanted.calibration:
        tolerances = names.new_file(tolerances or FIRST_TOLERANCES)
        yield of_baseline(_calibrate(comparison, baselines, tolerances))
    if wanted.if_identical:
        where = f"{code.remark}; only where these repeats are bit-identical"
        for output, line in _perturbed(baseline, code, wanted.if_identical, names, plan=plan):
            baselines.append(output)
            yield of_baseline(line, where)
        instead = names.new_file(FIRST_TOLERANCES)
        yield of_baseline(_calibrate(comparison, baselines, instead), where)
    for _ in range(wanted.candidates):
        candidates.append(names.next(candidate.path, AGAIN))
        line = _recorded(candidate, changed, output=candidates[-1], plan=plan)
        yield Command(purpose=ADD_RUNS, line=line, arm="candidate", remark=changed.remark)
    compared = [run.path for run in comparison.runs if run.arm == "baseline"]
    again = _compare_again(code, changed)
    if wanted.if_identical:
        again += f"; where the repeats were bit-identical, with -t {shlex.quote(instead)}"
    yield Command(purpose=ADD_RUNS, line=_diff(comparison, compared, candidates, tolerances), remark=again)


def _is_lost(run: RunSummary, baseline: RunSummary) -> bool:
    """Say whether a run that the tolerances come from is not where it was, or another one is there."""
    there = recorded.run_id(run.path)
    return there != run.run_id if there else bool(recorded.run_id(baseline.path))


def _narrowing(comparison: Comparison, found: FirstDivergence, names: FreeNames) -> Iterator[Command]:
    baseline, candidate = _first(comparison, "baseline"), _first(comparison, "candidate")
    if baseline is None or candidate is None:
        return
    how = narrowing(comparison)
    if how.what not in (KEEP, INSIDE):
        yield from _shown(found, baseline, candidate)
        return
    again = comparison.tolerances
    if how.what == INSIDE:
        plan, again = names.new_file(how.plan_file), ""
        yield Command(purpose=NARROW_DOWN, line=_written(plan, how.plan), remark="a plan that looks inside")
    else:
        written, plan = _plan(comparison, names, NARROW_DOWN)
        yield from written
    codes = {run.arm: checkout(run, other) for run, other in ((baseline, candidate), (candidate, baseline))}
    outputs = []
    for run in (baseline, candidate):
        outputs.append(names.beside(run.path, KEPT if how.what == KEEP else OPENED))
        full = found.keep if how.what == KEEP else ()
        step = str(found.place.step)
        line = _recorded(run, codes[run.arm], output=outputs[-1], steps=step, full=full, plan=plan)
        yield Command(purpose=NARROW_DOWN, line=line, arm=run.arm, remark=codes[run.arm].remark)
    remark = _compare_again(*codes.values())
    if how.what == INSIDE and comparison.tolerances:
        remark += "; without -t, for the tolerances know nothing of what is inside"
    line = _diff(comparison, outputs[:1], outputs[1:], again)
    yield Command(purpose=NARROW_DOWN, line=line, remark=remark)


def _plan(comparison: Comparison, names: FreeNames, purpose: str) -> tuple[list[Command], str]:
    """Return the plan file to record by; where it is not known, what writes one that records the same."""
    if comparison.plan or not (text := recorded_plan(comparison.runs[0])):
        return [], comparison.plan
    path = names.new_file(RECORDED_PLAN)
    return [Command(purpose=purpose, line=_written(path, text), remark="the plan of the compared runs")], path


def _written(path: str, text: str) -> str:
    """Return the lines that write a plan file."""
    return f"cat > {shlex.quote(path)} <<'{_HERE_DOCUMENT}'\n{text.rstrip()}\n{_HERE_DOCUMENT}"


def _shown(found: FirstDivergence, baseline: RunSummary, candidate: RunSummary) -> Iterator[Command]:
    """Look at the values where recording more would not tell more."""
    name = f"{found.place.kind.value}/{found.place.name}"
    at = ["--step", str(found.place.step), "--rank", str(found.place.rank)]
    for run in (baseline, candidate):
        missing = run.arm == "candidate" and found.actual == "missing"
        parts = ["probe", "show", run.path, *(["--names"] if missing else [name]), *at]
        yield Command(purpose=NARROW_DOWN, line=shlex.join(parts))
