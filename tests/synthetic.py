"""Captures made of numbers instead of training: noise, chaos and faults are put in by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from probe.measure.series import names_in
from probe.point import STEP_CLOCK, Key, Kind
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K, StepRows

SHAPE = (40, 50)
PARAM_SHAPE = (20, 30)


@dataclass(frozen=True, kw_only=True)
class SyntheticCapture:
    """A capture that lives in memory."""

    path: Path
    manifest: Mapping[str, Any]
    run_id: str
    world_size: int
    segments: Mapping[tuple[int, int], StepRows]
    problems: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self.segments}))

    def steps(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(step for r, step in self.segments if r == rank))

    def rows(self, rank: int, step: int) -> StepRows:
        return self.segments[rank, step]

    def names(self, rank: int) -> tuple[tuple[Key, ...], tuple[str, ...]]:
        return names_in(self, rank)

    def edited(self, edit: Callable[[StepRows], StepRows]) -> SyntheticCapture:
        return replace(self, segments={place: edit(rows) for place, rows in self.segments.items()})


@lru_cache(maxsize=4096)
def drawn(tag: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(list(tag)).standard_normal(shape)
    values.flags.writeable = False
    return values


@lru_cache(maxsize=64)
def signs(rows: int) -> np.ndarray:
    return np.where(np.random.default_rng(0).random(rows) < 0.5, -1.0, 1.0)


def sketch(values: np.ndarray) -> np.ndarray:
    """One sign per row of k consecutive elements, as the recorder does."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    if not np.isfinite(flat).all():
        return np.full(SKETCH_K, np.nan, np.float32)
    rows = -(-flat.size // SKETCH_K)
    padded = np.zeros(rows * SKETCH_K)
    padded[: flat.size] = flat
    return (signs(rows) @ padded.reshape(rows, SKETCH_K)).astype(np.float32)


@dataclass
class Rows:
    """Rows of one segment, gathered one by one."""

    step: int
    rank: int
    world_size: int
    keys: list[Key] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, key: Key, value: object, *, dtype: str = "float32", hashed: bool = False) -> None:
        self.keys.append(key)
        row: dict[str, Any] = dict.fromkeys(SCALARS, np.nan)
        row |= {"numel": 0, "nonfinite": 0, "value": np.nan, "sketch": np.full(SKETCH_K, np.nan, np.float32)}
        row |= {"shape": (), "text": "", "hash": (0, 0), "dtype": dtype}
        if isinstance(value, str):
            row |= {"text": value, "dtype": "str"}
        else:
            array = np.asarray(value, dtype=np.float64)
            finite = np.isfinite(array)
            row |= {"numel": array.size, "nonfinite": int((~finite).sum()), "shape": array.shape}
            row |= {
                "l2": float(np.linalg.norm(array)),
                "mean": float(array.mean()),
                "mean_abs": float(abs(array).mean()),
            }
            row |= {"rms": float(np.sqrt((array**2).mean())), "max_abs": float(abs(array).max())}
            if array.size == 1:
                row["value"] = float(array.reshape(-1)[0])
            row["sketch"] = sketch(array)
            if hashed:
                row["hash"] = (hash(array.tobytes()) & 0xFFFFFFFFFFFF, 1)
        for name, item in row.items():
            self.columns.setdefault(name, []).append(item)

    def finish(self) -> StepRows:
        c = self.columns
        count = len(self.keys)
        return StepRows(
            step=self.step,
            rank=self.rank,
            world_size=self.world_size,
            keys=tuple(self.keys),
            order=np.arange(count, dtype=np.int32),
            dtype=tuple(c["dtype"]),
            shape=tuple(c["shape"]),
            numel=np.array(c["numel"], dtype=np.int64),
            nonfinite=np.array(c["nonfinite"], dtype=np.int64),
            value=np.array(c["value"], dtype=np.float64),
            scalars={name: np.array(c[name], dtype=np.float64) for name in SCALARS},
            sketch=np.array(c["sketch"], dtype=np.float32).reshape(count, SKETCH_K),
            sample=np.full((count, SAMPLES), np.nan, dtype=np.float32),
            hash=np.array(c["hash"], dtype=np.uint64).reshape(count, 2),
            text=tuple(c["text"]),
            where=("",) * count,
        )


Fault = Callable[[Key, int, int, np.ndarray], Any]
"""(key, step, rank, value) to the value that the candidate records, or None for no row at all."""


def run(
    name: str,
    *,
    noise: float = 1e-6,
    growth: float = 1.0,
    run_seed: int = 0,
    data_seed: int = 0,
    steps: Sequence[int] = (1, 2, 3),
    ranks: int = 1,
    layers: int = 3,
    microbatches: int = 1,
    fault: Fault | None = None,
    code: str = "aaaa",
    command: Sequence[str] = ("python", "train.py"),
    perturb: str = "",
) -> SyntheticCapture:
    """Make one run of a model of a few layers. Noise is relative, of every value, and grows by a factor per step."""
    segments = {}
    for rank in range(ranks):
        for step in steps:
            segments[rank, step] = _segment(
                step,
                rank,
                ranks,
                layers,
                microbatches,
                noise * growth ** (step - 1),
                run_seed,
                data_seed,
                fault,
                step == steps[0],
            )
    provenance = {"code": {"hash": code, "files": {"train.py": code}}, "versions": {"torch": "2.14.1"}, "device": "cpu"}
    return SyntheticCapture(
        path=Path(name),
        manifest={
            "config": {"command": list(command), "seed": 42, "steps": "1-3", "plan": None, "perturb": perturb},
            "provenance": provenance,
            "env": {},
            "created_utc": "2026-01-01T00:00:00Z",
        },
        run_id=f"run-{name}",
        world_size=ranks,
        segments=segments,
    )


def _segment(
    step: int,
    rank: int,
    ranks: int,
    layers: int,
    microbatches: int,
    noise: float,
    run_seed: int,
    data_seed: int,
    fault: Fault | None,
    first: bool,
) -> StepRows:
    rows = Rows(step, rank, ranks)
    jitter = np.random.default_rng([run_seed, step, rank, 77])
    shared = np.random.default_rng([run_seed, step, 78])
    noisy = noise > 0

    def put(key: Key, exact: np.ndarray, *, hashed: bool = False, noise_of: float = 1.0) -> None:
        value: Any = exact
        if noisy and noise_of:
            rms = float(np.sqrt((exact**2).mean())) or 1.0
            source = shared if key.microbatch == STEP_CLOCK else jitter  # Reduced across ranks: the same on all.
            value = exact + noise_of * noise * rms * source.standard_normal(exact.shape)
        if fault is not None:
            value = fault(key, step, rank, value)
        if value is not None:
            rows.add(key, value, hashed=hashed)

    def draw(*tag: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
        return drawn((data_seed, *tag), shape)

    names = [f"blocks.{layer}.lora_A.weight" for layer in range(layers)]
    if first:
        for number, name in enumerate(names):
            put(
                Key(kind=Kind.PARAM, name=name, item="before"),
                drawn((0, 9, number), PARAM_SHAPE),
                noise_of=0,
                hashed=True,
            )
    for microbatch in range(microbatches):
        put(
            Key(kind=Kind.BATCH, name="x", microbatch=microbatch),
            draw(1, step, rank, microbatch),
            hashed=True,
            noise_of=0,
        )
        for layer in range(layers):
            for part, name in enumerate((f"blocks.{layer}.attn", f"blocks.{layer}")):
                key = Key(kind=Kind.FORWARD, name=name, microbatch=microbatch)
                put(key, draw(2, step, rank, microbatch, layer, part))
        loss = np.array(1.0 + 0.3 * float(draw(3, step, rank, microbatch, shape=(1,))[0]))
        put(Key(kind=Kind.LOSS, name="micro_loss", microbatch=microbatch), loss)
        put(Key(kind=Kind.LOSS, name="loss_scale", microbatch=microbatch), np.array(1.0), noise_of=0)
        for layer in reversed(range(layers)):
            for part, name in enumerate((f"blocks.{layer}", f"blocks.{layer}.attn")):
                key = Key(kind=Kind.BACKWARD, name=name, microbatch=microbatch)
                put(key, draw(4, step, rank, microbatch, layer, part))
    for number, name in enumerate(names):
        put(Key(kind=Kind.GRAD, name=name, microbatch=STEP_CLOCK), draw(5, step, number, shape=PARAM_SHAPE))
    put(Key(kind=Kind.GRAD_NORM, name="grad_norm"), np.array(2.0 + 0.3 * float(draw(6, step, shape=(1,))[0])))
    put(Key(kind=Kind.LR, name="lr"), np.array(1e-3 / step), noise_of=0)
    for number, name in enumerate(names):
        value = drawn((0, 9, number), PARAM_SHAPE)
        for past in range(1, step + 1):
            value = value - 1e-3 * np.sign(draw(5, past, number, shape=PARAM_SHAPE))
        put(Key(kind=Kind.PARAM, name=name), value, noise_of=1e-2)
    put(Key(kind=Kind.STATE, name="train_mode"), np.array(7.0), noise_of=0)
    return rows.finish()


UNTOUCHED = (Kind.BATCH, Kind.LR, Kind.STATE)


def breaks(
    kind: Kind,
    name: str,
    *,
    item: str = "",
    step: int = 1,
    ranks: Sequence[int] | None = None,
    size: float = 1e-2,
    spreads: bool = True,
) -> Fault:
    """Make a fault that starts at one quantity in one step and is seen in all that is computed from there on.

    Args:
        ranks: Ranks on which the place itself is wrong; None: all.
        size: Relative size of the error.
        spreads: Whether later quantities are wrong too.
    """
    begun: set[int] = set()

    def fault(key: Key, at: int, rank: int, value: np.ndarray) -> np.ndarray:
        wrong = ranks is None or rank in ranks
        starts = (key.kind, key.name, key.item, at) == (kind, name, item, step)
        if starts and wrong:
            begun.add(rank)
        computed = key.kind not in UNTOUCHED and key.item != "before" and key.name != "loss_scale"
        if (starts and wrong) or (spreads and rank in begun and computed and at >= step):
            reduced = key.microbatch == STEP_CLOCK
            error = np.random.default_rng([at, 99 if reduced else rank, 5]).standard_normal(value.shape)
            return value + size * float(np.sqrt((value**2).mean())) * error
        return value

    return fault
