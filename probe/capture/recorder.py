"""Collect the rows of a step and hand each finished step to one writer thread.

The training thread only reduces tensors and appends; the HDF5 layout, the hashing of full tensors and the disk belong
to the worker. Its queue is bounded in bytes. What fails in it is told once, at the next step and at the end, and stops
training only under `strict`. This module must not know where a value comes from.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probe.capture import summary
from probe.capture.imported import imported_files
from probe.capture.kept import Copies, Copy
from probe.capture.launched import launched_rank, launched_world_size
from probe.capture.reducer import Reducer
from probe.capture.rows import Rows, step_rows
from probe.capture.shards import Part
from probe.errors import CaptureError
from probe.plan import Plan
from probe.point import STEP_CLOCK, Key, Kind
from probe.store.folder import write_json, write_manifest
from probe.store.folding import FoldingWriter
from probe.store.layout import NAMES_FILE, StepRows, rank_folder
from probe.store.writer import RankWriter

QUEUE_BYTES = 512 * 1024 * 1024
"""Bytes that may wait for the writer before the training thread waits for it; one larger step may always pass."""

Scalar = float | int | bool | str


class Recorder:
    """Hold the two clocks and the rows of the current step of one process."""

    def __init__(
        self,
        *,
        output: Path,
        run_id: str,
        plan: Plan,
        strict: bool,
        first_step: int = 1,
        steps_per_file: int = 1,
        manifest: Callable[[int, tuple[str, ...] | None], dict[str, Any]],
        sink: Callable[[StepRows], None] | None = None,
    ) -> None:
        """Prepare to record; nothing is opened before the first step has something to store.

        Args:
            output: The capture's folder.
            run_id: The run's identity, shared by its ranks.
            plan: What to record.
            strict: A step that cannot be stored raises in the training process.
            first_step: Number of the first step; above 1 where training goes on from a checkpoint.
            steps_per_file: Stored steps that are folded into one file; 1: none are.
            manifest: Called on rank 0 with the world size, before the first step is stored (None: quickly, without
                provenance) and after it, with the files that the process had imported when the step ended.
            sink: Takes each finished step in place of the writer; then there is no thread and no folder.
        """
        self.plan = plan
        self.pid = os.getpid()
        self.step = first_step
        self.microbatch = 0
        self.recording = first_step in plan.steps
        """The current step is wanted."""
        self.previous_recorded = False
        self.steps_written: list[int] = []
        self.names: dict[str, Any] = {}
        """How the names were derived; stored beside the rank's segments whenever it is another object."""
        self._names_written: dict[str, Any] = self.names
        self.events: dict[str, int] = {}
        """How often the process did what recording waits for; told when nothing was recorded."""
        self.warnings: list[str] = []
        """What of the plan cannot be recorded, in sentences."""
        self._output, self._run_id, self._strict, self._manifest = output, run_id, strict, manifest
        self._sink, self._steps_per_file = sink, steps_per_file
        self._order = 0
        self._calls: dict[tuple[Kind, str, str], int] = {}
        self._plan_says: dict[tuple[Kind, str, str], tuple[bool, bool]] = {}
        self._rows = Rows(256)
        self._copies = Copies()
        self._reducer = Reducer(self._copies, warn=self.warn, strict=strict)
        self._imported: tuple[str, ...] = ()
        self._lock = threading.RLock()
        self._worker: ThreadPoolExecutor | None = None
        self._writer: FoldingWriter | None = None
        self._pending: list[tuple[int, int, Future[int]]] = []
        self._room = threading.Condition()
        self._queued = 0
        self.waited_s = 0.0
        """Seconds that the training thread waited for room in the writer's queue."""
        self._failure: str | None = None
        self._dropped: list[int] = []
        self._told = False
        self.rank, self.world_size = 0, 1

    # ------------------------------------------------------------------ clocks
    def count(self, event: str) -> None:
        """Count something that recording depends on."""
        self.events[event] = self.events.get(event, 0) + 1

    def mine(self) -> bool:
        """Tell whether this is the process that records, and not a fork of it."""
        return os.getpid() == self.pid

    def warn(self, message: str) -> None:
        """Tell, now and at the end of the run through the launcher, that something of the plan is not recorded."""
        if message not in self.warnings:
            self.warnings.append(message)
            if launched_rank() == 0:
                print(f"probe: {message}", file=sys.stderr, flush=True)

    def next_call(self, kind: Kind, name: str, item: str = "") -> int:
        """Number this firing of a point within the microbatch."""
        slot = (kind, name, item)
        call = self._calls.get(slot, 0)
        self._calls[slot] = call + 1
        return call

    def next_microbatch(self) -> None:
        """Move on after a backward pass."""
        self.microbatch += 1
        self._calls.clear()

    def next_step(self) -> None:
        """Close the current step: store it if it was wanted, and start the next."""
        if self.recording and self._rows.keys:
            self._submit()
        self.previous_recorded = self.recording
        self.step += 1
        self.microbatch = 0
        self._order = 0
        self._calls.clear()
        self._rows = Rows(max(256, 1 << math.ceil(math.log2(len(self._rows.keys) + 1))))
        self.recording = self.step in self.plan.steps

    def restart(self) -> None:
        """Forget what the current step holds so far; it was no training."""
        self.microbatch = 0
        self._order = 0
        self._calls.clear()
        self._rows = Rows(256)

    def refuse(self, why: str) -> None:
        """Record nothing of this run, and say why at its end."""
        self._failure = why
        self.recording = False

    # ------------------------------------------------------------------ values
    def _place(self, key: Key) -> tuple[Key, int]:
        while key in self._rows.seen:
            key = Key(kind=key.kind, name=key.name, item=key.item, microbatch=key.microbatch, call=key.call + 1)
        order = self._order
        self._order += 1
        return key, order

    def tensor(
        self, key: Key, value: torch.Tensor, where: str = "", *, exact: bool = False, part: Part | None = None
    ) -> None:
        """Reduce a tensor now and keep its row; of a sharded one, the row of this rank's part.

        Args:
            key: Its name; a key that the step already holds becomes the next call.
            value: Any tensor. What cannot be reduced (sparse, meta, a subclass that hides its data) becomes a text row
                that says so.
            where: Where it was taken.
            exact: Keep a fingerprint of its bits too, unless it is a part.
            part: Which part of the whole it is, where the tensor does not know it itself.
        """
        wanted, keeps = self._wanted(key)
        if not wanted:
            return
        with self._lock:
            key, order = self._place(key)
            self._reducer.row(self._rows, order, key, value, where, exact=exact, keeps=keeps, part=part)

    def _wanted(self, key: Key) -> tuple[bool, bool]:
        """Tell whether the plan records a quantity, and keeps it whole."""
        point = (key.kind, key.name, key.item)
        wanted = self._plan_says.get(point)
        if wanted is None:
            wanted = self._plan_says[point] = (self.plan.records(*point), self.plan.keeps(*point))
        return wanted

    def scalar(self, key: Key, value: Scalar, where: str = "", dtype: str | None = None) -> None:
        """Keep a Python number, truth value or text."""
        if not self._wanted(key)[0]:
            return
        with self._lock:
            key, order = self._place(key)
            kind = dtype or type(value).__name__
            if isinstance(value, str):
                self._rows.add(key, order, kind, (), where, value)
                return
            row = self._rows.add(key, order, kind, (), where)
            self._rows.value[row] = float(value)
            self._rows.counts[row] = (0 if math.isfinite(float(value)) else 1, 1)

    def unchanged(self, key: Key, value: torch.Tensor) -> bool:
        """Tell by its samples whether a tensor is what a row was made of; True if distributed, or on an accelerator."""
        row = self._rows.seen.get(key)
        if row is None or self._rows.text[row] or type(value) is not torch.Tensor or value.device.type != "cpu":
            return True
        if summary.is_plain(value):
            return summary.samples_are(value, key.name, self._rows.sample[row])
        index = summary.sample_index(key.name, value.numel())
        with summary.quiet():
            now = value.detach().reshape(-1)[torch.from_numpy(index)].to(torch.float32).numpy()
        return np.array_equal(now, self._rows.sample[row, : index.size], equal_nan=True)

    def copy_row(self, source: Key, target: Key) -> None:
        """Keep a second row with the numbers of one already taken: the tensor is known to be unchanged."""
        row = self._rows.seen.get(source)
        if row is None:
            return
        key, order = self._place(target)
        rows = self._rows
        new = rows.add(key, order, rows.dtype[row], rows.shape[row], rows.where[row])
        rows.repeat(row, new)
        rows.sample[new] = rows.sample[row]

    def forget(self, kind: Kind) -> None:
        """Drop the rows of a kind that a later reading in the same step replaces."""
        self._rows.forget(kind)

    # ------------------------------------------------------------------ writing
    def _submit(self) -> None:
        with summary.quiet():
            self._rows.transfer.send()
        if self._sink is not None:
            self._sink(step_rows(self._rows, self.step, *ranks()))
            return
        self._report()
        if self._failure is not None:
            self._dropped.append(self.step)
            return
        if self._worker is None:
            self.rank, self.world_size = ranks()
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="probe-writer")
            # Listed here and not by the worker: what a run goes on to import is not the same at every moment.
            self._imported = imported_files()
        rows, step = self._rows, self.step
        nbytes = sum(a.nbytes for a in (rows.sketch, rows.sample, rows.sums))
        nbytes += sum(tensor.nbytes for tensor in rows.tensors.values())
        began = time.perf_counter()
        with self._room:
            if self._room.wait_for(lambda: self._queued == 0 or self._queued + nbytes <= QUEUE_BYTES):
                self._queued += nbytes
        self.waited_s += time.perf_counter() - began
        try:
            future = self._worker.submit(self._store, rows, step, nbytes)
        except RuntimeError:
            # The interpreter is shutting down and its pools with it: the last step is stored here.
            future = Future()
            try:
                future.set_result(self._store(rows, step, nbytes))
            except Exception as error:
                future.set_exception(error)
        self._pending.append((step, nbytes, future))

    def _store(self, rows: Rows, step: int, nbytes: int) -> int:
        try:
            if self._failure is not None:
                raise CaptureError(self._failure)
            if self._writer is None:
                rank = RankWriter(self._output, run_id=self._run_id, rank=self.rank, world_size=self.world_size)
                self._writer = FoldingWriter(rank, self._steps_per_file, self.warn)
                if self.rank == 0:
                    write_manifest(self._output, self._manifest(self.world_size, None))
            written = self._writer.write(step_rows(rows, step, self.rank, self.world_size))
            if not self.steps_written and self.rank == 0:
                # Finding out what code ran takes a while; the first step is safe by now.
                write_manifest(self._output, self._manifest(self.world_size, self._imported))
            self.steps_written.append(step)
            self._write_names()
            if rows.tensors:
                self._copies.give_back(copy for copy in rows.tensors.values() if isinstance(copy, Copy))
            else:
                self._copies.clear()
            return written
        except Exception as error:
            if self._failure is None:
                self._failure = str(error)
            raise
        finally:
            with self._room:
                self._queued -= nbytes
                self._room.notify_all()

    def _write_names(self) -> None:
        names = self.names
        if names is not self._names_written:
            write_json(self._output / rank_folder(self.rank) / NAMES_FILE, names)
            self._names_written = names

    def _report(self) -> None:
        """Tell of a failed write, once; the steps after it are dropped and counted."""
        done = [entry for entry in self._pending if entry[2].done()]
        self._pending = [entry for entry in self._pending if not entry[2].done()]
        for step, _, future in done:
            error = future.exception()
            if error is None:
                continue
            self._dropped.append(step)
            if not self._told:
                self._told = True
                print(
                    f"probe: step {step} on rank {self.rank} could not be stored and recording stops here; "
                    f"training goes on: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            if self._strict:
                raise CaptureError(f"Step {step} on rank {self.rank} could not be stored: {error}") from error

    def close(self) -> None:
        """Wait for the writer and mark the rank as cleanly closed. Never raises."""
        if os.getpid() != self.pid:
            return
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        strict, self._strict = self._strict, False
        self._report()
        self._strict = strict
        if self._writer is not None:
            try:
                self._write_names()
                self._writer.close(error=self._failure, dropped_steps=sorted(set(self._dropped)))
            except Exception as error:
                if self._failure is None:
                    print(f"probe: rank {self.rank} could not be closed cleanly: {error}", file=sys.stderr, flush=True)
            self._writer = None

    @property
    def problem(self) -> str:
        """What kept a step from being stored, or an empty text."""
        return self._failure or ""

    def drain(self) -> None:
        """Wait until every finished step is on disk."""
        for _, _, future in list(self._pending):
            future.exception()
        self._report()


def ranks() -> tuple[int, int]:
    """Give (rank, world size) of this process: from torch.distributed if it runs, else from the launcher's
    variables."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank = launched_rank()
    return rank, max(launched_world_size(), rank + 1)


def step_key(kind: Kind, name: str, item: str = "") -> Key:
    """Key of a quantity that exists once per step."""
    return Key(kind=kind, name=name, item=item, microbatch=STEP_CLOCK)
