"""Commands that keep captures, `probe pack` and `prune`, and how all commands read them: by which processes.

This module must not know how anything is judged or drawn.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from probe.check import Check
    from probe.judge.cells import Judgement
    from probe.judge.comparison import Comparison
    from probe.judge.tolerance import Tolerances
    from probe.store.reader import Capture

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_SECONDS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_BYTES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _age(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([hdw])", value)
    if not found:
        raise click.BadParameter(f"{value!r} is no age. Write hours, days or weeks, such as '36h', '30d' or '8w'.")
    return float(found[1]) * _SECONDS[found[2]]


def _size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", value.upper())
    if not found:
        raise click.BadParameter(f"{value!r} is no size. Write bytes, such as '500M' or '20GB'.")
    return int(float(found[1]) * _BYTES[found[2]])


@click.command(context_settings=_HELP)
@click.argument("capture", type=click.Path(path_type=Path), metavar="CAPTURE")
@click.option("--compress", is_flag=True, help="Shuffle and deflate what gets smaller by it; any HDF5 tool reads it.")
@click.option("--remove", is_flag=True, help="Remove the segments once their packed copy was compared with them.")
def pack(capture: Path, compress: bool, remove: bool) -> None:
    """Pack the segments of each rank into one file.

    The packed file is read back and compared before it gets its name, and segments stay unless --remove is given.
    Packing again goes on where it was. All commands read packed captures as they read others.

    \b
    probe pack captures/base-0
    probe pack captures/base-0 --compress --remove
    """
    from probe.store.pack import pack as packed
    from probe.store.reader import open_capture

    opened = open_capture(capture)
    before = after = removed = merged = ranks = steps = 0
    with _progress(opened.nbytes, shown=True) as progress:
        done = 0

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done / max(opened.nbytes, 1))

        for rank in packed(opened, compress=compress, remove=remove, progress=tell):
            ranks, steps = ranks + 1, max(steps, rank.steps)
            before, after = before + rank.before, after + rank.after
            removed, merged = removed + rank.removed, merged + rank.merged
    if not ranks:
        click.echo(f"Capture {capture} holds nothing that is not packed.")
        return
    click.echo(
        f"Packed {_count(ranks, 'rank')} of up to {_count(steps, 'step')} into {capture / 'packed'}: "
        f"{_in_words(before)} became {_in_words(after)}."
    )
    if remove:
        files = f" and {_count(merged, 'file')} of several steps" if merged else ""
        click.echo(f"{_count(removed, 'segment')}{files} removed.")
    else:
        click.echo("The segments are still there; --remove removes them.")


@click.command(context_settings=_HELP)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option(
    "--older-than", callback=_age, metavar="AGE", help="Delete captures not written to for AGE: 36h, 30d, 8w."
)
@click.option(
    "--keep", callback=_size, metavar="SIZE", help="Delete the oldest until all take at most SIZE: 500M, 20GB."
)
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would be deleted.")
def prune(folder: Path, older_than: float | None, keep: int | None, yes: bool) -> None:
    """Delete old captures; say only which, unless --yes is given.

    What is no capture, holds anything else, or may still be recorded is never touched.

    \b
    probe prune captures --older-than 30d
    probe prune captures --keep 20GB --yes
    """
    if older_than is None and keep is None:
        raise click.UsageError("Nothing says which captures to delete. Give --older-than AGE, --keep SIZE, or both.")
    from probe.store.prune import choose, delete, find_captures

    captures = find_captures(folder, time.time())
    chosen = choose(captures, older_than_s=older_than, keep_nbytes=keep)
    for each in captures:
        if each in chosen:
            if yes:
                delete(each)
            click.echo(f"{'deleted' if yes else 'would delete'} {each.path}: {_described(each.nbytes, each.age_s)}")
        elif each.kept_for:
            click.echo(f"kept {each.path}: {each.kept_for}")
    freed, all_bytes = sum(each.nbytes for each in chosen), sum(each.nbytes for each in captures)
    what = f"{_count(len(chosen), 'capture')} of {len(captures)}, {_in_words(freed)} of {_in_words(all_bytes)}"
    click.echo(f"Deleted {what}." if yes else f"Would delete {what}. Nothing was deleted; --yes deletes.")


def _described(nbytes: int, age_s: float) -> str:
    return f"{_in_words(nbytes)}, last written {age_s / 86400:.1f} days ago"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _in_words(nbytes: int) -> str:
    """Write a number of bytes in three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return _count(nbytes, "byte")


def import_numpy() -> None:
    """Import numpy before anything else does, with one thread for linear algebra, of which comparing does none.

    OpenBLAS starts a thread for each core, and they wait for work by spinning: on two cores 0.1 CPU seconds, of the 0.3
    that a small comparison takes. Whoever sets the number is obeyed, and commands started later do not see ours.
    """
    if _BLAS_THREADS in os.environ:
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[_BLAS_THREADS]


def checks_of(plan: Path | None) -> tuple[Check, ...]:
    """Return the checks of a plan, or the default ones."""
    if plan is None:
        from probe.check import default_checks

        return default_checks()
    from probe.plan import load_plan

    return load_plan(plan).checks


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
    from probe.measure.workers import PIECES, WORTH_NBYTES, WORTH_SEGMENTS, dask_cluster, local_processes

    nbytes = sum(capture.nbytes for capture in (*baselines, *candidates))
    with (
        dask_cluster(scheduler) if scheduler else nullcontext(local_processes(nbytes)) as spread,
        _progress(nbytes, shown=spread is not None and nbytes >= WORTH_NBYTES) as progress,
    ):
        few = sum(len(run.steps(rank)) for run in (*baselines, *candidates) for rank in run.ranks) < WORTH_SEGMENTS
        comparison, judgements = compare_cells(
            baselines,
            candidates,
            tolerances,
            checks=checks,
            same_code=same_code,
            spread=None if few and not scheduler else spread,
            progress=progress,
        )
        elements = []
        if baselines[0].may_keep_tensors:
            from probe.measure.elementwise import compare_elements

            threads = 1 if scheduler or spread is None else spread.pieces // PIECES
            for candidate in candidates:
                found = compare_elements(baselines[0], candidate, spread, threads=threads)
                if found is not None and found.tensors:
                    elements.append((str(candidate.path), found))
    return replace(comparison, elements=tuple(elements)), judgements


@contextmanager
def _progress(nbytes: int, *, shown: bool) -> Iterator[Callable[[float], None] | None]:
    """Draw a bar with bytes and time left on stderr; nothing where stderr is no terminal."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=nbytes, label=f"Reading {_in_words(nbytes)}", file=sys.stderr) as bar:
        yield lambda part: bar.update(int(part * nbytes) - bar.pos)
