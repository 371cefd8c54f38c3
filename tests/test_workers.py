from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from step_rows import forward_keys, make_rows

from probe import cli
from probe.errors import ProbeError
from probe.measure import workers
from probe.measure.workers import WORTH_NBYTES, dask_cluster, local_processes
from probe.store.reader import open_capture
from probe.store.writer import RankWriter, create_capture, write_manifest

needs_dask = pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="distributed is not installed")


def captures(folder: Path) -> list[str]:
    """Record two baselines and a candidate of four ranks, three steps."""
    for number, name in enumerate(("base-0", "base-1", "cand")):
        path = folder / name
        create_capture(path)
        code = {"code": {"hash": name[:4], "files": {"train.py": name[:4]}}}
        write_manifest(path, {"run_id": f"run-{number}", "world_size": 4, "provenance": code})
        for rank in range(4):
            writer = RankWriter(path, run_id=f"run-{number}", rank=rank, world_size=4)
            for step in (1, 2, 3):
                keys = forward_keys(8 + step)
                writer.write(make_rows(keys, step=step, rank=rank, world_size=4, seed=10_000 * number))
            writer.close(error=None, dropped_steps=[])
    return [str(folder / "base-0"), str(folder / "base-1"), "--candidate", str(folder / "cand")]


def probe(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, standalone_mode=False)


def test_small_work_and_a_single_core_are_worth_no_process() -> None:
    assert local_processes(WORTH_NBYTES - 1, 4) is None
    assert local_processes(WORTH_NBYTES, 1) is None


def started(count: int) -> AbstractContextManager[Executor]:
    spread = local_processes(WORTH_NBYTES, count)
    assert spread is not None
    return spread.start()


def test_large_work_is_spread_over_the_cores_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_cores", lambda: 3)
    spread = local_processes(WORTH_NBYTES)
    assert spread is not None
    assert spread.pieces == 6
    with spread.start() as executor:
        assert len({executor.submit(os.getpid).result() for _ in range(9)} - {os.getpid()}) in (1, 2, 3)


def test_a_process_with_threads_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    real = multiprocessing.get_context

    def context(method: str | None = None) -> Any:
        asked.append(method)
        return real(method)

    monkeypatch.setattr(multiprocessing, "get_context", context)
    monkeypatch.setattr(sys, "platform", "linux")
    # Threads of other tests may be left: they are not counted.
    alive, count = threading.active_count(), threading.active_count
    monkeypatch.setattr(threading, "active_count", lambda: count() - alive + 1)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    with started(2):
        pass
    thread.start()
    with started(2):
        pass
    done.set()
    thread.join()
    assert asked == ["fork", None]


def test_a_killed_process_is_told_from_a_wrong_answer() -> None:
    message = (
        "One of the 2 processes that read the captures was killed, most likely for lack of memory. Free memory, or "
        "compare fewer runs at once."
    )

    def killed() -> None:
        with started(2) as executor:
            executor.submit(os._exit, 9).result()

    with pytest.raises(ProbeError, match=f"^{re.escape(message)}$"):
        killed()


def test_a_comparison_by_several_processes_prints_the_same_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = captures(tmp_path)
    alone = probe("diff", *runs, "--json")
    monkeypatch.setattr(workers, "WORTH_NBYTES", 1)
    monkeypatch.setattr(workers, "WORTH_SEGMENTS", 1)
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    asked: list[int] = []
    real: Callable[..., Any] = workers.local_processes

    def watched(nbytes: int) -> Any:
        spread = real(nbytes)
        asked.append(spread.pieces)
        return spread

    monkeypatch.setattr(workers, "local_processes", watched)
    assert probe("diff", *runs, "--json").stdout == alone.stdout
    assert asked == [4]


def test_a_capture_sent_elsewhere_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captures(tmp_path)
    monkeypatch.chdir(tmp_path)
    capture = open_capture("base-0")
    assert capture.nbytes == sum(file.stat().st_size for file in tmp_path.glob("base-0/*/step*.h5"))
    assert (capture.path, capture.__getstate__()["path"]) == (Path("base-0"), tmp_path / "base-0")


def test_dask_that_is_not_installed_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    message = "Option --scheduler needs Dask, which is not installed. Install it with `pip install 'trainprobe[dask]'`."
    with pytest.raises(ProbeError, match=f"^{re.escape(message)}$"), dask_cluster("tcp://127.0.0.1:1"):
        pass


@needs_dask
@pytest.mark.filterwarnings("ignore")
def test_a_scheduler_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "TIMEOUT_S", 1)
    message = (
        "No Dask scheduler answers at 'tcp://127.0.0.1:1' within 1 s. Start one with `dask scheduler`, or leave "
        "--scheduler out to compare on this machine."
    )
    with pytest.raises(ProbeError, match=f"^{re.escape(message)}$"), dask_cluster("tcp://127.0.0.1:1"):
        pass


@needs_dask
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_of_two_workers_prints_the_same_json(tmp_path: Path) -> None:
    from distributed import LocalCluster

    runs = captures(tmp_path)
    with LocalCluster(n_workers=0, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        message = (
            f"The Dask scheduler at {address!r} has no worker. Start one with `dask worker {address}`, where the "
            "captures are seen under the same paths."
        )
        with pytest.raises(ProbeError, match=f"^{re.escape(message)}$"):
            cli.main.main(["diff", *runs, "--scheduler", address], standalone_mode=False)
        cluster.scale(2)
        from distributed import Client

        with Client(address) as client:
            client.wait_for_workers(2)
        spread_out = probe("diff", *runs, "--json", "--scheduler", address)
    assert spread_out.stdout == probe("diff", *runs, "--json").stdout
    assert '"verdict"' in spread_out.stdout
