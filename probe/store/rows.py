"""Turn the rows of a step into the tables of a segment, and back.

Names, shapes and call sites hardly change from step to step, so both directions keep what they converted last: the
writer shares the training process's interpreter lock, and a reader shares the objects among thousands of steps. This
module must not know HDF5's types and calls.

Shapes: see `probe.store.layout`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from probe.errors import CaptureError, listed
from probe.point import Key, Kind
from probe.store.dtypes import BITS
from probe.store.image import Texts
from probe.store.layout import NAME_NBYTES, SCALARS, TEXT_NBYTES, StepRows

Tables: TypeAlias = dict[str, Any]
"""Each table by name, without a step axis: an array, or UTF-8 texts (`Texts` where they were read)."""

_LINK_NBYTES = 1024
"""Longest link name under `/tensors`: what tools can print."""
_KINDS = {kind.value: kind for kind in Kind}
_CONVERTED = 1024
"""Columns that a decoder keeps; a run has a dozen, unless its names change from step to step."""
_LASTING = 256
"""The same of columns that are looked up without a digest; they hold on to their texts."""
_PER_ROW = ("order", "dtype", "shape", "numel", "nonfinite", "value", "sketch", "sample", "hash", "text", "where")


class LastingTexts(Texts):
    """Texts that a reader keeps, for they mostly come again in the next segment: then they are the same object."""


class Encoder:
    """Turn one rank's rows into tables, step after step."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Sequence[Any], Any]] = {}

    def tables(self, rows: StepRows, links: dict[Key, bytes]) -> Tables:
        """Encode the rows of a step.

        Args:
            rows: What the step recorded.
            links: Name of the dataset of each tensor kept whole, see `links`.
        """
        sketch_row, sketch = _stored(rows.sketch)
        sample_row, sample = _stored(rows.sample)
        return {
            **self._once("keys", rows.keys, _key_tables),
            "dtype": self._once("dtype", rows.dtype, _encoded),
            "shape": self._once("shape", rows.shape, _encoded_shapes),
            "where": self._once("where", rows.where, _encoded),
            "tensor": [links.get(key, b"") for key in rows.keys] if links else [b""] * len(rows.keys),
            **self._once("text", rows.text, _text_tables),
            "order": rows.order,
            "numel": rows.numel,
            "nonfinite": rows.nonfinite,
            "value": rows.value,
            **rows.scalars,
            "hash": rows.hash,
            "sketch_row": sketch_row,
            "sketch": sketch,
            "sample_row": sample_row,
            "sample": sample,
        }

    def links(self, rows: StepRows) -> dict[Key, bytes]:
        """Name the dataset of each tensor kept whole.

        It is the label, percent-encoded where HDF5 or a terminal would stumble.
        """
        links: dict[Key, bytes] = {}
        if not rows.tensors:
            return links
        labels = self._once("keys", rows.keys, _key_tables)["quantity"]
        for key, label in zip(rows.keys, labels, strict=True):
            if key in rows.tensors:
                links[key] = _link_name(label, len(links))
        return links

    def _once(self, name: str, column: Sequence[Any], convert: Callable[[Any], Any]) -> Any:
        last = self._last.get(name)
        if last is None or last[0] != column:
            last = self._last[name] = (column, convert(column))
        return last[1]


class Decoder:
    """Turn tables into rows, segment after segment."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], tuple[Any, ...]] = {}
        self._objects: dict[tuple[Any, ...], tuple[list[Any], tuple[Any, ...]]] = {}
        """The same by `LastingTexts` as objects, and by the digest of what is no text."""

    def rows(self, tables: Tables, *, step: int, rank: int, world_size: int) -> StepRows:
        """Decode the rows of a step; its tensors stay where they are.

        Raises:
            ValueError, KeyError, IndexError: The tables contradict each other.
        """
        return StepRows(
            step=step,
            rank=rank,
            world_size=world_size,
            keys=self.keys(tables),
            order=tables["order"],
            dtype=self._once("dtype", [tables["dtype"]], _decoded),
            shape=self._once("shape", [tables["shape"]], _decoded_shapes),
            numel=tables["numel"],
            nonfinite=tables["nonfinite"],
            value=tables["value"],
            scalars={name: tables[name] for name in SCALARS},
            sketch=_spread(tables["sketch_row"], tables["sketch"]),
            sample=_spread(tables["sample_row"], tables["sample"]),
            hash=tables["hash"],
            text=self._once("text", [tables["text_row"], tables["text"]], _decoded_texts),
            where=self._once("where", [tables["where"]], _decoded),
        )

    def keys(self, tables: Tables) -> tuple[Key, ...]:
        """Decode the key of each row."""
        columns = [tables[name] for name in ("kind", "name", "item", "microbatch", "call")]
        return self._once("keys", columns, _decoded_keys)

    def _once(self, name: str, columns: list[Any], convert: Callable[..., Any]) -> tuple[Any, ...]:
        lasting = all(isinstance(column, (LastingTexts, np.ndarray)) for column in columns)
        same: tuple[Any, ...] = (name,)
        if lasting:
            # A digest of numbers: looking up their bytes would hash them a tenth as fast.
            numbers = [column for column in columns if isinstance(column, np.ndarray)]
            texts = [id(column) for column in columns if isinstance(column, Texts)]
            same = (name, *texts, *(xxhash.xxh3_128_digest(column.tobytes()) for column in numbers))
        found = self._objects.get(same)
        if found is not None:
            return found[1]
        digest = xxhash.xxh3_128()
        for column in columns:
            digest.update(column.joined if isinstance(column, Texts) else column.tobytes())
        known = (name, digest.digest())
        if known not in self._known:
            if len(self._known) >= _CONVERTED:
                self._known.clear()
            self._known[known] = tuple(convert(*columns))
        if lasting:
            if len(self._objects) >= _LASTING:
                self._objects.clear()
            # With the texts, lest others get their `id`.
            self._objects[same] = columns, self._known[known]
        return self._known[known]


def require_consistent(rows: StepRows) -> None:
    """Refuse rows that could not be read back as they are.

    Raises:
        CaptureError: A column has another number of rows, a key occurs twice, or a tensor has no row or no dtype that
            the format holds.
    """
    count = len(rows.keys)
    if set(rows.scalars) != set(SCALARS):
        raise CaptureError(f"Step {rows.step} has the scalars {listed(rows.scalars)}; expected {listed(SCALARS)}.")
    lengths = {name: len(getattr(rows, name)) for name in _PER_ROW} | {n: len(a) for n, a in rows.scalars.items()}
    wrong = [f"{name} {length}" for name, length in lengths.items() if length != count]
    if wrong:
        raise CaptureError(f"Step {rows.step} has {count} keys and other numbers of rows: {listed(wrong)}.")
    known = set(rows.keys)
    if len(known) != count:
        raise CaptureError(f"Step {rows.step} has the same key twice: {listed(_doubles(rows.keys))}.")
    strangers = [repr(key.label) for key in rows.tensors if key not in known]
    if strangers:
        raise CaptureError(f"Step {rows.step} has tensors without a row: {listed(strangers)}.")
    for key, tensor in rows.tensors.items():
        bits = BITS.get(tensor.dtype)
        if bits is None:
            raise CaptureError(
                f"Tensor {key.label!r} has dtype {tensor.dtype!r}, which a capture cannot hold; it holds "
                f"{', '.join(BITS)}."
            )
        if tensor.bits.dtype != np.dtype(bits):
            raise CaptureError(
                f"Tensor {key.label!r} of dtype {tensor.dtype!r} comes in bits of {tensor.bits.dtype}; "
                f"expected {np.dtype(bits)}."
            )


def encode(text: str, most: int = NAME_NBYTES) -> bytes:
    """Encode text as a table can hold it.

    HDF5 ends a text at NUL, and a lone surrogate is no UTF-8: both are replaced. What is longer than `most` bytes is
    cut and ends in a digest of the whole, so that it is still equal only to itself.

    >>> encode("a\\0b").decode()
    'a␀b'
    """
    encoded = text.replace("\0", "\u2400").encode("utf-8", "backslashreplace")
    if len(encoded) <= most:
        return encoded
    end = f"… ({len(encoded)} bytes, xxh3_128 {xxhash.xxh3_128_hexdigest(encoded)})".encode()
    return encoded[: most - len(end)].decode("utf-8", "ignore").encode() + end


def _encoded(texts: Sequence[str]) -> list[bytes]:
    return [encode(text) for text in texts]


def _text_tables(texts: Sequence[str]) -> Tables:
    rows = {text: at for at, text in enumerate(dict.fromkeys(text for text in texts if text))}
    return {
        "text_row": np.array([rows.get(text, -1) for text in texts], dtype="<i4"),
        "text": [encode(text, TEXT_NBYTES) for text in rows],
    }


def _encoded_shapes(shapes: Sequence[tuple[int, ...]]) -> list[bytes]:
    return [",".join(map(str, shape)).encode() for shape in shapes]


def _key_tables(keys: Sequence[Key]) -> Tables:
    return {
        "quantity": _labels(keys),
        "kind": [key.kind.value.encode() for key in keys],
        "name": [encode(key.name) for key in keys],
        "item": [encode(key.item) for key in keys],
        "microbatch": np.array([key.microbatch for key in keys], dtype="<i4"),
        "call": np.array([key.call for key in keys], dtype="<i4"),
    }


def _labels(keys: Sequence[Key]) -> list[bytes]:
    """Encode the keys' labels, unique: two keys may share a label, for it hides microbatch 0."""
    labels: dict[bytes, None] = {}
    for key in keys:
        label = first = encode(key.label)
        again = 1
        while label in labels:
            again += 1
            label = first + b" (%d)" % again
        labels[label] = None
    return list(labels)


@functools.lru_cache(maxsize=65536)
def _link_name(label: bytes, number: int) -> bytes:
    """Name a dataset; asked for again at every step."""
    plain = b"".join(
        b"%%%02X" % byte if byte in b"%/\x7f" or byte < 0x20 or (byte == 0x2E and not at) else bytes((byte,))
        for at, byte in enumerate(label)
    )
    if len(plain) <= _LINK_NBYTES:
        return plain
    end = b"~%d" % number  # makes what is cut unique
    return plain[: _LINK_NBYTES - len(end)].decode("utf-8", "ignore").encode() + end


def _stored(vectors: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Leave out the vectors that are NaN throughout, and say where the others went."""
    present = ~np.isnan(vectors).all(axis=1)
    index = np.where(present, np.cumsum(present) - 1, -1).astype(np.int32)
    return index, vectors if present.all() else vectors[present]


def _spread(index: npt.NDArray[np.int32] | None, stored: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Put stored vectors back into the rows that they belong to; None: they lie there."""
    if index is None:
        return stored
    if len(index) == len(stored) and np.array_equal(index, np.arange(len(index))):
        return stored
    present = index >= 0
    rows = np.full((len(index), stored.shape[1]), np.nan, dtype=np.float32)
    rows[present] = stored[index[present]]
    return rows


def _doubles(keys: Collection[Key]) -> set[str]:
    seen: set[Key] = set()
    doubles = set()
    for key in keys:
        if key in seen:
            doubles.add(repr(key.label))
        seen.add(key)
    return doubles


def _decoded(texts: Sequence[bytes]) -> list[str]:
    return [text.decode() for text in texts]


def _decoded_texts(rows: npt.NDArray[np.int32], texts: Sequence[bytes]) -> list[str]:
    different = _decoded(texts)
    return [different[row] if row >= 0 else "" for row in rows.tolist()]


def _decoded_shapes(texts: Sequence[bytes]) -> list[tuple[int, ...]]:
    return [tuple(int(length) for length in text.split(b",")) if text else () for text in texts]


def _decoded_keys(
    kinds: Sequence[bytes],
    names: Sequence[bytes],
    items: Sequence[bytes],
    microbatches: npt.NDArray[np.int32],
    calls: npt.NDArray[np.int32],
) -> list[Key]:
    keys = [
        Key(kind=_KINDS[kind], name=name, item=item, microbatch=microbatch, call=call)
        for kind, name, item, microbatch, call in zip(
            _decoded(kinds), _decoded(names), _decoded(items), microbatches.tolist(), calls.tolist(), strict=True
        )
    ]
    doubles = _doubles(keys)
    if doubles:
        raise ValueError(f"the same key twice, {listed(doubles)}")
    return keys
