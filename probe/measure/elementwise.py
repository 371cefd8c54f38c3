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
import time
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
from probe.store.steps import StepFile
from probe.store.tensors import Whole

try:
    from probe.measure import _elementwise
except ImportError:  # no compiler where the package was installed
    _elementwise = None  # type: ignore[assignment]

BLOCK = 1 << 18
"""Bytes of each side that are compared at once: two blocks stay in the second-level cache."""
ALONE_S = 0.5
"""How long digests are compared before others are asked to help."""
WORTH_NBYTES = 256 << 20
"""Bytes to read from which on other processes pay."""
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


class _Task(NamedTuple):
    """Tensors of one step on one rank that are to be read."""

    rank: int
    step: int
    numbers: tuple[int, ...] | None
    """Places among those that both keep, in order of execution; None: nobody has looked which of them differ."""


class _Survey(NamedTuple):
    """What digests alone show of one step on one rank."""

    compared: ElementsCompared
    unequal: list[tuple[list[int], int]]
    """Places of tensors to read, those of the same bits together, and the bytes of a pair."""


def compare_elements(
    baseline: Capture,
    candidate: Capture,
    spread: Spread | None = None,
    progress: Callable[[float], None] | None = None,
) -> ElementsCompared | None:
    """Compare all tensors that two captures kept whole; None where one of them was not asked to keep any.

    Digests are compared here, as long as that is quick; what has to be read is read elsewhere if it is much.

    Args:
        spread: Where to read; None: in this process.
        progress: Is told which part of the work is done, from 0 to 1.

    Raises:
        CaptureFormatError: A tensor does not have its digest, or a file is damaged.
    """
    if not (baseline.may_keep_tensors and candidate.may_keep_tensors):
        return None
    places = [
        (rank, step)
        for rank in baseline.ranks
        if rank in candidate.ranks
        for step in baseline.steps(rank)
        if step in candidate.steps(rank)
    ]
    found: list[tuple[ElementsCompared, list[int]]] = []
    tasks: list[_Task] = []
    nbytes, begun = 0, time.monotonic()
    for rank, step in places:
        if spread is not None and time.monotonic() - begun > ALONE_S:
            tasks.append(_Task(rank, step, None))
            nbytes += WORTH_NBYTES  # not known, and worth it
            continue
        survey = _survey(baseline, candidate, rank, step)
        found.append((survey.compared, []))
        nbytes += sum(size for _, size in survey.unequal)
        tasks += [_Task(rank, step, tuple(same)) for same, _ in survey.unequal]
    if spread is None or nbytes < WORTH_NBYTES:
        for done, task in enumerate(tasks, start=1):
            found.append(_compare_task(baseline, candidate, task))
            if progress is not None:
                progress(done / len(tasks))
    else:
        calls = [(baseline, candidate, task) for task in _gathered(tasks, spread.pieces)]
        found += spread_calls(spread, _compare_task, calls, progress)
    return _joined(found)


def _gathered(tasks: Sequence[_Task], pieces: int) -> list[_Task]:
    """Put tasks of one step together, until there are a few for each worker: each opens its two files."""
    most = -(-len(tasks) // (4 * pieces))
    gathered: list[_Task] = []
    for task in tasks:
        last = gathered[-1] if gathered else None
        if last and last[:2] == task[:2] and last.numbers and task.numbers and len(last.numbers) < most:
            gathered[-1] = last._replace(numbers=last.numbers + task.numbers)
        else:
            gathered.append(task)
    return gathered


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


class _Shared(NamedTuple):
    """The tensors that two open steps both keep, in order of execution."""

    keys: list[Key]
    pairs: list[tuple[Whole, Whole]]
    norms: list[float]


def _shared(one: StepFile, two: StepFile, numbers: Sequence[int] | None = None) -> _Shared:
    tables, others = one.tables(), links_of(two, two.tables())
    norms = {link: float(l2) for link, l2 in zip(tables["tensor"], tables["l2"], strict=True) if link}
    links = [(key, link) for key, link in links_of(one, tables).items() if key in others]
    chosen = links if numbers is None else [links[number] for number in numbers]
    return _Shared(
        keys=[key for key, _ in chosen],
        pairs=[(one.tensor(link), two.tensor(others[key])) for key, link in chosen],
        norms=[norms[link] for _, link in chosen],
    )


def _survey(baseline: Capture, candidate: Capture, rank: int, step: int) -> _Survey:
    """Compare the digests of a step."""
    if not (baseline.keeps_tensors(rank, step) and candidate.keeps_tensors(rank, step)):
        return _Survey(ElementsCompared(tensors=0, identical=0, equal=0, reshaped=(), different=()), [])
    with baseline.open_step(rank, step) as one, candidate.open_step(rank, step) as two:
        shared = _shared(one, two)
        return _compared_digests(shared)


def _compared_digests(shared: _Shared) -> _Survey:
    identical = 0
    reshaped = []
    # A module often returns what its last child returned: the same pair is read once.
    unequal: dict[tuple[str, str], tuple[list[int], int]] = {}
    for number, (key, (a, b)) in enumerate(zip(shared.keys, shared.pairs, strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            reshaped.append(key.label)
        elif a.digest == b.digest:
            identical += 1
        else:
            unequal.setdefault((a.digest, b.digest), ([], 2 * a.nbytes))[0].append(number)
    compared = ElementsCompared(
        tensors=len(shared.keys), identical=identical, equal=0, reshaped=tuple(reshaped), different=()
    )
    return _Survey(compared, list(unequal.values()))


def _compare_task(baseline: Capture, candidate: Capture, task: _Task) -> tuple[ElementsCompared, list[int]]:
    """Read tensors side by side; also return the place of each different one in the order of execution."""
    with baseline.open_step(task.rank, task.step) as one, candidate.open_step(task.rank, task.step) as two:
        shared = _shared(one, two, task.numbers)
        survey = _compared_digests(shared)
        equal = 0
        different, orders = [], []
        for same, _ in survey.unequal:
            a, b = shared.pairs[same[0]]
            found = _compare(a, b, shared.keys[same[0]], task, shared.norms[same[0]])
            if found is None:
                equal += len(same)
                continue
            for at in same:
                different.append(replace(found, key=shared.keys[at]))
                orders.append(at if task.numbers is None else task.numbers[at])
    known = survey.compared if task.numbers is None else replace(survey.compared, tensors=0, identical=0, reshaped=())
    return replace(known, equal=equal, different=tuple(different)), orders


def _compare(a: Whole, b: Whole, key: Key, task: _Task, norm: float) -> ElementDifference | None:
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
        step=task.step,
        rank=task.rank,
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
