"""Make the row of one tensor: choose how it is reduced, and what else is kept of it.

Nearly every tensor is plain (see `summary.is_plain`): it is read where it lies, and no operation of torch runs. What
cannot be reduced gets a row that says so. This module must not know where a tensor came from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from probe.capture import summary
from probe.capture.device import device_row
from probe.capture.kept import Copies
from probe.capture.rows import Rows
from probe.capture.shards import Part, held, part_row
from probe.point import Key, Kind

DIGESTED = 16 << 20
"""Bytes of a tensor on an accelerator, at most, that are brought to the host for the digest of their bits."""


class Reducer:
    """Reduce tensors, one after the other."""

    def __init__(self, copies: Copies, *, warn: Callable[[str], None], strict: bool) -> None:
        """Prepare to reduce.

        Args:
            copies: Gives memory for tensors that are kept whole.
            warn: Is told once that a tensor has no numbers.
            strict: A tensor that cannot be read raises.
        """
        self._copies, self._warn, self._strict = copies, warn, strict
        self._scratch = summary.Scratch()
        self._told = False

    def row(
        self,
        rows: Rows,
        order: int,
        key: Key,
        value: torch.Tensor,
        where: str,
        *,
        exact: bool,
        keeps: bool,
        part: Part | None,
    ) -> None:
        """Add a tensor's row.

        Args:
            rows: Get the row.
            order: Execution index in the step.
            key: Its name, which no row has yet.
            value: Any tensor.
            where: Where it was taken.
            exact: Keep a fingerprint of its bits too, unless it is a part.
            keeps: Keep its values whole.
            part: Which part of the whole it is, where the tensor does not know it itself.
        """
        if part is None and summary.is_plain(value):
            row = rows.add(key, order, summary.dtype_name(value.dtype), tuple(value.shape), where)
            try:
                self._plain(rows, row, key, value, exact, keeps)
            except Exception as error:
                self._not_reduced(rows, row, key, error)
            return
        with summary.quiet():
            dtype, found = summary.dtype_name(value.dtype), held(value)
            part = part or found.part
            shape, text = tuple(value.shape if part is None else part.shape), found.text if part is None else part.text
            value = found.tensor
            if value.layout is not torch.strided or value.is_meta or value.is_quantized or not found.reducible:
                rows.add(key, order, dtype, shape, where, text or f"not reduced: {value.layout}, {value.device}")
                return
            row = rows.add(key, order, dtype, shape, where, text)
            try:
                self._any(rows, row, key, value, exact, keeps, part)
            except Exception as error:
                self._not_reduced(rows, row, key, error)

    def _plain(self, rows: Rows, row: int, key: Key, value: torch.Tensor, exact: bool, keeps: bool) -> None:
        copy = self._copies.room_for(value.nbytes, rows.dtype[row], rows.shape[row]) if keeps else None
        summary.reduce_plain(value, key.name, rows, row, 0 if copy is None else copy.address)
        if value.numel() == 1:
            rows.value[row] = rows.sums[row, 0]
        if exact:
            rows.hash[row] = summary.fingerprint_plain(value)
        if copy is not None:
            rows.tensors[key] = copy

    def _any(
        self, rows: Rows, row: int, key: Key, value: torch.Tensor, exact: bool, keeps: bool, part: Part | None
    ) -> None:
        if not _on_host(value):
            scratch = self._scratch
            numbers = device_row(value, key.name, scratch) if part is None else part_row(value, key.name, part, scratch)
            rows.transfer.add_row(row, numbers)
            # The batch is judged by its bits, whatever its size; parameters need not all cross to the host.
            if exact and part is None and (key.kind is Kind.BATCH or value.nbytes <= DIGESTED):
                rows.transfer.add_bits(row, value)
            if keeps:
                rows.tensors[key] = rows.transfer.copy(value)
            return
        if part is not None:
            rows.fill(row, part_row(value, key.name, part, self._scratch).numpy())
        else:
            sums = summary.host_row(value, key.name, self._scratch, rows.sketch[row], rows.sample[row])
            rows.sums[row], rows.counts[row] = sums[:4], sums[4:]
            if sums[5] == 1:
                rows.value[row] = sums[0]
            if exact:
                rows.hash[row] = summary.fingerprint(value)
        if keeps:
            copy = self._copies.room_for(value.nbytes, summary.dtype_name(value.dtype), tuple(value.shape))
            copy.fill(value.detach())
            rows.tensors[key] = copy

    def _not_reduced(self, rows: Rows, row: int, key: Key, error: Exception) -> None:
        """Say in a row why it has no numbers: whatever a tensor is made of, the training goes on."""
        if self._strict:
            raise error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        rows.text[row] = f"not reduced: {reason}"
        if not self._told:
            self._told = True
            self._warn(f"Some tensors have no numbers, the first of them {key.label!r}: {reason.rstrip('.')}.")


def _on_host(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cpu)
