"""Write one rank's segments, and have every N of them folded into one file without making the training wait.

What folds is `probe.store.fold`, in a child process, one at a time. In a thread it would hold the interpreter for some
15 ms a step, and HDF5 for as long. It removes segments only after it has compared their copy with them: whatever ends
it, no step is lost. If it fails, the segments stay, and that is told once. This module must not know what a segment
holds, and imports no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy
import xxhash

import probe
from probe.store.layout import UNFINISHED, Folded, StepRows, folded_file, rank_folder
from probe.store.writer import RankWriter

_CHILD = "import sys; sys.path += sys.argv[1:]; from probe.store.fold import main; main()"
_NEEDED = (probe, numpy, h5py, xxhash)
"""What the child imports. It runs isolated (-I -S), for the job's own sitecustomize, folders and variables are not for
it; so it is told where these lie."""
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def child_command() -> list[str]:
    """Write the command line of the process that folds; what, it is told on stdin."""
    places = dict.fromkeys(str(Path(str(each.__file__)).absolute().parent.parent) for each in _NEEDED)
    return [sys.executable, "-I", "-S", "-c", _CHILD, *places]


class FoldingWriter:
    """A `RankWriter` that leaves few files. Used by one thread at a time."""

    def __init__(self, writer: RankWriter, steps_per_file: int, warn: Callable[[str], None]) -> None:
        """Write as `writer` does, and fold.

        Args:
            writer: Of the rank.
            steps_per_file: Steps that are folded into one file; with 1, none are.
            warn: Is told, once, that folding failed.
        """
        self._writer, self._steps_per_file, self._warn = writer, steps_per_file, warn
        self._folder = (writer.path / rank_folder(writer.rank)).absolute()
        self._waiting: list[int] = []
        """Steps that have segments and are in no child's hands."""
        self._child: subprocess.Popen[str] | None = None
        self._steps: tuple[int, ...] = ()
        """What the child folds."""
        self._folded: list[Folded] = []
        self._warned = False

    def write(self, rows: StepRows) -> int:
        """Write one step as a segment, as `RankWriter.write` does, and start to fold when there are enough."""
        nbytes = self._writer.write(rows)
        if self._steps_per_file > 1:
            self._waiting.append(rows.step)
            try:
                self._go_on()
            except Exception as error:
                # The step is stored: whatever is wrong with folding must not end recording.
                self._tell(repr(error))
        return nbytes

    def close(self, *, error: str | None, dropped_steps: Sequence[int]) -> None:
        """Fold what is left, unless recording failed, and write `end.json` as `RankWriter.close` does."""
        self._finish()
        while error is None and self._steps_per_file > 1 and len(self._waiting) > 1:
            self._start()
            self._finish()
        self._writer.close(error=error, dropped_steps=dropped_steps, folded=self._folded)

    def _go_on(self) -> None:
        if self._child is not None and self._child.poll() is not None:
            self._finish()
        if self._child is None and len(self._waiting) >= self._steps_per_file:
            self._start()

    def _start(self) -> None:
        count = self._steps_per_file
        self._steps, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        request = {
            "folder": str(self._folder),
            "steps": self._steps,
            "run_id": self._writer.run_id,
            "rank": self._writer.rank,
            "world_size": self._writer.world_size,
        }
        try:
            self._child = subprocess.Popen(
                child_command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, **_THREADS},
            )
            assert self._child.stdin is not None
            with self._child.stdin as pipe:
                json.dump(request, pipe)
        except OSError as error:
            if self._child is None:
                self._tell(f"no process to fold them can be started: {error.strerror}")
            # A child that is gone before it has read says why when it is waited for.

    def _finish(self) -> None:
        """Wait for the child, if there is one."""
        child, self._child = self._child, None
        if child is None:
            return
        assert child.stderr is not None
        with child.stderr as pipe:
            said = pipe.read().strip()
        status = child.wait()
        file = self._folder / folded_file(self._steps[0])
        if file.exists():
            # A file that has its name was compared with its segments; which of them are left does not matter.
            self._folded.append(Folded(file=file.name, steps=self._steps, nbytes=file.stat().st_size))
            return
        file.with_name(file.name + UNFINISHED).unlink(missing_ok=True)
        ended = f"folding ended by signal {-status}" if status < 0 else f"folding ended with status {status}"
        self._tell(said.splitlines()[-1] if said else ended)

    def _tell(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"Rank {self._writer.rank} keeps some steps one to a file: {why.rstrip('.')}. Recording goes on."
            )
