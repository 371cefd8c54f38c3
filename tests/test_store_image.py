from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from h5py import h5t

from probe.store import disk
from probe.store import image as image_module
from probe.store.image import Image, Journal, Layouts, bits_digest, flat_bytes, tables_digest, tensor_type


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


def image_of(arrays: dict[str, np.ndarray], number: int) -> Image:
    image = Image()
    group = image.add_group(image.root, b"tensors")
    image.add_attribute(image.root, "step", number, changes=True)
    for name, array in arrays.items():
        dataset = image.add_array(group, name.encode(), array, ("uint8", "|u1"))
        image.add_attribute(dataset, "long", name * 100)
        image.add_attribute(dataset, "digest", bits_digest(array), changes=True)
    image.add_name(group, b"001", b"again")
    image.add_text(image.root, b"texts", [b"a", b"", "\u00e9".encode()], (3, 1))
    return image


def not_found(*_: Any) -> None:
    raise ValueError("a value lies in no header")


def some_arrays(number: int) -> dict[str, np.ndarray]:
    return {f"{at:03d}": np.full(at * 1000, (at + number) % 256, dtype=np.uint8) for at in range(100)}


def check_file(file: Path, arrays: dict[str, np.ndarray], number: int) -> None:
    with h5py.File(file) as opened:
        assert opened.attrs["step"] == number
        tensors = opened["tensors"]
        assert {name: tensors[name][:].tobytes() for name in tensors if name != "again"} == {
            name: array.tobytes() for name, array in arrays.items()
        }
        assert tensors["again"] == tensors["001"]
        assert opened["texts"].asstr()[:, 0].tolist() == ["a", "", "\u00e9"]
        for name, array in arrays.items():
            assert tensors[name].attrs["digest"].decode() == bits_digest(array)
            assert tensors[name].attrs["long"].decode() == name * 100


@pytest.mark.parametrize("found", [True, False], ids=["patched", "laid out anew"])
def test_files_of_one_layout_differ_in_their_data_and_the_attributes_that_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    calls: list[int] = []
    inner = image_module._lay_out

    def counted(objects: Any, values: Any) -> Any:
        calls.append(len(values))
        return inner(objects, values)

    monkeypatch.setattr(image_module, "_lay_out", counted)
    if not found:
        monkeypatch.setattr(image_module, "Patches", not_found)
    layouts = Layouts()
    for number in range(3):
        arrays = some_arrays(number)
        pieces, size = image_of(arrays, number).pieces(layouts)
        disk.write(tmp_path / "file.h5", pieces, size)
        assert (tmp_path / "file.h5").stat().st_size == size
        check_file(tmp_path / "file.h5", arrays, number)
    assert calls == [101] * (1 if found else 6)


def test_a_file_of_another_layout_is_laid_out_anew_and_old_layouts_are_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_module, "KEPT_LAYOUTS", 2)
    layouts = Layouts()
    for number in (1, 2, 1, 3, 1, 2):
        arrays = {name: array[: number * 500] for name, array in some_arrays(number).items()}
        pieces, size = image_of(arrays, number).pieces(layouts)
        disk.write(tmp_path / "file.h5", pieces, size)
        check_file(tmp_path / "file.h5", arrays, number)
        assert len(layouts._kept) <= 2


def test_a_patched_file_is_byte_for_byte_what_hdf5_lays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = some_arrays(0)
    layouts = Layouts()
    image_of(arrays, 1).pieces(layouts)
    patched, size = image_of(arrays, 7).pieces(layouts)
    monkeypatch.setattr(image_module, "Patches", not_found)
    plain, same = image_of(arrays, 7).pieces(Layouts())
    assert size == same
    assert [(offset, bytes(view)) for offset, view in patched] == [(offset, bytes(view)) for offset, view in plain]


def test_what_a_journal_holds_at_last_is_what_was_written_last() -> None:
    random = np.random.default_rng(1)
    journal = Journal()
    for _ in range(200):
        journal.seek(int(random.integers(0, 3000)))
        journal.write(random.bytes(int(random.integers(1, 90))))
    whole = bytearray(journal.size)
    journal.seek(0)
    journal.readinto(whole)
    final = journal.final()
    for (one, block), (two, _) in itertools.pairwise(final):
        assert one + len(block) < two
    image = bytearray(journal.size)
    for offset, block in final:
        image[offset : offset + len(block)] = block
    assert image == whole


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
