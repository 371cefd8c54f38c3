"""`probe.close_to`: equality within tolerances, for plain assertions.

Tensors and structures of them are compared element by element in float64, by the metric of the reports,
||a - b|| / ||b||. Two captures are compared as `probe diff` does. What is said about a failure names places and
numbers, and never prints a tensor. This module must not import torch: it takes what the test has.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probe.equivalence.explain import explain
from probe.equivalence.options import Allowed, declared
from probe.errors import ProbeError, ToleranceError
from probe.judge.comparison import Comparison, Outcome
from probe.judge.tolerance import Tolerances, load
from probe.measure.distance import ASSUMED_EPSILONS, EPSILON, INTEGER_TYPES, TINY
from probe.report import words
from probe.selection import glob_pattern, split_kind
from probe.store.layout import MANIFEST_FILE

Array = np.ndarray[Any, np.dtype[Any]]

_SHORT = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32"}
_ONE_SIDED = {"missing": "is missing", "unexpected": "is not expected"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One value inside a structure."""

    values: Array | None
    """float64 for numbers; None for text and other objects."""
    dtype: str
    shape: tuple[int, ...]
    plain: object = None
    """The object itself where it is no array."""

    def __str__(self) -> str:
        if self.values is None:
            return type(self.plain).__name__
        return f"{_SHORT.get(self.dtype, self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """A leaf that is not close."""

    path: str
    problem: str
    """What is wrong, in words, with the numbers."""
    difference: float = math.nan
    """||a - b|| / ||b||; NaN where it cannot be measured."""
    allowed: float = math.nan
    where: str = ""
    """The element that is furthest off, with both values."""


class CloseTo:
    """What `actual == ...` is compared with; see `probe.close_to`."""

    __array_ufunc__ = None
    """Makes numpy leave `array == self` to this class."""
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: object, tolerances: Allowed = None, *, same_code: bool = False) -> None:
        """Keep what is expected; see `probe.close_to`."""
        declared(tolerances)
        self.expected, self.tolerances, self.same_code = expected, tolerances, same_code

    def __eq__(self, actual: object) -> bool:
        if isinstance(actual, CloseTo):
            return self is actual
        if _capture_of(self.expected) is not None:
            return self._compared(actual).outcome is Outcome.EQUIVALENT
        return not self._unlike(actual)[0]

    def __repr__(self) -> str:
        if _capture_of(self.expected) is not None:
            return f"close_to({_named(self.expected)!r})"
        leaves = _leaves(self.expected)
        if len(leaves) == 1 and "" in leaves:
            return f"close_to({leaves['']})"
        return f"close_to({type(self.expected).__name__} of {len(leaves)} values)"

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make torch leave `tensor == self` to this class."""
        return NotImplemented

    def explain(self, actual: object) -> list[str]:
        """Say why the assertion failed: the first place, the worst place, what was allowed, what would have passed."""
        if _capture_of(self.expected) is not None:
            return explain(self._compared(actual))
        return _explain(*self._unlike(actual))

    # ------------------------------------------------------------------ captures
    def _compared(self, actual: object) -> Comparison:
        from probe.equivalence.options import Options
        from probe.judge.compare import compare

        baseline, candidate = _capture_of(self.expected), _capture_of(actual)
        if candidate is None:
            raise ProbeError(
                f"Actual value is {type(actual).__name__!r}, and a capture is expected. Give the folder of a capture, "
                "or what `probe.store.reader.open_capture` returns."
            )
        given = self.tolerances
        allowed = load(given) if isinstance(given, (str, Path)) else given if isinstance(given, Tolerances) else None
        checks = Options(tolerances=given).checks() if declared(given) else None
        return compare([baseline], [candidate], allowed, checks=checks, same_code=self.same_code)

    # ------------------------------------------------------------------ tensors
    def _unlike(self, actual: object) -> tuple[list[Unlike], int]:
        expected, found = _leaves(self.expected), _leaves(actual)
        allowed = self._allowed(expected)
        unlike = []
        for path in dict.fromkeys((*expected, *found)):
            if path not in found or path not in expected:
                side, leaf = ("missing", expected[path]) if path not in found else ("unexpected", found[path])
                unlike.append(Unlike(path=path, problem=f"{leaf} {_ONE_SIDED[side]}"))
            else:
                problem = _compare(path, expected[path], found[path], allowed.get(path))
                unlike += [problem] if problem else []
        return unlike, len(expected)

    def _allowed(self, expected: Mapping[str, Leaf]) -> dict[str, float]:
        """Look up the declared or calibrated tolerance of each path; what has none has the assumed one of its type."""
        given = self.tolerances
        names = {path: path.lstrip(".") for path in expected}
        if isinstance(given, (str, Path, Tolerances)):
            members = (given if isinstance(given, Tolerances) else load(given)).members()
            by_name = {label.partition("/")[2]: member for label, member in members.items()}
            found = {path: members.get(name, by_name.get(name)) for path, name in names.items()}
            unknown = [names[path] for path, leaf in expected.items() if _is_judged(leaf) and found[path] is None]
            if unknown:
                raise ToleranceError(
                    f"No tolerance is known for {unknown[0]!r}. Known: {', '.join(sorted(members)[:5])} ... "
                    "Name the values as the tolerance file does."
                )
            return {path: max(member.tolerance) for path, member in found.items() if member is not None}
        patterns = [(glob_pattern((split_kind(what)[1],)), value) for what, value in declared(given).items()]
        matched = {
            path: next((value for pattern, value in patterns if pattern.fullmatch(name)), None)
            for path, name in names.items()
        }
        return {path: value for path, value in matched.items() if value is not None}


def _is_judged(leaf: Leaf) -> bool:
    return leaf.values is not None and leaf.dtype not in INTEGER_TYPES


def _capture_of(value: object) -> Any:
    """Return the capture that a value is or names, or None."""
    if hasattr(value, "run_id") and hasattr(value, "world_size"):
        return value
    if isinstance(value, Path) or (isinstance(value, str) and (Path(value) / MANIFEST_FILE).is_file()):
        from probe.store.reader import open_capture

        return open_capture(value)
    return None


def _named(value: object) -> str:
    return str(getattr(value, "path", value))


def _leaves(value: object, path: str = "") -> dict[str, Leaf]:
    """Flatten a structure: mappings give `.key`, sequences `[index]`; a value that stands alone has the path ''."""
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in _leaves(item, f"{path}.{key}").items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return {k: v for index, item in enumerate(value) for k, v in _leaves(item, f"{path}[{index}]").items()}
    return {path: _leaf(value)}


def _leaf(value: object) -> Leaf:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        host = value.detach().to("cpu")
        if host.is_complex():
            host = torch.view_as_real(host.resolve_conj())
        return Leaf(values=host.double().numpy(), dtype=dtype, shape=shape)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "fiub":
        return Leaf(values=np.asarray(value, dtype=np.float64), dtype=value.dtype.name, shape=value.shape)
    if isinstance(value, (int, float)):
        return Leaf(values=np.asarray(float(value)), dtype=type(value).__name__, shape=())
    return Leaf(values=None, dtype=type(value).__name__, shape=(), plain=value)


def _compare(path: str, expected: Leaf, actual: Leaf, allowed: float | None) -> Unlike | None:
    if expected.values is None or actual.values is None:
        same = type(expected.plain) is type(actual.plain) and bool(expected.plain == actual.plain)
        if same and (expected.values is None) == (actual.values is None):
            return None
        if expected.values is None and actual.values is None and isinstance(expected.plain, str):
            return Unlike(path=path, problem=f"is {actual.plain!r}, expected {expected.plain!r}")
        return Unlike(path=path, problem=f"is {actual}, expected {expected}")
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return Unlike(path=path, problem=f"is {actual}, expected {expected}")
    a, b = actual.values, expected.values
    with np.errstate(all="ignore"):
        same = a == b  # a NaN never passes; an infinity in the same place, as in a mask, does
        if same.all():
            return None
        not_finite = ~same & ~(np.isfinite(a) & np.isfinite(b))
        if not_finite.any():
            where, count = _at(np.where(not_finite, 1.0, 0.0), a, b), int(not_finite.sum())
            elements = "1 element" if count == 1 else f"{count:,} elements"
            return Unlike(path=path, problem=f"{expected} is not finite in {elements}", where=where)
        delta = np.where(same, 0.0, a - b)
        size = float(np.linalg.norm(np.where(np.isfinite(b), b, 0.0)))
        distance = float(np.linalg.norm(delta))
        relative = distance / size if size >= TINY else math.inf
    exact = expected.dtype in INTEGER_TYPES
    if allowed is None:
        allowed = 0.0 if exact else ASSUMED_EPSILONS * EPSILON.get(expected.dtype, EPSILON["float32"])
        source = "judged exactly" if exact else f"assumed: {ASSUMED_EPSILONS:.0f} eps"
    else:
        source = "declared"
    if relative <= allowed:
        return None
    shown = words.difference(allowed, "relative") if allowed else "0"
    problem = f"{expected}: difference {words.difference(relative, 'relative')}, allowed {shown} ({source})"
    return Unlike(path=path, problem=problem, difference=relative, allowed=allowed, where=_at(np.abs(delta), a, b))


def _at(measure: Array, a: Array, b: Array) -> str:
    place = np.unravel_index(int(np.argmax(measure)), measure.shape)
    expected, actual = words.pair(float(b[place]), float(a[place]))
    index = f"[{', '.join(str(int(i)) for i in place)}] " if place else ""
    return f"{index}expected {expected}, actual {actual}"


def _explain(unlike: list[Unlike], of: int) -> list[str]:
    """Lay the explanation out; eight lines at most, for pytest cuts what is longer."""
    if not unlike:
        return ["Equal within the tolerances when compared again; the values changed since, or are not repeatable."]
    first = unlike[0]
    worst = max(unlike, key=lambda each: _times(each))
    what = "value" if of == 1 else "values"
    lines = [f"{len(unlike)} of {of} {what} not close (||a - b|| / ||b||)"]
    lines += _place("First" if len(unlike) > 1 else "At", first)
    if worst is not first:
        lines += _place("Worst", worst)
    unmeasured = [each for each in unlike if math.isnan(each.difference) or math.isinf(each.difference)]
    exact = [each for each in unlike if each.allowed == 0]
    if unmeasured or exact:
        return [*lines, "Would have passed: no tolerance"]
    most = max(each.difference for each in unlike)
    return [*lines, f"Would have passed: close_to(expected, {_upward(most)})"]


def _times(each: Unlike) -> float:
    if math.isnan(each.difference) or not each.allowed:
        return math.inf
    return each.difference / each.allowed


def _place(title: str, each: Unlike) -> list[str]:
    name = each.path.lstrip(".")
    lines = [f"{title}: {name + ' ' if name else ''}{each.problem}"]
    return [*lines, f"  furthest off: {each.where}"] if each.where else lines


def _upward(value: float) -> str:
    """Write a number with two digits, rounded up, so that it would indeed have passed."""
    from probe.judge.tolerance import round_up

    return f"{round_up(value, 2):.2g}"
