"""What a comparison found: plain data, joined to nothing that prints or exits.

`compare` builds a `Comparison`; the reports, the CLI and the pytest plugin read it. This module must not know how a
difference is measured or how it is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from probe.judge.tolerance import CalibratedRun
from probe.point import Kind

if TYPE_CHECKING:
    from probe.measure.elementwise import ElementsCompared


WITHOUT_TOLERANCE = "without a tolerance"
"""Why a value was not judged that the calibration did not have."""


class Outcome(str, Enum):
    """The answer to the whole question. Its exit status: 0 equivalent, 1 different, 2 for the other two."""

    EQUIVALENT = "equivalent"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"

    @property
    def exit_status(self) -> int:
        """Status that `probe diff` exits with."""
        return {Outcome.EQUIVALENT: 0, Outcome.DIFFERENT: 1}.get(self, 2)


class Shown(str, Enum):
    """What the pair of an expected and an actual value is."""

    VALUE = "value"
    """The number itself."""
    L2_NORM = "l2 norm"
    """The l2 norm of a tensor: two tensors of one norm can still differ."""
    TEXT = "text"


class Verdict(str, Enum):
    """The answer for one check, in the words of the report."""

    IDENTICAL = "identical"
    """Every compared value is bit-identical in what was recorded."""
    WITHIN = "within"
    ABOVE = "above"
    NOT_FINITE = "not finite"
    MISSING = "missing"
    """A required quantity is in no candidate."""
    UNEXPECTED = "unexpected"
    NOT_COMPARABLE = "not comparable"
    """Nothing matched, or shapes differ, or what came before makes it meaningless (other data)."""
    RECORDED_ONLY = "recorded only"


class Origin(str, Enum):
    """Whether the first divergence arose where it is seen."""

    HERE = "here"
    """What entered the module was within tolerance."""
    BEFORE = "before"
    """Something that entered it was already off, or could not be compared."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in training a value was taken."""

    step: int
    rank: int
    kind: Kind
    name: str
    item: str = ""
    microbatch: int | None = None
    """None for quantities that exist once per step."""
    call: int = 0
    order: int = -1
    """Execution index within the step, in the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The cell of a check that came closest to its tolerance, or passed it furthest."""

    place: Place
    expected: float | str
    """The baseline's value: the number itself, a tensor's l2 norm, or text."""
    actual: float | str
    difference: float
    tolerance: float
    spread: float = float("nan")
    """Difference of the unmodified code with itself at this step and series; NaN if not known."""
    shown: Shown = Shown.VALUE
    """What `expected` and `actual` are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One row of the table: a family of quantities, its metric and its tolerance."""

    what: str
    """Name of the family, e.g. `attention outputs`."""
    where: str
    """Where in the job's code the values were taken, in words."""
    form: str
    """How it was judged: `calibrated`, `exact`, `rel`, `abs`, `rel or abs`, `rel + abs`, `ratio`, `record only`."""
    metric: str
    """How the difference is measured, naming its denominator."""
    verdict: Verdict
    difference: float
    """At the worst cell (largest difference / tolerance); NaN if nothing was compared."""
    unit: str
    """`relative`, `absolute` or `` (exact kinds)."""
    tolerance: float
    """At the worst cell."""
    spread: float
    """Largest difference of the unmodified code with itself, over the cells of the check; NaN if not known."""
    worst: Worst | None
    quantities: int
    """Number of distinct series of the check."""
    cells: int
    """(series, microbatch, step, rank) cells judged."""
    above: int
    """Cells above tolerance, missing, or not finite."""
    not_compared: int
    """Cells present in one arm only, or of another shape, or beyond the horizon."""
    not_compared_why: str = ""
    smallest_detectable: float = float("nan")
    """Least relative change that would have been flagged in any quantity of the check, at the first judged step; NaN if
    not known."""
    finest_detectable: float = float("nan")
    """The same in the most sensitive quantity of the check."""
    unjudged_failures: int = 0
    """Cells among `above` that are not among `cells`: there is nothing to judge in what is missing or not finite."""
    vacuous: bool = False
    """A scrambled run would pass this check."""
    assumed: bool = False
    """At least one tolerance is an assumed floor: nothing was measured."""
    horizon: int | None = None
    """Last step judged in every quantity of the check, when shorter than the run."""
    covered: tuple[int, ...] = ()
    """Steps that were calibrated, where the judging ends because they do; empty: it ends because of the spread."""
    bound: str = ""
    """The tolerance as a plan declares it, e.g. `15 % or 0.03 abs`; empty when it was calibrated."""
    fit: str = ""
    """A declared tolerance beside the measured noise: `vacuous` (more than ten times what calibration would allow),
    `flaky` (the unmodified code exceeds it by itself), or nothing to say."""
    needed: float = float("nan")
    """What calibration would allow instead, in the same unit; NaN for what is not declared or has no known spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDivergence:
    """The earliest quantity, in execution order, that is above its tight tolerance."""

    place: Place
    ranks: tuple[int, ...]
    """Ranks on which it is above."""
    difference: float
    tolerance: float
    expected: float | str
    actual: float | str
    origin: Origin
    phase: str
    """In words: `batch`, `forward`, `loss`, `backward`, `gradient reduction`, `clipping`, `optimizer update`,
    `schedule`, `state`."""
    because: str
    """One sentence for the origin: what entered it and how far that was off."""
    after: str = ""
    """One sentence that summarises what differs after it."""
    next: str = ""
    """One sentence: what to look at, or to record, to narrow it down."""
    keep: tuple[str, ...] = ()
    """Selections of the tensors that are worth keeping whole in both arms; empty where none would tell more."""
    ahead: str = ""
    """Label of the nearest quantity recorded before it that could be compared."""
    unit: str = "relative"
    """Unit of the difference and the tolerance: `relative`, `absolute` or `ratio`."""
    shown: Shown = Shown.VALUE
    """What `expected` and `actual` are."""
    declared: bool = False
    """The tolerance was declared by a person, and is the same in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What could be matched at all."""

    matched: int
    """Cells present in both arms with the same shape."""
    missing: tuple[str, ...] = ()
    """Labels in the baseline only."""
    unexpected: tuple[str, ...] = ()
    """Labels in the candidate only."""
    reshaped: tuple[str, ...] = ()
    retyped: tuple[str, ...] = ()
    """Labels whose shape, or element type, differs."""
    missing_cells: int = 0
    unexpected_cells: int = 0
    reshaped_cells: int = 0
    """Cells of the labels above; together with `matched` they are all cells there are. 0 beside labels: not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One capture that took part."""

    arm: str
    """`baseline` or `candidate`."""
    path: str
    run_id: str
    ranks: int
    world_size: int
    steps: tuple[int, ...]
    command: str = ""
    seed: str = ""
    commit: str = ""
    dirty: bool | None = None
    perturb: str = ""
    created_utc: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    """The attention kernel of each module that called one."""
    problems: tuple[str, ...] = ()
    """Missing ranks, runs not closed cleanly, dropped steps."""
    step_offset: int = 0
    """Steps trained before the checkpoint that the run went on from."""
    in_process: bool = False
    """A test recorded it within its own process: `command` is the test's, and `probe record` cannot repeat it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSummary:
    """The largest difference / tolerance between two runs."""

    first: str
    second: str
    relation: str
    """`baseline pair`, `candidate pair` or `cross pair`."""
    ratio: float
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeChange:
    """Which files of the job's code differ between the arms. Empty: both ran the same files."""

    changed: tuple[str, ...] = ()
    """In both arms, with other contents: paths inside the source tree."""
    added: tuple[str, ...] = ()
    """Run by the candidate only."""
    removed: tuple[str, ...] = ()
    """Run by the baseline only."""
    outside: tuple[str, ...] = ()
    """Differing files outside every source tree: whole paths."""

    @property
    def count(self) -> int:
        """Number of files that differ."""
        return len(self.changed) + len(self.added) + len(self.removed) + len(self.outside)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The runs that would settle what is not clear yet."""

    baselines: int = 0
    candidates: int = 0
    perturbed: tuple[str, ...] = ()
    """Perturbations to record the unmodified code with, e.g. `ulp:1`."""
    if_identical: tuple[str, ...] = ()
    """The same, where the wanted baselines come out bit-identical."""
    calibration: bool = False
    """The tolerances are to be measured, or measured again, with what is there."""

    def __bool__(self) -> bool:
        return self != NOTHING_WANTED


NOTHING_WANTED = Wanted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the tolerances were measured from."""

    k: float
    """Multiple of the spread."""
    runs: tuple[CalibratedRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything that a report needs."""

    outcome: Outcome
    reason: str
    """One sentence: why this outcome, with the closest call when equivalent and the first divergence when different."""
    checks: tuple[CheckResult, ...]
    first_divergence: FirstDivergence | None
    coverage: Coverage
    runs: tuple[RunSummary, ...]
    pairs: tuple[PairSummary, ...] = ()
    provenance_changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was not recorded or not judged, and why; assumptions; warnings."""
    more_runs: str = ""
    """When inconclusive: the runs to add."""
    wanted: Wanted = NOTHING_WANTED
    """The same, counted."""
    code: CodeChange | None = None
    """None: what code ran is not known."""
    calibration: Calibration | None = None
    """None: nothing was calibrated."""
    tolerances: str = ""
    """Path of the tolerance file, or empty."""
    plan: str = ""
    """Path of the plan file whose checks judged, or empty."""
    elements: tuple[tuple[str, ElementsCompared], ...] = ()
    """Path of each candidate that kept tensors whole as the first baseline did, and how they differ. Not judged."""
