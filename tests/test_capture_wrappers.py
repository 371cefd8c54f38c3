"""What wraps, shards or replicates a model changes neither the names of its quantities nor their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from probe.judge.calibrate import calibrate
from probe.judge.compare import compare
from probe.judge.comparison import Outcome
from probe.measure.series import CaptureLike
from probe.measure.whole import whole
from probe.point import Key, Kind
from probe.store.layout import StepRows
from probe.store.parts import read
from probe.store.reader import Capture
from tests.recording import command, probe, record

Runs = Callable[..., Capture]

SAME = 2e-6
"""Largest relative difference that another order of summation makes here; measured 3e-7."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Record `sharded.py` under a wrapper once, whoever asks for it."""
    folder = tmp_path_factory.mktemp("wrapped")
    made: dict[tuple[str, ...], Capture] = {}

    def one(wrap: str, *options: str, ranks: int = 2, perturb: str = "") -> Capture:
        name = (wrap, *options, perturb)
        if name not in made:
            words = command("sharded.py", "--wrap", wrap, *options, ranks=ranks)
            wanted = ("--seed", "1", *(("--perturb", perturb) if perturb else ()))
            made[name] = record(folder / "_".join(name).replace(":", ""), words, *wanted)
        return made[name]

    return one


def rows_by_key(rows: StepRows) -> dict[Key, int]:
    return {key: row for row, key in enumerate(rows.keys)}


def differences(expected: StepRows, actual: StepRows, absent: frozenset[str] = frozenset()) -> dict[str, float]:
    """Measure what both have in one shape: of tensors the larger of sketch and norm, of numbers |a - b|."""
    of_actual = rows_by_key(actual)
    found = {}
    for key, i in rows_by_key(expected).items():
        j = of_actual.get(key)
        if j is None or expected.shape[i] != actual.shape[j] or expected.text[i] or key.name in absent:
            continue
        if expected.numel[i] == 1:
            found[key.label] = abs(float(expected.value[i] - actual.value[j]))
        else:
            norm = float(expected.scalars["l2"][i]) or 1.0
            sketches = np.linalg.norm(expected.sketch[i].astype(np.float64) - actual.sketch[j]) / norm
            found[key.label] = max(float(sketches), abs(float(actual.scalars["l2"][j]) / norm - 1) if norm != 1 else 0)
    return found


def assert_same(expected: CaptureLike, actual: CaptureLike, *, absent: frozenset[str] = frozenset()) -> None:
    """Hold every step of every rank of two runs together: the same names, and values but for rounding."""
    expected, actual = whole(expected), whole(actual)
    for rank in actual.ranks:
        for step in actual.steps(rank):
            one, two = expected.rows(rank if rank in expected.ranks else 0, step), actual.rows(rank, step)
            labels = [{key.label for key in rows.keys if key.name not in absent} for rows in (one, two)]
            assert labels[0] == labels[1]
            off = {label: d for label, d in differences(one, two, absent).items() if not d <= SAME}
            assert off == {}
            assert not any(read(text) for text in two.text)


@pytest.mark.parametrize("wrap", ["ddp-view", "fsdp2"])
def test_a_wrapper_has_the_names_and_values_of_plain_data_parallel_training(runs: Runs, wrap: str) -> None:
    assert_same(runs("ddp", "--clip", "0.05"), runs(wrap, "--clip", "0.05"))


def test_flat_shards_have_them_too_and_gradients_of_what_is_unused_on_top(runs: Runs) -> None:
    absent = frozenset({"unused.weight", "unused.bias", "gradients"})  # zeros among flat shards, None elsewhere
    assert_same(runs("ddp", "--clip", "0.05"), runs("fsdp1", "--clip", "0.05"), absent=absent)


def test_parameters_that_exist_only_as_flat_tensors_are_told(tmp_path: Path) -> None:
    words = command("sharded.py", "--wrap", "fsdp1-flat", ranks=2)
    done = probe("record", "-o", str(tmp_path / "c"), "--", *words)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("probe: FSDP")]
    assert told[:1] == told[1:]  # at once, and at the end
    assert told[1:] == [
        "probe: FSDP without use_orig_params keeps the parameters of a module in one flat tensor: they and their "
        "gradients are recorded as `_flat_param`, and match no run that is wrapped in another way. Use "
        "use_orig_params=True, or fully_shard."
    ]


def test_without_synchronisation_between_microbatches_the_last_reading_is_the_reduced_gradient(runs: Runs) -> None:
    assert_same(runs("ddp-view", "--micro", "2"), runs("ddp-no-sync", "--micro", "2"))


def test_a_static_graph_and_a_sharded_optimizer_have_the_names_and_values_of_each_other(runs: Runs) -> None:
    assert_same(runs("ddp-static"), runs("zero"))


def test_two_ranks_with_half_the_batch_each_have_the_gradients_of_one_with_all_of_it(runs: Runs) -> None:
    plain, shared = runs("none", ranks=1), runs("ddp-static")
    one, two = plain.rows(0, 1), shared.rows(0, 1)
    step = {Kind.GRAD, Kind.PARAM, Kind.LR}
    found = differences(one, two)
    labels = [key.label for key in one.keys if key.kind in step]
    assert labels == [key.label for key in two.keys if key.kind in step]
    assert {label: found[label] for label in labels if not found[label] <= SAME} == {}


def test_parts_of_tensor_parallel_gradients_add_up_to_the_gradients_of_the_plain_run(runs: Runs) -> None:
    plain, parallel = runs("none", ranks=1), runs("tp")
    texts = {text for text in parallel.rows(1, 1).text if read(text)}
    assert texts == {
        "part [15:30,0:10] of [30,10] on ranks 0-1",
        "part [15:30] of [30] on ranks 0-1",
        "part [0:10,15:30] of [10,30] on ranks 0-1",
    }
    assert_same(plain, parallel, absent=frozenset({"world_size"}))


def test_a_whole_of_which_a_part_is_missing_has_no_row(runs: Runs) -> None:
    class Half:
        """A capture whose second rank recorded nothing in step 2."""

        def __init__(self, capture: Capture) -> None:
            self._capture = capture

        def __getattr__(self, name: str) -> object:
            return getattr(self._capture, name)

        def steps(self, rank: int) -> tuple[int, ...]:
            return (1,) if rank else (1, 2)

    capture = whole(Half(runs("tp")))  # type: ignore[arg-type]
    whole_names, half_names = (
        {key.name for key in capture.rows(0, step).keys if key.kind is Kind.GRAD} for step in (1, 2)
    )
    assert whole_names - half_names == {
        f"blocks.{i}.{n}" for i in (0, 1) for n in ("up.weight", "up.bias", "down.weight")
    }


def test_shards_are_judged_against_replicas_and_a_fault_under_them_is_located(runs: Runs) -> None:
    baselines = [runs("ddp", "--clip", "0.05"), *(runs("ddp", "--clip", "0.05", perturb=f"ulp:{n}") for n in (1, 2))]
    tolerances = calibrate(baselines)
    sound = compare(baselines[:1], [runs("fsdp2", "--clip", "0.05")], tolerances, same_code=True)
    assert (sound.outcome, sound.coverage.missing, sound.coverage.unexpected) == (Outcome.EQUIVALENT, (), ())
    faulty = compare(baselines[:1], [runs("fsdp2", "--clip", "0.05", "--fault", "forward")], tolerances, same_code=True)
    assert faulty.outcome is Outcome.DIFFERENT
    assert faulty.first_divergence is not None
    place = faulty.first_divergence.place
    assert (place.step, place.kind, place.name, faulty.first_divergence.ranks) == (1, Kind.FORWARD, "head", (0, 1))
