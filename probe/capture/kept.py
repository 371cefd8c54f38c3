"""Copies of tensors that are kept whole, in memory that is used again once a step is stored.

Memory fresh from the system costs more than the copy: each page is a fault, and is zeroed before it is written. The
training thread takes memory, the writer gives it back. It begins and ends at a page's boundary, so that a disk can be
handed it as it is. This module must not know what is kept or why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from probe.errors import CaptureError
from probe.store.disk import aligned
from probe.store.dtypes import BITS
from probe.store.layout import PAGE, FullTensor


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor's values in host memory, in C order."""

    memory: npt.NDArray[np.uint8]
    """[whole pages] what is beyond `nbytes` is undefined."""
    nbytes: int
    dtype: str
    """torch's name of the element type."""
    shape: tuple[int, ...]

    @property
    def address(self) -> int:
        """Where the values begin."""
        return self.memory.ctypes.data

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of this type and shape."""
        if self.nbytes:
            values = torch.from_numpy(self.memory[: self.nbytes]).view(tensor.dtype).view(self.shape)
            values.copy_(tensor)

    def whole(self) -> FullTensor:
        """View the values as what is stored."""
        bits = self.memory[: self.nbytes].view(BITS[self.dtype]).reshape(self.shape)
        return FullTensor(bits=bits, dtype=self.dtype)


class Copies:
    """Hand memory out, and take it back."""

    def __init__(self) -> None:
        self._free: dict[int, deque[npt.NDArray[np.uint8]]] = {}
        """By size. Appending and popping a deque need no lock."""

    def room_for(self, nbytes: int, dtype: str, shape: tuple[int, ...]) -> Copy:
        """Give memory for a tensor; its values are undefined.

        Raises:
            CaptureError: No tensor of this type can be stored.
        """
        if dtype not in BITS:
            raise CaptureError(f"tensors of {dtype} cannot be kept whole")
        pages = -(-nbytes // PAGE) * PAGE
        try:
            memory = self._free[pages].pop()
        except (KeyError, IndexError):
            memory = aligned(nbytes)
        return Copy(memory, nbytes, dtype, shape)

    def give_back(self, copies: Iterable[Copy]) -> None:
        """Use the memory of copies again; nobody may read them any more."""
        for copy in copies:
            self._free.setdefault(copy.memory.size, deque()).append(copy.memory)

    def clear(self) -> None:
        """Let the memory go."""
        self._free.clear()
