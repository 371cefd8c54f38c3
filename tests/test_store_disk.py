"""A file has all its pieces and its size, whichever way they went to the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probe.store import disk
from probe.store.disk import Piece, aligned
from probe.store.layout import PAGE


def memory(nbytes: int, random: np.random.Generator, shift: int = 0) -> memoryview:
    room = aligned(nbytes + shift)[shift : shift + nbytes]
    room[:] = random.integers(0, 256, nbytes, dtype=np.uint8)
    return room.data


def make_pieces(large: Sequence[int], *, shift: int = 0) -> tuple[list[Piece], int]:
    """Large pieces at pages, and small ones before, between and behind them."""
    random = np.random.default_rng(3)
    pieces: list[Piece] = [(0, memory(48, random))]
    end = 48
    for nbytes in large:
        pieces.append((end, memory(100, random)))
        start = -(-(end + 100) // PAGE) * PAGE
        pieces.append((start, memory(nbytes, random, shift)))
        pieces.append((start + nbytes, memory(7, random)))
        end = start + nbytes + 7
    pieces.append((end + 3000, memory(5000, random)))
    order = random.permutation(len(pieces))
    return [pieces[at] for at in order], end + 8000


def check(path: Path, pieces: Sequence[Piece], size: int) -> None:
    content = path.read_bytes()
    assert len(content) == size
    for offset, view in pieces:
        assert content[offset : offset + len(view)] == bytes(view)


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BATCH", 4 << 20)


LARGE = (disk.LARGE, 1 << 20, (1 << 20) + 1, disk.LARGE + PAGE - 1, disk.PIECE + 5 * PAGE + 17)


@pytest.fixture
def past_the_cache(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many buffers each write past the cache had."""
    calls: list[int] = []
    inner = os.pwritev

    def counted(descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        calls.append(len(buffers))
        return inner(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", counted)
    return calls


def test_large_aligned_pieces_go_past_the_cache_and_all_is_there(tmp_path: Path, past_the_cache: list[int]) -> None:
    pieces, size = make_pieces(LARGE * 3)
    disk.write(tmp_path / "file", pieces, size)
    check(tmp_path / "file", pieces, size)
    if not past_the_cache:
        pytest.skip("this file system has no O_DIRECT")
    assert max(past_the_cache) > 1


@pytest.mark.parametrize(
    ("large", "shift"), [((), 0), ((disk.LARGE - 1,) * 20, 0), ((disk.LARGE,), 0), (LARGE, 16)], ids=str
)
def test_other_pieces_do_not(tmp_path: Path, past_the_cache: list[int], large: tuple[int, ...], shift: int) -> None:
    pieces, size = make_pieces(large, shift=shift)
    disk.write(tmp_path / "file", pieces, size)
    check(tmp_path / "file", pieces, size)
    assert past_the_cache == []


def no_such_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return inner(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)


def other_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "pwritev", refusing)


def short_writes(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    inner, random = os.pwritev, np.random.default_rng(4)

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        whole = b"".join(buffers)
        some = int(random.integers(1, 1 + len(whole) // nbytes)) * nbytes if len(whole) > nbytes else len(whole)
        room = aligned(some)[:some]
        room[:] = np.frombuffer(whole[:some], np.uint8)
        return inner(descriptor, [room.data], offset) if some % PAGE == 0 else some

    monkeypatch.setattr(os, "pwritev", short)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize(
    "trouble",
    [no_such_flag, other_alignment, lambda m: short_writes(m, PAGE), lambda m: short_writes(m, PAGE + 1)],
    ids=["no such flag", "other alignment", "short writes", "odd writes"],
)
def test_a_disk_that_wants_it_otherwise_gets_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[pytest.MonkeyPatch], None]
) -> None:
    pieces, size = make_pieces(LARGE)
    trouble(monkeypatch)
    disk.write(tmp_path / "file", pieces, size)
    check(tmp_path / "file", pieces, size)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def full(*_: Any) -> int:
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    monkeypatch.setattr(os, "pwrite", full)
    for pieces, size in (make_pieces(LARGE), make_pieces(())):
        with pytest.raises(OSError, match="No space left on device"):
            disk.write(tmp_path / "file", pieces, size)
    assert calls


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1])
def test_memory_for_a_disk_is_whole_pages(nbytes: int) -> None:
    room = aligned(nbytes)
    assert room.ctypes.data % PAGE == 0
    assert room.nbytes == -(-nbytes // PAGE) * PAGE
