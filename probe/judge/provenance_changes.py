"""Whose code, data and settings two captures are of, and how these differ between the arms.

Provenance is compared before any number: the commonest way to a false PASS is that the branch never ran. This module
must not know quantities.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from probe.errors import IncomparableError, ToleranceError, listed
from probe.judge.command_change import command_change
from probe.judge.comparison import CodeChange, RunSummary
from probe.judge.kernels import attention_kernels, kernel_summary
from probe.judge.tolerance import CalibratedRun, Tolerances
from probe.measure.series import CaptureLike, perturbation
from probe.point import Kind

OF_ONE_LAUNCH = ("env.TORCHELASTIC_ERROR_FILE", "env.TORCHELASTIC_RUN_ID", "env.MASTER_PORT")
"""What a launcher makes up anew each time: no difference between arms."""
MOST_CHANGES = 40
"""Lines of configuration differences that are listed."""
HALF = ("bfloat16", "float16")
FEW_RUNS = 2
"""So many runs make one pair, and its difference can be small by luck."""


def _part(capture: CaptureLike, name: str) -> Mapping[str, Any]:
    part = capture.manifest.get(name)
    return part if isinstance(part, Mapping) else {}


def command_text(capture: CaptureLike) -> str:
    """Return the recorded command, quoted for a shell."""
    command = _part(capture, "config").get("command") or []
    return command if isinstance(command, str) else shlex.join(map(str, command))


def code_hash(capture: CaptureLike) -> str:
    """Return the hash of the code that ran, or an empty text."""
    code = _part(capture, "provenance").get("code")
    return str(code.get("hash") or "") if isinstance(code, Mapping) else ""


def code_files(capture: CaptureLike) -> Mapping[str, str]:
    """Return the hash of each file of code that ran, by path inside its tree."""
    code = _part(capture, "provenance").get("code")
    files = code.get("files") if isinstance(code, Mapping) else None
    roots = [str(tree.get("root", "")).rstrip("/") + "/" for tree in trees(capture) if tree.get("root")]
    relative = {}
    for path, digest in files.items() if isinstance(files, Mapping) else ():
        root = max((root for root in roots if path.startswith(root)), key=len, default="")
        relative[path[len(root) :]] = str(digest)
    return relative


def code_change(baseline: CaptureLike, candidate: CaptureLike) -> CodeChange | None:
    """Sort the files of code that differ between two runs; None where one of them does not say what code ran."""
    one, two = code_files(baseline), code_files(candidate)
    if not one or not two:
        return None
    differing = _changed_files(baseline, candidate)
    inside = [name for name in differing if not os.path.isabs(name)]
    return CodeChange(
        changed=tuple(name for name in inside if name in one and name in two),
        added=tuple(name for name in inside if name not in one),
        removed=tuple(name for name in inside if name not in two),
        outside=tuple(name for name in differing if os.path.isabs(name)),
    )


def in_half_precision(capture: CaptureLike) -> bool:
    """Tell whether a run computes in bf16 or fp16, where noise in the weights alone calibrates too tightly."""
    rank = next((rank for rank in capture.ranks if capture.steps(rank)), None)
    if rank is None:
        return False
    rows = capture.rows(rank, capture.steps(rank)[0])
    return any(key.kind is Kind.FORWARD and dtype in HALF for key, dtype in zip(rows.keys, rows.dtype, strict=True))


def perturbations(capture: CaptureLike, first: int = 1, count: int = 3) -> tuple[str, ...]:
    """Return how to perturb a run of this job, e.g. `ulp:1`, `ulp:2` and `ulp:3`."""
    form = "layer" if in_half_precision(capture) else "ulp"
    return tuple(f"{form}:{number}" for number in range(first, first + count))


def trees(capture: CaptureLike) -> Sequence[Mapping[str, Any]]:
    """Return the source trees that the run's modules came from."""
    found = _part(capture, "provenance").get("trees")
    return [tree for tree in found if isinstance(tree, Mapping)] if isinstance(found, Sequence) else []


def commit_text(capture: CaptureLike) -> str:
    """Return the commits of the source trees, shortened and joined."""
    return ", ".join(str(tree["commit"])[:12] for tree in trees(capture) if tree.get("commit"))


def calibrated_run(capture: CaptureLike) -> CalibratedRun:
    """Return the line of a run in a tolerance file."""
    return CalibratedRun(
        run_id=capture.run_id,
        path=capture.path.name,
        created_utc=str(capture.manifest.get("created_utc") or ""),
        command=command_text(capture),
        commit=commit_text(capture),
        code=code_hash(capture),
        perturb=perturbation(capture),
    )


def run_summary(capture: CaptureLike, arm: str) -> RunSummary:
    """Return the line of a run in a report."""
    steps = sorted({step for rank in capture.ranks for step in capture.steps(rank)})
    dirty = [tree.get("dirty") for tree in trees(capture) if tree.get("dirty") is not None]
    seed = _part(capture, "config").get("seed")
    kernels = attention_kernels(capture)
    return RunSummary(
        arm=arm,
        path=str(capture.path),
        run_id=capture.run_id,
        ranks=len(capture.ranks),
        world_size=capture.world_size,
        steps=tuple(steps),
        command=command_text(capture),
        seed="" if seed is None else str(seed),
        commit=commit_text(capture),
        dirty=any(dirty) if dirty else None,
        perturb=perturbation(capture),
        created_utc=str(capture.manifest.get("created_utc") or ""),
        environment={
            **{name: str(value) for name, value in flat(environment(capture)).items()},
            **({"attention": kernel_summary(kernels)} if kernels else {}),
        },
        attention=kernels,
        problems=tuple(capture.problems),
        step_offset=int(_part(capture, "config").get("step_offset") or 0),
        in_process=bool(_part(capture, "config").get("in_process")),
    )


def environment(capture: CaptureLike) -> dict[str, Any]:
    """Return what a run's numbers may depend on besides code and command: versions, device, variables."""
    provenance = _part(capture, "provenance")
    found = {name: provenance[name] for name in ("versions", "device", "launcher", "attention") if name in provenance}
    if _part(capture, "env"):
        found["env"] = _part(capture, "env")
    return found


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Flatten nested mappings into dotted names.

    >>> flat({"versions": {"torch": "2.14.1"}})
    {'versions.torch': '2.14.1'}
    """
    if not isinstance(value, Mapping):
        return {name: value}
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out.update(flat(inner, f"{name}.{key}" if name else str(key)))
    return out


def check_same_job(captures: Sequence[CaptureLike]) -> tuple[str, ...]:
    """Check that runs are separate launches of one job, as a calibration needs.

    Returns:
        Warnings: commands that differ, problems of the runs.

    Raises:
        ToleranceError: Fewer than two runs, one run given twice, other world sizes, other code.
    """
    if len(captures) < 2:
        raise ToleranceError(
            f"A calibration needs repeated runs and got {len(captures)}. Record the unmodified code three times "
            "(two at the least) as separate launches."
        )
    paths: dict[str, str] = {}
    for capture in captures:
        if capture.run_id in paths:
            raise ToleranceError(
                f"The captures {paths[capture.run_id]!r} and {str(capture.path)!r} are the same run "
                f"{capture.run_id!r}. Record each baseline as a launch of its own."
            )
        paths[capture.run_id] = str(capture.path)
    first = captures[0]
    notes = []
    for capture in captures[1:]:
        if capture.world_size != first.world_size:
            raise ToleranceError(
                f"The runs have different world sizes: {first.world_size} in {str(first.path)!r} and "
                f"{capture.world_size} in {str(capture.path)!r}. Calibrate runs of one job."
            )
        if code_hash(capture) and code_hash(first) and code_hash(capture) != code_hash(first):
            raise ToleranceError(
                f"The runs are of different code: {str(first.path)!r} and {str(capture.path)!r} differ in "
                f"{listed(_changed_files(first, capture)) or 'the code hash'}. Calibrate runs of one unmodified code."
            )
        if command_text(capture) != command_text(first):
            notes.append(
                f"The command of {capture.path.name} differs from that of {first.path.name}: "
                f"{command_change(command_text(first), command_text(capture))}."
            )
    for capture in captures:
        notes += [f"{capture.path.name}: {problem}" for problem in capture.problems]
    return tuple(notes)


def few_runs(*, repeatable: bool) -> str:
    """Say that tolerances were measured from `FEW_RUNS`, and which to add."""
    missing = "two more perturbed ones" if repeatable else "a third one"
    return f"Two runs were calibrated from. Record {missing}: the spread of a single pair can be small by luck."


def check_comparable(baselines: Sequence[CaptureLike], candidates: Sequence[CaptureLike], *, same_code: bool) -> None:
    """Check that two arms can be compared at all.

    Raises:
        IncomparableError: A run is in both arms, world sizes differ, or both arms ran the same code with the same
            command and that was not asked for.
    """
    for baseline in baselines:
        for candidate in candidates:
            if baseline.run_id == candidate.run_id:
                raise IncomparableError(
                    f"The captures {str(baseline.path)!r} and {str(candidate.path)!r} are the same run "
                    f"{baseline.run_id!r}. Give the capture of another launch."
                )
            if baseline.world_size != candidate.world_size:
                raise IncomparableError(
                    f"The world sizes differ: {baseline.world_size} in {str(baseline.path)!r} and "
                    f"{candidate.world_size} in {str(candidate.path)!r}. Record both with the same number of ranks."
                )
            same = code_hash(baseline) and code_hash(baseline) == code_hash(candidate)
            if same and command_text(baseline) == command_text(candidate) and not same_code:
                raise IncomparableError(
                    f"The captures {str(baseline.path)!r} and {str(candidate.path)!r} ran the same code (hash "
                    f"{code_hash(baseline)!r}) with the same command, so the branch never ran. Check which tree the "
                    "candidate imported; give --same-code if this is meant."
                )


def check_not_calibrated_from(candidates: Sequence[CaptureLike], tolerances: Tolerances) -> None:
    """Check that no candidate is a run that the tolerances were made from: it is within them by construction.

    Raises:
        IncomparableError: One is.
    """
    runs = {run.run_id for run in tolerances.runs}
    for candidate in candidates:
        if candidate.run_id in runs:
            raise IncomparableError(
                f"The candidate {str(candidate.path)!r} is one of the runs that the tolerances were calibrated from, "
                "so that it is within them whatever it holds. Give the capture of the branch as the candidate, after "
                "the baseline; give --same-code if this is meant."
            )


def changes(baseline: CaptureLike, candidate: CaptureLike) -> tuple[str, ...]:
    """List what differs between the arms besides the numbers: command, seed, code, versions, device, environment."""
    lines = []
    if command_text(baseline) != command_text(candidate):
        lines.append(f"command: {command_change(command_text(baseline), command_text(candidate))}")
    for name in ("seed", "steps", "plan", "perturb"):
        one, two = _part(baseline, "config").get(name), _part(candidate, "config").get(name)
        if one != two:
            lines.append(f"{name}: {one!r} -> {two!r}")
    if code_hash(baseline) != code_hash(candidate):
        lines.append(f"code: {_files_text(_changed_files(baseline, candidate))}")
    if commit_text(baseline) != commit_text(candidate):
        lines.append(f"commit: {commit_text(baseline) or 'none'} -> {commit_text(candidate) or 'none'}")
    one_flat, two_flat = flat(environment(baseline)), flat(environment(candidate))
    for name in sorted(one_flat.keys() | two_flat.keys()):
        before, after = one_flat.get(name, "absent"), two_flat.get(name, "absent")
        if before != after and name not in OF_ONE_LAUNCH:
            lines.append(f"{name}: {before} -> {after}")
    if len(lines) > MOST_CHANGES:
        lines = [*lines[:MOST_CHANGES], f"and {len(lines) - MOST_CHANGES} more"]
    return tuple(lines)


def _files_text(files: Sequence[str]) -> str:
    if not files:
        return "another hash"
    inside = [name for name in files if not os.path.isabs(name)]
    outside = [name for name in files if os.path.isabs(name)]
    count = "1 file differs" if len(files) == 1 else f"{len(files)} files differ"
    parts = [listed(inside)] if inside else []
    parts += [f"{len(outside)} outside the source trees ({listed(outside, most=2)})"] if outside else []
    return f"{count}: {'; '.join(parts)}"


def _changed_files(one: CaptureLike, two: CaptureLike) -> list[str]:
    files_one, files_two = code_files(one), code_files(two)
    return sorted(name for name in files_one.keys() | files_two.keys() if files_one.get(name) != files_two.get(name))
