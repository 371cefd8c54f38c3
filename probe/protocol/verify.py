"""The whole protocol in one call: two trees, repeated baselines, calibration, the candidate, and a verdict.

Every run is a launch of its own through the recorder's launcher, in the arm's own tree with the arm's own imports. The
candidate is recorded second, so that what makes a comparison meaningless (both arms import one tree, the branch
crashes) shows after two runs and not after all. Runs that are whole are kept: interrupted, the same call goes on. This
module must not know how a difference is measured or shown.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from probe.capture import launch
from probe.errors import CaptureError, IncomparableError, listed
from probe.judge.calibrate import calibrate
from probe.judge.compare import compare_cells
from probe.judge.comparison import Comparison, Outcome
from probe.judge.outcome import ENOUGH_BASELINES, ENOUGH_CANDIDATES
from probe.judge.provenance_changes import code_hash, perturbations
from probe.judge.tolerance import Tolerances, save
from probe.plan import Plan, default_checks, default_plan, load_plan
from probe.protocol import own_imports, worktrees
from probe.protocol.progress import Progress
from probe.protocol.verify_state import State, digest, locked, open_state
from probe.store.folder import create_capture
from probe.store.layout import NOTES_FOLDER
from probe.store.reader import Capture, open_capture

if TYPE_CHECKING:
    from probe.check import Check
    from probe.judge.cells import Judgement

ROUNDS = 2
"""How often runs are added to an inconclusive result: with five baselines and two candidates nothing is left open."""
PERTURBED = 3
"""Perturbed runs where repeats are bit-identical, as many as plain runs are recommended."""
TOLERANCES_FILE = "tolerances.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `probe verify` was asked to do."""

    baseline: str
    """Revision or folder."""
    candidate: str
    command: tuple[str, ...]
    output: Path | None = None
    """Folder of everything that is made; None: one under `captures`, named after the request."""
    baselines: int = 3
    steps: str = ""
    seed: int | None = None
    plan: Path | None = None
    links: tuple[Path, ...] = ()
    """Files and folders of the user's checkout that git does not hold and the command needs."""
    same_code: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What the protocol came to."""

    comparison: Comparison
    judgements: tuple[Judgement, ...]
    checks: tuple[Check, ...]
    output: Path


def verify(options: VerifyOptions, *, tell: Callable[[str], None]) -> Verified:
    """Record both arms, calibrate, and compare; add runs while the result is inconclusive.

    Args:
        options: What to verify.
        tell: Receives a line whenever something begins or ends.

    Raises:
        CaptureError: An arm cannot be found, a run fails or is not whole, or it did not import its own tree.
        IncomparableError: Both arms run the same code.
        KeyboardInterrupt: A signal asked to stop; what is whole is kept.
    """
    here = Path.cwd().resolve()
    sources = [
        worktrees.find_source("baseline", options.baseline, here=here),
        worktrees.find_source("candidate", options.candidate, here=here),
    ]
    if sources[0].identity == sources[1].identity and not options.same_code:
        raise IncomparableError(
            f"The baseline {options.baseline!r} and the candidate {options.candidate!r} are the same code: "
            f"{sources[0].identity}. Name another revision or folder, or give --same-code if this is meant."
        )
    plan = default_plan() if options.plan is None else load_plan(options.plan)
    plan = plan.narrowed(steps=options.steps or None)
    request = {
        "baseline": sources[0].identity,
        "candidate": sources[1].identity,
        "command": list(options.command),
        "folder": str(here),
        "steps": str(plan.steps),
        "seed": options.seed,
        "plan": plan.as_dict(),
        "links": [str(link) for link in options.links],
    }
    output = options.output or Path("captures") / f"verify-{digest(request)}"
    output.mkdir(parents=True, exist_ok=True)
    progress = Progress(tell)
    with locked(output) as lock:
        state = open_state(output, request, force=options.force)
        protocol = _Protocol(options, plan, state, progress, lock=lock, here=here, sources=sources)
        return protocol.verdict()


class _Protocol:
    """The runs of one verification."""

    def __init__(
        self,
        options: VerifyOptions,
        plan: Plan,
        state: State,
        progress: Progress,
        *,
        lock: int,
        here: Path,
        sources: Sequence[worktrees.Source],
    ) -> None:
        self._options, self._plan, self._state, self._progress = options, plan, state, progress
        self._lock, self._here, self._sources = lock, here, sources
        self._output = state.folder
        checkouts = worktrees.checkouts(here)
        self._trees = {
            source.arm: worktrees.make_tree(source, self._output / "trees" / source.arm, here=here)
            for source in sources
        }
        self._origin = worktrees.checkout_of(here)
        roots = [tree.root for tree in self._trees.values()]
        folders = [tree.root for tree in self._trees.values() if not tree.commit]
        # Two folders of one checkout may share what else is in it.
        outer = [top for top in checkouts if not any(top in folder.parents for folder in folders)]
        self._known = list(dict.fromkeys([*outer, *roots]))
        self._related = [
            *roots,
            *(checkouts if any(t.commit or t.root in checkouts for t in self._trees.values()) else ()),
        ]
        self._checks = tuple(plan.checks) or default_checks()
        for tree in self._trees.values():
            empty = worktrees.submodules(tree)
            if empty:
                progress(f"{tree.arm}: git leaves the submodules {listed(empty)} empty in a worktree")

    # ------------------------------------------------------------------ the protocol
    def verdict(self) -> Verified:
        """Run what is missing and judge."""
        baselines, candidates = [self._run("base-0", "baseline")], [self._run("cand-0", "candidate")]
        self._require_two_codes(baselines[0], candidates[0])
        baselines += [self._run(f"base-{number}", "baseline") for number in range(1, self._options.baselines)]
        perturbed: list[Capture] = []
        tolerances = self._calibrate(baselines, perturbed)
        if tolerances.assumed:
            self._progress("baselines are bit-identical: recording perturbed ones to calibrate with")
            self._perturb(baselines[0], perturbed, PERTURBED)
            tolerances = self._calibrate(baselines, perturbed)
        verified = self._compare(baselines, candidates, tolerances)
        for _ in range(ROUNDS):
            if verified.comparison.outcome is not Outcome.INCONCLUSIVE:
                break
            self._progress(f"inconclusive so far: {verified.comparison.reason}")
            before = len(baselines) + len(perturbed) + len(candidates)
            if tolerances.repeatable:
                self._perturb(baselines[0], perturbed, ENOUGH_BASELINES)
            else:
                for number in range(len(baselines), ENOUGH_BASELINES):
                    baselines.append(self._run(f"base-{number}", "baseline"))
                for number in range(len(candidates), ENOUGH_CANDIDATES):
                    candidates.append(self._run(f"cand-{number}", "candidate"))
            if len(baselines) + len(perturbed) + len(candidates) == before:
                break
            tolerances = self._calibrate(baselines, perturbed)
            verified = self._compare(baselines, candidates, tolerances)
        return verified

    def _perturb(self, baseline: Capture, perturbed: list[Capture], count: int) -> None:
        """Add perturbed baselines up to a number."""
        for how in perturbations(baseline, len(perturbed) + 1, count - len(perturbed)):
            perturbed.append(self._run(f"base-{how.replace(':', '-')}", "baseline", how))

    def _calibrate(self, baselines: Sequence[Capture], perturbed: Sequence[Capture]) -> Tolerances:
        tolerances = calibrate([*baselines, *perturbed], checks=self._checks)
        save(tolerances, self._output / TOLERANCES_FILE)
        return tolerances

    def _compare(self, baselines: Sequence[Capture], candidates: Sequence[Capture], tolerances: Tolerances) -> Verified:
        comparison, judgements = compare_cells(
            baselines, candidates, tolerances, checks=self._checks, same_code=self._options.same_code
        )
        return Verified(comparison=comparison, judgements=judgements, checks=self._checks, output=self._output)

    def _require_two_codes(self, baseline: Capture, candidate: Capture) -> None:
        if self._options.same_code or code_hash(baseline) != code_hash(candidate):
            return
        changed = worktrees.files_between(self._here, *self._sources)
        what = f" The revisions differ in {listed(changed)}, which was not imported." if changed else ""
        raise IncomparableError(
            f"Both arms imported the same code (hash {code_hash(baseline)!r}), so the branch never ran.{what} "
            "Check the command and what it imports; give --same-code if the change is in no Python file."
        )

    # ------------------------------------------------------------------ one run
    def _run(self, name: str, arm: str, perturb: str = "") -> Capture:
        """Return a run's capture: the one that is there if it is whole, else a new one."""
        tree, output = self._trees[arm], self._output / name
        kept = self._kept(name)
        if kept is not None:
            self._progress(f"{name}: kept from before")
        else:
            kept = self._record(name, tree, output, perturb)
        own_imports.prove(kept, tree, self._known)
        first = self._output / ("base-0" if arm == "baseline" else "cand-0")
        if output != first:
            own_imports.require_one_code(open_capture(first), kept, tree)
        return kept

    def _kept(self, name: str) -> Capture | None:
        try:
            capture = open_capture(self._output / name)
        except CaptureError:
            return None
        whole = not capture.problems and "exit_status" not in capture.manifest
        return capture if whole and self._state.done.get(name) == capture.run_id else None

    def _record(self, name: str, tree: worktrees.Tree, output: Path, perturb: str) -> Capture:
        options = self._options
        links = tuple(self._here / link for link in options.links)
        worktrees.restore(tree, links=links, origin=self._origin)
        # What a killed launch leaves in a capture beside its segments.
        shutil.rmtree(output / NOTES_FOLDER, ignore_errors=True)
        create_capture(output, force=True)
        log = self._output / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        request = launch.make_request(
            launch.RecordOptions(
                output=output, command=options.command, steps=str(self._plan.steps), seed=options.seed, perturb=perturb
            ),
            self._plan,
        )
        self._progress(f"{name}: recording{f' with --perturb {perturb}' if perturb else ''} in {tree.root}")
        ended = launch.launch(request, self._surroundings(tree, log))
        problem = _problem(name, ended, output, log)
        if not problem:
            self._state.finish(name, request.run_id)
        if ended.signal:
            self._progress(f"{name}: interrupted; the same command goes on {'from' if problem else 'after'} here")
            raise KeyboardInterrupt
        if problem:
            raise CaptureError(problem)
        capture = open_capture(output)
        self._progress(f"{name}: {launch.summary_line(capture)}")
        return capture

    def _surroundings(self, tree: worktrees.Tree, log: Path) -> launch.Surroundings:
        folder = tree.root / self._inner_folder()
        if not folder.is_dir():
            raise CaptureError(
                f"The {tree.arm} has no folder {folder}, where the command would run. "
                "Call probe from a folder that both arms have."
            )
        here = launch.Surroundings(folder=folder)
        environment = own_imports.import_environment(
            tree,
            self._known,
            program=launch.find_program(self._options.command[0], here),
            environment=here.environment,
            links=(self._output / "trees" / f"{tree.arm}-imports").resolve(),
        )
        return launch.Surroundings(folder=folder, environment=environment, log=log, inherit=(self._lock,))

    def _inner_folder(self) -> Path:
        """Return the current folder relative to the tree that holds it: the command runs in the same one of its arm."""
        root = own_imports.owner(self._here, self._related)
        return self._here.relative_to(root) if root is not None else Path()


def _problem(name: str, ended: launch.Ended, output: Path, log: Path) -> str:
    """Say why a run cannot be used, or nothing."""
    if ended.status:
        why = f"Run {name} ended with status {ended.status}."
    elif ended.capture is None:
        why = launch.nothing_recorded(output, ended.notes)
    elif ended.capture.problems:
        why = f"Run {name} is not whole: {listed(ended.capture.problems)}."
    else:
        return ""
    hint = "A worktree holds what git holds: give data and checkpoints by absolute paths, or with --link."
    return "\n".join([why, *launch.last_lines(log), *([hint] if ended.status else [])])
