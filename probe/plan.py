"""What is recorded and how it is judged, as one value that both sides read.

A plan is decided once, by the defaults or by a plan file, and travels to the recording processes as plain values.
Recording asks `Plan.records` and `Plan.keeps`, judging asks the checks. This module must not know how a value is taken,
stored or compared.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from probe.check import FORMS, NEEDS, Check, default_checks
from probe.errors import PlanError
from probe.point import Kind
from probe.selection import (
    ALL_STEPS,
    KINDS,
    StepSet,
    glob_pattern,
    matches,
    nearest,
    parse_steps,
    patterns_by_kind,
    split_kind,
)

__all__ = [
    "ALL_STEPS",
    "FORMS",
    "NEEDS",
    "Check",
    "Plan",
    "StepSet",
    "default_checks",
    "default_plan",
    "glob_pattern",
    "load_plan",
    "parse_steps",
    "plan_from_dict",
]

_RECORD_KEYS = ("calls", "exclude", "full", "include", "inside_compiled", "kinds", "steps", "steps_per_file")
_CHECK_KEYS = (
    "abs",
    "form",
    "k",
    "kinds",
    "leaf",
    "metric",
    "over_ranks",
    "ratio",
    "reduce",
    "rel",
    "required",
    "select",
    "steps",
    "what",
    "where",
    "window",
    "without",
)
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""`package.module:function` or `package.module:Class.method`."""

_TOP_KEYS = ("check", "default_checks", "record")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Say what is recorded, in which steps, and the checks that judge it."""

    kinds: tuple[Kind, ...] = tuple(Kind)
    include: tuple[str, ...] = ()
    """Selections. A kind that none of them speaks of is recorded whole."""
    exclude: tuple[str, ...] = ()
    """Selections that are not recorded, included or not."""
    full: tuple[str, ...] = ()
    """Selections whose tensors are kept whole beside their summaries."""
    inside_compiled: tuple[str, ...] = ()
    """Selections of modules that are tapped although they lie inside a compiled region."""
    calls: tuple[tuple[str, str], ...] = ()
    """Functions whose arguments and results are recorded: (name, import path `package.module:function`)."""
    steps: StepSet = ALL_STEPS
    steps_per_file: int = 1
    """Steps that each rank folds into one file as it goes on; 1: each step has a file of its own."""
    checks: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        for selection in (*self.include, *self.exclude, *self.full, *self.inside_compiled):
            split_kind(selection)
        if self.steps_per_file < 1:
            raise PlanError(f"Key 'steps_per_file' of [record] is {self.steps_per_file}; it must be a number from 1.")

    def records(self, kind: Kind, name: str, item: str = "") -> bool:
        """Say whether a quantity is recorded at all; steps are asked separately."""
        if kind not in self.kinds:
            return False
        include = patterns_by_kind(self.include)[kind]
        if include is not None and not matches(include, name, item):
            return False
        return not matches(patterns_by_kind(self.exclude)[kind], name, item)

    def ignores(self, kind: Kind, name: str) -> bool:
        """Say whether nothing of a point is recorded, whatever its items are: such a point needs no hook."""
        return kind not in self.kinds or matches(patterns_by_kind(self.exclude)[kind], name, "")

    def keeps(self, kind: Kind, name: str, item: str = "") -> bool:
        """Say whether a quantity's tensor is kept whole."""
        return bool(self.full) and matches(patterns_by_kind(self.full)[kind], name, item)

    def taps_inside(self, name: str) -> bool:
        """Say whether a module is tapped although it lies inside a compiled region."""
        return bool(self.inside_compiled) and matches(patterns_by_kind(self.inside_compiled)[Kind.FORWARD], name, "")

    def narrowed(
        self, *, steps: str | None = None, full: Iterable[str] = (), steps_per_file: int | None = None
    ) -> Plan:
        """Return the plan with the steps, the further full tensors, and the steps of a file, of a command line."""
        wanted = self.steps if steps is None else parse_steps(steps)
        per_file = self.steps_per_file if steps_per_file is None else steps_per_file
        return replace(self, steps=wanted, full=(*self.full, *full), steps_per_file=per_file)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values (for JSON), in the structure of a plan file; `plan_from_dict` reads it."""
        record: dict[str, Any] = {
            "kinds": [kind.value for kind in self.kinds],
            "include": list(self.include),
            "exclude": list(self.exclude),
            "full": list(self.full),
            "inside_compiled": list(self.inside_compiled),
            "calls": dict(self.calls),
            "steps": str(self.steps),
        }
        if self.steps_per_file != 1:
            record["steps_per_file"] = self.steps_per_file
        return {"record": record, "check": [_check_as_dict(check) for check in self.checks], "default_checks": False}


def _check_as_dict(check: Check) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "what": check.what,
        "where": check.where,
        "form": check.form,
        "required": check.required,
        "kinds": [kind.value for kind in check.kinds],
        "select": list(check.select),
        "leaf": list(check.leaf),
        "without": list(check.without),
        "rel": check.rel,
        "abs": check.abs,
        "ratio": check.ratio,
        "k": check.k,
        "steps": None if check.steps is None else str(check.steps),
        "metric": list(check.metric),
        "reduce": check.reduce or None,
        "window": check.window,
        "over_ranks": check.over_ranks or None,
    }
    return {name: value for name, value in plain.items() if value not in (None, [])}


def default_plan() -> Plan:
    """Return the plan that is used without a plan file: everything, in every step, judged by the default checks."""
    return Plan(checks=default_checks())


def load_plan(path: Path | str) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: The file cannot be read, is no TOML, or has a key or value that a plan does not have.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
    path = Path(path)
    try:
        data = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise PlanError(f"Plan {str(path)!r} cannot be read: {error.strerror}. Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"Plan {str(path)!r} is not valid TOML: {error}.") from error
    try:
        return plan_from_dict(data)
    except PlanError as error:
        # add_note needs Python 3.11; the CLI prints `__notes__` on any version.
        error.__notes__ = [*getattr(error, "__notes__", []), f"The plan is {str(path)!r}."]  # type: ignore[attr-defined]
        raise


def plan_from_dict(data: Mapping[str, Any]) -> Plan:
    """Make a plan from the plain values of a plan file or of `Plan.as_dict`.

    Raises:
        PlanError: A key is unknown or a value has the wrong type or range.
    """
    _known(data, _TOP_KEYS, "the plan")
    record = _table(data.get("record", {}), "record")
    _known(record, _RECORD_KEYS, "[record]")
    kinds = _kinds(record, "[record]") if "kinds" in record else tuple(Kind)
    if not kinds:
        raise PlanError(
            f"Key 'kinds' of [record] is empty, so nothing would be recorded. Allowed: {', '.join(sorted(KINDS))}."
        )
    entries = data.get("check", [])
    if not isinstance(entries, list):
        raise PlanError(f"Key 'check' of the plan is {_described(entries)}, not a list of tables. Write [[check]].")
    checks = tuple(_check(_table(entry, f"check {number}"), number) for number, entry in enumerate(entries, 1))
    with_defaults = _typed(data, "default_checks", bool, "true or false", "the plan", True)
    include, exclude, full, inside = (
        _selections(record, name, "[record]", ()) for name in ("include", "exclude", "full", "inside_compiled")
    )
    return Plan(
        kinds=kinds,
        include=include,
        exclude=exclude,
        full=full,
        inside_compiled=inside,
        calls=_calls(record),
        steps=_steps(record, "[record]") or ALL_STEPS,
        steps_per_file=1 if (per_file := _whole(record, "steps_per_file", "[record]")) is None else per_file,
        checks=checks + (default_checks() if with_defaults else ()),
    )


def _check(table: Mapping[str, Any], number: int) -> Check:
    where = f"[[check]] {number}"
    _known(table, _CHECK_KEYS, where)
    what = _typed(table, "what", str, "text", where, "")
    if not what:
        raise PlanError(f"Key 'what' of {where} is missing. It names the row of the table.")
    where = f"{where} ({what!r})"
    form = _typed(table, "form", str, "text", where, "calibrated")
    select = _selections(table, "select", where, ("*",))
    bounds = {name: _number(table, name, where) for name in ("rel", "abs", "ratio", "k")}
    metric = _texts(table, "metric", where) if "metric" in table else ()
    reduce, over_ranks = (_typed(table, name, str, "text", where, "") for name in ("reduce", "over_ranks"))
    window = _whole(table, "window", where)
    try:
        return Check(
            what=what,
            where=_typed(table, "where", str, "text", where, ", ".join(select)),
            form=form,
            required=_typed(table, "required", bool, "true or false", where, form != "record only"),
            kinds=_kinds(table, where) if "kinds" in table else (),
            select=select,
            leaf=_selections(table, "leaf", where, ()),
            without=_selections(table, "without", where, ()),
            steps=_steps(table, where),
            metric=metric,
            reduce=reduce,
            window=window,
            over_ranks=over_ranks,
            **bounds,
        )
    except PlanError as error:
        error.__notes__ = [*getattr(error, "__notes__", []), f"It is entry {number} of [[check]]."]  # type: ignore[attr-defined]
        raise


def _known(table: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in allowed:
            raise PlanError(f"Key {key!r} of {where} is unknown.{nearest(key, allowed)}")


def _described(value: object) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return f"{value!r} ({names.get(type(value), type(value).__name__)})"


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise PlanError(f"Key {name!r} of the plan is {_described(value)}, not a table.")
    return value


def _typed(table: Mapping[str, Any], key: str, kind: type[_T], words: str, where: str, default: _T) -> _T:
    value = table.get(key, default)
    if not isinstance(value, kind):
        raise PlanError(f"Key {key!r} of {where} is {_described(value)}, not {words}.")
    return value


def _number(table: Mapping[str, Any], key: str, where: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanError(f"Key {key!r} of {where} is {_described(value)}, not a number.")
    return float(value)


def _whole(table: Mapping[str, Any], key: str, where: str) -> int | None:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, type(None))):
        raise PlanError(f"Key {key!r} of {where} is {_described(value)}, not a whole number.")
    return value


def _texts(table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = table[key]
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise PlanError(f"Key {key!r} of {where} is {_described(value)}, not text or a list of texts.")
    return tuple(values)


def _selections(table: Mapping[str, Any], key: str, where: str, default: tuple[str, ...]) -> tuple[str, ...]:
    if key not in table:
        return default
    selections = _texts(table, key, where)
    try:
        for selection in selections:
            split_kind(selection)
    except PlanError as error:
        raise PlanError(f"Key {key!r} of {where} cannot be used. {error}") from None
    return selections


def _calls(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Read the functions to record: a list of import paths, or a table of names and import paths."""
    value = record.get("calls", ())
    if isinstance(value, dict):
        named = dict(value)
    else:
        named = {path: path for path in _texts(record, "calls", "[record]")} if "calls" in record else {}
    for name, path in named.items():
        if not isinstance(path, str) or not _IMPORT_PATH.fullmatch(path):
            raise PlanError(
                f"Key 'calls' of [record] has {path!r}, which is no import path of a function. "
                "Write 'package.module:function' or 'package.module:Class.method'."
            )
        if not name:
            raise PlanError(f"Key 'calls' of [record] has an empty name for {path!r}. Give the function a name.")
    return tuple((name.replace(":", "."), path) for name, path in named.items())


def _kinds(table: Mapping[str, Any], where: str) -> tuple[Kind, ...]:
    words = _texts(table, "kinds", where)
    for word in words:
        if word not in KINDS:
            raise PlanError(f"Key 'kinds' of {where} has {word!r}, which is no kind.{nearest(word, KINDS)}")
    return tuple(Kind(word) for word in words)


def _steps(table: Mapping[str, Any], where: str) -> StepSet | None:
    value = table.get("steps")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise PlanError(f"Key 'steps' of {where} is {_described(value)}, not text such as '1-5,10'.")
    try:
        return parse_steps(str(value))
    except PlanError as error:
        raise PlanError(f"Key 'steps' of {where} cannot be used. {error}") from None
