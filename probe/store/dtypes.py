"""Element types by torch's names, and the numpy type that carries the bits of each.

numpy has no bf16 and no fp8, so these travel as bit patterns and are widened only for whoever looks at values. This
module must know neither torch nor HDF5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BITS: dict[str, str] = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e5m2": "|u1",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "bool": "|b1",
    "complex64": "<c8",
    "complex128": "<c16",
}
"""torch's name of an element type to the numpy type string of its bits."""

_EIGHT_BITS = {
    "float8_e4m3fn": (4, 7, "fn"),
    "float8_e4m3fnuz": (4, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 16, "fnuz"),
}
"""Exponent width, exponent bias and the family of special values: `fn` has NaN at S.1111.111 and no infinity; `fnuz`
has one NaN, 0x80, and neither infinity nor negative zero. Source: ONNX specification, "Float stored in 8 bits"."""


def widen(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """Give the values that bit patterns stand for.

    Args:
        bits: Array of the numpy type that `BITS` gives for `dtype`.
        dtype: torch's name of the element type.

    Returns:
        float32 of the same shape for bf16 and fp8, exactly; any other type as it is.
    """
    if dtype == "bfloat16":
        wide = bits.astype(np.uint32, order="C")
        wide <<= 16
        return wide.view(np.float32)
    if dtype == "float8_e5m2":
        return np.asarray((bits.astype(np.uint16) << 8).view(np.float16).astype(np.float32))
    if dtype == "float8_e8m0fnu" or dtype in _EIGHT_BITS:
        return np.asarray(_codes(dtype)[bits])
    return bits


def _codes(dtype: str) -> npt.NDArray[np.float32]:
    """Tabulate the values of all 256 codes of an eight-bit type."""
    code = np.arange(256)
    if dtype == "float8_e8m0fnu":  # a power of two and no sign: OCP Microscaling Formats 1.0, section 5.4.1
        return np.where(code == 255, np.nan, np.ldexp(1.0, code - 127)).astype(np.float32)
    width, bias, family = _EIGHT_BITS[dtype]
    fraction_width = 7 - width
    exponent = (code >> fraction_width) & ((1 << width) - 1)
    fraction = (code & ((1 << fraction_width) - 1)) / (1 << fraction_width)
    size = np.where(exponent == 0, np.ldexp(fraction, 1 - bias), np.ldexp(1 + fraction, exponent - bias))
    value = np.where(code < 128, size, -size)
    not_a_number = (code & 0x7F) == 0x7F if family == "fn" else code == 0x80
    return np.where(not_a_number, np.nan, value).astype(np.float32)
