"""Numbers for keys, and which rows of two segments belong together."""

from __future__ import annotations

import numpy as np
from synthetic import run

from probe.measure.series import Catalog, SeriesIndex, common_steps, perturbation, sibling_name
from probe.point import Key, Kind

GRAD = Key(kind=Kind.GRAD, name="w")
CLIPPED = Key(kind=Kind.GRAD, name="w", item="clipped")
NORM = Key(kind=Kind.GRAD_NORM, name="grad_norm")


def pairs(
    baseline: tuple[Key, ...], candidate: tuple[Key, ...]
) -> tuple[dict[str, tuple[int, int]], list[str], list[str]]:
    catalog = Catalog()
    found = catalog.align(baseline, candidate)
    left = np.arange(len(baseline))[found.baseline]
    right = np.arange(len(candidate))[found.candidate]
    matched = {catalog.keys[c].label: (int(b), int(a)) for c, b, a in zip(found.cells, left, right, strict=True)}
    names = [[catalog.keys[c].label for c in cells] for cells in (found.missing, found.unexpected)]
    return matched, names[0], names[1]


def test_rows_are_paired_by_key_and_not_by_position() -> None:
    assert pairs((GRAD, NORM), (NORM, GRAD)) == ({"grad/w": (0, 1), "grad_norm/grad_norm": (1, 0)}, [], [])


def test_what_one_arm_lacks_is_told_apart() -> None:
    assert pairs((GRAD,), (NORM,)) == ({}, ["grad/w"], ["grad_norm/grad_norm"])


def test_a_gradient_clipped_in_one_arm_only_is_paired_with_the_unclipped_one() -> None:
    assert pairs((GRAD, CLIPPED), (GRAD,)) == ({"grad/w": (0, 0), "grad/w:clipped": (1, 0)}, [], [])
    assert pairs((GRAD,), (GRAD, CLIPPED)) == ({"grad/w": (0, 0), "grad/w:clipped": (0, 1)}, [], [])


def test_identical_key_lists_need_no_index() -> None:
    catalog = Catalog()
    found = catalog.align((GRAD, NORM), (GRAD, NORM))
    assert (found.baseline, found.candidate) == (slice(None), slice(None))


def test_siblings_share_the_path_without_layer_indices() -> None:
    names = [
        sibling_name(Key(kind=Kind.FORWARD, name=name))[1]
        for name in ("blocks.3.attn", "blocks.12.attn", "layers.0.1.fc1", "4", "conv2d.weight")
    ]
    assert names == ["blocks.*.attn", "blocks.*.attn", "layers.*.*.fc1", "*", "conv2d.weight"]


def test_a_series_folds_microbatches_and_ranks() -> None:
    keys = [Key(kind=Kind.FORWARD, name="a", microbatch=m) for m in range(2)] + [Key(kind=Kind.LR, name="lr")]
    index = SeriesIndex(keys)
    values = np.array([[[1.0, 5.0, np.nan], [7.0, np.nan, np.nan]]])
    assert index.labels == ("forward/a", "lr/lr")
    np.testing.assert_array_equal(index.largest(values), [[7.0, np.nan]])


def test_the_largest_sibling_is_found_per_step() -> None:
    index = SeriesIndex([Key(kind=Kind.FORWARD, name=name) for name in ("blocks.0", "blocks.1", "head")])
    largest = index.largest_sibling(np.array([[1.0, 4.0, 2.0], [3.0, np.nan, 9.0]]))
    np.testing.assert_array_equal(largest, [[4.0, 4.0, 2.0], [3.0, 3.0, 9.0]])


def test_common_steps_are_those_of_all_runs() -> None:
    runs = [run("a", steps=(1, 2, 3)), run("b", steps=(2, 3, 4))]
    assert common_steps(runs, 0) == (2, 3)
    assert common_steps(runs, 1) == ()


def test_a_perturbed_run_says_so() -> None:
    assert (perturbation(run("a")), perturbation(run("b", perturb="ulp:3"))) == ("", "ulp:3")
