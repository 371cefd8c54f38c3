"""Find who reads the captures: this process alone, local processes beside it, or the workers of a Dask cluster.

Handing work to processes costs a tenth of a second, so small comparisons are made in one. This module must not know
what the work is.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from probe.errors import ProbeError
from probe.measure.lent import lend
from probe.measure.pairs import Spread

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

WORTH_NBYTES = 256 << 20
"""Bytes of segments from which on a second process pays: about a quarter of a second of reading and measuring."""
WORTH_SEGMENTS = 100
"""The same in segments, which may be large for the tensors in them, of which measuring reads nothing."""
TIMEOUT_S = 10
"""How long a scheduler may take to answer."""
PIECES = 2
"""Pieces for each worker: one that is slow, or shares its core, gets fewer."""


def local_processes(nbytes: int, most: int | None = None) -> Spread | None:
    """Use one process for each core that this one may use; None where the work is small or there is one core.

    Args:
        nbytes: Size of what is to be read.
        most: Most processes; None: as many as there are cores.
    """
    count = _cores() if most is None else most
    if nbytes < WORTH_NBYTES or count < 2:
        return None
    return Spread(start=lambda: _processes(count), pieces=PIECES * count)


@contextmanager
def _processes(count: int) -> Iterator[Executor]:
    import multiprocessing
    from concurrent.futures import BrokenExecutor, ProcessPoolExecutor

    # A forked process is there at once, where a new one imports for half a second. It must not be forked while
    # another thread may hold a lock.
    forks = sys.platform == "linux" and threading.active_count() == 1
    context = multiprocessing.get_context("fork" if forks else None)
    try:
        with (
            _memory() if forks else nullcontext() as memory,
            ProcessPoolExecutor(count, mp_context=context) as executor,
        ):
            yield executor if memory is None else cast("Executor", _Lending(executor, memory))
    except BrokenExecutor as error:
        raise ProbeError(
            f"One of the {count} processes that read the captures was killed, most likely for lack of memory. "
            "Free memory, or compare fewer runs at once."
        ) from error


@contextmanager
def _memory() -> Iterator[int | None]:
    """Make a file in memory, which processes forked from now on have under the same descriptor; None if none is had."""
    try:
        descriptor = os.memfd_create("probe")
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Lending:
    """An executor of forked processes whose results come through memory that both see."""

    def __init__(self, executor: Executor, memory: int) -> None:
        self._executor, self._memory, self._numbers = executor, memory, itertools.count()

    def submit(self, call: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Make a call elsewhere."""
        return self._executor.submit(lend, self._memory, next(self._numbers), call, *arguments)


@contextmanager
def dask_cluster(address: str) -> Iterator[Spread]:
    """Connect to a Dask cluster whose workers see the captures under the same paths.

    Args:
        address: Of the scheduler, such as `tcp://10.0.0.1:8786`.

    Raises:
        ProbeError: Dask is not installed, nobody answers there, or no worker is there.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ProbeError(
            "Option --scheduler needs Dask, which is not installed. Install it with `pip install 'trainprobe[dask]'`."
        ) from error
    try:
        client: Any = Client(address, timeout=TIMEOUT_S, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ProbeError(
            f"No Dask scheduler answers at {address!r} within {TIMEOUT_S} s. Start one with `dask scheduler`, or leave "
            "--scheduler out to compare on this machine."
        ) from error
    with client:
        threads = sum(client.ncores().values())
        if not threads:
            raise ProbeError(
                f"The Dask scheduler at {address!r} has no worker. Start one with `dask worker {address}`, where the "
                "captures are seen under the same paths."
            )
        with client.get_executor(pure=False) as executor:
            yield Spread(start=lambda: nullcontext(executor), pieces=PIECES * threads)


def _cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
