"""Prove that recording leaves a run as it is, or name the points that disturb it.

The command runs bare twice, which says whether it repeats at all, and once recorded; the losses and the trained
parameters must have the same bits. Where they have not, points are left out of the recording, first whole kinds, then
parts of the model, until the smallest set is found that disturbs. Every run is a launch of its own. This module must
not know how anything is recorded.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from probe.capture import launch
from probe.errors import CaptureError, listed
from probe.plan import Plan, default_plan, load_plan
from probe.point import Kind
from probe.protocol.bisect import OutOfRuns, Part, smallest
from probe.protocol.progress import Progress
from probe.store.reader import Capture

RUNS = 60
"""Most runs of the command. One disturbing module among a thousand takes about twenty-five."""
MODULE = (Kind.FORWARD, Kind.BACKWARD)
"""Kinds that are taken by one hook on a module: they are left out together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfcheckOptions:
    """What `probe selfcheck` was asked to do."""

    command: tuple[str, ...]
    output: Path
    """Folder for captures, digests and logs; it must not hold anything."""
    steps: str = ""
    seed: int | None = None
    plan: Path | None = None
    runs: int = RUNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Selfcheck:
    """What the check came to."""

    difference: str
    """The first difference between a bare and a recorded run, in words; empty: they are bit-identical."""
    points: tuple[str, ...] = ()
    """Each of these disturbs, as a selection of a plan, or as several joined by ` with ` that disturb together."""
    exclude: tuple[str, ...] = ()
    """Selections that leave the points out of a plan, hooks included."""
    complete: bool = True
    """Without these points recording changes nothing. False: the runs were used up before that was found."""
    attachment: bool = False
    """The run is changed even when every point is left out."""
    size: str = ""
    """How much was compared, in words."""
    runs: int = 0

    @property
    def exit_status(self) -> int:
        """Status that `probe selfcheck` exits with."""
        return 1 if self.difference else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What one run ended in."""

    status: int
    digests: dict[str, dict[str, Any]]
    """File name (rank and number of the process) to its content."""
    capture: Capture | None
    notes: tuple[dict[str, Any], ...]


def selfcheck(options: SelfcheckOptions, *, tell: Callable[[str], None]) -> Selfcheck:
    """Run the command bare and recorded, and find what disturbs.

    Raises:
        CaptureError: The command fails, trains nothing, or does not repeat without recording.
        KeyboardInterrupt: A signal asked to stop.
    """
    plan = default_plan() if options.plan is None else load_plan(options.plan)
    plan = plan.narrowed(steps=options.steps or None)
    launch.find_program(options.command[0], launch.Surroundings())
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise CaptureError(f"Output {options.output} is not an empty folder. Choose another one with -o.")
    runs = _Runs(options, Progress(tell))
    bare, again = runs.bare(), runs.bare()
    between = difference(bare, again)
    if between:
        raise CaptureError(
            f"The command does not repeat: two runs without recording differ in {between}. Whether recording changes "
            "it cannot be told. Seed it with --seed, and choose deterministic algorithms."
        )
    runs.expected = bare
    recorded = runs.recorded(plan, "everything")
    _require_recorded(recorded, runs)
    found = difference(bare, recorded)
    if not found or recorded.capture is None:
        return Selfcheck(difference=found, size=_size(bare), runs=runs.count)
    return replace(_blame(plan, recorded.capture, runs), difference=found, size=_size(bare), runs=runs.count)


def _require_recorded(recorded: _Outcome, runs: _Runs) -> None:
    """Check that the recorded run was recorded: a run that was not is equal for the wrong reason.

    Raises:
        CaptureError: It was not, or not whole.
    """
    capture, log = recorded.capture, runs.log
    if capture is None:
        # A run that recording itself ends is a finding, and needs no capture.
        if recorded.status:
            return
        raise CaptureError("\n".join([launch.nothing_recorded(runs.last, recorded.notes), *launch.last_lines(log)]))
    if capture.problems and not recorded.status:
        problems = listed(capture.problems)
        raise CaptureError("\n".join([f"The recorded run is not whole: {problems}.", *launch.last_lines(log)]))


@dataclass(slots=True)
class _Runs:
    """Launches the command, and counts."""

    options: SelfcheckOptions
    progress: Progress
    count: int = 0
    expected: _Outcome | None = None
    tested: dict[frozenset[str], bool] = field(default_factory=dict)
    """Selections that were left out, to whether the rest disturbed."""

    @property
    def last(self) -> Path:
        """Folder of the last run's capture."""
        return self.options.output / f"run-{self.count}"

    @property
    def log(self) -> Path:
        """What the last run printed."""
        return self.options.output / f"run-{self.count}.log"

    def bare(self) -> _Outcome:
        """Run without recording."""
        self.progress(f"run {self.count + 1}: without recording")
        outcome = self._launch(default_plan(), bare=True)
        if outcome.status:
            why = f"The command ended with status {outcome.status} without recording."
            raise CaptureError("\n".join([why, *launch.last_lines(self.log)]))
        if not outcome.digests:
            raise CaptureError(
                f"No optimizer stepped in {shlex.join(self.options.command)!r}, so there is nothing to compare. "
                "Name a command that trains with torch."
            )
        return outcome

    def recorded(self, plan: Plan, what: str) -> _Outcome:
        """Run with a plan."""
        self.progress(f"run {self.count + 1}: recording {what}")
        return self._launch(plan, bare=False)

    def disturbs(self, plan: Plan, what: str) -> bool:
        """Tell whether a plan changes the outcome; a plan is tried once.

        Raises:
            OutOfRuns: No run is left.
        """
        assert self.expected is not None
        left_out = frozenset(plan.exclude)
        if left_out not in self.tested:
            if self.count >= self.options.runs:
                raise OutOfRuns
            outcome = self.recorded(plan, what)
            self.tested[left_out] = bool(difference(self.expected, outcome))
            self.progress(f"run {self.count}: {'changes the run' if self.tested[left_out] else 'changes nothing'}")
            if outcome.capture is not None:
                shutil.rmtree(outcome.capture.path)
        return self.tested[left_out]

    def _launch(self, plan: Plan, *, bare: bool) -> _Outcome:
        self.count += 1
        folder, digests = self.last, self.last.with_name(f"{self.last.name}-outcome")
        digests.mkdir(parents=True)
        options = self.options
        request = launch.make_request(
            launch.RecordOptions(output=folder, command=options.command, steps=str(plan.steps), seed=options.seed),
            plan,
        )
        request = replace(request, digest=str(digests.resolve()), bare=bare)
        folder.mkdir()
        ended = launch.launch(request, launch.Surroundings(log=self.log))
        if ended.signal:
            raise KeyboardInterrupt
        found = {file.name: json.loads(file.read_text()) for file in sorted(digests.glob("*.json"))}
        return _Outcome(status=ended.status, digests=found, capture=ended.capture, notes=ended.notes)


def difference(expected: _Outcome, actual: _Outcome) -> str:
    """Say in words where two outcomes first differ; nothing where they are the same."""
    if expected.status != actual.status:
        return f"the exit status: {expected.status} and {actual.status}"
    if expected.digests.keys() != actual.digests.keys():
        return f"the ranks that trained: {listed(expected.digests)} and {listed(actual.digests) or 'none'}"
    for name, one in expected.digests.items():
        two, rank = actual.digests[name], one["rank"]
        for number, (loss, other) in enumerate(zip(one["losses"], two["losses"], strict=False), start=1):
            if loss != other:
                values = f"{loss.split()[1]} and {other.split()[1]}"
                return f"the loss of backward pass {number} on rank {rank}: {values}"
        for what, counts in (
            ("backward passes", (len(one["losses"]), len(two["losses"]))),
            ("optimizer steps", (one["steps"], two["steps"])),
            ("trained parameters", (len(one["parameters"]), len(two["parameters"]))),
            *((f"compiled {what}", (count, two["compiled"][what])) for what, count in one["compiled"].items()),
        ):
            if counts[0] != counts[1]:
                return f"the number of {what} on rank {rank}: {counts[0]} and {counts[1]}"
        pairs = list(zip(one["parameters"], two["parameters"], strict=True))
        unequal = [number for number, (first, second) in enumerate(pairs, start=1) if first != second]
        if unequal:
            shape = pairs[unequal[0] - 1][0].rsplit(" ", 1)[0]
            count = f"{len(unequal)} of {len(pairs)}"
            return f"{count} trained parameters on rank {rank}, first number {unequal[0]} ({shape})"
    return ""


def _size(outcome: _Outcome) -> str:
    digests = outcome.digests.values()
    parameters = sum(len(each["parameters"]) for each in digests)
    losses = sum(len(each["losses"]) for each in digests)
    ranks = len({each["rank"] for each in digests})
    return f"{parameters} trained parameters and {losses} losses on {ranks} {'rank' if ranks == 1 else 'ranks'}"


def _blame(plan: Plan, capture: Capture, runs: _Runs) -> Selfcheck:
    """Find every smallest set of points that disturbs, leaving out one after the other."""
    names = _names(capture)
    points: list[str] = []
    left_out: tuple[str, ...] = ()
    try:
        if runs.disturbs(replace(plan, exclude=("*",)), "no point at all"):
            return Selfcheck(difference="", attachment=True)
        while not points or runs.disturbs(replace(plan, exclude=(*plan.exclude, *left_out)), "all other points"):
            parts = _search(replace(plan, exclude=(*plan.exclude, *left_out)), names, runs)
            points.append(" with ".join(part.label for part in parts))
            before = len(left_out)
            left_out = tuple(dict.fromkeys([*left_out, *(glob for part in parts for glob in _globs_of_hook(part))]))
            if len(left_out) == before:
                break
    except OutOfRuns as stop:
        points += [" with ".join(part.label for part in stop.parts)] if stop.parts else []
        return Selfcheck(difference="", points=tuple(points), complete=False)
    return Selfcheck(difference="", points=tuple(points), exclude=left_out)


def _globs_of_hook(part: Part) -> tuple[str, ...]:
    kinds = MODULE if part.kind in MODULE else (part.kind,)
    return tuple(glob for kind in kinds for glob in replace(part, kind=kind).globs)


def _search(plan: Plan, names: Mapping[Kind, Sequence[str]], runs: _Runs) -> list[Part]:
    """Find one smallest set of parts that disturbs: kinds first, then ever smaller parts of the model."""
    parts, silent = [Part(kind=kind) for kind in names], list[Part]()
    while True:
        chosen = _narrow(plan, parts, silent, runs)
        silent += [part for part in parts if part not in chosen]
        parts = [inner for part in chosen for inner in part.inner(names[part.kind])]
        if parts == chosen:
            return chosen


def _narrow(plan: Plan, parts: Sequence[Part], silent: Sequence[Part], runs: _Runs) -> list[Part]:
    """Find a smallest set among `parts` that disturbs while `silent` and the rest are left out."""

    def disturbs(chosen: Sequence[Part]) -> bool:
        left_out = [*silent, *(part for part in parts if part not in chosen)]
        globs = [glob for part in left_out for glob in part.globs]
        what = listed((part.label for part in chosen), most=3)
        return runs.disturbs(replace(plan, exclude=(*plan.exclude, *globs)), what)

    return smallest(parts, disturbs)


def _names(capture: Capture) -> dict[Kind, list[str]]:
    """List the names of each kind that were recorded, in the order of `Kind`."""
    found: dict[Kind, dict[str, None]] = {}
    for rank in capture.ranks:
        steps = capture.steps(rank)
        for step in {steps[0], steps[-1]}:
            for key in capture.rows(rank, step).keys:
                found.setdefault(key.kind, {})[key.name] = None
    return {kind: list(found[kind]) for kind in Kind if kind in found}


def verdict_lines(result: Selfcheck) -> list[str]:
    """Say in words what the check came to."""
    if not result.difference:
        return [f"Recording changes nothing: {result.size} are bit-identical with and without it."]
    lines = [f"Recording changes the run, which differs in {result.difference}."]
    if result.attachment:
        lines.append(
            "It does so even when every point is left out: what disturbs is the attachment itself, which wraps "
            "backward, clipping and the optimizer's step."
        )
        return lines
    if not result.complete:
        known = f"After {result.runs} runs, these are known to disturb, and what else does is not:"
        return [*lines, known, *(f"  {point}" for point in result.points), "Raise --runs to search on."]
    if not result.points:
        return lines
    lines.append("This point disturbs:" if len(result.points) == 1 else "These points disturb:")
    lines += [f"  {point}" for point in result.points]
    lines.append("Without recording them nothing changes. Leave them out in both arms, with a plan that has")
    lines += ["  [record]", f"  exclude = {json.dumps(list(result.exclude))}"]
    return lines
