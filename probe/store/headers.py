"""Find values inside HDF5's object headers, and change them there: HDF5 itself need not lay the file out again.

A header is guarded by a checksum, which is computed anew. Every block is proved when it is found: it must have the
checksum that HDF5 gave it. This module must not know what the values mean.

Source: HDF5 File Format Specification Version 3.0, IV.A.1.b (version 2 data object headers), IV.A.2.q (continuation
message); the checksum is Bob Jenkins's lookup3, `hashlittle` with initial value 0 (burtleburtle.net/bob/c/lookup3.c).

Shapes: N blocks of L bytes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

_CHECKSUM = 4
"""Bytes of the checksum that ends a block."""
_CONTINUATION = 0x10
"""Type of the message that says where a header goes on."""
_TIMES, _PHASES, _ORDERED = 0x20, 0x10, 0x04
"""Flags of a header: it has times, its attributes' phase change values, and numbers messages."""

Extents = Sequence[tuple[int, bytes]]
"""Offset and bytes of pieces of a file, ascending; none overlaps another."""
Block = tuple[int, int]
"""Where a part of a header begins, and where it ends and its checksum begins."""


class Patches:
    """Change values in copies of one file's metadata."""

    def __init__(self, extents: Extents, values: Sequence[bytes]) -> None:
        """Find where the values lie.

        Args:
            extents: The metadata of a file.
            values: Each unlike any other bytes of the metadata.

        Raises:
            ValueError: A value is not exactly once in a header, or the header's checksum is not what it should be.
        """
        self._metadata = _Joined(extents)
        self._starts = [self._metadata.only(value) for value in values]
        blocks = sorted(set(self._metadata.blocks()))
        wanted = set()
        for start, value in zip(self._starts, values, strict=True):
            number = bisect.bisect_right(blocks, (start, start)) - 1
            if number < 0 or start + len(value) > blocks[number][1]:
                raise ValueError("a value lies in no header")
            wanted.add(blocks[number])
        by_length: dict[int, list[int]] = {}
        for start, stop in sorted(wanted):
            by_length.setdefault(stop - start, []).append(start)
        self._blocks = [
            (np.array(starts)[:, None] + np.arange(length), np.array(starts)[:, None] + length + np.arange(_CHECKSUM))
            for length, starts in by_length.items()
        ]
        """Indices of the bytes of blocks of one length [N, L], and of their checksums [N, 4]."""
        flat = np.frombuffer(self._metadata.data, np.uint8)
        if not all(np.array_equal(flat[checksum], _checksums(flat[block])) for block, checksum in self._blocks):
            raise ValueError("a header has another checksum than is known")

    def apply(self, values: Sequence[bytes]) -> list[tuple[int, memoryview]]:
        """Return the metadata with these values, each as long as the one that was there, and right checksums."""
        metadata = bytearray(self._metadata.data)
        for start, value in zip(self._starts, values, strict=True):
            metadata[start : start + len(value)] = value
        flat = np.frombuffer(metadata, np.uint8)
        for block, checksum in self._blocks:
            flat[checksum] = _checksums(flat[block])
        return self._metadata.apart(memoryview(metadata))


class _Joined:
    """Pieces of a file, one after the other. Positions are those in `data`."""

    def __init__(self, extents: Extents) -> None:
        self._offsets = [offset for offset, _ in extents]
        self._begins = [0, *itertools.accumulate(len(data) for _, data in extents)]
        self.data = b"".join(data for _, data in extents)

    def apart(self, data: memoryview) -> list[tuple[int, memoryview]]:
        """Cut as many bytes into the pieces again."""
        cuts = itertools.pairwise(self._begins)
        return [(offset, data[start:stop]) for offset, (start, stop) in zip(self._offsets, cuts, strict=True)]

    def only(self, value: bytes) -> int:
        """Find the one place where bytes are."""
        at = self.data.find(value)
        if at < 0 or self.data.find(value, at + 1) >= 0:
            raise ValueError("a value is not exactly once in the metadata")
        return at

    def blocks(self) -> Iterator[Block]:
        """Walk the object headers and what continues them."""
        start = self.data.find(b"OHDR")
        while start >= 0:
            flags = self.data[start + 5]
            width = 1 << (flags & 3)
            at = start + 6 + (16 if flags & _TIMES else 0) + (4 if flags & _PHASES else 0)
            stop = at + width + int.from_bytes(self.data[at : at + width], "little")
            if stop + _CHECKSUM <= len(self.data):
                yield start, stop
                yield from self._continued(at + width, stop, flags)
            start = self.data.find(b"OHDR", start + 1)

    def _continued(self, at: int, end: int, flags: int) -> Iterator[Block]:
        """Find the blocks that a header goes on in, from the messages in one of its blocks."""
        prefix = 6 if flags & _ORDERED else 4
        while at + prefix <= end:
            kind, length = self.data[at], int.from_bytes(self.data[at + 1 : at + 3], "little")
            body = self.data[at + prefix : at + prefix + 16]
            if kind == _CONTINUATION:
                start = self._position(int.from_bytes(body[:8], "little"))
                stop = start + int.from_bytes(body[8:], "little") - _CHECKSUM
                if start >= 0 and stop + _CHECKSUM <= len(self.data):
                    yield start, stop
                    yield from self._continued(start + len(b"OCHK"), stop, flags)
            at += prefix + length

    def _position(self, address: int) -> int:
        """Translate an offset in the file; -1 where there is no piece."""
        number = bisect.bisect_right(self._offsets, address) - 1
        if number < 0:
            return -1
        position = self._begins[number] + address - self._offsets[number]
        return position if position < self._begins[number + 1] else -1


def _checksums(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Shapes [N, L] and [N, 4]."""
    return lookup3(blocks).view(np.uint8).reshape(-1, _CHECKSUM)


def lookup3(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Compute the checksum of blocks of one length. Shapes [N, L] and [N]; L is not 0."""
    count, length = blocks.shape
    rounds = -(-length // 12)
    padded = np.zeros((count, rounds * 12), np.uint8)
    padded[:, :length] = blocks
    words = np.ascontiguousarray(padded.view("<u4").T).reshape(rounds, 3, count)
    a, b, c = (np.full(count, (0xDEADBEEF + length) & 0xFFFFFFFF, np.uint32) for _ in range(3))
    for number, (x, y, z) in enumerate(words):
        a, b, c = a + x, b + y, c + z
        if number < rounds - 1:
            for turn in (4, 6, 8, 16, 19, 4):
                a, b, c = b, c + b, (a - c) ^ _turned(c, turn)
    for turn in (14, 11, 25, 16, 4, 14, 24):
        a, b, c = b, (c ^ b) - _turned(b, turn), a
    return np.asarray(b.astype("<u4"))


def _turned(words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    return np.asarray((words << np.uint32(bits)) | (words >> np.uint32(32 - bits)))
