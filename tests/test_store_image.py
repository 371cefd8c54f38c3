from __future__ import annotations

import io
import os
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5t

from probe.store.image import Image, Journal, bits_digest, flat_bytes, tables_digest, tensor_type


def test_a_journal_reads_back_the_latest_bytes_and_zeros_in_between() -> None:
    journal = Journal()
    journal.write(b"abcdef")
    journal.seek(10)
    journal.write(b"xy")
    journal.seek(2)
    journal.write(b"CD")
    journal.seek(0)
    buffer = bytearray(20)
    assert (journal.readinto(buffer), bytes(buffer[:12]), journal.size) == (12, b"abCDef\0\0\0\0xy", 12)


def test_a_journal_behaves_as_a_file_in_memory_does_under_random_use() -> None:
    random = np.random.default_rng(0)
    journal, expected = Journal(), io.BytesIO()
    for _ in range(300):
        offset, length = int(random.integers(0, 400)), int(random.integers(1, 60))
        for file in (journal, expected):
            file.seek(offset)
        if random.random() < 0.5:
            block = random.bytes(length)
            assert journal.write(block) == expected.write(block)
        else:
            ours, theirs = bytearray(length), bytearray(length)
            assert (journal.readinto(ours), bytes(ours)) == (expected.readinto(theirs), bytes(theirs))
        assert (journal.tell(), journal.size) == (expected.tell(), len(expected.getvalue()))


def test_hdf5_s_metadata_does_not_touch_the_data_between_it(tmp_path: Path) -> None:
    file = tmp_path / "many.h5"
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR)
    image = Image(descriptor)
    arrays = {f"{at:03d}": np.full(at * 37, at % 256, dtype=np.uint8) for at in range(300)}
    for name, array in arrays.items():
        dataset = image.add_array(image.root, name.encode(), array, tensor_type("uint8", "|u1"))
        image.add_attribute(dataset, "long", name * 100)
    assert image.finish() == os.fstat(descriptor).st_size
    os.close(descriptor)
    with h5py.File(file) as opened:
        assert {name: opened[name][:].tobytes() for name in opened} == {n: a.tobytes() for n, a in arrays.items()}


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float8_e5m2", 1)])
def test_native_narrow_floats_are_floating_point_types(dtype: str, size: int) -> None:
    kind = tensor_type(dtype, f"<u{size}")
    assert (kind.get_class(), kind.get_size()) == (h5t.FLOAT, size)


def test_complex_numbers_are_compounds_of_r_and_i_on_every_version_of_hdf5() -> None:
    kind = tensor_type("complex64", "<c8")
    assert [kind.get_member_name(at) for at in range(kind.get_nmembers())] == [b"r", b"i"]


def test_a_digest_is_over_the_bits_in_c_order() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    transposed = np.asfortranarray(array)
    assert bytes(flat_bytes(transposed)) == array.astype("<i4").tobytes()
    assert bits_digest(transposed) == bits_digest(array.astype("<i4"))
    assert bits_digest(array.T) != bits_digest(array)
    assert bits_digest(np.empty((0, 3))) == "99aa06d3014798d86001c324468d497f"  # xxh3_128 of nothing


def test_the_digest_of_tables_depends_on_names_elements_and_where_a_text_ends() -> None:
    first = tables_digest({"b": [b"x", b"y"], "a": np.array([1, 2])})
    assert tables_digest({"a": np.array([1, 2]), "b": [b"x", b"y"]}) == first
    others = (
        {"b": [b"xy", b""], "a": np.array([1, 2])},
        {"b": [b"x", b"y"], "a": np.array([1, 3])},
        {"b": [b"x", b"y"], "c": np.array([1, 2])},
    )
    assert first not in {tables_digest(other) for other in others}
