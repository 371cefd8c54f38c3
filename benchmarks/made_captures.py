"""Captures of any size made of random numbers, for the benchmarks: what is measured is reading, not training."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np

from probe.point import STEP_CLOCK, Key, Kind
from probe.store.layout import SAMPLES, SCALARS, SKETCH_K, FullTensor, StepRows
from probe.store.writer import RankWriter, create_capture, write_manifest


def keys_of(quantities: int) -> tuple[Key, ...]:
    """Name the quantities of a model of as many layers as it takes: outputs, gradients, parameters, loss."""
    keys = [
        Key(kind=Kind.LOSS, name="micro_loss", microbatch=0),
        Key(kind=Kind.LOSS, name="loss_scale", microbatch=0),
        Key(kind=Kind.GRAD_NORM, name="grad_norm"),
        Key(kind=Kind.LR, name="lr"),
        Key(kind=Kind.BATCH, name="x", microbatch=0),
    ]
    parts = ("attn", "attn.qkv_proj", "attn.out_proj", "mlp", "norm1", "")
    layer = 0
    while len(keys) < quantities:
        for part in parts:
            name = f"blocks.{layer}.{part}".rstrip(".")
            keys.append(Key(kind=Kind.FORWARD, name=name, microbatch=0))
            keys.append(Key(kind=Kind.BACKWARD, name=name, microbatch=0))
        for part in ("attn.qkv_proj.lora_A.weight", "attn.qkv_proj.lora_B.weight", "mlp.lora_A.weight"):
            keys.append(Key(kind=Kind.GRAD, name=f"blocks.{layer}.{part}", microbatch=STEP_CLOCK))
            keys.append(Key(kind=Kind.PARAM, name=f"blocks.{layer}.{part}", microbatch=STEP_CLOCK))
        layer += 1
    return tuple(keys[:quantities])


def make(
    path: Path,
    *,
    quantities: int = 2000,
    steps: int = 30,
    ranks: int = 8,
    noise: float = 0.0,
    seed: int = 0,
    code: str = "unmodified",
    tensors: tuple[int, int] = (0, 0),
) -> None:
    """Write a capture.

    Args:
        noise: Relative, of every value; the values themselves are the same in all captures.
        seed: Of the noise.
        code: What the provenance says of the code; two arms must not have run the same.
        tensors: How many tensors each step keeps whole, and how many fp32 elements each has.
    """
    create_capture(path)
    run_id = f"{path.name}-{seed}"
    plan = {"record": {"full": ["*"] if tensors[0] else []}}
    config = {"command": ["python", "train.py"], "seed": 42, "steps": f"1-{steps}", "plan": plan, "perturb": ""}
    provenance = {"code": {"hash": code, "files": {"train.py": code}}, "versions": {}, "device": "cpu"}
    manifest = {"run_id": run_id, "world_size": ranks, "config": config, "provenance": provenance, "env": {}}
    write_manifest(path, manifest)
    keys = keys_of(quantities)
    for rank in range(ranks):
        writer = RankWriter(path, run_id=run_id, rank=rank, world_size=ranks)
        for step in range(1, steps + 1):
            before = tuple(replace(key, item="before") for key in keys if key.kind is Kind.PARAM) if step == 1 else ()
            writer.write(_rows((*before, *keys), step, rank, ranks, noise, seed, tensors))
        writer.close(error=None, dropped_steps=())


def _rows(
    keys: tuple[Key, ...], step: int, rank: int, ranks: int, noise: float, seed: int, tensors: tuple[int, int]
) -> StepRows:
    count = len(keys)
    exact = np.random.default_rng([step, rank])
    own = np.random.default_rng([seed, step, rank])
    single = np.array([key.kind in (Kind.LOSS, Kind.GRAD_NORM, Kind.LR) for key in keys])
    fixed = np.array([bool(key.item) or key.kind is Kind.BATCH or key.name in ("lr", "loss_scale") for key in keys])

    def noisy(values: np.ndarray) -> np.ndarray:
        jitter = noise * own.standard_normal(values.shape, dtype=np.float32)
        return values * np.where(fixed.reshape(-1, *[1] * (values.ndim - 1)), 1.0, 1.0 + jitter)

    size = noisy(1.0 + exact.random(count))
    sketch = noisy(exact.standard_normal((count, SKETCH_K), dtype=np.float32)).astype(np.float32)
    sample = noisy(exact.standard_normal((count, SAMPLES), dtype=np.float32)).astype(np.float32)
    sketch[single], sample[single] = np.nan, np.nan
    sketch *= (size * 100 / np.sqrt(np.square(sketch).sum(axis=1)))[:, None].astype(np.float32)
    hashed = np.array([key.kind in (Kind.PARAM, Kind.BATCH) for key in keys])
    bits = (np.random.default_rng([step, rank, 1]) if not noise else own).integers(1, 2**63, (count, 2), np.uint64)
    bits[~hashed] = 0
    bits[fixed & hashed] = 7
    scalars = dict(zip(SCALARS, (size * 100, size * 1e-3, size * 0.8, size, size * 4), strict=True))
    kept = {}
    for number in range(tensors[0]):
        whole = np.random.default_rng([step, rank, number, 2]).standard_normal(tensors[1], dtype=np.float32)
        if noise:
            whole *= np.float32(1 + noise * (seed + 1))
        kept[[key for key in keys if key.kind is Kind.FORWARD][number]] = FullTensor(bits=whole, dtype="float32")
    return StepRows(
        step=step,
        rank=rank,
        world_size=ranks,
        keys=keys,
        order=np.arange(count, dtype=np.int32),
        dtype=("float32",) * count,
        shape=tuple(() if one else (100, 100) for one in single),
        numel=np.where(single, 1, 10_000),
        nonfinite=np.zeros(count, np.int64),
        value=np.where(single, np.where(fixed, 1.0, size), np.nan),
        scalars={name: np.where(single, np.nan, values) for name, values in scalars.items()},
        sketch=sketch,
        sample=sample,
        hash=bits,
        text=("",) * count,
        where=("",) * count,
        tensors=kept,
    )


def rows_with(tensors: dict[Key, FullTensor], step: int) -> StepRows:
    """Make the rows of a step of one rank that keeps these tensors whole."""
    return replace(_rows(tuple(tensors), step, 0, 1, 0.0, 0, (0, 0)), tensors=tensors)


def machine() -> str:
    """Name the machine, and how busy it is."""
    busy = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load {busy}"


def summary(path: Path) -> str:
    """Say how large a capture is."""
    files = [file for file in path.rglob("*") if file.is_file()]
    return json.dumps({"files": len(files), "bytes": sum(file.stat().st_size for file in files)})
