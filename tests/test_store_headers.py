"""Values in HDF5's headers: the checksum is the published one, and what is not proved is not patched."""

from __future__ import annotations

import numpy as np
import pytest

from probe.store.headers import Patches, lookup3


def block_with(value: bytes) -> bytes:
    """An object header of version 2 with one message."""
    body = b"\x0c" + len(value).to_bytes(2, "little") + b"\0" + value
    head = b"OHDR\x02\x00" + bytes([len(body)]) + body
    return head + lookup3(np.frombuffer(head, np.uint8)[None]).tobytes()


def test_the_checksum_is_the_one_that_its_author_published() -> None:
    # Source: driver5 in Bob Jenkins's lookup3.c.
    text = np.frombuffer(b"Four score and seven years ago", np.uint8)
    assert lookup3(np.stack([text, text])).tolist() == [0x17770551, 0x17770551]


def test_values_are_changed_with_their_checksums_and_nothing_else_is() -> None:
    one, two = block_with(b"the first value"), block_with(b"another, longer")
    extents = [(100, b"before" + one + b"between" + two), (900, b"apart")]
    patches = Patches(extents, [b"another, longer", b"first"])
    changed = patches.apply([b"of just as long", b"third"])
    wanted = b"before" + block_with(b"the third value") + b"between" + block_with(b"of just as long")
    assert [(offset, bytes(data)) for offset, data in changed] == [(100, wanted), (900, b"apart")]


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (b"no header, but the value", "lies in no header"),
        (block_with(b"another"), "is not exactly once"),
        (block_with(b"the value") + b"value", "is not exactly once"),
        (block_with(b"the value")[:-1] + b"!", "another checksum"),
        (block_with(b"the value")[:-3], "lies in no header"),
    ],
    ids=["outside", "missing", "twice", "checksum", "cut"],
)
def test_what_is_not_proved_to_be_a_header_is_not_patched(metadata: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Patches([(0, metadata)], [b"value"])
