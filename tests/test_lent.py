"""What a forked process found comes back through memory as it would through a pipe."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from probe.measure.lent import REGION_NBYTES, WORTH_NBYTES, Lent, lend
from probe.measure.workers import WORTH_NBYTES as WORTH_PROCESSES
from probe.measure.workers import local_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def made(count: int = WORTH_NBYTES // 8) -> dict[str, Any]:
    """Arrays of several types, one of them twice, behind one of an odd size."""
    numbers = np.arange(count + 1.0)[1:]
    return {"odd": np.ones(7, bool), "numbers": numbers, "again": numbers, "words": ("a", "b"), "few": np.arange(3)}


def assert_made(found: dict[str, Any], count: int = WORTH_NBYTES // 8) -> None:
    for name, expected in made(count).items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    assert found["again"] is found["numbers"]
    assert found["numbers"].flags.aligned


def blocks(memory: int) -> int:
    return os.fstat(memory).st_blocks


def test_arrays_come_through_memory_and_are_what_they_were(memory: int) -> None:
    found = [pickle.loads(pickle.dumps(lend(memory, number, made))) for number in (0, 5)]
    for each in found:
        assert_made(each)
    assert os.fstat(memory).st_size > 5 * REGION_NBYTES
    assert blocks(memory) * 512 < 4 * WORTH_NBYTES


def test_small_results_come_through_the_pipe(memory: int) -> None:
    assert_made(pickle.loads(pickle.dumps(lend(memory, 0, made, 10))), 10)
    assert blocks(memory) == 0


def test_results_come_through_the_pipe_where_memory_is_short(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    for write in (full, lambda *_: 100):
        monkeypatch.setattr(os, "pwritev", write)
        assert_made(pickle.loads(pickle.dumps(Lent(made(), memory, 0))))


def test_many_arrays_are_written_in_several_calls(memory: int) -> None:
    result = [np.full(1 + number, number % 100, np.int8) for number in range(2000)]
    found = pickle.loads(pickle.dumps(Lent(result, memory, 1)))
    assert all(np.array_equal(one, two) for one, two in zip(result, found, strict=True))


def test_local_processes_lend_what_they_find() -> None:
    spread = local_processes(WORTH_PROCESSES, 2)
    assert spread is not None
    with spread.start() as executor:
        futures = [executor.submit(made) for _ in range(4)]
        for future in futures:
            assert_made(future.result())


def test_local_processes_do_without_a_file_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refused)
    test_local_processes_lend_what_they_find()
