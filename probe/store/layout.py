"""What one segment of a capture holds: the rows of one step on one rank.

The recorder fills a `StepRows`, the writer stores it, the reader returns it. It is plain numpy, so that judging never
needs torch and recording never needs to know HDF5.

Shapes: Q quantities recorded in the step, K sketch buckets, N samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.point import Key

FORMAT_CAPTURE = "probe-capture"
FORMAT_SEGMENT = "probe-segment"
FORMAT_VERSION = 1
FORMAT_MINOR = 0

SKETCH_K = 251
"""Buckets of the sketch: prime, so that strided buckets never line up with a row length (relative sd of the
estimated norm 1/sqrt(2k) = 4.5 %). Source: the project's statistics study, section 5."""
SAMPLES = 64
"""Sampled values per tensor; the custom of the pull requests this tool serves (huggingface/peft#3712)."""

SCALARS = ("l2", "mean", "mean_abs", "rms", "max_abs")
"""Per-tensor reductions, float64 [Q], NaN where the quantity is not a tensor of numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTensor:
    """One tensor kept whole."""

    bits: npt.NDArray[Any]
    """C-contiguous array, little endian. bf16 and fp8 travel as uint16 and uint8 bit patterns."""
    dtype: str
    """torch's name of the element type, e.g. `bfloat16`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Everything one rank recorded in one step, one row per quantity in order of first execution."""

    step: int
    """Optimizer update, from 1."""
    rank: int
    world_size: int
    keys: tuple[Key, ...]
    """[Q], unique."""
    order: npt.NDArray[np.int32]
    """[Q] execution index within the step."""
    dtype: tuple[str, ...]
    """[Q] torch's name of the element type; `str`, `int`, `float`, `bool` for explicit Python values."""
    shape: tuple[tuple[int, ...], ...]
    """[Q] shape of the recorded tensor; () for scalars and text."""
    numel: npt.NDArray[np.int64]
    """[Q] number of elements; 0 for text."""
    nonfinite: npt.NDArray[np.int64]
    """[Q] number of NaN and infinite elements."""
    value: npt.NDArray[np.float64]
    """[Q] the number itself where numel is 1, else NaN."""
    scalars: dict[str, npt.NDArray[np.float64]]
    """One [Q] array for each name of `SCALARS`."""
    sketch: npt.NDArray[np.float32]
    """[Q, K] signed buckets over the flat index; NaN where there is none."""
    sample: npt.NDArray[np.float32]
    """[Q, N] sampled values; NaN beyond numel or where there are none."""
    hash: npt.NDArray[np.uint64]
    """[Q, 2] xxh3_128 of the bits (high, low); 0, 0 where exactness is not judged."""
    text: tuple[str, ...]
    """[Q] exact value of text, names, modes; empty elsewhere."""
    where: tuple[str, ...]
    """[Q] where the value was taken: a call site or the class of the module; may be empty."""
    tensors: dict[Key, FullTensor] = field(default_factory=dict)
    """Tensors kept whole. The reader leaves it empty; it reads them one by one on request."""
