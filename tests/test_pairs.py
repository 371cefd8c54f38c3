"""Work that is cut into pieces and read elsewhere must give the same bits as one walk over everything."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
from synthetic import SyntheticCapture, breaks, run

from probe.check import Check, default_checks
from probe.errors import CaptureFormatError
from probe.judge.compare import compare_cells
from probe.measure.differences import Axes
from probe.measure.pairs import Runs, Spread, _cut, measure_pairs
from probe.measure.reduced import reduced
from probe.measure.series import CaptureLike
from probe.measure.whole import whole
from probe.point import Key, Kind
from probe.report.machine import to_json
from probe.store import parts
from probe.store.layout import StepRows


class Elsewhere(Executor):
    """Runs at once, on copies of what is sent and returned, as another process would."""

    def __init__(self) -> None:
        self.sent = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.sent += 1
        future: Future[Any] = Future()
        try:
            future.set_result(pickle.loads(pickle.dumps(fn(*pickle.loads(pickle.dumps(args)), **kwargs))))
        except Exception as error:
            future.set_exception(error)
        return future


def compared(runs: Sequence[SyntheticCapture], checks: Sequence[Check], spread: Spread | None) -> tuple[str, list[Any]]:
    """Compare the last run with the others; the report and every array behind it."""
    comparison, judgements = compare_cells(runs[:-1], runs[-1:], None, checks=checks, spread=spread)
    arrays = [
        (each.name, getattr(judgement.differences, each.name))
        for judgement in judgements
        for each in fields(judgement.differences)
        if each.name != "index"
    ]
    return to_json(comparison) + repr(comparison.notes), arrays


def assert_same(one: tuple[str, list[Any]], two: tuple[str, list[Any]]) -> None:
    assert one[0] == two[0]
    for (name, expected), (_, actual) in zip(one[1], two[1], strict=True):
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(actual, expected, err_msg=name, strict=True)
        else:
            assert actual == expected, name


def baselines(**options: Any) -> list[SyntheticCapture]:
    return [run(f"base-{seed}", run_seed=seed, **options) for seed in range(2)]


def sharded(rows: StepRows) -> StepRows:
    """Say of each gradient that it is the half that this rank of two holds."""
    grads = np.array([key.kind is Kind.GRAD for key in rows.keys])
    text = parts.flat_text(300 * rows.rank, 300, (20, 30), (0, 1))
    return replace(
        rows,
        numel=np.where(grads, 300, rows.numel),
        text=tuple(text if grad else one for grad, one in zip(grads, rows.text, strict=True)),
    )


def late_key(key: Key, step: int, rank: int, value: np.ndarray) -> Any:
    """A candidate that lacks one output, and on the last rank another one from the second step on."""
    if key.name == "blocks.1.attn" and key.kind is Kind.FORWARD:
        return None
    return None if key.name == "blocks.2.attn" and rank == 3 and step > 1 else value


def scaled(key: Key, step: int, rank: int, value: np.ndarray) -> Any:
    """A candidate that scales its loss by another factor on the last rank, and in the second step."""
    factor = 1024.0 if step == 2 else 8.0 if rank == 3 else 2.0
    if key.name == "loss_scale":
        return np.array(factor)
    return value * factor if key.kind is Kind.BACKWARD else value


def without(*absent: tuple[str, int, tuple[int, ...]]) -> Callable[[StepRows], StepRows]:
    """Leave out outputs: name, step, ranks."""

    def edit(rows: StepRows) -> StepRows:
        names = {name for name, step, ranks in absent if step == rows.step and rows.rank in ranks}
        keep = [row for row, key in enumerate(rows.keys) if key.kind is not Kind.FORWARD or key.name not in names]
        columns = {each.name: getattr(rows, each.name) for each in fields(rows)}
        for name, column in columns.items():
            if isinstance(column, tuple):
                columns[name] = tuple(column[row] for row in keep)
            elif isinstance(column, np.ndarray):
                columns[name] = column[keep]
        columns["scalars"] = {name: column[keep] for name, column in rows.scalars.items()}
        return StepRows(**columns)

    return edit


def moded(words: Callable[[int], str]) -> Callable[[Key, int, int, np.ndarray], Any]:
    """Record a text in place of the mode."""
    return lambda key, step, rank, value: words(rank) if key.kind is Kind.STATE else value


def edited(edit: Callable[[StepRows], StepRows], **options: Any) -> list[SyntheticCapture]:
    return [each.edited(edit) for each in (*baselines(ranks=4, **options), run("c", ranks=4, code="b", **options))]


CASES: dict[str, tuple[list[SyntheticCapture], Sequence[Check]]] = {
    "equal names": ([*baselines(ranks=4), run("c", ranks=4, run_seed=9, code="b")], default_checks()),
    "a fault on one rank": (
        [*baselines(ranks=4), run("c", ranks=4, code="b", fault=breaks(Kind.FORWARD, "blocks.1", ranks=(2,)))],
        default_checks(),
    ),
    "names that come and go": ([*baselines(ranks=4), run("c", ranks=4, code="b", fault=late_key)], default_checks()),
    "scaled losses": ([*baselines(ranks=4), run("c", ranks=4, code="b", fault=scaled)], default_checks()),
    "other microbatches": (
        [*baselines(ranks=4, microbatches=2), run("c", ranks=4, microbatches=4, code="b")],
        default_checks(),
    ),
    "a mean over ranks": (
        [*baselines(ranks=4), run("c", ranks=4, code="b")],
        (
            Check(what="mean", where="", select=("loss/micro_loss",), form="rel", rel=0.5, over_ranks="mean"),
            *default_checks(),
        ),
    ),
    "a mean over steps": (
        [*baselines(ranks=2, steps=range(1, 7)), run("c", ranks=2, steps=range(1, 7), code="b")],
        (Check(what="mean", where="", select=("loss/micro_loss",), form="rel", rel=0.5, window=2), *default_checks()),
    ),
    "names that come late": (
        edited(without(("blocks.2", 1, (0, 1)), ("blocks.1", 1, (0, 1, 2, 3)))),
        default_checks(),
    ),
    "other names on other ranks": (
        edited(without(("blocks.2", 1, (0, 1)), ("blocks.1", 1, (2, 3))), steps=(1,)),
        default_checks(),
    ),
    "texts": (
        [
            *baselines(ranks=4, fault=moded(lambda rank: "train")),
            run("c", ranks=4, code="b", fault=moded(lambda rank: "eval" if rank == 3 else "train")),
        ],
        default_checks(),
    ),
    "sharded tensors": (
        [each.edited(sharded) for each in (*baselines(ranks=2), run("c", ranks=2, code="b"))],
        default_checks(),
    ),
    "one rank": ([*baselines(steps=range(1, 9)), run("c", steps=range(1, 9), code="b")], default_checks()),
}


@pytest.mark.parametrize("pieces", [2, 3, 100])
@pytest.mark.parametrize("case", CASES)
def test_pieces_read_elsewhere_give_the_same_bits_as_one_walk(case: str, pieces: int) -> None:
    runs, checks = CASES[case]
    elsewhere = Elsewhere()
    assert_same(compared(runs, checks, None), compared(runs, checks, Spread(start=lambda: elsewhere, pieces=pieces)))
    assert elsewhere.sent > 1


def test_local_processes_give_the_same_bits_as_one_walk() -> None:
    runs, checks = CASES["names that come and go"]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as executor:
        assert_same(
            compared(runs, checks, None), compared(runs, checks, Spread(start=lambda: nullcontext(executor), pieces=2))
        )


def cut(runs: Sequence[CaptureLike], pieces: int) -> list[tuple[list[int], list[int]]]:
    captures = tuple(runs)
    work = Runs(captures=captures, baselines=1, axes=Axes.shared(captures), loss_tolerances={})
    return [(list(piece.steps), list(piece.ranks)) for piece in _cut(work, pieces)]


def test_work_is_cut_by_ranks_and_by_steps_where_ranks_are_few_or_need_each_other() -> None:
    plain = [whole(each) for each in baselines(ranks=4)]
    assert cut(plain, 1) == [([0, 1, 2], [0, 1, 2, 3])]
    assert cut(plain, 2) == [([0, 1, 2], [0, 1]), ([0, 1, 2], [2, 3])]
    assert cut(plain, 100) == [([0, 1, 2], [rank]) for rank in range(4)]
    assert cut(baselines(ranks=1), 3) == [([0], [0]), ([1], [0]), ([2], [0])]
    halves = [whole(each.edited(sharded)) for each in baselines(ranks=2)]
    assert cut(halves, 2) == [([0], [0, 1]), ([1, 2], [0, 1])]
    mean = reduced([whole(each) for each in baselines(ranks=2)], CASES["a mean over ranks"][1])
    assert cut(mean, 2) == [([0], [0, 1]), ([1, 2], [0, 1])]


def test_progress_is_told_in_parts_of_the_whole() -> None:
    runs, checks = CASES["equal names"]
    told: list[float] = []
    spread = Spread(start=Elsewhere, pieces=4)
    compare_cells(runs[:-1], runs[-1:], None, checks=checks, spread=spread, progress=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_an_error_elsewhere_is_raised_here_and_ends_the_work() -> None:
    runs, checks = CASES["equal names"]
    broken = Broken(**{each.name: getattr(runs[-1], each.name) for each in fields(runs[-1])})
    with pytest.raises(CaptureFormatError, match=r"^Segment 3 of step 2 is damaged\.$"):
        compared([*runs[:-1], broken], checks, Spread(start=Elsewhere, pieces=4))


@dataclass(frozen=True, kw_only=True)
class Broken(SyntheticCapture):
    """A capture of which one segment is damaged."""

    def rows(self, rank: int, step: int) -> StepRows:
        if (rank, step) == (3, 2):
            raise CaptureFormatError("Segment 3 of step 2 is damaged.")
        return super().rows(rank, step)


def test_what_several_pairs_share_is_in_memory_once() -> None:
    runs, _ = CASES["equal names"]
    captures = tuple(runs)
    work = Runs(captures=captures, baselines=2, axes=Axes.shared(captures), loss_tolerances=dict.fromkeys((1, 2, 3), 0))
    for spread in (None, Spread(start=Elsewhere, pieces=2)):
        pairs = measure_pairs(work, spread).pairs
        held = {name: {id(base(getattr(d, name))) for d in pairs.values()} for name in ("expected", "actual", "order")}
        assert len(held["expected"] | held["actual"]) == 3
        assert len(held["order"]) == 1


def base(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
