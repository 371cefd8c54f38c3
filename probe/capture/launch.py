"""Run any command with recording on in the processes below it, and say at the end what was recorded.

The command is not changed: a variable carries the request, and a folder at the head of PYTHONPATH makes each Python
process read it. This module imports no torch: the launcher stays out of the way of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from probe.capture.session import NOTES, REQUEST, Request
from probe.errors import CaptureError, listed
from probe.plan import default_plan, load_plan
from probe.store.folder import create_capture, write_manifest
from probe.store.reader import Capture, open_capture

NOTHING_RECORDED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """What `probe record` was asked to do."""

    output: Path
    command: tuple[str, ...]
    steps: str = ""
    """Steps to record, such as `1-5,10`; empty for all, or what the plan says."""
    seed: int | None = None
    plan: Path | None = None
    full: tuple[str, ...] = ()
    perturb: str = ""
    strict: bool = False
    force: bool = False


def record(options: RecordOptions) -> int:
    """Run the command and record it.

    Returns:
        The command's own exit status; 2 if that was 0 and nothing was recorded.

    Raises:
        CaptureError: The output exists, or the command cannot be started.
        PlanError: The plan, the steps or a selection is wrong.
    """
    plan = default_plan() if options.plan is None else load_plan(options.plan)
    plan = plan.narrowed(steps=options.steps or None, full=options.full)
    program = shutil.which(options.command[0])
    if program is None:
        raise CaptureError(
            f"Command {options.command[0]!r} was not found on PATH. "
            "Write the training command after `--` as it is run by hand."
        )
    create_capture(options.output, force=options.force)
    request = Request(
        output=str(options.output.resolve()),
        run_id=uuid.uuid4().hex,
        plan=plan.as_dict(),
        seed=options.seed,
        perturb=options.perturb,
        strict=options.strict,
        command=options.command,
        steps=options.steps,
    )
    status = _run(program, options.command, request)
    return _conclude(options.output, status)


def _environment(request: Request) -> dict[str, str]:
    environment = dict(os.environ)
    bootstrap = str(Path(__file__).parent / "bootstrap")
    earlier = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = bootstrap + (os.pathsep + earlier if earlier else "")
    environment[REQUEST] = request.to_json()
    environment["PROBE"] = "1"
    environment["PROBE_OUT"] = request.output
    return environment


def _run(program: str, command: tuple[str, ...], request: Request) -> int:
    child = subprocess.Popen([program, *command[1:]], env=_environment(request))

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    # An interrupt reaches the child by itself (same terminal group); the others are passed on.
    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status


def _notes(output: Path) -> list[dict[str, Any]]:
    folder = output / NOTES
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _conclude(output: Path, status: int) -> int:
    notes = _notes(output)
    try:
        capture = open_capture(output)
        recorded = bool(capture.ranks)
    except CaptureError:
        recorded = False
    if not recorded:
        print(nothing_recorded(output, notes), file=sys.stderr)
        _remove_if_empty(output)
        return status or NOTHING_RECORDED
    if status:
        write_manifest(output, {**capture.manifest, "exit_status": status})
    print(summary_line(capture, output), file=sys.stderr)
    for problem in capture.problems:
        print(f"probe: {problem}", file=sys.stderr)
    if any(note["problem"] for note in notes):
        return status or NOTHING_RECORDED
    return status


def _remove_if_empty(output: Path) -> None:
    # Whatever is in it is not ours to delete.
    with contextlib.suppress(OSError):
        output.rmdir()


def summary_line(capture: Capture, output: Path) -> str:
    """Say in one line what a capture holds."""
    steps = sorted({step for rank in capture.ranks for step in capture.steps(rank)})
    first = capture.ranks[0]
    quantities = len(capture.rows(first, capture.steps(first)[-1]).keys)
    nbytes = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    return (
        f"probe: recorded {_count(len(capture.ranks), 'rank')}, {_count(len(steps), 'step')}, "
        f"{_count(quantities, 'quantity', 'quantities')} a step, {_bytes(nbytes)} in {output}"
    )


def nothing_recorded(output: Path, notes: list[dict[str, Any]]) -> str:
    """Say why a run left nothing: what was looked for, and what of it was seen."""
    looked_for = (
        "optimizers constructed",
        "models found",
        "training forward passes",
        "backward passes",
        "optimizer steps",
    )
    lines = [f"Nothing was recorded in {str(output)!r}."]
    if not notes:
        lines.append(
            "No Python process below the command imported torch with recording on; "
            "a process started with -I, -E or -S, or killed by a signal, leaves no trace."
        )
    for note in notes:
        seen = ", ".join(f"{name} {note['events'].get(name, 0)}" for name in looked_for)
        lines.append(f"{note['program'] or 'python'}: {seen}.")
        if note["problem"]:
            lines.append(note["problem"])
    if notes:
        missing = [name for name in looked_for if not any(note["events"].get(name) for note in notes)]
        if missing:
            lines.append(f"Looked for and not found: {listed(missing)}.")
        elif not any(note["problem"] for note in notes):
            lines.append("Training steps were seen, but none among the steps to record; widen --steps.")
    return "\n".join(lines)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
