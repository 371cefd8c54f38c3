"""How commands read captures: by which processes, and with what shown meanwhile.

This module must not know how anything is judged or drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from probe.check import Check
    from probe.judge.cells import Judgement
    from probe.judge.comparison import Comparison
    from probe.judge.tolerance import Tolerances
    from probe.store.reader import Capture


def compare_captures(
    baselines: Sequence[Capture],
    candidates: Sequence[Capture],
    tolerances: Tolerances | None,
    *,
    checks: Sequence[Check],
    same_code: bool,
    scheduler: str | None,
) -> tuple[Comparison, tuple[Judgement, ...]]:
    """Compare captures, with as many processes as pay, or on a Dask cluster; show how far it is on a terminal."""
    from probe.judge.compare import compare_cells
    from probe.measure.workers import WORTH_NBYTES, dask_cluster, local_processes

    nbytes = sum(capture.nbytes for capture in (*baselines, *candidates))
    with (
        dask_cluster(scheduler) if scheduler else local_processes(nbytes) as spread,
        _progress(nbytes, shown=spread is not None and nbytes >= WORTH_NBYTES) as progress,
    ):
        return compare_cells(
            baselines, candidates, tolerances, checks=checks, same_code=same_code, spread=spread, progress=progress
        )


@contextmanager
def _progress(nbytes: int, *, shown: bool) -> Iterator[Callable[[float], None] | None]:
    """Draw a bar with bytes and time left on stderr; nothing where stderr is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    size = f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
    with click.progressbar(length=nbytes, label=f"Reading {size}", show_eta=True, file=sys.stderr) as bar:
        yield lambda part: bar.update(int(part * nbytes) - bar.pos)
