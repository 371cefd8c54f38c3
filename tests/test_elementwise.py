from __future__ import annotations

import json
import math
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from step_rows import forward_keys, make_rows, random_tensor

from probe import cli
from probe.errors import CaptureFormatError
from probe.measure import blocks, elementwise
from probe.measure.elementwise import ElementDifference, ElementsCompared, compare_elements
from probe.measure.pairs import Spread
from probe.point import Key
from probe.report.elements import objects, sentences
from probe.store.dtypes import BITS, widen
from probe.store.layout import FullTensor, StepRows
from probe.store.pack import pack
from probe.store.reader import Capture, open_capture
from probe.store.tensors import Placed
from probe.store.writer import RankWriter, create_capture, write_manifest

KEYS = forward_keys(4)


def recorded(path: Path, tensors: dict[Key, FullTensor], *, steps: tuple[int, ...] = (1,), **config: Any) -> Capture:
    create_capture(path)
    write_manifest(path, {"run_id": path.name, "world_size": 2, **config})
    for rank in range(2):
        writer = RankWriter(path, run_id=path.name, rank=rank, world_size=2)
        for step in steps:
            writer.write(_rows(step, rank, tensors))
        writer.close(error=None, dropped_steps=[])
    return open_capture(path)


def _rows(step: int, rank: int, tensors: dict[Key, FullTensor]) -> StepRows:
    rows = make_rows(KEYS, step=step, rank=rank, world_size=2, tensors=tensors)
    rows.scalars["l2"][:] = 4.0
    return rows


def f32(*values: float) -> FullTensor:
    return FullTensor(bits=np.array(values, dtype="<f4"), dtype="float32")


def one_pair(tmp_path: Path, expected: FullTensor, actual: FullTensor) -> ElementsCompared:
    """Compare one tensor on rank 0 alone."""
    runs = [recorded(tmp_path / name, {KEYS[2]: each}) for name, each in (("a", expected), ("b", actual))]
    found = compare_elements(*runs)
    assert found is not None
    first = tuple(each for each in found.different if each.rank == 0)
    return ElementsCompared(
        tensors=found.tensors // 2,
        identical=found.identical // 2,
        equal=found.equal // 2,
        reshaped=found.reshaped,
        different=first,
    )


def test_where_and_by_how_much_two_tensors_differ(tmp_path: Path) -> None:
    expected = FullTensor(bits=np.arange(24, dtype="<f4").reshape(2, 3, 4), dtype="float32")
    changed = expected.bits.copy()
    changed[1, 2, 0] += 3
    changed[0, 1, 1] = np.nextafter(changed[0, 1, 1], np.float32(9))
    assert one_pair(tmp_path, expected, FullTensor(bits=changed, dtype="float32")) == ElementsCompared(
        tensors=1,
        identical=0,
        equal=0,
        reshaped=(),
        different=(
            ElementDifference(
                key=KEYS[2],
                step=1,
                rank=0,
                elements=24,
                different=2,
                nonfinite=0,
                max_abs=3.0,
                l2=math.sqrt(9 + 2.0**-42),
                relative_l2=math.sqrt(9 + 2.0**-42) / 4,
                ulps=3 << 19,
                at=(1, 2, 0),
                expected=20.0,
                actual=23.0,
            ),
        ),
    )


def test_zeros_of_other_signs_and_other_nans_are_equal_and_not_identical(tmp_path: Path) -> None:
    other_nan = np.array([0x7FC00001], dtype="<u4").view("<f4")[0]
    found = one_pair(tmp_path, f32(0.0, math.nan, 1.0), f32(-0.0, other_nan, 1.0))
    assert (found.identical, found.equal, found.different) == (0, 1, ())


def test_what_is_not_finite_on_one_side_is_counted_and_not_measured(tmp_path: Path) -> None:
    (found,) = one_pair(
        tmp_path, f32(1.0, math.nan, math.inf, -math.inf, 2.0), f32(1.0, 5.0, math.inf, math.inf, 2.5)
    ).different
    assert (found.different, found.nonfinite, found.max_abs, found.l2) == (3, 2, 0.5, 0.5)
    assert (found.at, found.expected, found.actual) == ((4,), 2.0, 2.5)
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    (found,) = one_pair(tmp_path, f32(1.0, 3.0), f32(1.0, math.inf)).different
    assert (found.nonfinite, found.max_abs, found.ulps, found.at, found.actual) == (1, 0.0, 0, (1,), math.inf)


def test_tensors_of_another_shape_or_type_are_named(tmp_path: Path) -> None:
    found = one_pair(tmp_path, f32(1.0, 2.0), f32(1.0, 2.0, 3.0))
    assert (found.tensors, found.reshaped, found.different) == (1, (KEYS[2].label,), ())


@pytest.mark.parametrize("dtype", BITS)
def test_every_type_is_compared_by_its_values(tmp_path: Path, dtype: str) -> None:
    one, two = (random_tensor(dtype, (3, 100_003), seed) for seed in (1, 2))
    mixed = np.where(np.arange(100_003) % 3 == 0, two.bits, one.bits).astype(one.bits.dtype)
    (found,) = one_pair(tmp_path, one, FullTensor(bits=mixed, dtype=dtype)).different
    kind = np.complex128 if "complex" in dtype else np.float64
    with np.errstate(all="ignore"):
        a, b = (widen(bits, dtype).astype(kind) for bits in (one.bits, mixed))
        unequal = ~((widen(one.bits, dtype) == widen(mixed, dtype)) | (np.isnan(a) & np.isnan(b)))
        finite = np.isfinite(a) & np.isfinite(b)
        apart = np.where(finite, np.abs(a - b), 0.0)
        squares = np.sum(np.square(apart))
    assert (found.different, found.nonfinite) == (unequal.sum(), (unequal & ~finite).sum())
    assert found.max_abs == apart.max()
    assert found.at == np.unravel_index(np.argmax(apart), apart.shape)
    np.testing.assert_allclose(found.l2, math.sqrt(squares), rtol=1e-12)
    assert (found.ulps is not None) == (dtype in ("float64", "float32", "float16", "bfloat16"))


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("float64", 8)])
def test_units_in_the_last_place_are_counted_across_zero_and_over_the_whole_range(dtype: str, item: int) -> None:
    def apart(one: int, two: int) -> int:
        pair = [np.array([bits], dtype=f"<u{item}").view(np.uint8).data for bits in (one, two)]
        return blocks._Found(*blocks._block(dtype)(*pair, -1.0)).ulps

    sign = 1 << (8 * item - 1)
    largest = {"float32": 0x7F7FFFFF, "bfloat16": 0x7F7F, "float16": 0x7BFF, "float64": 0x7FEFFFFFFFFFFFFF}[dtype]
    assert apart(5, 6) == apart(6, 5) == apart(sign | 6, sign | 5) == 1
    assert apart(sign, 1) == apart(0, sign | 1) == 1
    assert apart(sign | 3, 4) == 7
    assert apart(sign | largest, largest) == 2 * largest


needs_compiler = pytest.mark.skipif(
    blocks.compiled is None,
    reason="the compiled comparison was not built: no C compiler when the package was installed",
)


@needs_compiler
@settings(max_examples=200, deadline=None)
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    count=st.integers(0, 100),
    seed=st.integers(0, 2**32 - 1),
    same=st.sampled_from([0.0, 0.5, 1.0]),
    special=st.booleans(),
)
def test_the_compiled_comparison_finds_what_numpy_does(
    dtype: str, count: int, seed: int, same: float, special: bool
) -> None:
    random = np.random.default_rng(seed)
    kind = np.dtype(BITS[dtype]).newbyteorder("=").str.replace("f", "u")
    one, two = (random.integers(0, 2 ** (8 * np.dtype(kind).itemsize), count, dtype=kind) for _ in range(2))
    if special:
        odd = [0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 1, 0x8001, 0x7F7F, 0xFF7F]
        odd = np.array([each << (16 if dtype == "float32" else 0) for each in odd], dtype=kind)
        one, two = odd[random.integers(0, len(odd), count)], odd[random.integers(0, len(odd), count)]
    two = np.where(random.random(count) < same, one, two)
    pair = one.view(np.uint8).data, two.view(np.uint8).data
    for known in (-1.0, 0.0, blocks._with_numpy(*pair, dtype).largest / 2, math.inf):
        found = blocks._Found(*blocks._block(dtype)(*pair, known))
        expected = blocks._with_numpy(*pair, dtype, known)
        assert found[:2] + found[3:] == expected[:2] + expected[3:]
        np.testing.assert_allclose(found.squares, expected.squares, rtol=1e-13)


@needs_compiler
def test_the_compiled_comparison_refuses_what_does_not_fit() -> None:
    compare = blocks.compiled.compare
    for one, two, number in ((b"1234", b"12345678", 0), (b"123", b"123", 0), (b"1", b"1", 1), (b"1234", b"1234", 7)):
        with pytest.raises(ValueError, match=r"^compare: the blocks have other sizes, or the type is unknown\.$"):
            compare(one, two, number, 0.0)


@pytest.mark.parametrize("built", [pytest.param(True, marks=needs_compiler), False], ids=["compiled", "numpy"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1.0, math.inf], ids=["finite", "not finite"])
def test_of_several_largest_differences_the_first_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool, dtype: str, size: float
) -> None:
    if not built:
        monkeypatch.setattr(blocks, "compiled", None)
    count = 3 * blocks.BLOCK // 2 + 5
    for number, first in enumerate((0, 3, 5000, 8191, blocks.BLOCK // 4 + 7000, count - 1)):
        one, two = np.ones(count, "<f4"), np.ones(count, "<f4")
        two[[first, *(at for at in (9000, count - 2) if at > first)]] += size
        if first > 10:
            two[10] += min(size, 0.5)  # less, and before it
        bits = [each if dtype == "float32" else (each.view("<u4") >> 16).astype("<u2") for each in (one, two)]
        found = one_pair(tmp_path / str(number), *(FullTensor(bits=each, dtype=dtype) for each in bits)).different[0]
        expected = 10 if first > 10 and math.isinf(size) else first
        assert (found.at, found.max_abs) == ((expected,), 0.5 if expected == 10 else 0.0 if math.isinf(size) else 1.0)


def test_without_the_compiled_module_numpy_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (random_tensor("bfloat16", (300, 1001), seed) for seed in (1, 2))
    with_it = one_pair(tmp_path, one, two).different[0]
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    monkeypatch.setattr(blocks, "compiled", None)
    without = one_pair(tmp_path, one, two).different[0]
    np.testing.assert_allclose(with_it.l2, without.l2, rtol=1e-12)
    assert [getattr(with_it, name) for name in ("different", "nonfinite", "max_abs", "ulps", "at")] == [
        getattr(without, name) for name in ("different", "nonfinite", "max_abs", "ulps", "at")
    ]


def test_equal_digests_are_not_read_and_the_same_pair_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, one, two = (random_tensor("float32", (1000,), seed) for seed in range(3))
    a = recorded(tmp_path / "a", {KEYS[0]: same, KEYS[1]: one, KEYS[2]: one, KEYS[3]: one})
    b = recorded(tmp_path / "b", {KEYS[0]: same, KEYS[1]: two, KEYS[2]: two})
    read: list[str] = []
    real = Placed.reader
    monkeypatch.setattr(Placed, "reader", lambda tensor: (read.append(tensor.digest), real(tensor))[1])
    found = compare_elements(a, b)
    assert found is not None
    assert (found.tensors, found.identical) == (6, 2)
    assert [(each.rank, each.key) for each in found.different] == [
        (0, KEYS[1]),
        (0, KEYS[2]),
        (1, KEYS[1]),
        (1, KEYS[2]),
    ]
    assert len(read) == 4


def test_a_tensor_that_does_not_have_its_digest_is_damage(tmp_path: Path) -> None:
    one, two = (random_tensor("float32", (100_000,), seed) for seed in range(2))
    a, b = recorded(tmp_path / "a", {KEYS[0]: one}), recorded(tmp_path / "b", {KEYS[0]: two})
    file = tmp_path / "b/rank00001/step00000001.h5"
    with h5py.File(file) as opened:
        place = next(iter(opened["tensors"].values())).id.get_offset()
    with open(file, "r+b") as raw:
        raw.seek(place + 70_000)
        raw.write(b"xyz")
    message = (
        f"Segment {file} is damaged: tensor 'forward%2Fblocks.0.attn' does not have its digest. Record the run again, "
        "or delete the file to go on without the step."
    )
    with pytest.raises(CaptureFormatError, match=f"^{re.escape(message)}$"):
        compare_elements(a, b)


@pytest.mark.parametrize("alone_s", [0.0, 60.0], ids=["digests elsewhere", "digests here"])
def test_other_processes_and_packed_files_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_s: float
) -> None:
    monkeypatch.setattr(elementwise, "ALONE_S", alone_s)
    monkeypatch.setattr(elementwise, "WORTH_NBYTES", 1)
    tensors = [{key: random_tensor("float32", (5000,), at + seed) for at, key in enumerate(KEYS)} for seed in (0, 9)]
    a, b = (recorded(tmp_path / name, each, steps=(1, 2)) for name, each in zip("ab", tensors, strict=True))
    alone = compare_elements(a, b)
    assert alone is not None
    assert [(each.step, each.rank, each.key) for each in alone.different] == [
        (step, rank, key) for step in (1, 2) for rank in (0, 1) for key in KEYS
    ]
    told: list[float] = []
    with ThreadPoolExecutor(2) as executor:
        for pieces in (2, 9):
            assert (
                compare_elements(a, b, Spread(start=lambda: nullcontext(executor), pieces=pieces), told.append) == alone
            )
    assert (told[0] < told[-1], told[-1]) == (True, 1.0)
    told.clear()
    assert compare_elements(a, b, progress=told.append, threads=3) == alone
    assert (told[0] < told[-1], told[-1]) == (True, 1.0)
    list(pack(b, compress=True, remove=True))
    for threads in (1, 3):
        assert compare_elements(a, open_capture(tmp_path / "b"), threads=threads) == alone


def test_threads_read_without_hdf5_and_elsewhere_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "WORTH_NBYTES", 1)
    one, two = (random_tensor("float32", (5000,), seed) for seed in range(2))
    a, b = recorded(tmp_path / "a", {KEYS[0]: one}), recorded(tmp_path / "b", {KEYS[0]: two})
    spread = Spread(start=lambda: pytest.fail("asked"), pieces=4)
    opened: list[int] = []
    real = Capture.open_step
    monkeypatch.setattr(Capture, "open_step", lambda *at: (opened.append(at[2]), real(*at))[1])
    found = compare_elements(a, b, spread, threads=2)
    assert found is not None
    # Each step of both runs is opened for its digests; that of the first for its layout, too.
    assert (len(found.different), len(opened)) == (2, 5)
    with pytest.raises(pytest.fail.Exception, match="asked"):
        compare_elements(a, b, spread, threads=elementwise.MOST_THREADS + 1)


def test_others_find_the_files_wherever_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "WORTH_NBYTES", 1)
    one, two = (random_tensor("float32", (5000,), seed) for seed in range(2))
    recorded(tmp_path / "a", {KEYS[0]: one})
    recorded(tmp_path / "b", {KEYS[0]: two})
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        spread = Spread(start=lambda: (os.chdir("/"), nullcontext(executor))[1], pieces=2)
        found = compare_elements(open_capture("a"), open_capture("b"), spread)
    assert found is not None
    assert len(found.different) == 2


def test_a_file_that_was_cut_since_its_digests_were_compared_is_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (random_tensor("float32", (100_000,), seed) for seed in range(2))
    a, b = recorded(tmp_path / "a", {KEYS[0]: one}), recorded(tmp_path / "b", {KEYS[0]: two})
    file = tmp_path / "b/rank00000/step00000001.h5"
    real = Placed.reader

    def cut(tensor: Placed) -> Any:
        if tensor.path == file:
            os.truncate(file, tensor.offset + 1000)
        return real(tensor)

    monkeypatch.setattr(Placed, "reader", cut)
    message = f"Segment {file} is truncated. Record the run again, or delete the file to go on without the step."
    with pytest.raises(CaptureFormatError, match=f"^{re.escape(message)}$"):
        compare_elements(a, b)


@pytest.mark.parametrize(
    ("config", "looked"),
    [
        ({}, True),
        ({"config": {"plan": {"record": {"full": ["*"]}}}}, True),
        ({"config": {"plan": {"record": {"full": []}}}}, False),
        ({"config": {"plan": None}}, True),
    ],
)
def test_captures_that_were_not_asked_to_keep_tensors_are_not_searched(
    tmp_path: Path, config: dict[str, Any], looked: bool
) -> None:
    a, b = recorded(tmp_path / "a", {}, **config), recorded(tmp_path / "b", {})
    assert (compare_elements(a, b) is not None) is looked


def test_the_reports_say_where_tensors_differ_most(tmp_path: Path) -> None:
    base = [np.arange(1, 7, dtype="<f4") for _ in KEYS]
    changed = [base[0], base[1] * 2, base[2] + np.array([0, 0, 1, 0, 0, 0], dtype="<f4"), base[3][:5]]
    for name, values in (("a", base), ("b", changed)):
        recorded(
            tmp_path / name,
            {key: FullTensor(bits=each, dtype="float32") for key, each in zip(KEYS, values, strict=True)},
            provenance={"code": {"hash": name, "files": {"train.py": name}}},
        )
    arguments = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    printed = json.loads(CliRunner().invoke(cli.main, [*arguments, "--json"], standalone_mode=False).stdout)["tensors"]
    (found,) = printed
    assert {name: found[name] for name in found if name != "differences"} == {
        "candidate": str(tmp_path / "b"),
        "tensors": 8,
        "identical": 2,
        "equal": 0,
        "reshaped": ["forward/blocks.3.attn"],
        "different": 4,
    }
    assert found["differences"][1] == {
        "step": 1,
        "rank": 0,
        "name": "forward/blocks.2.attn",
        "elements": 6,
        "different": 1,
        "nonfinite": 0,
        "max_abs": 1.0,
        "relative_l2": 0.25,
        "ulps": 1 << 22,
        "at": [2],
        "expected": 3.0,
        "actual": 4.0,
    }
    for options in ([], ["--markdown", str(tmp_path / "r.md"), "--report", str(tmp_path / "r.html")]):
        text = CliRunner().invoke(cli.main, [*arguments, *options], standalone_mode=False).stdout
    flat = " ".join(text.split())
    assert (
        f"Tensors kept whole: 8 tensors are kept whole in the first baseline and in {tmp_path / 'b'}: 2 identical, 4 "
        "different, of another shape or type: forward/blocks.3.attn."
    ) in flat
    assert (
        "step 1, rank 0, forward/blocks.2.attn: 1 of 6 elements differ, by up to 1 at [2] (expected 3, actual 4), "
        "4,194,304 ulp; l2 norm of the difference 25 %"
    ) in flat
    assert "**Tensors kept whole**" in (tmp_path / "r.md").read_text()
    assert "<h2>Tensors kept whole</h2>" in (tmp_path / "r.html").read_text()


def difference(number: int, /, **changes: Any) -> ElementDifference:
    whole: dict[str, Any] = {
        "key": KEYS[number % 4],
        "step": 1 + number,
        "rank": 0,
        "elements": 1_000_000,
        "different": 1_000_000,
        "nonfinite": 0,
        "max_abs": 0.5,
        "l2": 1.0,
        "relative_l2": 0.01 * number,
        "ulps": 12,
        "at": (3, 4),
        "expected": 1.0,
        "actual": 1.5,
    }
    return ElementDifference(**(whole | changes))


def test_of_many_tensors_those_that_differ_most_are_shown() -> None:
    from probe.judge.comparison import Comparison, Coverage, Outcome

    many = (
        *(difference(at) for at in range(1200)),
        difference(0, nonfinite=7, at=(), ulps=None, expected=complex(1, 2), actual=complex(math.inf, 0)),
    )
    found = ElementsCompared(tensors=1300, identical=90, equal=9, reshaped=tuple("abcde"), different=many)
    comparison = Comparison(
        outcome=Outcome.EQUIVALENT,
        reason="",
        checks=(),
        first_divergence=None,
        coverage=Coverage(matched=0),
        runs=(),
        elements=(("cand", found),),
    )
    lines = sentences(comparison)
    assert lines[:3] == [
        "1,300 tensors are kept whole in the first baseline and in cand: 90 identical, 9 equal but for the bits of "
        "zeros and NaN, 1,201 different, of another shape or type: a, b, c and 2 more.",
        "step 1, rank 0, forward/blocks.0.attn: all 1,000,000 elements differ, by up to 0.5 (expected 1+2j, actual "
        "inf+0j); l2 norm of the difference 0; 7 of them are not finite",
        "step 1200, rank 0, forward/blocks.3.attn: all 1,000,000 elements differ, by up to 0.5 at [3, 4] (expected 1, "
        "actual 1.5), 12 ulp; l2 norm of the difference 1,200 %",
    ]
    assert lines[6:] == ["1,196 more differ by less; --json has them."]
    (made,) = objects(comparison)
    assert (made["different"], len(made["differences"])) == (1201, 1000)
    assert made["differences"][-1]["actual"] == [None, 0.0]
    assert made["differences"][0]["step"] == 202
