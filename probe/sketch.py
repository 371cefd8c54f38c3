"""The sketch and the sampled positions of a tensor that is at hand as a numpy array.

Recording computes the same on the tensor's own device; this is for whoever changes a recorded tensor afterwards, or
checks a capture without torch. This module must not know torch.

Source: the project's statistics study, sections 5 and 8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from probe.store.layout import SAMPLES, SCALARS, SKETCH_K

_CHUNK_ROWS = 4096


def mix64(index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    with np.errstate(over="ignore"):
        z = (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def sketch(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the sketch of an array: sums of its flat rows of k elements, each with a sign of its own. Shape [k]."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    total = np.zeros(SKETCH_K)
    for first in range(0, -(-flat.size // SKETCH_K), _CHUNK_ROWS):
        part = flat[first * SKETCH_K : (first + _CHUNK_ROWS) * SKETCH_K]
        rows = -(-part.size // SKETCH_K)
        padded = np.zeros(rows * SKETCH_K)
        padded[: part.size] = part
        negative = mix64(np.arange(first, first + rows, dtype=np.uint64)) >> np.uint64(63)
        total += (1.0 - 2.0 * negative.astype(np.float64)) @ padded.reshape(rows, SKETCH_K)
    return total


def sample_index(name: str, numel: int) -> npt.NDArray[np.int64]:
    """Return the flat positions whose values are kept, from the name and the size alone. Shape [min(numel, N)]."""
    if numel <= SAMPLES:
        return np.arange(numel, dtype=np.int64)
    seed = np.uint64(xxhash.xxh3_64_intdigest(name.encode()))
    with np.errstate(over="ignore"):
        draws = mix64(np.arange(SAMPLES, dtype=np.uint64) + seed)
    return np.sort((draws % np.uint64(numel)).astype(np.int64))


def reductions(values: npt.NDArray[Any]) -> dict[str, float]:
    """Return the reductions of an array that are recorded, by the names of `SCALARS`."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    squares = float(np.square(flat).sum())
    found = (np.sqrt(squares), flat.mean(), np.abs(flat).mean(), np.sqrt(squares / flat.size), np.abs(flat).max())
    return dict(zip(SCALARS, map(float, found), strict=True))
