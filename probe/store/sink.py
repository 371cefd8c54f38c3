"""A file that HDF5 writes through plain system calls.

HDF5 that meets a full disk in its own writes takes the process down (the project's storage study, section 5.3). Here an
error is kept, what follows is thrown away, and whoever asks gets the error. This module must not know what is written.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class Sink(io.RawIOBase):
    """A new file, to be given to `h5py.File`."""

    def __init__(self, path: Path) -> None:
        """Make the file, or empty the one that is there."""
        super().__init__()
        self._descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o666)
        self._position = 0
        self._error: OSError | None = None

    def require_sound(self) -> None:
        """Raise the error that a write met."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Sync the file, once HDF5 has let go of it."""
        self.require_sound()
        os.fsync(self._descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Sink:
        return self

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        size = os.fstat(self._descriptor).st_size if whence == os.SEEK_END else 0
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def truncate(self, size: int | None = None) -> int:
        size = self._position if size is None else size
        self._attempt(lambda: os.ftruncate(self._descriptor, size))
        return size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        count = len(view)

        def put() -> None:
            rest, offset = view, self._position
            while len(rest):
                done = os.pwrite(self._descriptor, rest, offset)
                rest, offset = rest[done:], offset + done

        self._attempt(put)
        self._position += count
        return count

    def readinto(self, buffer: Any) -> int:
        done = os.preadv(self._descriptor, [buffer], self._position)
        self._position += done
        return done

    def _attempt(self, call: Any) -> None:
        if self._error is None:
            try:
                call()
            except OSError as error:
                self._error = error
