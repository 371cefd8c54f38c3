"""Commands start quickly because they import little: what each may not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from step_rows import forward_keys, make_rows

from probe.measure.differences import _median
from probe.store.writer import RankWriter, create_capture, write_manifest

LISTED = """
import sys
from probe.cli import status_of
status_of(sys.argv[1:])
print("modules:", *(name for name in {names!r} if name in sys.modules))
"""


def imported(*arguments: str, names: tuple[str, ...]) -> set[str]:
    """Run a command in a process of its own; which of these modules did it import?"""
    code = LISTED.format(names=names)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Two captures that can be compared."""
    for number in range(2):
        path = tmp_path / f"run-{number}"
        create_capture(path)
        write_manifest(path, {"run_id": path.name, "world_size": 1})
        writer = RankWriter(path, run_id=path.name, rank=0, world_size=1)
        for step in (1, 2):
            writer.write(make_rows(forward_keys(9), step=step, seed=number))
        writer.close(error=None, dropped_steps=[])
    return [str(tmp_path / "run-0"), str(tmp_path / "run-1")]


HEAVY = (
    "torch",
    "tomllib",
    "rich",
    "numpy.ma",
    "pandas",
    "distributed",
    "multiprocessing",
    "concurrent.futures.process",
    "isal",
)


def test_help_imports_no_library_but_click() -> None:
    assert imported("--help", names=("numpy", "h5py", "xxhash", *HEAVY)) == set()


def test_comparing_a_small_capture_to_json_imports_nothing_heavy(pair: list[str]) -> None:
    assert imported("diff", *pair, "--same-code", "--json", names=("numpy", *HEAVY)) == {"numpy"}


def test_showing_a_capture_as_json_imports_nothing_heavy(pair: list[str]) -> None:
    assert imported("show", pair[0], "--json", names=("numpy", *HEAVY)) == {"numpy"}


def test_comparing_a_small_capture_to_text_imports_nothing_heavy(pair: list[str]) -> None:
    assert imported("diff", *pair, "--same-code", names=("numpy", *HEAVY)) == {"numpy"}


THREADS = """
import os, sys
from probe.cli import status_of
status_of(sys.argv[1:])
print("threads:", len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize("wanted", [None, "3"])
def test_linear_algebra_gets_the_threads_that_the_user_wants_and_no_other(pair: list[str], wanted: str | None) -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {} if wanted is None else {"OPENBLAS_NUM_THREADS": wanted}
    command = [sys.executable, "-c", THREADS, "diff", *pair, "--same-code"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    count, seen = done.stdout.splitlines()[-1].split()[1:]
    assert (count == "1", seen) == (wanted is None or os.cpu_count() == 1, str(wanted))


def test_what_is_imported_is_seen(pair: list[str]) -> None:
    assert imported("diff", *pair, "--same-code", names=("h5py", "click", "torch")) == {"h5py", "click"}


@pytest.mark.parametrize("count", range(1, 20))
def test_the_median_is_numpys_to_the_last_bit(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count) * 1e-3
    assert _median(values) == float(np.median(values))
