"""Compare tensors that both runs kept whole, element by element.

A summary says how far two tensors are apart; this says where, and by how much at most. Digests are compared first, and
only tensors that differ are read, as `probe.measure.blocks` says, by several threads or processes where it is much.
This module must not know what is allowed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from probe.measure.blocks import compare_tensors
from probe.measure.pairs import Spread, spread_calls
from probe.point import Key
from probe.store.reader import Capture, links_of
from probe.store.rows import Tables
from probe.store.steps import StepFile
from probe.store.tensors import Placed, Whole

if TYPE_CHECKING:
    from concurrent.futures import Executor

ALONE_S = 0.5
"""How long digests are compared before others are asked to help."""
WORTH_NBYTES = 256 << 20
"""Bytes to read from which on others pay."""
MOST_THREADS = 8
"""More would wait for each other: one at a time has the interpreter, for some 6 of the 85 microseconds of a block."""
PIECES = 4
"""Tasks for each piece of a spread at least, as far as there are tensors: they differ in size."""


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


_NOTHING = ElementsCompared(tensors=0, identical=0, equal=0, reshaped=(), different=())


class _Pair(NamedTuple):
    """Two tensors of other bits, which are to be read side by side."""

    keys: tuple[Key, ...]
    """A module often returns what its last child returned: what has the same bits in both runs is read once."""
    orders: tuple[int, ...]
    """Place of each among those that both keep, in order of execution."""
    norm: float
    """Recorded l2 norm of the baseline's."""
    a: Whole | Placed
    b: Whole | Placed


class _Task(NamedTuple):
    """Tensors of one step on one rank that are to be read."""

    rank: int
    step: int
    numbers: tuple[int, ...] | None
    """Places among those that both keep, in order of execution; None: nobody has looked which of them differ."""
    pairs: tuple[_Pair, ...] = ()
    """Where each lies, if all lie in one piece: opening a file with HDF5 takes as long as reading 16 MB of it."""


class _Survey(NamedTuple):
    """What digests alone show of one step on one rank."""

    compared: ElementsCompared
    pairs: list[_Pair]


def compare_elements(
    baseline: Capture,
    candidate: Capture,
    spread: Spread | None = None,
    progress: Callable[[float], None] | None = None,
    threads: int = 1,
) -> ElementsCompared | None:
    """Compare all tensors that two captures kept whole; None where one of them was not asked to keep any.

    Digests are compared here, as long as that is quick; what has to be read is read elsewhere if it is much.

    Args:
        spread: Where to read; None: in this process.
        progress: Is told which part of the work is done, from 0 to 1.
        threads: If more than one and at most `MOST_THREADS`, as many read here instead of `spread` where no file needs
            HDF5, which has one lock: they start at once, and need no memory of their own.

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
        nbytes += sum(2 * pair.a.nbytes for pair in survey.pairs)
        tasks += [_task(rank, step, pair) for pair in survey.pairs]
    if 1 < threads <= MOST_THREADS and all(task.pairs for task in tasks):
        spread = Spread(start=lambda: _threads(threads), pieces=2 * threads)
    elif spread is not None:
        tasks = [task._replace(pairs=tuple(map(_absolute, task.pairs))) for task in tasks]
    if spread is None or nbytes < WORTH_NBYTES:
        for done, task in enumerate(tasks, start=1):
            found.append(_compare_task(baseline, candidate, task))
            if progress is not None:
                progress(done / len(tasks))
    else:
        calls = [(baseline, candidate, task) for task in _gathered(tasks, spread.pieces)]
        found += spread_calls(spread, _compare_task, calls, progress)
    return _joined(found)


def _threads(count: int) -> AbstractContextManager[Executor]:
    # Most comparisons come without it.
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(count)


def _task(rank: int, step: int, pair: _Pair) -> _Task:
    a, b = pair.a, pair.b
    if isinstance(a, Whole) and isinstance(b, Whole) and a.contiguous and b.contiguous:
        return _Task(rank, step, pair.orders, (pair._replace(a=a.placed, b=b.placed),))
    return _Task(rank, step, pair.orders)


def _absolute(pair: _Pair) -> _Pair:
    """Name the files so that a process elsewhere finds them."""
    a, b = (replace(each, path=each.path.absolute()) for each in (pair.a, pair.b) if isinstance(each, Placed))
    return pair._replace(a=a, b=b)


def _gathered(tasks: Sequence[_Task], pieces: int) -> list[_Task]:
    """Put tasks of one step together, until there are a few for each worker."""
    most = -(-len(tasks) // (PIECES * pieces))
    gathered: list[_Task] = []
    for task in tasks:
        last = gathered[-1] if gathered else None
        alike = last and last[:2] == task[:2] and last.numbers and task.numbers and bool(last.pairs) == bool(task.pairs)
        if last and alike and len(last.numbers or ()) < most:
            numbers = (*(last.numbers or ()), *(task.numbers or ()))
            gathered[-1] = last._replace(numbers=numbers, pairs=last.pairs + task.pairs)
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


def _shared(
    one: StepFile, two: StepFile, tables: tuple[Tables, Tables], numbers: Sequence[int] | None = None
) -> _Shared:
    others = links_of(two, tables[1])
    norms = {link: float(l2) for link, l2 in zip(tables[0]["tensor"], tables[0]["l2"], strict=True) if link}
    links = [(key, link) for key, link in links_of(one, tables[0]).items() if key in others]
    chosen = links if numbers is None else [links[number] for number in numbers]
    pairs = zip(one.tensors([link for _, link in chosen]), two.tensors([others[key] for key, _ in chosen]), strict=True)
    return _Shared(keys=[key for key, _ in chosen], pairs=list(pairs), norms=[norms[link] for _, link in chosen])


def _survey(baseline: Capture, candidate: Capture, rank: int, step: int) -> _Survey:
    """Compare the digests of a step."""
    tables = baseline.tables(rank, step), candidate.tables(rank, step)
    if not all(any(each["tensor"]) for each in tables):
        return _Survey(_NOTHING, [])
    with baseline.open_step(rank, step) as one, candidate.open_step(rank, step) as two:
        shared = _shared(one, two, tables)
        return _compared_digests(shared, range(len(shared.keys)))


def _compared_digests(shared: _Shared, numbers: Sequence[int]) -> _Survey:
    identical = 0
    reshaped = []
    unequal: dict[tuple[str, str], list[int]] = {}
    for at, (key, (a, b)) in enumerate(zip(shared.keys, shared.pairs, strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            reshaped.append(key.label)
        elif a.digest == b.digest:
            identical += 1
        else:
            unequal.setdefault((a.digest, b.digest), []).append(at)
    compared = ElementsCompared(
        tensors=len(shared.keys), identical=identical, equal=0, reshaped=tuple(reshaped), different=()
    )
    pairs = [
        _Pair(
            keys=tuple(shared.keys[at] for at in same),
            orders=tuple(numbers[at] for at in same),
            norm=shared.norms[same[0]],
            a=shared.pairs[same[0]][0],
            b=shared.pairs[same[0]][1],
        )
        for same in unequal.values()
    ]
    return _Survey(compared, pairs)


def _compare_task(baseline: Capture, candidate: Capture, task: _Task) -> tuple[ElementsCompared, list[int]]:
    """Read tensors side by side; also return the place of each different one in the order of execution."""
    if task.pairs:
        return _compare_pairs(task, task.pairs, _NOTHING)
    tables = baseline.tables(task.rank, task.step), candidate.tables(task.rank, task.step)
    with baseline.open_step(task.rank, task.step) as one, candidate.open_step(task.rank, task.step) as two:
        shared = _shared(one, two, tables, task.numbers)
        survey = _compared_digests(shared, range(len(shared.keys)) if task.numbers is None else task.numbers)
        return _compare_pairs(task, survey.pairs, survey.compared if task.numbers is None else _NOTHING)


def _compare_pairs(task: _Task, pairs: Sequence[_Pair], known: ElementsCompared) -> tuple[ElementsCompared, list[int]]:
    """Add to what digests have shown."""
    equal = 0
    different: list[ElementDifference] = []
    orders: list[int] = []
    for pair in pairs:
        found = _compare(pair, task)
        if found is None:
            equal += len(pair.keys)
            continue
        different += [replace(found, key=key) for key in pair.keys]
        orders += pair.orders
    return replace(known, equal=equal, different=tuple(different)), orders


def _compare(pair: _Pair, task: _Task) -> ElementDifference | None:
    """Read two tensors side by side; None if all values are equal."""
    found = compare_tensors(pair.a, pair.b)
    if found is None:
        return None
    l2, shape = math.sqrt(found.squares), pair.a.shape
    return ElementDifference(
        key=pair.keys[0],
        step=task.step,
        rank=task.rank,
        elements=math.prod(shape),
        different=found.different,
        nonfinite=found.nonfinite,
        max_abs=found.largest,
        l2=l2,
        relative_l2=l2 / pair.norm if pair.norm > 0 else math.nan,
        ulps=found.ulps,
        at=tuple(int(at) for at in np.unravel_index(found.at, shape)) if shape else (),
        expected=found.expected,
        actual=found.actual,
    )
