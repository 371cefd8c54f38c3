"""`probe_check`: what a test calls.

One object per test. It knows the test's marker, where the test's baselines lie and what the command line asked for, and
nothing of pytest, so that it can be handed to processes that a test spawns. This module must not print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probe.equivalence import explain
from probe.equivalence.options import Options
from probe.errors import IncomparableError, NotEquivalentError, ProbeError
from probe.judge import tolerance
from probe.judge.comparison import Comparison, Outcome
from probe.judge.tolerance import Tolerances

if TYPE_CHECKING:
    import torch

    from probe.equivalence.protocol import Recorded, Result
    from probe.equivalence.run import Job
    from probe.equivalence.stored import Baseline
    from probe.measure.series import CaptureLike

RECORD, RECORD_ALL = "record", "record all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which test a check belongs to."""

    file: Path
    """The test's file, absolute."""
    test: str
    """Its name within the file, e.g. `TestBlock::test_fused[bf16]`."""
    nodeid: str
    root: Path
    """Folder that paths in messages are relative to."""

    @property
    def command(self) -> tuple[str, ...]:
        """How the test is run again."""
        return ("pytest", self.nodeid)

    def shown(self, path: Path) -> str:
        """Write a path relative to the root, where it lies below it."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a check tells to whoever runs the test."""

    label: str
    comparison: Comparison | None = None
    recorded: str = ""
    """Path of a baseline that was recorded."""
    failed: bool = False


class ProbeCheck:
    """Compare two callables, or a callable with a stored baseline; see `__call__`."""

    def __init__(
        self,
        *,
        place: Place,
        options: Options,
        mode: str = "",
        report: Path | None = None,
        tell: Callable[[Told], None] | None = None,
    ) -> None:
        """Prepare the checks of one test.

        Args:
            place: The test.
            options: Its marker.
            mode: `RECORD`, `RECORD_ALL` or empty.
            report: Folder for the HTML page of each failed check.
            tell: Called with every check's result; left behind when the object goes to another process.
        """
        self.place, self.options, self.mode, self.report = place, options, mode, report
        self._tell = tell
        self._labels: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tell": None}

    def __call__(
        self,
        candidate: Callable[..., Any],
        /,
        baseline: Callable[..., Any] | None = None,
        *,
        inputs: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
        name: str | None = None,
    ) -> Comparison:
        """Fail unless the candidate computes what the baseline computes.

        Output, loss, gradients of parameters and inputs, the outputs of all modules and their gradients, and with an
        optimizer the parameters after its step. Tolerances are measured: the baseline is called again with every
        parameter and input moved by one ulp. Modules and random generators are as before when it returns.

        Args:
            candidate: A module or a function of tensors.
            baseline: The same before the change; None: the one that is stored under `name`.
            inputs: Positional arguments of both. If none requires a gradient, the floating-point ones are given one.
            kwargs: Keyword arguments of both.
            loss: Makes a number of the output; None: a fixed random projection.
            optimizer: Makes an optimizer of the trainable parameters, e.g. `partial(torch.optim.AdamW, lr=1e-3)`.
            name: Of a stored baseline, unique within the test.

        Returns:
            What was found, where the candidate is equivalent.

        Raises:
            NotEquivalentError: The candidate is different.
            ProbeError: It cannot be told, there is no stored baseline, or one was recorded just now.
        """
        __tracebackhide__ = True
        label = self._label(baseline, name)
        job = self._job(inputs, kwargs, loss, optimizer)
        if baseline is not None:
            result = self._in_process(candidate, baseline, job)
            return self._conclude(label, result, ())
        return self._with_stored(candidate, label, job)

    # ------------------------------------------------------------------ arguments
    def _label(self, baseline: object, name: str | None) -> str:
        if (baseline is None) == (name is None):
            given = "neither a baseline nor a name" if name is None else "both a baseline and a name"
            raise IncomparableError(
                f"Call of probe_check has {given}. Give baseline=FUNCTION to compare in this process, or name='...' to "
                "compare with a stored capture."
            )
        if name is None:
            name = f"check{len(self._labels) + 1}"
        if not name or name in self._labels:
            raise IncomparableError(f"Name {name!r} of probe_check is {'used twice' if name else 'empty'} in one test.")
        self._labels.add(name)
        return name

    def _job(
        self,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        loss: Callable[[Any], torch.Tensor] | None,
        optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None,
    ) -> Job:
        from probe.equivalence.arm import Inputs
        from probe.equivalence.run import Job

        if not isinstance(inputs, (tuple, list)):
            raise IncomparableError(
                f"Inputs of probe_check are {type(inputs).__name__!r}, not a tuple. Write inputs=(x,)."
            )
        if optimizer is not None and not callable(optimizer):
            raise IncomparableError(
                f"The optimizer of probe_check is {type(optimizer).__name__!r}. Give a function of the parameters, "
                "such as `lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)`: each arm has its own parameters."
            )
        return Job(
            inputs=Inputs(inputs, kwargs or {}),
            loss=loss,
            optimizer=optimizer,
            steps=self.options.steps,
            seed=self.options.seed,
            command=self.place.command,
        )

    def _given_tolerances(self) -> Tolerances | None:
        given = self.options.tolerances
        if isinstance(given, (str, Path)):
            return tolerance.load(self.place.file.parent / given)
        return given if isinstance(given, Tolerances) else None

    # ------------------------------------------------------------------ both in this process
    def _in_process(self, candidate: Callable[..., Any], baseline: Callable[..., Any], job: Job) -> Result:
        __tracebackhide__ = True
        from probe.equivalence.arm import find_arm
        from probe.equivalence.protocol import check_in_process

        arms = find_arm("baseline", baseline), find_arm("candidate", candidate)
        result = check_in_process(
            *arms, job, k=self.options.k, checks=self.options.checks(), tolerances=self._given_tolerances()
        )
        if arms[0].module is not None and arms[1].module is None:
            result = result.with_note(
                "The candidate is a function behind which no single module was found, so its parameters are not known. "
                "Give a module, or a function that closes over one."
            )
        return result

    # ------------------------------------------------------------------ with a stored baseline
    def _with_stored(self, candidate: Callable[..., Any], name: str, job: Job) -> Comparison:
        __tracebackhide__ = True
        from probe.equivalence.run import where_it_ran
        from probe.equivalence.stored import NoBaselineError, baseline_of, made_elsewhere

        stored = baseline_of(self.place.file, self.place.test, name)
        shown, again = self.place.shown(stored.capture), f"pytest {self.place.nodeid!r} --probe-record"
        missing = stored.missing()
        if self.mode != RECORD_ALL and missing is not None:
            if self.mode == RECORD:
                self._record(candidate, stored, name, job)
                raise self._just_recorded(shown)
            self._say(Told(label=name, failed=True))
            raise NoBaselineError(
                f"No baseline {name!r} of this test is stored: {self.place.shown(missing)} does not exist. Record it "
                f"with the code that is known to be right:\n  {again}"
            )
        if self.mode == RECORD_ALL:
            return self._record(candidate, stored, name, job)
        capture, tolerances, neighbours = stored.load()
        result = self._against(candidate, capture, neighbours, tolerances, job)
        if self.mode == RECORD and result.comparison.outcome is not Outcome.EQUIVALENT:
            self._record(candidate, stored, name, job)
            raise self._just_recorded(shown)
        also = (
            f"Baseline: {shown}, recorded {capture.manifest.get('created_utc', 'at an unknown time')}.",
            *filter(None, [made_elsewhere(capture.manifest, where_it_ran())]),
            f"If the change is meant, record the baseline anew:\n  {again}",
        )
        return self._conclude(name, result, also)

    def _against(
        self,
        candidate: Callable[..., Any],
        capture: CaptureLike,
        neighbours: Sequence[CaptureLike],
        tolerances: Tolerances,
        job: Job,
    ) -> Result:
        from probe.capture.perturb import Perturbation
        from probe.equivalence.arm import find_arm, undisturbed
        from probe.equivalence.memory import MemoryCapture
        from probe.equivalence.protocol import elsewhere, judged
        from probe.equivalence.run import run
        from probe.judge.outcome import ENOUGH_CANDIDATES

        arm, checks = find_arm("candidate", candidate), self.options.checks()
        allowed = self._given_tolerances() or tolerances
        with undisturbed([arm]) as state:
            runs = [run(arm, job, state, name="candidate")]
            result = judged([capture], runs, allowed, checks)
            if result.comparison.outcome is Outcome.INCONCLUSIVE and not allowed.repeatable:
                runs += [run(arm, job, state, name=f"candidate {count}") for count in range(2, ENOUGH_CANDIDATES + 1)]
                result = judged([capture], runs, allowed, checks)

            def perturbed(how: Perturbation) -> MemoryCapture:
                return run(arm, job, state, name=f"candidate {how}", how=how)

            return elsewhere(result, neighbours, perturbed)

    def _record(self, candidate: Callable[..., Any], stored: Baseline, name: str, job: Job) -> Comparison:
        """Record the candidate as the baseline. Repeats are made in advance: later the baseline's code is gone."""
        from probe.capture.perturb import Perturbation
        from probe.capture.recorder import ranks
        from probe.equivalence.arm import find_arm, undisturbed
        from probe.equivalence.memory import MemoryCapture
        from probe.equivalence.protocol import judged, record_baseline
        from probe.equivalence.run import run
        from probe.judge.outcome import ENOUGH_BASELINES

        arm, checks = find_arm("baseline", candidate), self.options.checks()
        with undisturbed([arm]) as state:

            def make(label: str, how: Perturbation | None) -> MemoryCapture:
                return run(arm, job, state, name=label, how=how)

            recorded: Recorded = record_baseline(make, repeats=ENOUGH_BASELINES, k=self.options.k, checks=checks)
            if ranks()[0] == 0:
                stored.store(recorded.plain[0], recorded.perturbed, recorded.tolerances)
            self._say(Told(label=name, recorded=self.place.shown(stored.capture)))
            return judged(recorded.plain[:1], [recorded.plain[1]], recorded.tolerances, checks).comparison

    def _just_recorded(self, shown: str) -> ProbeError:
        from probe.equivalence.stored import RecordedError

        return RecordedError(
            f"Baseline {shown} was recorded just now, so this run shows nothing. Look at it (`probe show {shown}`), "
            "commit it with what lies beside it, and run the test again without --probe-record."
        )

    # ------------------------------------------------------------------ the end
    def _conclude(self, label: str, result: Result, also: Iterable[str]) -> Comparison:
        __tracebackhide__ = True
        comparison = result.comparison
        failed = comparison.outcome is not Outcome.EQUIVALENT
        lines = list(explain.explain(comparison, also=also)) if failed else []
        if failed and self.report is not None:
            lines += self._write_report(label, result)
        self._say(Told(label=label, comparison=comparison, failed=failed))
        if not failed:
            return comparison
        text = "\n".join(lines)
        if comparison.outcome is Outcome.NOT_COMPARABLE:
            raise IncomparableError(text)
        raise NotEquivalentError(text)

    def _write_report(self, label: str, result: Result) -> list[str]:
        from probe.capture.recorder import ranks
        from probe.equivalence.stored import folder_of, in_a_path
        from probe.report.grid import grid_of
        from probe.report.html import to_html

        assert self.report is not None
        page = self.report / f"{folder_of(self.place.file, self.place.test)}.{in_a_path(label)}.html"
        if ranks()[0] == 0:
            try:
                self.report.mkdir(parents=True, exist_ok=True)
                page.write_text(to_html(result.comparison, grid_of(result.judgements, result.checks)), "utf-8")
            except OSError as error:
                return [f"Report {self.place.shown(page)} cannot be written: {error.strerror}."]
        return [f"Report: {self.place.shown(page)}"]

    def _say(self, told: Told) -> None:
        if self._tell is not None:
            self._tell(told)
