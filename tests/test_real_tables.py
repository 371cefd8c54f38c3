"""The tables of real pull requests: declared as plans, fed with captures that differ as they did, and read back.

The figures are those that the authors printed; their captures were not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest
from synthetic import SyntheticCapture
from table_captures import Quantity, capture

from probe.judge.compare import compare
from probe.judge.comparison import Comparison, Outcome, Verdict
from probe.plan import load_plan
from probe.point import STEP_CLOCK, Kind
from probe.point import Key as NewKey
from probe.report.markdown import to_markdown
from probe.store.layout import StepRows

Key = lru_cache(maxsize=None)(NewKey)
"""One key for one quantity, as the reader makes them: comparing the same objects costs nothing."""
PLANS = Path(__file__).parent / "plans"
EXAMPLE = Path(__file__).parent.parent / "examples" / "plans" / "lora.toml"


def table(comparison: Comparison) -> dict[str, tuple[str, str, str]]:
    """Read the Markdown's table back: row to unmodified, difference, tolerance."""
    rows = {}
    for line in to_markdown(comparison).splitlines():
        # A bar inside a cell is escaped.
        cells = [cell.strip() for cell in line.replace("\\|", "\0").split("|")[1:-1]]
        if (
            len(cells) == 5
            and cells[1]
            and cells[0] not in ("Pair", "baseline pair", "cross pair")
            and not cells[0].startswith(("---", "What is recorded"))
        ):
            what, _, spread, difference, tolerance = (cell.replace("\0", "|").replace("\\", "") for cell in cells)
            rows[what] = (spread, difference, tolerance)
    return rows


# DiffSynth-Studio#1680


def lora_names() -> Iterator[str]:
    modules = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
    for block in [f"blocks.{n}" for n in range(50)] + [f"text_refiner.{n}" for n in range(2)]:
        for module in modules:
            for half in "AB":
                yield f"{block}.{module}.lora_{half}.weight"


LORA = tuple(lora_names())
TAIL = tuple(name for name in LORA if name.startswith("blocks.4") and name[8] != ".")


@cache
def lora_gradients(norm: float, tail: float) -> tuple[Quantity, ...]:
    l2 = norm / float(np.sqrt(len(LORA)))
    return tuple(
        Quantity(
            key=Key(kind=Kind.GRAD, name=name, microbatch=STEP_CLOCK),
            scalars={"l2": l2 * (tail if name in TAIL else 1.0)},
        )
        for name in LORA
    )


@cache
def lora_parameters(sum_squares: float, mean_abs: tuple[tuple[str, float], ...]) -> tuple[Quantity, ...]:
    special = dict(mean_abs)
    l2 = float(np.sqrt(sum_squares / len(LORA)))
    return tuple(
        Quantity(
            key=Key(kind=Kind.PARAM, name=name, microbatch=STEP_CLOCK),
            scalars={"l2": l2, "mean_abs": special.get(name, 0.01 if "lora_A" in name else 5e-4)},
        )
        for name in LORA
    )


def diffsynth(arm: str) -> Callable[[int, int], Iterator[Quantity]]:
    """Return what one arm records; `opt` differs by the figures of the table."""

    def made(step: int, rank: int) -> Iterator[Quantity]:
        def at(place: tuple[int, int], base: float, other: float) -> float:
            return other if arm == "opt" and place == (step, rank) else base

        def forward(item: str, mean_abs: float) -> Quantity:
            key = Key(kind=Kind.FORWARD, name="(root)", item=item, microbatch=0)
            return Quantity(key=key, scalars={"mean_abs": mean_abs, "l2": 100 * mean_abs}, dtype="bfloat16")

        yield Quantity(key=Key(kind=Kind.EXPLICIT, name="timestep", microbatch=0), value=1000.0 - 7 * step + rank)
        if step == 1:
            for name in ("video", "audio", "text"):
                yield Quantity(key=Key(kind=Kind.EXPLICIT, name=f"{name}_shape"), text=f"[1, 16, {rank + 1}, 60, 104]")
        yield forward("[0]", at((17, 2), 0.5, 0.5 * 1.0041))
        yield forward("[1]", at((8, 5), 0.25, 0.25 * 1.0051))
        loss = 0.0076 / 0.024
        yield Quantity(key=Key(kind=Kind.LOSS, name="micro_loss", microbatch=0), value=at((22, 6), loss, loss + 0.0076))
        yield from lora_gradients(at((14, 3), 0.043, 0.247), at((1, 4), 1.0, 1.051))
        special = (
            ("blocks.9.mlp.fc1.lora_A.weight", at((30, 7), 0.01, 0.01 * 1.0095)),
            ("blocks.31.mlp.fc2.lora_B.weight", at((30, 0), 5e-4, 5e-4 + 1.4e-4)),
        )
        yield from lora_parameters(at((30, 1), 1.0, 1.0018), special)

    return made


@pytest.fixture(scope="module")
def diffsynth_1680() -> Comparison:
    base, opt = (capture(arm, range(1, 31), 8, diffsynth(arm)) for arm in ("base", "opt"))
    return compare([base], [opt], None, checks=load_plan(PLANS / "diffsynth_1680.toml").checks)


def test_diffsynth_1680_passes_with_its_5040_checks(diffsynth_1680: Comparison) -> None:
    assert diffsynth_1680.outcome is Outcome.EQUIVALENT, diffsynth_1680.reason
    assert "0 of 5,040 values are above tolerance." in to_markdown(diffsynth_1680)
    assert sum(check.cells for check in diffsynth_1680.checks) == 5040


def test_diffsynth_1680_has_the_rows_and_numbers_of_the_table(diffsynth_1680: Comparison) -> None:
    assert table(diffsynth_1680) == {
        "mean |.| of each LoRA A after step 30 (208 quantities, 1,664 values)": ("-", "0.95 %", "2 % (sees 2 %)"),
        "mean |.| of each LoRA B after step 30 (208 quantities, 1,664 values)": (
            "-",
            "0.00014 abs",
            "0.0004 abs (sees 80 %)",
        ),
        "loss (1 quantity, 240 values)": ("-", "0.0076 abs (2.4 %)", "15 % or 0.03 abs (sees 15 %)"),
        "DiT video output, mean |noise_pred| (1 quantity, 240 values)": ("-", "0.41 %", "2 % (sees 2 %)"),
        "DiT audio output, mean |noise_pred| (1 quantity, 240 values)": ("-", "0.51 %", "2.5 % (sees 2.5 %)"),
        "LoRA sum of squares (1 quantity, 240 values)": ("-", "0.18 %", "1.5 % (sees 1.5 %)"),
        "LoRA gradient norm, blocks 40-49, step 1 (1 quantity, 8 values)": ("-", "5.1 %", "10 % (sees 10 %)"),
        "LoRA gradient norm, all 416 tensors (1 quantity, 240 values)": (
            "-",
            "5.74x; at step 14, rank 3, `*lora_*(norm)`: expected 0.043, actual 0.247",
            "20x (sees 1,900 %)",
        ),
        "gradient tensor count (1 quantity, 240 values)": ("-", "identical (416)", "exact (sees any)"),
        "sampled timestep, input shapes (4 quantities, 264 values)": ("-", "identical", "exact (sees any)"),
    }


def test_the_example_plan_is_the_one_that_reproduces_the_table() -> None:
    assert load_plan(EXAMPLE).checks == load_plan(PLANS / "diffsynth_1680.toml").checks


# peft#3712

ADAPTERS = tuple(
    f"model.layers.{layer}.{module}.lora_{half}.weight"
    for layer in range(62)
    for module in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "linear_attn.out_proj"),
    )
    for half in "AB"
)
UPDATES = (1, 5, 15, 250)


@cache
def samples(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(64).astype(np.float32)


@cache
def adapters(kind: Kind, item: str, seed: int) -> tuple[Quantity, ...]:
    return tuple(
        Quantity(
            key=Key(kind=kind, name=name, item=item, microbatch=STEP_CLOCK),
            sample=samples(1000 * seed + number),
            scalars={"l2": 1.0 + number / 1000},
        )
        for number, name in enumerate(ADAPTERS)
    )


def peft(step: int, rank: int) -> Iterator[Quantity]:
    if step == 1:
        yield Quantity(key=Key(kind=Kind.EXPLICIT, name="dataset_fingerprint"), text="9f0c2a17d3")
        yield Quantity(key=Key(kind=Kind.EXPLICIT, name="trainable"), text=", ".join(ADAPTERS))
        yield from adapters(Kind.PARAM, "before", 900)
    for microbatch in range(4):
        if step <= 15:
            key = Key(kind=Kind.EXPLICIT, name="logits", microbatch=microbatch)
            sample = samples(10_000_000 + 100 * step + 10 * rank + microbatch)
            yield Quantity(key=key, sample=sample, scalars={"l2": 30.0 + step}, dtype="bfloat16")
        loss = 1.9 + 0.01 * rank + 0.001 * microbatch - 0.002 * step
        yield Quantity(key=Key(kind=Kind.LOSS, name="micro_loss", microbatch=microbatch), value=loss)
    if step in UPDATES:
        yield from adapters(Kind.GRAD, "", step)
        yield from adapters(Kind.PARAM, "", 300 + step)


@pytest.fixture(scope="module")
def peft_base() -> SyntheticCapture:
    return capture("base", [*range(1, 16), 250], 8, peft)


def peft_compared(base: SyntheticCapture, segments: dict[tuple[int, int], StepRows]) -> Comparison:
    opt = replace(base, run_id="run-opt", path=Path("opt"), segments={**base.segments, **segments})
    return compare([base], [opt], None, checks=load_plan(PLANS / "peft_3712.toml").checks, same_code=True)


def test_peft_3712_is_identical_in_every_row(peft_base: SyntheticCapture) -> None:
    comparison = peft_compared(peft_base, {})
    assert (comparison.outcome, comparison.reason) == (Outcome.EQUIVALENT, "All recorded values are bit-identical.")
    assert table(comparison) == {
        "loss, unrounded, every microbatch (1 quantity, 512 values)": ("-", "identical", "0 abs (sees any)"),
        "logits, 2 rows of 64 entries: 64 samples and norm (2 quantities, 960 values)": (
            "-",
            "identical",
            "exact (sees any)",
        ),
        "LoRA tensors: 64 samples and norm (1,984 quantities, 63,488 values)": ("-", "identical", "exact (sees any)"),
        "LoRA gradients before clipping: 64 samples and norm (1,984 quantities, 63,488 values)": (
            "-",
            "identical",
            "exact (sees any)",
        ),
        "initial LoRA tensors (1,984 quantities, 15,872 values)": ("-", "identical", "exact (sees any)"),
        "LoRA tensor count (1 quantity, 32 values)": ("-", "identical (992)", "exact (sees any)"),
        "LoRA gradient count (1 quantity, 32 values)": ("-", "identical (992)", "exact (sees any)"),
        "dataset fingerprint, names, shapes, dtypes (2 quantities, 16 values)": ("-", "identical", "exact (sees any)"),
    }


def test_one_sample_that_is_off_by_one_ulp_fails_one_row_and_names_tensor_rank_and_update(
    peft_base: SyntheticCapture,
) -> None:
    rows = peft_base.segments[5, 15]
    row = next(n for n, key in enumerate(rows.keys) if key.kind is Kind.GRAD and key.name == ADAPTERS[700])
    sample = rows.sample.copy()
    expected = sample[row, 41]
    sample[row, 41] = actual = np.nextafter(expected, np.float32(np.inf))
    comparison = peft_compared(peft_base, {(5, 15): replace(rows, sample=sample)})
    assert comparison.outcome is Outcome.DIFFERENT
    failing = [check for check in comparison.checks if check.verdict is not Verdict.IDENTICAL]
    assert [(check.what, check.above, check.cells) for check in failing] == [
        ("LoRA gradients before clipping: 64 samples and norm", 1, 63488)
    ]
    assert failing[0].worst is not None
    place = failing[0].worst.place
    assert (place.name, place.item, place.rank, place.step) == (ADAPTERS[700], "(sample)", 5, 15)
    assert (failing[0].worst.expected, failing[0].worst.actual) == (float(expected), float(actual))
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.place == place


# transformers#48915

LOSSES = (1.0091, 1.17035, 1.17035, *[0.93004] * 5)
"""Of a rank: one bf16 ulp of one of them is 0.097 % of their mean, of two others 0.225 %."""


def transformers(arm: str) -> Callable[[int, int], Iterator[Quantity]]:
    """`base-1` differs from `base-0` as unmodified code did from itself, `opt` as the branch did."""
    pick = {"base-0": 0, "base-1": 1, "opt": 2}[arm]

    def made(step: int, rank: int) -> Iterator[Quantity]:
        def moved(place: tuple[int, int], base: float, itself: float, branch: float) -> float:
            """Move a value by a relative difference at one place."""
            return base * (1 + (0.0, itself, branch)[pick]) if (step, rank) == place else base

        def explicit(name: str, value: float) -> Quantity:
            return Quantity(key=Key(kind=Kind.EXPLICIT, name=name, microbatch=0), value=value)

        yield Quantity(
            key=Key(kind=Kind.BATCH, name="input_ids", microbatch=0), sample=samples(step + rank), dtype="int64"
        )
        loss = LOSSES[rank]
        for at in {0: (), 1: ((3, 0),), 2: ((4, 1), (4, 2))}[pick]:
            loss *= 1.00769 if (step, rank) == at else 1.0
        yield Quantity(key=Key(kind=Kind.LOSS, name="micro_loss", microbatch=0), value=loss, dtype="bfloat16")
        mean = moved((1, 0), 2.0, 0.0005, 0.001) if step == 1 else moved((4, 1), 2.0, 0.00986, 0.01568)
        yield Quantity(
            key=Key(kind=Kind.FORWARD, name="(root)", item=".logits", microbatch=0), scalars={"mean": mean, "l2": 9.0}
        )
        yield explicit("logits_max", moved((5, 0), 20.0, 0.1804, 0.1519))
        yield explicit("logits_min", moved((5, 0), -15.0, 0.1203, 0.0949))
        yield explicit("slice_max", moved((5, 1), 6.0, 0.3039, 0.1847))
        yield explicit("slice_sum", moved((5, 1), 1000.0, 0.08786, 0.01829))
        yield Quantity(key=Key(kind=Kind.EXPLICIT, name="logits_shape", microbatch=0), text="[2, 1024, 32000]")
        yield Quantity(
            key=Key(kind=Kind.GRAD_NORM, name="grad_norm", microbatch=STEP_CLOCK),
            value=moved((2, 0), 0.8, 0.2149, 0.1231),
        )
        for name, value in (("world_size", 2.0), ("fsdp_modules", 33.0), ("local_parameters", 290.0)):
            yield Quantity(key=Key(kind=Kind.STATE, name=name, microbatch=STEP_CLOCK), value=value, dtype="int")

    return made


def test_transformers_48915_has_the_rows_and_numbers_of_the_table() -> None:
    runs = [capture(arm, range(1, 7), 8, transformers(arm), code=arm[:3]) for arm in ("base-0", "base-1", "opt")]
    comparison = compare(runs[:2], runs[2:], None, checks=load_plan(PLANS / "transformers_48915.toml").checks)
    assert comparison.outcome is Outcome.EQUIVALENT, comparison.reason
    assert table(comparison) == {
        "logged training loss, step 1 (1 quantity, 1 value)": ("0 (bit-identical)", "identical", "0.2 % (sees 0.2 %)"),
        "logged training loss, steps 2 on (1 quantity, 5 values)": ("0.097 %", "0.225 %", "2 % (sees 2 %)"),
        "loss per rank (bf16) (1 quantity, 48 values)": ("0.769 %", "0.769 %", "2 % (sees 2 %)"),
        "mean of logits, step 1 (1 quantity, 8 values)": ("0.05 %", "0.1 %", "0.2 % (sees 0.2 %)"),
        "mean of logits, steps 2 on (1 quantity, 40 values)": ("0.986 %", "1.57 %", "2 % (sees 2 %)"),
        "logged gradient norm": ("21.5 %", "12.3 %, recorded only", "50 %, not judged"),
        "max logits": ("18 %", "15.2 %, recorded only", "50 %, not judged"),
        "min logits": ("12 %", "9.49 %, recorded only", "50 %, not judged"),
        "max of logits[0, :8, :64]": ("30.4 %", "18.5 %, recorded only", "50 %, not judged"),
        "sum of logits[0, :8, :64]": ("87.9 abs", "18.3 abs, recorded only", "600 abs, not judged"),
        "logits shape, ids and labels, world size, FSDP module and local parameter counts (5 quantities, 240 values)": (
            "-",
            "identical",
            "exact (sees any)",
        ),
    }


# lerobot#4607


def lerobot(arm: str, dropout: bool = True) -> Callable[[int, int], Iterator[Quantity]]:
    moved = arm == "opt"

    def made(step: int, rank: int) -> Iterator[Quantity]:
        here = (step, rank)

        def at(places: dict[tuple[int, int], float], base: float) -> float:
            """Move a value by a relative difference at some places."""
            return base * (1 + places.get(here, 0.0)) if moved else base

        def explicit(name: str, value: float, dtype: str = "float32") -> Quantity:
            return Quantity(key=Key(kind=Kind.EXPLICIT, name=name, microbatch=0), value=value, dtype=dtype)

        yield Quantity(key=Key(kind=Kind.BATCH, name="action", microbatch=0), sample=samples(10 * step + rank))
        yield explicit("padded_count", 3.0 + rank, "int64")
        for number, off in enumerate((0.0027, 0.006, 0.0058) if dropout else (0.0006, 0.00005, 0.00007)):
            key = Key(kind=Kind.FORWARD, name="model", item=f"[{number}]", microbatch=0)
            yield Quantity(key=key, scalars={"mean": at({(2, 1): off}, 0.4 + number), "l2": 5.0})
        # Step 300: the mean over both ranks is 2.442 and 2.452.
        loss = 2.442 if step == 300 else 4.0
        last = 0.01 / 2.442
        seen = {(2, 0): 0.017, (4, 1): 0.015, (88, 1): 0.081, (300, 0): last, (300, 1): last}
        yield Quantity(key=Key(kind=Kind.LOSS, name="micro_loss", microbatch=0), value=at(seen, loss))
        yield explicit("l1_loss", at({(3, 0): 0.0012, (120, 1): 0.02}, 0.5))
        yield explicit("kld_loss", at({(2, 0): 0.018, (3, 1): 0.012, (88, 1): 0.088}, 0.35))
        key = Key(kind=Kind.GRAD_NORM, name="grad_norm", microbatch=STEP_CLOCK)
        yield Quantity(key=key, value=at({(5, 0): 0.0063, (210, 1): 0.048}, 12.0))

    return made


ACT_MEANS = "ACT means (actions, mu, log sigma), steps 1-3 (3 quantities, 18 values)"


@pytest.fixture(scope="module")
def lerobot_4607() -> Comparison:
    base, opt = (capture(arm, range(1, 301), 2, lerobot(arm)) for arm in ("base", "opt"))
    return compare([base], [opt], None, checks=load_plan(PLANS / "lerobot_4607.toml").checks)


def test_lerobot_4607_shows_the_rows_that_are_above_with_counts_places_and_values(lerobot_4607: Comparison) -> None:
    assert (lerobot_4607.outcome, lerobot_4607.outcome.exit_status) == (Outcome.DIFFERENT, 1)
    assert table(lerobot_4607) == {
        "loss per rank, steps 1-5 (1 quantity, 10 values)": (
            "-",
            "1.7 %, **above 2 of 10**; worst at step 2, rank 0, `micro_loss`: expected 4, actual 4.07",
            "1 % (sees 1 %)",
        ),
        "loss per rank, steps 6-300 (1 quantity, 590 values)": (
            "-",
            "0.324 abs (8.1 %), **above 1 of 590**; worst at step 88, rank 1, `micro_loss`: expected 4, actual 4.32",
            "3 % + 0.01 abs (sees 3.25 %)",
        ),
        "kld_loss per rank, steps 1-5 (1 quantity, 10 values)": (
            "-",
            "1.8 %, **above 2 of 10**; worst at step 2, rank 0, `kld_loss`: expected 0.35, actual 0.356",
            "1 % (sees 1 %)",
        ),
        "kld_loss per rank, steps 6-300 (1 quantity, 590 values)": (
            "-",
            "0.0308 abs (8.8 %), **above 1 of 590**; worst at step 88, rank 1, `kld_loss`: expected 0.35, actual 0.381",
            "3 % + 0.01 abs (sees 5.86 %)",
        ),
        ACT_MEANS: (
            "-",
            "0.6 %, **above 3 of 18**; worst at step 2, rank 1, `model[1](mean)`: expected 1.4, actual 1.41",
            "0.1 % (sees 0.1 %)",
        ),
        "loss, mean over ranks, step 300 (1 quantity, 1 value)": (
            "-",
            "0.41 %; at step 300, rank 0, `micro_loss(mean over ranks)`: expected 2.44, actual 2.45",
            "3 % (sees 3 %)",
        ),
        "gradient norm, steps 1-5 (1 quantity, 10 values)": ("-", "0.63 %", "1 % (sees 1 %)"),
        "gradient norm, steps 6-300 (1 quantity, 590 values)": ("-", "4.8 %", "10 % (sees 10 %)"),
        "l1_loss per rank, steps 1-5 (1 quantity, 10 values)": ("-", "0.12 %", "1 % (sees 1 %)"),
        "l1_loss per rank, steps 6-300 (1 quantity, 590 values)": (
            "-",
            "0.01 abs (2 %)",
            "3 % + 0.01 abs (sees 5 %)",
        ),
        "batch shapes, dtypes, devices, action values, padded count, steps 1-3 (2 quantities, 12 values)": (
            "-",
            "identical",
            "exact (sees any)",
        ),
    }


def test_lerobot_4607_without_dropout_has_its_means_within() -> None:
    base, opt = (capture(arm, range(1, 4), 2, lerobot(arm, dropout=False)) for arm in ("base", "opt"))
    checks = [check for check in load_plan(PLANS / "lerobot_4607.toml").checks if check.what.startswith("ACT means")]
    comparison = compare([base], [opt], None, checks=checks)
    assert comparison.outcome is Outcome.EQUIVALENT, comparison.reason
    assert table(comparison) == {ACT_MEANS: ("-", "0.06 %", "0.1 % (sees 0.1 %)")}
