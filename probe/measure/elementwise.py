"""Compare tensors that both runs kept whole, element by element.

A summary says how far two tensors are apart; this says where, and by how much at most. Digests are compared first, and
only tensors that differ are read, both side by side in blocks that stay in the processor's cache, so memory is bounded
whatever their size. What is read is checked against its digest. The compiled `_elementwise` compares fp32 and bf16 at
the speed of reading them; where it was not built, numpy does, as for all other types. This module must not know what
is allowed.

Two elements are equal if their values are, or if both are NaN. Differences are taken in double precision, and only of
finite elements; what is not finite on one side only is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from probe.measure.pairs import Spread, spread_calls
from probe.point import Key
from probe.store.dtypes import BITS, widen
from probe.store.reader import Capture, links_of
from probe.store.tensors import Whole

try:
    from probe.measure import _elementwise
except ImportError:  # no compiler where the package was installed
    _elementwise = None  # type: ignore[assignment]

BLOCK = 1 << 18
"""Bytes of each side that are compared at once: two blocks stay in the second-level cache."""
_COMPILED = {"float32": 0, "bfloat16": 1}
_ORDERED = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of types whose bits, with the sign taken apart, are in the order of their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementDifference:
    """How one tensor differs from another, element by element."""

    key: Key
    step: int
    rank: int
    elements: int
    different: int
    """Elements that are not equal."""
    nonfinite: int
    """Those among them that are not finite on either side."""
    max_abs: float
    """Largest absolute difference of finite elements."""
    l2: float
    """Norm of the differences of finite elements."""
    relative_l2: float
    """The same, divided by the recorded l2 norm of the baseline; NaN where that is not known."""
    ulps: int | None
    """Largest distance in units in the last place of the type; None where the type has none."""
    at: tuple[int, ...]
    """Where the largest absolute difference is."""
    expected: float | complex
    """The baseline's element there."""
    actual: float | complex


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementsCompared:
    """All tensors that a baseline and a candidate kept whole."""

    tensors: int
    """Kept by both."""
    identical: int
    """Equal in all bits."""
    equal: int
    """Equal in all values, but not in all bits (zeros of other signs, NaN of other bits)."""
    reshaped: tuple[str, ...]
    """Labels of those of another shape or type, at any step and rank."""
    different: tuple[ElementDifference, ...]
    """By step, rank and order of execution."""


class _Found(NamedTuple):
    """What one block, or several, showed."""

    different: int = 0
    nonfinite: int = 0
    squares: float = 0.0
    largest: float = 0.0
    ulps: int = 0


class _Part(NamedTuple):
    """Some of the tensors of one step on one rank: every `of`-th, from the `number`-th on."""

    rank: int
    step: int
    number: int
    of: int


def compare_elements(
    baseline: Capture,
    candidate: Capture,
    spread: Spread | None = None,
    progress: Callable[[float], None] | None = None,
) -> ElementsCompared | None:
    """Compare all tensors that two captures kept whole; None where one of them was not asked to keep any.

    Args:
        spread: Where to do it; None: in this process.
        progress: Is told which part of the work is done, from 0 to 1.

    Raises:
        CaptureFormatError: A tensor does not have its digest, or a file is damaged.
    """
    if not (_may_keep(baseline) and _may_keep(candidate)):
        return None
    places = [
        (rank, step)
        for rank in baseline.ranks
        if rank in candidate.ranks
        for step in baseline.steps(rank)
        if step in candidate.steps(rank)
    ]
    pieces = 1 if spread is None else spread.pieces
    of = -(-pieces // max(1, len(places)))
    parts = [_Part(rank, step, number, of) for rank, step in places for number in range(of)]
    if spread is None:
        found = []
        for done, part in enumerate(parts, start=1):
            found.append(_compare_part(baseline, candidate, part))
            if progress is not None:
                progress(done / len(parts))
    else:
        found = spread_calls(spread, _compare_part, [(baseline, candidate, part) for part in parts], progress)
    return _joined(found)


def _may_keep(capture: Capture) -> bool:
    """Tell whether a run was asked to keep tensors whole; where nothing says so, it may have been."""
    config = capture.manifest.get("config")
    plan = config.get("plan") if isinstance(config, dict) else None
    record = plan.get("record") if isinstance(plan, dict) else None
    return not isinstance(record, dict) or "full" not in record or bool(record["full"])


def _joined(found: Sequence[tuple[ElementsCompared, list[int]]]) -> ElementsCompared:
    ordered = sorted(
        (
            (each.step, each.rank, order, each)
            for one, orders in found
            for each, order in zip(one.different, orders, strict=True)
        ),
        key=lambda each: each[:3],
    )
    return ElementsCompared(
        tensors=sum(one.tensors for one, _ in found),
        identical=sum(one.identical for one, _ in found),
        equal=sum(one.equal for one, _ in found),
        reshaped=tuple(sorted({label for one, _ in found for label in one.reshaped})),
        different=tuple(each for *_, each in ordered),
    )


def _compare_part(baseline: Capture, candidate: Capture, part: _Part) -> tuple[ElementsCompared, list[int]]:
    """Compare some tensors of one step; also return the place of each different one in the order of execution."""
    tensors = identical = equal = 0
    reshaped: list[str] = []
    different: list[ElementDifference] = []
    orders: list[int] = []
    if not (baseline.keeps_tensors(part.rank, part.step) and candidate.keeps_tensors(part.rank, part.step)):
        return ElementsCompared(tensors=0, identical=0, equal=0, reshaped=(), different=()), []
    known: dict[tuple[str, str], ElementDifference | None] = {}
    with baseline.open_step(part.rank, part.step) as one, candidate.open_step(part.rank, part.step) as two:
        links, others = links_of(one), links_of(two)
        shared = [(order, key) for order, key in enumerate(links) if key in others]
        norms = one.norms() if shared else {}
        for order, key in shared[part.number :: part.of]:
            a, b = one.tensor(links[key]), two.tensor(others[key])
            tensors += 1
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                reshaped.append(key.label)
            elif a.digest == b.digest:
                identical += 1
            else:
                # A module often returns what its last child returned: the same pair is read once.
                pair = (a.digest, b.digest)
                if pair not in known:
                    known[pair] = _compare(a, b, key, part, norms.get(links[key], math.nan))
                found = known[pair]
                if found is None:
                    equal += 1
                else:
                    different.append(replace(found, key=key))
                    orders.append(order)
    compared = ElementsCompared(
        tensors=tensors, identical=identical, equal=equal, reshaped=tuple(reshaped), different=tuple(different)
    )
    return compared, orders


def _compare(a: Whole, b: Whole, key: Key, part: _Part, norm: float) -> ElementDifference | None:
    """Read two tensors side by side; None if all values are equal."""
    size = min(BLOCK, a.nbytes)
    one, two = (np.empty(size, np.uint8) for _ in range(2))
    digests = xxhash.xxh3_128(), xxhash.xxh3_128()
    block = _block(a.dtype)
    total, worst = _Found(), (0, 0.0, 0.0)
    with a.reader() as first, b.reader() as second:
        for start in range(0, a.nbytes, BLOCK):
            x, y = one[: a.nbytes - start], two[: a.nbytes - start]
            first.fill(x.data)
            second.fill(y.data)
            digests[0].update(x.data)
            digests[1].update(y.data)
            found = block(x, y)
            if not found.different:
                continue
            if found.largest > total.largest or not total.different:
                at, expected, actual = _worst(x, y, a.dtype)
                worst = (start // a.item + at, expected, actual)
            total = _Found(
                total.different + found.different,
                total.nonfinite + found.nonfinite,
                total.squares + found.squares,
                max(total.largest, found.largest),
                max(total.ulps, found.ulps),
            )
    a.check(digests[0])
    b.check(digests[1])
    if not total.different:
        return None
    l2 = math.sqrt(total.squares)
    return ElementDifference(
        key=key,
        step=part.step,
        rank=part.rank,
        elements=a.nbytes // a.item,
        different=total.different,
        nonfinite=total.nonfinite,
        max_abs=total.largest,
        l2=l2,
        relative_l2=l2 / norm if norm > 0 else math.nan,
        ulps=total.ulps if a.dtype in _ORDERED else None,
        at=tuple(int(at) for at in np.unravel_index(worst[0], a.shape)) if a.shape else (),
        expected=worst[1],
        actual=worst[2],
    )


def _block(dtype: str) -> Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], _Found]:
    """Return what compares two blocks of a type."""
    if _elementwise is not None and dtype in _COMPILED:
        compiled, number = _elementwise.compare, _COMPILED[dtype]
        return lambda x, y: _Found(*compiled(x, y, number))
    return lambda x, y: _with_numpy(x, y, dtype)


def _with_numpy(x: npt.NDArray[np.uint8], y: npt.NDArray[np.uint8], dtype: str) -> _Found:
    if x.data == y.data:
        return _Found()
    a, b = _values(x, dtype), _values(y, dtype)
    with np.errstate(all="ignore"):
        unequal = (a != b) & ~((a != a) & (b != b))
        count = int(np.count_nonzero(unequal))
        if not count:
            return _Found()
        delta, finite = _delta(a, b)
        squares = float(np.dot(delta, delta))
        ulps = int(_apart(x, y, dtype)[finite].max(initial=0)) if dtype in _ORDERED else 0
    return _Found(count, int(np.count_nonzero(unequal & ~finite)), squares, float(delta.max(initial=0.0)), ulps)


def _values(block: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[Any]:
    return widen(block.view(BITS[dtype]), dtype)


def _delta(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return |a - b| in double precision, 0 where it is not of finite elements, and where it is."""
    kind = np.complex128 if np.iscomplexobj(a) else np.float64
    finite = np.isfinite(a) & np.isfinite(b)
    delta = np.abs(a.astype(kind) - b.astype(kind))
    return np.where(finite, delta, 0.0), finite


def _worst(x: npt.NDArray[np.uint8], y: npt.NDArray[np.uint8], dtype: str) -> tuple[int, Any, Any]:
    """Find the largest difference in a block: its place, and both values. Where none is finite: the first unequal."""
    a, b = _values(x, dtype), _values(y, dtype)
    with np.errstate(all="ignore"):
        delta, _ = _delta(a, b)
        at = int(np.argmax(delta))
        if not delta[at]:
            at = int(np.argmax((a != b) & ~((a != a) & (b != b))))
    return at, a[at].item(), b[at].item()


def _apart(x: npt.NDArray[np.uint8], y: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.uint64]:
    """Count the units in the last place between elements."""
    one, two = _ordered(x, _ORDERED[dtype]), _ordered(y, _ORDERED[dtype])
    # Two's complement wraps: what is subtracted from the larger is right as an unsigned number.
    return np.where(one > two, one.view(np.uint64) - two.view(np.uint64), two.view(np.uint64) - one.view(np.uint64))


def _ordered(block: npt.NDArray[np.uint8], item: int) -> npt.NDArray[np.int64]:
    """Number the values of a floating-point type in their order; both zeros are 0."""
    bits = block.view(f"<i{item}").astype(np.int64)
    size = bits & ((1 << (8 * item - 1)) - 1)
    return np.where(bits < 0, -size, size)
