"""Copies of tensors that are kept whole, in memory that is used again once a step is stored.

Memory fresh from the system costs more than the copy: each page is a fault, and is zeroed before it is written. The
training thread takes buffers, the writer gives them back. This module must not know what is kept or why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch


class Copies:
    """Make copies, and take their memory back."""

    def __init__(self) -> None:
        self._free: dict[int, deque[torch.Tensor]] = {}
        """Flat buffers of bytes, by size. Appending and popping a deque need no lock."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor: in host memory contiguous, on an accelerator as it lies there (the writer fetches it)."""
        tensor = tensor.detach()
        if tensor.device.type != "cpu":
            return tensor.clone()
        copy = self.room_for(tensor)
        copy.copy_(tensor)
        return copy

    def room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give a contiguous tensor in host memory of the same shape and type; its values are undefined."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        nbytes = tensor.numel() * tensor.element_size()
        try:
            buffer = self._free[nbytes].pop()
        except (KeyError, IndexError):
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer.view(tensor.dtype).view(tensor.shape)

    def give_back(self, copies: Iterable[torch.Tensor]) -> None:
        """Use the memory of copies again; nobody may read them any more."""
        for copy in copies:
            if copy.device.type == "cpu" and copy.numel():
                buffer = copy.reshape(-1).view(torch.uint8)
                self._free.setdefault(buffer.numel(), deque()).append(buffer)

    def clear(self) -> None:
        """Let the memory go."""
        self._free.clear()
