"""Compare two tensors block by block, each block while it is in the processor's cache.

Both are read side by side, so memory is bounded whatever their size, and what is read is checked against its digest.
The compiled `_elementwise` compares fp32 and bf16 at the speed of reading them; where it was not built, numpy does, as
for all other types. This module must not know which quantity a tensor is, nor what is allowed.

Two elements are equal if their values are, or if both are NaN. Differences are taken in double precision, and only of
finite elements; what is not finite on one side only is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from probe.built import built
from probe.store.dtypes import BITS, widen
from probe.store.tensors import Placed, Whole

INTERFACE = 2
"""How the compiled comparison is called here; a build that is called in another way is not used."""


compiled = built("probe.measure._elementwise", INTERFACE)
"""The compiled comparison; None where there was no C compiler when the package was installed, or the build is older."""

BLOCK = 1 << 18
"""Bytes of each side that are compared at once: two blocks stay in the second-level cache."""
_COMPILED = {"float32": 0, "bfloat16": 1}
_ORDERED = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of types whose bits, with the sign taken apart, are in the order of their values."""
_UNKNOWN = -1.0
"""Less than any difference."""


class Apart(NamedTuple):
    """How far two tensors are apart, of which some element is not equal."""

    different: int
    nonfinite: int
    squares: float
    """Sum of the squared differences."""
    largest: float
    ulps: int | None
    """Largest distance in units in the last place; None where the type has none."""
    at: int
    """Flat index of the largest difference; of the first unequal element where none is finite."""
    expected: float | complex
    actual: float | complex


class _Found(NamedTuple):
    """What one block showed."""

    different: int = 0
    nonfinite: int = 0
    squares: float = 0.0
    largest: float = 0.0
    ulps: int = 0
    at: int = -1
    """As in `Apart`, within the block; -1 where the largest difference is not above what was known before."""


def compare_tensors(a: Whole | Placed, b: Whole | Placed) -> Apart | None:
    """Read two tensors of one type and shape side by side; None if all values are equal.

    Raises:
        CaptureFormatError: One of them does not have its digest, or its file is truncated.
    """
    nbytes, item, block = a.nbytes, a.item, _block(a.dtype)
    x, y = (np.empty(min(BLOCK, nbytes), np.uint8).data for _ in range(2))
    digests = xxhash.xxh3_128(), xxhash.xxh3_128()
    different = nonfinite = ulps = at = 0
    squares, largest = 0.0, _UNKNOWN
    expected = actual = 0.0
    with a.reader() as first, b.reader() as second:
        for start in range(0, nbytes, BLOCK):
            if nbytes - start < BLOCK:
                x, y = x[: nbytes - start], y[: nbytes - start]
            first.fill(x)
            digests[0].update(x)
            second.fill(y)
            digests[1].update(y)
            found = _Found(*block(x, y, largest))
            if not found.different:
                continue
            different += found.different
            nonfinite += found.nonfinite
            squares += found.squares
            ulps = max(ulps, found.ulps)
            if found.at >= 0:
                largest, at = found.largest, start // item + found.at
                one = slice(found.at * item, (found.at + 1) * item)
                expected, actual = _values(x[one], a.dtype)[0].item(), _values(y[one], a.dtype)[0].item()
    a.check(digests[0])
    b.check(digests[1])
    if not different:
        return None
    known = ulps if a.dtype in _ORDERED else None
    return Apart(different, nonfinite, squares, largest, known, at, expected, actual)


def _block(dtype: str) -> Callable[[memoryview, memoryview, float], tuple[int, int, float, float, int, int]]:
    """Return what compares two blocks of a type, and looks for the largest difference if it is above what is known."""
    if compiled is not None and dtype in _COMPILED:
        compare, number = compiled.compare, _COMPILED[dtype]
        return lambda x, y, known: compare(x, y, number, known)
    return lambda x, y, known: _with_numpy(x, y, dtype, known)


def _with_numpy(x: memoryview, y: memoryview, dtype: str, known: float = _UNKNOWN) -> _Found:
    if x == y:
        return _Found()
    a, b = _values(x, dtype), _values(y, dtype)
    with np.errstate(all="ignore"):
        unequal = (a != b) & ~((a != a) & (b != b))
        count = int(np.count_nonzero(unequal))
        if not count:
            return _Found()
        delta, finite = _delta(a, b)
        squares = float(np.dot(delta, delta))
        ulps = int(_apart(x, y, dtype)[finite].max(initial=0)) if dtype in _ORDERED else 0
    at = int(np.argmax(delta))
    largest = float(delta[at])
    if largest <= known:
        at = -1
    elif not largest:
        at = int(np.argmax(unequal))
    return _Found(count, int(np.count_nonzero(unequal & ~finite)), squares, largest, ulps, at)


def _values(block: memoryview, dtype: str) -> npt.NDArray[Any]:
    return widen(np.frombuffer(block, BITS[dtype]), dtype)


def _delta(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return |a - b| in double precision, 0 where it is not of finite elements, and where it is."""
    kind = np.complex128 if np.iscomplexobj(a) else np.float64
    finite = np.isfinite(a) & np.isfinite(b)
    delta = np.abs(a.astype(kind) - b.astype(kind))
    return np.where(finite, delta, 0.0), finite


def _apart(x: memoryview, y: memoryview, dtype: str) -> npt.NDArray[np.uint64]:
    """Count the units in the last place between elements."""
    one, two = _ordered(x, _ORDERED[dtype]), _ordered(y, _ORDERED[dtype])
    # Two's complement wraps: what is subtracted from the larger is right as an unsigned number.
    return np.where(one > two, one.view(np.uint64) - two.view(np.uint64), two.view(np.uint64) - one.view(np.uint64))


def _ordered(block: memoryview, item: int) -> npt.NDArray[np.int64]:
    """Number the values of a floating-point type in their order; both zeros are 0."""
    bits = np.frombuffer(block, f"<i{item}").astype(np.int64)
    size = bits & ((1 << (8 * item - 1)) - 1)
    return np.where(bits < 0, -size, size)
