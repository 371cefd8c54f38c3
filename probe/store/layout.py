"""What one segment of a capture holds: the rows of one step on one rank, and the tables of the file they go to.

The recorder fills a `StepRows`, the writer stores it, the reader returns it. It is plain numpy, so that judging never
needs torch and recording never needs to know HDF5. Writer and reader agree through `TABLES`.

Shapes: S steps in the file (1 in version 1), Q quantities recorded in the step, K sketch buckets, N samples,
R stored sketches, P stored samples, T different texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from probe.point import Key

FORMAT_CAPTURE = "probe-capture"
FORMAT_SEGMENT = "probe-segment"
FORMAT_PACKED = "probe-packed"
FORMAT_VERSION = 1
FORMAT_MINOR = 0

SKETCH_K = 251
"""Buckets of the sketch: prime, so that strided buckets never line up with a row length (relative sd of the
estimated norm 1/sqrt(2k) = 4.5 %). Source: the project's statistics study, section 5."""
SAMPLES = 64
"""Sampled values per tensor; the custom of the pull requests this tool serves (huggingface/peft#3712)."""

PAGE = 4096
"""Bytes: a block of any disk and a page of memory divide it; large datasets begin at a multiple of it."""

RANK_FOLDER = re.compile(r"rank(\d{5})")
SEGMENT_FILE = re.compile(r"step(\d{8})\.h5")
PACKED_FOLDER = "packed"
PACKED_FILE = re.compile(r"rank(\d{5})\.h5")
FOLDED_FILE = re.compile(r"packed(\d{8})\.h5")
"""In a rank's folder: a packed file of some of its steps, made while it recorded."""
MANIFEST_FILE = "capture.json"
END_FILE = "end.json"
NAMES_FILE = "names.json"
"""In a rank's folder: from which path in the model each name was derived. Readers do without it."""
NOTES_FOLDER = "notes"
"""Where a process that ends leaves what it saw, for the launcher's last line; a killed launcher leaves it behind."""
NOTE_FILE = re.compile(r"\d+\.json")
UNFINISHED = ".tmp"
"""Suffix of a file that is being written. Readers ignore it: it is what a killed process leaves behind."""


def rank_folder(rank: int) -> str:
    """Name the folder of one rank's segments.

    >>> rank_folder(3)
    'rank00003'
    """
    return f"rank{rank:05d}"


def segment_file(step: int) -> str:
    """Name the file of one step.

    >>> segment_file(12)
    'step00000012.h5'
    """
    return f"step{step:08d}.h5"


def packed_file(rank: int) -> str:
    """Name the file of one rank's packed steps.

    >>> packed_file(3)
    'packed/rank00003.h5'
    """
    return f"{PACKED_FOLDER}/rank{rank:05d}.h5"


def folded_file(step: int) -> str:
    """Name the packed file, in a rank's folder, of some steps of which this is the first.

    >>> folded_file(101)
    'packed00000101.h5'
    """
    return f"packed{step:08d}.h5"


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
    """[Q] number of elements; 0 for text. Of a sharded tensor, whose shape is the whole's, the elements of the part."""
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
    """[Q] exact value of text, name, mode; where a part of a sharded tensor lies (`probe.store.parts`); else empty."""
    where: tuple[str, ...]
    """[Q] where the value was taken: a call site or the class of the module; may be empty."""
    tensors: dict[Key, FullTensor] = field(default_factory=dict)
    """Tensors kept whole. The reader leaves it empty; it reads them one by one on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What `end.json` says of a packed file that was made while recording."""

    file: str
    steps: tuple[int, ...]
    """Ascending."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One dataset at the root of a segment."""

    name: str
    code: str
    """numpy type string, little endian; `S` for UTF-8 text."""
    axes: str
    """One letter for each axis (see the module's legend); `2` is an axis of two."""


TABLES = (
    Table(name="quantity", code="S", axes="Q"),
    Table(name="kind", code="S", axes="Q"),
    Table(name="name", code="S", axes="Q"),
    Table(name="item", code="S", axes="Q"),
    Table(name="microbatch", code="<i4", axes="Q"),
    Table(name="call", code="<i4", axes="Q"),
    Table(name="dtype", code="S", axes="Q"),
    Table(name="shape", code="S", axes="Q"),
    Table(name="where", code="S", axes="Q"),
    Table(name="tensor", code="S", axes="Q"),
    Table(name="text_row", code="<i4", axes="SQ"),
    Table(name="text", code="S", axes="ST"),
    Table(name="order", code="<i4", axes="SQ"),
    Table(name="numel", code="<i8", axes="SQ"),
    Table(name="nonfinite", code="<i8", axes="SQ"),
    Table(name="value", code="<f8", axes="SQ"),
    *(Table(name=name, code="<f8", axes="SQ") for name in SCALARS),
    Table(name="hash", code="<u8", axes="SQ2"),
    Table(name="sketch_row", code="<i4", axes="SQ"),
    Table(name="sketch", code="<f4", axes="SRK"),
    Table(name="sample_row", code="<i4", axes="SQ"),
    Table(name="sample", code="<f4", axes="SPN"),
)
"""Every table of a segment. `tensor` is the link name under `/tensors` of a quantity kept whole. `text_row`,
`sketch_row` and `sample_row` index what is stored once (-1: none): most rows have no text, scalars have no sketch, and
one long text must not widen two thousand rows."""

NAME_NBYTES = 4096
"""Longest name, item, label or place; beyond it text is cut and ends in a digest of the whole."""
TEXT_NBYTES = 65536
"""Longest text, likewise."""

TABLES_HASH = "tables_xxh3_128"
"""Root attribute: 32 hex digits of xxh3_128 over all of `TABLES`, see `probe.store.image.tables_digest`."""
