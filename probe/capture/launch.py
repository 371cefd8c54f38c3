"""Run any command with recording on in the processes below it, and say at the end what was recorded.

The command is not changed: a variable carries the request, and a folder at the head of PYTHONPATH makes each Python
process read it. This module imports no torch: the launcher stays out of the way of the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from probe.capture.session import REQUEST, Request
from probe.errors import CaptureError, listed
from probe.plan import Plan, default_plan, load_plan
from probe.selection import glob_pattern, matches, split_kind
from probe.store.folder import create_capture, write_manifest
from probe.store.layout import NAMES_FILE, NOTES_FOLDER, rank_folder
from probe.store.problems import read_json
from probe.store.reader import Capture, open_capture

NOTHING_RECORDED = 2
LAST_LINES = 20
"""Lines of a log that an error message shows."""


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
    step_offset: int = 0
    """Steps trained before the checkpoint that the run goes on from."""
    steps_per_file: int | None = None
    """Steps that each rank folds into one file; None: what the plan says."""
    strict: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where a command runs; by default as in the shell that calls."""

    folder: Path | None = None
    """Working directory; None: the current one."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Variables of the command, before those that make it record."""
    log: Path | None = None
    """File that gets what the command prints; None: it prints as it would by hand."""
    inherit: tuple[int, ...] = ()
    """Descriptors that stay open in the command, such as that of a lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a launched command ended."""

    status: int
    """Its exit status; 128 + N when signal N ended it."""
    signal: int
    """Signal that asked this process to stop meanwhile; 0: none."""
    capture: Capture | None
    """What was recorded; None: nothing."""
    notes: tuple[dict[str, Any], ...]
    """What each process saw."""


def record(options: RecordOptions) -> int:
    """Run the command, record it, and say on stderr what was recorded.

    Returns:
        The command's own exit status; 2 if that was 0 and nothing was recorded.

    Raises:
        CaptureError: The output exists, or the command cannot be started.
        PlanError: The plan, the steps or a selection is wrong.
    """
    plan = default_plan() if options.plan is None else load_plan(options.plan)
    asked = plan.narrowed(steps=options.steps or None, full=options.full, steps_per_file=options.steps_per_file)
    request = make_request(options, asked)
    find_program(options.command[0], Surroundings())
    create_capture(options.output, force=options.force)
    ended = launch(request)
    if ended.capture is None:
        print(nothing_recorded(options.output, ended.notes), file=sys.stderr)
        _remove_if_empty(options.output)
        return ended.status or NOTHING_RECORDED
    print(f"probe: recorded {summary_line(ended.capture)} in {options.output}", file=sys.stderr)
    for problem in ended.capture.problems:
        print(f"probe: {problem}", file=sys.stderr)
    for warning in (*_uncalled(asked, ended.notes), *_unmatched(asked, ended.capture)):
        print(f"probe: {warning}", file=sys.stderr)
    if any(note["problem"] for note in ended.notes):
        return ended.status or NOTHING_RECORDED
    return ended.status


def _uncalled(plan: Plan, notes: Sequence[dict[str, Any]]) -> list[str]:
    """Say what the processes warned of, and which functions of the plan were not called in any."""
    found = dict.fromkeys(warning for note in notes for warning in note["warnings"])
    counts = [note["events"] for note in notes]
    for name, path in plan.calls:
        if not any(path in warning for warning in found) and not any(each.get(f"calls of {name}") for each in counts):
            module = path.partition(":")[0]
            wrapped = any(f"calls of {name}" in each for each in counts)
            why = "was never called eagerly in a recorded step" if wrapped else f"is in {module!r}, never imported"
            found[f"Function {path!r} of the plan {why}: nothing of it is recorded."] = None
    return list(found)


def _unmatched(plan: Plan, capture: Capture) -> list[str]:
    """Say which selections of the plan select nothing of what there was: they are misspelled, most likely.

    What is to be recorded, or kept, must have been; what is left out must be the name of a module or a parameter.
    """
    if not (plan.include or plan.exclude or plan.full or plan.inside_compiled):
        return []
    rank = capture.ranks[0]
    steps = capture.steps(rank)
    file = capture.path / rank_folder(rank) / NAMES_FILE
    told = read_json(file) if file.is_file() else {}
    modules = {each["name"] for each in told.get("names", ())} | set(told.get("inside_compiled", ()))
    keys = {key for step in {steps[0], steps[-1]} for key in capture.rows(rank, step).keys} if steps else set()
    found = []
    for role in ("include", "exclude", "full", "inside_compiled"):
        for selection in getattr(plan, role):
            kind, glob = split_kind(selection)
            pattern = glob_pattern((glob,))
            # What is left out has no key, so that the item of its name is not known.
            bare = glob_pattern((re.sub(r"(\[[^\]]*\]|\([^)]*\)|:\w+)$", "", glob),))
            recorded = any(kind in (None, key.kind) and matches(pattern, key.name, key.item) for key in keys)
            if role in ("include", "full"):
                if not recorded:
                    found.append(f"Selection {selection!r} of {role} matches nothing that was recorded.")
            elif not recorded and not any(matches(pattern, name, "") or matches(bare, name, "") for name in modules):
                found.append(f"Selection {selection!r} of {role} matches no module, and nothing that was recorded.")
    return found


def make_request(options: RecordOptions, plan: Plan) -> Request:
    """Write down what the processes of one launch are asked to record; each launch has an identity of its own."""
    return Request(
        output=str(options.output.resolve()),
        run_id=uuid.uuid4().hex,
        # How many steps a file holds is no part of what was recorded: two captures that differ in it are alike.
        plan=replace(plan, steps_per_file=1).as_dict(),
        steps_per_file=plan.steps_per_file,
        seed=options.seed,
        perturb=options.perturb,
        strict=options.strict,
        command=options.command,
        steps=options.steps,
        step_offset=options.step_offset,
    )


def launch(request: Request, surroundings: Surroundings | None = None) -> Ended:
    """Run a command to its end with a request in its environment, and open what it left.

    Raises:
        CaptureError: The command cannot be started.
    """
    surroundings = surroundings or Surroundings()
    program = find_program(request.command[0], surroundings)
    status, signalled = _run(program, request, surroundings)
    output = Path(request.output)
    notes = _notes(output)
    try:
        capture = open_capture(output)
    except CaptureError:
        capture = None
    if capture is not None and not capture.ranks:
        capture = None
    if capture is not None and status:
        write_manifest(output, {**capture.manifest, "exit_status": status})
    return Ended(status=status, signal=signalled, capture=capture, notes=notes)


def find_program(word: str, surroundings: Surroundings) -> str:
    """Find the program that a command names: on PATH, or in the folder where it runs, or in the current one.

    Raises:
        CaptureError: There is none.
    """
    path = surroundings.environment.get("PATH")
    places = [word]
    if os.path.dirname(word) and not os.path.isabs(word):
        # An environment such as .venv is in no revision: what the folder lacks is taken from where the user stands.
        places = [str((surroundings.folder or Path()).absolute() / word), os.path.abspath(word)]
    for place in places:
        program = shutil.which(place, path=path)
        if program is not None:
            return program
    raise CaptureError(
        f"Command {word!r} was not found on PATH. Write the training command after `--` as it is run by hand."
    )


def _environment(request: Request, surroundings: Surroundings) -> dict[str, str]:
    environment = dict(surroundings.environment)
    bootstrap = str(Path(__file__).parent / "bootstrap")
    earlier = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = bootstrap + (os.pathsep + earlier if earlier else "")
    environment[REQUEST] = request.to_json()
    environment["PROBE"] = "1"
    environment["PROBE_OUT"] = request.output
    return environment


def _run(program: str, request: Request, surroundings: Surroundings) -> tuple[int, int]:
    """Run the command and return its status, and the signal that came meanwhile."""
    came: list[int] = []
    with contextlib.ExitStack() as stack:
        log = None if surroundings.log is None else stack.enter_context(surroundings.log.open("wb"))
        try:
            child = subprocess.Popen(
                [program, *request.command[1:]],
                env=_environment(request, surroundings),
                cwd=surroundings.folder,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                pass_fds=surroundings.inherit,
            )
        except OSError as error:
            raise CaptureError(f"Command {request.command[0]!r} cannot be started: {error.strerror}.") from error

        def forward(number: int, frame: FrameType | None) -> None:
            came.append(number)
            if number != signal.SIGINT:
                child.send_signal(number)

        # An interrupt reaches the child by itself (same terminal group); the others are passed on.
        before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
        try:
            status = child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return (128 - status if status < 0 else status), (came[0] if came else 0)


def _notes(output: Path) -> tuple[dict[str, Any], ...]:
    folder = output / NOTES_FOLDER
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    shutil.rmtree(folder, ignore_errors=True)
    return tuple(found)


def _remove_if_empty(output: Path) -> None:
    # Whatever is in it is not ours to delete.
    with contextlib.suppress(OSError):
        output.rmdir()


def last_lines(log: Path) -> list[str]:
    """Return the end of what a command printed, with a line before it that says where the rest is."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
    except OSError:
        return []
    return [f"Its output is in {log}, and ends with:", *(f"  {line}" for line in lines)] if lines else []


def summary_line(capture: Capture) -> str:
    """Say in one line how much a capture holds."""
    steps = sorted({step for rank in capture.ranks for step in capture.steps(rank)})
    first = capture.ranks[0]
    quantities = len(capture.rows(first, capture.steps(first)[-1]).keys) if capture.steps(first) else 0
    nbytes = sum(file.stat().st_size for file in capture.path.rglob("*") if file.is_file())
    return (
        f"{_count(len(capture.ranks), 'rank')}, {_count(len(steps), 'step')}, "
        f"{_count(quantities, 'quantity', 'quantities')} a step, {_bytes(nbytes)}"
    )


def nothing_recorded(output: Path, notes: Sequence[dict[str, Any]]) -> str:
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
        refused = any(note["problem"] for note in notes)
        if missing and not refused:
            lines.append(f"Looked for and not found: {listed(missing)}.")
        elif not refused:
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
