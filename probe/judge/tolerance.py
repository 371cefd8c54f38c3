"""What differences are allowed, per series and step, and the TOML file that a reviewer reads and git compares.

One line per series, numbers with three significant digits, rounded upward so that a written tolerance is never tighter
than the measured one. Arrays have one number per calibrated step; trailing numbers that repeat are left out. This
module must not know where tolerances come from or how they are used.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probe.errors import ToleranceError, listed

K = 3.0
"""Tolerance = 3 x spread: the custom of the pull requests this tool serves, and a 95 % prediction interval for one
number under three Gaussian repeats. Source: the project's statistics study, section 0."""

ALL_JUDGED = 2**31 - 1
"""Horizon of a series that is judged at every step."""

MARKS = ("", "weak", "vacuous", "insensitive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What one series may differ by, step by step. Arrays have one number for each calibrated step."""

    spread: tuple[float, ...]
    """Largest difference of the unmodified code with itself up to this step, over ranks, microbatches and pairs."""
    floor: tuple[float, ...]
    """Least tolerance that the precision of the numbers allows."""
    tolerance: tuple[float, ...]
    """What the verdict allows."""
    flip: tuple[float, ...] = ()
    """How far one flipped sign of an update moves a parameter; empty for what is none."""
    control: float = float("nan")
    """How far a scrambled run (shifted by a step, ranks rotated) is off; NaN when it cannot be told."""
    horizon: int = ALL_JUDGED
    """Last step that is judged; 0: none is."""
    mark: str = ""
    """One of `MARKS`: weak (tolerance above a tenth of the control throughout), vacuous (a scrambled run passes),
    insensitive (an assumed floor that nothing was measured for)."""

    def __post_init__(self) -> None:
        for name in ("spread", "floor", "tolerance", "flip"):
            for value in getattr(self, name):
                if not value >= 0 or value == float("inf"):
                    raise ToleranceError(
                        f"The {name} is {value!r}. It must be a finite number, not negative. Calibrate again."
                    )
        if self.flip and len(self.flip) != len(self.spread):
            raise ToleranceError(f"The flip has {len(self.flip)} steps and the spread {len(self.spread)}.")
        if not len(self.spread) == len(self.floor) == len(self.tolerance):
            raise ToleranceError(
                f"The spread, floor and tolerance have {len(self.spread)}, {len(self.floor)} and {len(self.tolerance)} "
                "steps. They must have the same number."
            )
        if self.mark not in MARKS:
            raise ToleranceError(f"The mark is {self.mark!r}. Allowed: {', '.join(map(repr, MARKS))}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedRun:
    """One run that the tolerances were calibrated from."""

    run_id: str
    path: str
    created_utc: str = ""
    command: str = ""
    commit: str = ""
    code: str = ""
    """Hash of the code that ran."""
    perturb: str = ""
    """How it was perturbed on purpose, e.g. `ulp:3`; empty for a plain run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """The tolerances of one job."""

    k: float
    """Multiple of the spread."""
    created_utc: str
    steps: tuple[int, ...]
    world_size: int
    runs: tuple[CalibratedRun, ...]
    families: Mapping[str, Mapping[str, Tolerance]]
    """Family (a check's `what`) to series label to tolerance."""
    assumed: bool = False
    """The runs were bit-identical and none was perturbed: floors are assumed, nothing was measured."""
    repeatable: bool = False
    """The plain runs have the same bits (or there is only one): more plain runs would say nothing new."""
    self_test: Mapping[str, str] = field(default_factory=dict)
    """How scrambled baselines were judged: `step shift` and `rank rotation` to `different`, `not told apart` or
    `not run`."""
    notes: tuple[str, ...] = ()
    declared: Mapping[str, str] = field(default_factory=dict)
    """Bounds that the plan declared, by the name of the check, as they were when the runs were calibrated."""

    @property
    def plain_runs(self) -> int:
        """Number of runs that were not perturbed."""
        return sum(not run.perturb for run in self.runs)

    @property
    def perturbed_runs(self) -> int:
        """Number of runs that were perturbed on purpose."""
        return len(self.runs) - self.plain_runs

    def members(self) -> dict[str, Tolerance]:
        """Return all series by label."""
        return {label: member for members in self.families.values() for label, member in members.items()}


FORMAT = "probe-tolerances"
VERSION = 1

_TOP = (
    "format",
    "version",
    "k",
    "created",
    "steps",
    "world_size",
    "assumed",
    "repeatable",
    "notes",
    "self_test",
    "declared",
    "runs",
    "families",
)
_RUN = ("run_id", "path", "created", "command", "commit", "code", "perturb")
_FAMILY = ("series", "zero_spread", "largest_spread", "smallest_tolerance", "largest_tolerance", "members")
_MEMBER = ("spread", "floor", "flip", "tolerance", "control", "horizon", "mark")

_HEADER = """\
# Tolerances of one job, measured by `probe calibrate` from the runs listed below.
# tolerance = max(k * spread, floor, flip), and at least a third of the largest sibling's (same path, another layer);
# flip: what one flipped sign of an optimizer update moves a parameter by.
# Arrays have one number for each of `steps`; the last number holds for all later steps.
# An edited tolerance is used, and every report says that it was edited.
"""


def round_up(value: float, digits: int = 3) -> float:
    """Round to significant digits, never downward.

    >>> round_up(1.2341e-07), round_up(2.0), round_up(0.0)
    (1.24e-07, 2.0, 0.0)
    """
    if value == 0 or not math.isfinite(value):
        return value
    text = f"{value:.{digits - 1}e}"
    if float(text) < value:
        mantissa, exponent = text.split("e")
        text = f"{float(mantissa) + 10.0 ** (1 - digits):.{digits - 1}f}e{exponent}"
    return float(text)


def save(tolerances: Tolerances, path: Path | str) -> None:
    """Write tolerances to a file, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(dump(tolerances), encoding="utf-8")
    os.replace(partial, path)


def dump(tolerances: Tolerances) -> str:
    """Return the text of the file."""
    lines = [
        _HEADER,
        f"format = {_text(FORMAT)}",
        f"version = {VERSION}",
        f"k = {tolerances.k!r}",
        f"created = {_text(tolerances.created_utc)}",
        f"steps = [{', '.join(map(str, tolerances.steps))}]",
        f"world_size = {tolerances.world_size}",
        f"assumed = {'true' if tolerances.assumed else 'false'}",
        f"repeatable = {'true' if tolerances.repeatable else 'false'}",
        f"notes = [{', '.join(map(_text, tolerances.notes))}]",
        f"self_test = {{ {', '.join(f'{_text(k)} = {_text(v)}' for k, v in tolerances.self_test.items())} }}",
    ]
    if tolerances.declared:
        lines.append(
            f"declared = {{ {', '.join(f'{_text(k)} = {_text(v)}' for k, v in tolerances.declared.items())} }}"
        )
    for run in tolerances.runs:
        lines += ["", "[[runs]]", f"run_id = {_text(run.run_id)}", f"path = {_text(run.path)}"]
        lines += [f"created = {_text(run.created_utc)}", f"command = {_text(run.command)}"]
        lines += [f"commit = {_text(run.commit)}", f"code = {_text(run.code)}", f"perturb = {_text(run.perturb)}"]
    for family, members in tolerances.families.items():
        lines += ["", f"[families.{_text(family)}]", *_summary(members)]
        lines += [f"[families.{_text(family)}.members]"]
        lines += [f"{_text(label)} = {_member(member)}" for label, member in members.items()]
    return "\n".join(lines) + "\n"


def _summary(members: Mapping[str, Tolerance]) -> list[str]:
    zero = sum(max(member.spread) == 0 for member in members.values())
    return [
        f"series = {len(members)}",
        f"zero_spread = {zero}",
        f"largest_spread = {_number(max(max(member.spread) for member in members.values()))}",
        f"smallest_tolerance = {_number(min(min(member.tolerance) for member in members.values()))}",
        f"largest_tolerance = {_number(max(max(member.tolerance) for member in members.values()))}",
    ]


def _member(member: Tolerance) -> str:
    names = ("spread", "floor", "flip", "tolerance") if member.flip else ("spread", "floor", "tolerance")
    parts = [f"{name} = {_array(getattr(member, name))}" for name in names]
    if not math.isnan(member.control):
        parts.append(f"control = {_number(member.control)}")
    if member.horizon != ALL_JUDGED:
        parts.append(f"horizon = {member.horizon}")
    if member.mark:
        parts.append(f"mark = {_text(member.mark)}")
    return f"{{ {', '.join(parts)} }}"


def _array(values: Iterable[float]) -> str:
    numbers = [_number(value) for value in values]
    while len(numbers) > 1 and numbers[-1] == numbers[-2]:
        numbers.pop()
    return f"[{', '.join(numbers)}]"


def _number(value: float) -> str:
    return f"{round_up(value):.3g}" if value else "0.0"


def _text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c for c in escaped) + '"'


def load(path: Path | str) -> Tolerances:
    """Read a tolerance file.

    Raises:
        ToleranceError: The file cannot be read, is no tolerance file, is of another version, has an unknown key, or a
            number that no tolerance can be.
    """
    # All comparisons know tolerances, and not all read some from a file.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
    path = Path(path)
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise ToleranceError(
            f"Tolerance file {str(path)!r} cannot be read: {error.strerror}. Check the path."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ToleranceError(
            f"Tolerance file {str(path)!r} is not valid TOML: {error}. Restore it, or calibrate again."
        ) from error
    try:
        return parse(data)
    except ToleranceError as error:
        raise ToleranceError(f"Tolerance file {str(path)!r} cannot be used. {error}") from error


def parse(data: Mapping[str, Any]) -> Tolerances:
    """Make tolerances from the plain values of a file.

    Raises:
        ToleranceError: See `load`.
    """
    if data.get("format") != FORMAT:
        raise ToleranceError(
            f"Key 'format' is {data.get('format')!r}, and must be {FORMAT!r}. Give a file that `probe calibrate` wrote."
        )
    if data.get("version") != VERSION:
        raise ToleranceError(
            f"Key 'version' is {data.get('version')!r}, and this probe reads version {VERSION}. Calibrate again."
        )
    _only(data, _TOP, "the file")
    k = _finite(data, "k", "the file")
    steps = tuple(_integers(data, "steps"))
    if not steps or any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        raise ToleranceError(f"Key 'steps' is {list(steps)!r}. It must be ascending and not empty.")
    families = {}
    for family, table in _table(data, "families", "the file").items():
        where = f"family {family!r}"
        if not isinstance(table, dict):
            raise ToleranceError(f"Key {family!r} of 'families' is {table!r}, and must be a table.")
        _only(table, _FAMILY, where)
        members = _table(table, "members", where)
        families[family] = {label: _parse_member(value, label, len(steps)) for label, value in members.items()}
    runs = data.get("runs", [])
    for run in runs:
        _only(run, _RUN, "a run")
    return Tolerances(
        k=k,
        created_utc=str(data.get("created", "")),
        steps=steps,
        world_size=int(_finite(data, "world_size", "the file")),
        runs=tuple(
            CalibratedRun(
                run_id=str(run.get("run_id", "")),
                path=str(run.get("path", "")),
                created_utc=str(run.get("created", "")),
                command=str(run.get("command", "")),
                commit=str(run.get("commit", "")),
                code=str(run.get("code", "")),
                perturb=str(run.get("perturb", "")),
            )
            for run in runs
        ),
        families=families,
        assumed=bool(data.get("assumed", False)),
        repeatable=bool(data.get("repeatable", False)),
        self_test=dict(_table(data, "self_test", "the file")),
        notes=tuple(map(str, data.get("notes", []))),
        declared={what: str(bound) for what, bound in _table(data, "declared", "the file").items()},
    )


def _parse_member(table: object, label: str, steps: int) -> Tolerance:
    where = f"series {label!r}"
    if not isinstance(table, dict):
        raise ToleranceError(f"Key {label!r} is {table!r}, and must be a table with spread, floor and tolerance.")
    _only(table, _MEMBER, where)
    arrays = {}
    for name in ("spread", "floor", "tolerance", *(["flip"] if "flip" in table else [])):
        values = table.get(name)
        values = values if isinstance(values, list) else [values]
        if not 0 < len(values) <= steps:
            raise ToleranceError(f"Key {name!r} of {where} has {len(values)} numbers, and there are {steps} steps.")
        for value in values:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ToleranceError(f"Key {name!r} of {where} has {value!r}. Allowed: finite numbers from 0 up.")
        arrays[name] = tuple(map(float, values)) + (float(values[-1]),) * (steps - len(values))
    control, horizon = table.get("control", math.nan), table.get("horizon", ALL_JUDGED)
    if isinstance(control, bool) or not isinstance(control, (int, float)) or control < 0:
        raise ToleranceError(f"Key 'control' of {where} is {control!r}. Allowed: numbers from 0 up.")
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 0:
        raise ToleranceError(f"Key 'horizon' of {where} is {horizon!r}. Allowed: a step, or 0 for none.")
    try:
        return Tolerance(**arrays, control=float(control), horizon=horizon, mark=str(table.get("mark", "")))
    except ToleranceError as error:
        raise ToleranceError(f"{where[0].upper()}{where[1:]} cannot be used. {error}") from error


def _only(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise ToleranceError(f"Key {key!r} of {where} is unknown. Allowed: {listed(allowed, most=20)}.")


def _table(table: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ToleranceError(f"Key {key!r} of {where} is {value!r}, and must be a table.")
    return value


def _finite(table: Mapping[str, Any], key: str, where: str) -> float:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ToleranceError(f"Key {key!r} of {where} is {value!r}. Allowed: finite numbers above 0.")
    return float(value)


def _integers(table: Mapping[str, Any], key: str) -> list[int]:
    value = table.get(key)
    if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise ToleranceError(f"Key {key!r} of the file is {value!r}. Allowed: a list of whole numbers.")
    return value
