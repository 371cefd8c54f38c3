"""Parts of sharded tensors: reduced where they lie, they add up to the whole."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from probe.capture import summary
from probe.capture.shards import Part, part_row
from probe.store import parts
from probe.store.layout import SAMPLES, SKETCH_K

Cut = tuple[tuple[int, ...], ...]


def whole_row(tensor: torch.Tensor) -> np.ndarray:
    sketch, sample = np.zeros(SKETCH_K, np.float32), np.full(SAMPLES, np.nan, np.float32)
    numbers = summary.host_row(tensor, "name", summary.Scratch(), sketch, sample)
    return np.concatenate([numbers, sketch, sample])


def boxes(shape: tuple[int, ...], cuts: Cut) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut each dimension at the given places and give (offset, lengths) of all boxes."""
    ranges = [
        list(zip((0, *places), (*places, length), strict=True)) for length, places in zip(shape, cuts, strict=True)
    ]
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*ranges)]


CASES: list[tuple[tuple[int, ...], Cut]] = [
    ((700,), ((300,),)),
    ((64, 40), ((32,), ())),
    ((64, 40), ((), (20,))),
    ((7, 41), ((4,), (13, 30))),
    ((5, 6, 300), ((), (2, 4), ())),
    ((5, 6, 300), ((3,), (), (1,))),
    ((3, 50), ((1, 2, 3), ())),
    ((2,), ((1,),)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "cuts"), CASES, ids=str)
def test_the_rows_of_boxes_add_up_to_the_row_of_the_whole(
    shape: tuple[int, ...], cuts: Cut, dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows = []
    for offset, local in boxes(shape, cuts):
        piece = tensor[tuple(slice(a, a + n) for a, n in zip(offset, local, strict=True))]
        part = Part(shape=shape, local=local, offset=offset, ranks=(0, 1))
        rows.append(part_row(piece.contiguous(), "name", part, summary.Scratch()).numpy())
    add_up_to(np.stack(rows), whole_row(tensor))


def test_the_rows_of_ranges_of_the_flat_index_add_up_to_the_row_of_the_whole() -> None:
    tensor = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    rows = []
    for start, stop in ((0, 0), (0, 251), (251, 700), (700, 1500)):
        part = Part(shape=(30, 50), local=(stop - start,), start=start)
        rows.append(part_row(tensor.view(-1)[start:stop], "name", part, summary.Scratch()).numpy())
    add_up_to(np.stack(rows), whole_row(tensor))


def test_a_part_is_laid_out_a_few_rows_at_a_time_without_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    part = Part(shape=(64, 40), local=(64, 20), offset=(0, 20))
    at_once = part_row(tensor[:, 20:].contiguous(), "name", part, summary.Scratch())
    monkeypatch.setattr("probe.capture.shards.SPAN", 7 * 40)
    in_pieces = part_row(tensor[:, 20:].contiguous(), "name", part, summary.Scratch())
    torch.testing.assert_close(in_pieces, at_once, rtol=1e-6, atol=1e-6, equal_nan=True)


def add_up_to(rows: np.ndarray, whole: np.ndarray) -> None:
    sums = [rows[:, 0].sum(), np.sqrt((rows[:, 1] ** 2).sum()), rows[:, 2].sum(), rows[:, 3].max()]
    np.testing.assert_allclose(sums, whole[:4], rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(rows[:, 4:6].sum(axis=0), whole[4:6])
    sketch = slice(6, 6 + SKETCH_K)
    np.testing.assert_allclose(rows[:, sketch].sum(axis=0), whole[sketch], rtol=1e-5, atol=1e-5)
    samples = rows[:, 6 + SKETCH_K :]
    held = ~np.isnan(samples)
    assert (held.sum(axis=0) == ~np.isnan(whole[6 + SKETCH_K :])).all()  # each sample lies in one part
    np.testing.assert_array_equal(np.where(held, samples, 0).sum(axis=0), np.nan_to_num(whole[6 + SKETCH_K :]))


@pytest.mark.parametrize(
    ("text", "described"),
    [
        (parts.box_text((0, 2), (3, 4), (9, 6), (0, 1, 2)), parts.Described(numel=54, power=0.0, ranks=(0, 1, 2))),
        (parts.box_text((), (), (), (3,)), parts.Described(numel=1, power=0.0, ranks=(3,))),
        (parts.flat_text(7, 0, (5,), (0, 2, 4, 5)), parts.Described(numel=5, power=0.0, ranks=(0, 2, 4, 5))),
        (parts.norm_text(1, 4, 2.0, range(8)), parts.Described(numel=4, power=2.0, ranks=tuple(range(8)))),
        ("part of the training code's own text", None),
        ("", None),
    ],
    ids=str,
)
def test_what_a_row_says_of_its_part_is_read_again(text: str, described: parts.Described | None) -> None:
    assert parts.read(text) == described
