"""Bring what was taken on an accelerator to the host, without making the training thread wait for it.

Rows stay on their device until the step is over; then one copy brings them all, and an event says when it is done.
Tensors of which every bit is wanted are copied at once, into page-locked memory, in the order of their stream: what
the training does to them afterwards comes after the copy. Only the writer's thread waits. Nothing here has been run on
an accelerator yet; `torch.cpu` has the same interface, and the tests use that. This module must not know what a row is.
"""

from __future__ import annotations

from typing import Any

import torch


class Transfer:
    """What of one step is on its way."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, torch.Tensor]] = []
        """Number of a row, and its flat numbers on the device."""
        self._bits: list[tuple[int, torch.Tensor]] = []
        """Number of a row, and a copy of the tensor on the host."""
        self._streams: dict[torch.device, set[Any]] = {}
        """Streams on which something was computed or copied."""
        self._sent: list[tuple[list[int], torch.Tensor]] = []
        self._events: list[Any] = []

    def add_row(self, row: int, numbers: torch.Tensor) -> None:
        """Take the numbers of a row, which lie on an accelerator."""
        self._note(numbers.device)
        self._rows.append((row, numbers))

    def add_bits(self, row: int, tensor: torch.Tensor) -> None:
        """Take the bits of a tensor whose digest a row wants."""
        self._bits.append((row, self.copy(tensor)))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin a copy to the host, which is whole once `wait` has returned."""
        self._note(tensor.device)
        return _to_host(tensor.detach().resolve_conj().resolve_neg())

    def renumber(self, rows: dict[int, int]) -> None:
        """Follow rows to their new numbers; those without one are dropped."""
        self._rows = [(rows[row], numbers) for row, numbers in self._rows if row in rows]
        self._bits = [(rows[row], bits) for row, bits in self._bits if row in rows]

    def send(self) -> None:
        """Let all go to the host. Called by the training thread when the step is over; it does not wait."""
        for device, streams in self._streams.items():
            module = torch.get_device_module(device)
            current = module.current_stream(device)
            for stream in streams:
                current.wait_stream(stream)
            mine = [(row, numbers) for row, numbers in self._rows if numbers.device == device]
            if mine:
                # What another stream computed is free again only once this one has read it.
                for _, numbers in mine:
                    if numbers.device.type != "cpu":
                        numbers.record_stream(current)
                self._sent.append(([row for row, _ in mine], _to_host(torch.stack([n for _, n in mine]))))
            event = module.Event()
            event.record(current)
            self._events.append(event)
        self._rows.clear()
        self._streams.clear()

    def wait(self) -> None:
        """Wait until all is on the host. Called by the writer's thread."""
        for event in self._events:
            event.synchronize()
        self._events.clear()

    @property
    def rows(self) -> list[tuple[int, torch.Tensor]]:
        """Rows that have arrived, by number."""
        return [(row, numbers) for rows, stacked in self._sent for row, numbers in zip(rows, stacked, strict=True)]

    @property
    def bits(self) -> list[tuple[int, torch.Tensor]]:
        """Tensors that have arrived and whose digests rows want, by number."""
        return self._bits

    def _note(self, device: torch.device) -> None:
        self._streams.setdefault(device, set()).add(torch.get_device_module(device).current_stream(device))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    # Only CUDA copies to page-locked memory while the host goes on; elsewhere the copy is waited for.
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True).contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host
