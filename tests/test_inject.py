"""Known changes in recorded values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import pytest
from synthetic import Rows, SyntheticCapture, run

from probe.errors import PlanError
from probe.judge.inject import ChangedCapture, Injection, changed_tensor, kept_whole, parse_injection
from probe.point import Key, Kind
from probe.sketch import reductions, sketch
from probe.store.layout import FullTensor, StepRows

BASE = run("base-0", noise=0.0, ranks=2)
BLOCK = Key(kind=Kind.FORWARD, name="blocks.1", microbatch=0)


def row_of(rows: StepRows, key: Key) -> dict[str, object]:
    row = rows.keys.index(key)
    arrays = {name: getattr(rows, name)[row] for name in ("value", "sketch", "hash")}
    return arrays | {name: values[row] for name, values in rows.scalars.items()}


@pytest.mark.parametrize(
    ("text", "injection"),
    [
        ("scale", Injection(kind="scale", size=1.001)),
        ("scale:1.000001", Injection(kind="scale", size=1.000001)),
        ("scale:1e-3", Injection(kind="scale", size=1e-3)),
        ("zero-head:4", Injection(kind="zero-head", size=4.0)),
        ("swap-tokens", Injection(kind="swap-tokens", size=1.0)),
    ],
)
def test_an_injection_is_a_kind_and_a_size(text: str, injection: Injection) -> None:
    assert parse_injection(text) == injection
    assert parse_injection(str(injection)) == injection


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scael:2",
            "Injection 'scael:2' has kind 'scael'. Did you mean 'scale'? Allowed: drop-rank, scale, shift-step, "
            "swap-tokens, wrong-row, zero-head.",
        ),
        ("scale:x", "Injection 'scale:x' has no usable size. Write 'scale:SIZE' with SIZE 1.001: the factor."),
        (
            "zero-head",
            "Injection 'zero-head' has no usable size. Write 'zero-head:SIZE' with SIZE number of heads, of which the "
            "first is zeroed.",
        ),
        (
            "drop-rank:0.5",
            "Injection 'drop-rank:0.5' has no usable size. Write 'drop-rank:SIZE' with SIZE 1: how many "
            "ranks are lost.",
        ),
    ],
)
def test_a_wrong_injection_says_what_is_wrong_with_it(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        parse_injection(text)


def test_a_factor_scales_all_that_is_recorded_of_a_quantity_and_nothing_else() -> None:
    changed = ChangedCapture(BASE, Injection(kind="scale", size=-2.0), {(0, 2): {BLOCK}})
    before, after = BASE.rows(0, 2), changed.rows(0, 2)
    old, new = row_of(before, BLOCK), row_of(after, BLOCK)
    np.testing.assert_array_equal(new["sketch"], -2 * old["sketch"])  # type: ignore[operator]
    assert {name: new[name] for name in before.scalars} == {
        name: (-2 if name == "mean" else 2) * old[name]  # type: ignore[operator]
        for name in before.scalars
    }
    others = [row for row, key in enumerate(before.keys) if key != BLOCK]
    np.testing.assert_array_equal(after.sketch[others], before.sketch[others])
    assert changed.rows(1, 2) is BASE.rows(1, 2)
    assert changed.relative == {(0, 2, BLOCK): 3.0}


def test_a_changed_value_has_other_bits() -> None:
    batch = Key(kind=Kind.BATCH, name="x", microbatch=0)
    changed = ChangedCapture(BASE, Injection(kind="scale", size=1.001), {(0, 1): {batch}})
    assert (row_of(changed.rows(0, 1), batch)["hash"] != row_of(BASE.rows(0, 1), batch)["hash"]).all()  # type: ignore[attr-defined]


def test_a_step_ahead_has_the_later_values_with_the_data_and_state_of_its_own() -> None:
    changed = ChangedCapture(BASE, Injection(kind="shift-step", size=1.0))
    assert changed.steps(0) == (1, 2, 3)
    for step, source in ((1, 2), (2, 3), (3, 1)):
        rows = changed.rows(1, step)
        assert (rows.step, rows.rank) == (step, 1)
        for key in rows.keys:
            kept = key.kind in (Kind.BATCH, Kind.STATE) or key.item == "before"
            wanted = row_of(BASE.rows(1, step if kept else source), key)
            assert all(np.array_equal(row_of(rows, key)[n], wanted[n], equal_nan=True) for n in wanted)  # type: ignore[arg-type]


def test_a_dropped_rank_is_gone() -> None:
    changed = ChangedCapture(BASE, Injection(kind="drop-rank", size=1.0))
    assert (changed.ranks, changed.world_size) == ((0,), 2)


TENSOR = np.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("wrong-row", TENSOR[:, [0, 0, 2]]),
        ("wrong-row:9", TENSOR[:, [0, 0, 1]]),
        ("swap-tokens", TENSOR[:, [1, 0, 2]]),
        ("zero-head:2", TENSOR * [0, 0, 1, 1]),
        ("zero-head:3", TENSOR),
    ],
)
def test_rows_tokens_and_heads_of_a_tensor_are_changed(text: str, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(changed_tensor(parse_injection(text), TENSOR), wanted)


@dataclass(frozen=True, kw_only=True)
class WithTensors(SyntheticCapture):
    """A capture that kept the outputs of the blocks whole."""

    tensors: dict[tuple[int, int, Key], np.ndarray] = field(default_factory=dict)

    def tensor_keys(self, rank: int, step: int) -> tuple[Key, ...]:
        return tuple(key for r, s, key in self.tensors if (r, s) == (rank, step))

    def tensor(self, rank: int, step: int, key: Key) -> FullTensor:
        return FullTensor(bits=self.tensors[rank, step, key].astype("<f4"), dtype="float32")


@lru_cache(maxsize=1)
def with_tensors(seed: int = 0) -> WithTensors:
    base = run("base-0", noise=0.0, ranks=2, run_seed=seed)
    tensors = {}
    for rank, step in base.segments:
        values = np.random.default_rng([rank, step]).standard_normal((1, 40, 50)).astype(np.float32)
        tensors[rank, step, BLOCK] = values

    def kept(rows: StepRows) -> StepRows:
        row = rows.keys.index(BLOCK)
        values = tensors[rows.rank, rows.step, BLOCK].astype(np.float64)
        summary = rows.sketch.copy()
        summary[row] = sketch(values)
        scalars = {name: np.array(column) for name, column in rows.scalars.items()}
        for name, value in reductions(values).items():
            scalars[name][row] = value
        return replace(rows, sketch=summary, scalars=scalars)

    edited = base.edited(kept)
    return WithTensors(
        path=edited.path,
        manifest=edited.manifest,
        run_id=edited.run_id,
        world_size=2,
        segments=edited.segments,
        tensors=tensors,
    )


def test_a_changed_tensor_has_the_summary_that_it_would_have_been_recorded_with() -> None:
    base = with_tensors()
    assert kept_whole(base, 0, 1) == {BLOCK}
    assert kept_whole(BASE, 0, 1) == frozenset()
    injection = parse_injection("swap-tokens")
    changed = ChangedCapture(base, injection, {(0, 1): {BLOCK}})
    found = row_of(changed.rows(0, 1), BLOCK)
    old = base.tensors[0, 1, BLOCK].astype(np.float64)
    new = changed_tensor(injection, old)
    rows = Rows(1, 0, 2)
    rows.add(BLOCK, new)
    np.testing.assert_allclose(found["sketch"], sketch(new), rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]
    assert {name: found[name] for name in reductions(new)} == pytest.approx(reductions(new))
    assert changed.relative == {(0, 1, BLOCK): pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))}
