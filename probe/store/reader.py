"""Read a capture: what is in it, the rows of a step, and tensors kept whole.

Opening looks at file names, the JSON files and the steps of packed files alone, so that a capture of thousands of
segments opens at once and one that is damaged still says what it holds. A step that is both packed and there as a
segment is read from its segment. A run that goes on may fold the segments of a capture that is open: what has gone is
looked for again. What cannot be trusted is an error, never a value: the tables of a step and every tensor are checked
against their digests. This module must not know how values are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from probe.errors import CaptureError, CaptureFormatError, listed
from probe.point import Key
from probe.store.dtypes import BITS, widen
from probe.store.guard import open_segment
from probe.store.layout import (
    FORMAT_CAPTURE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    FullTensor,
    StepRows,
)
from probe.store.packed import Packed
from probe.store.places import Places
from probe.store.problems import find_problems, read_json, steps_in_words
from probe.store.rows import Decoder, Tables, encode
from probe.store.steps import StepFile, require_segment
from probe.store.twins import Twins

_DECODER = Decoder()
"""One for all captures: runs of one job share their names, and what is the same object is compared at once."""


def open_capture(path: Path | str) -> Capture:
    """Open a capture for reading.

    Args:
        path: Its folder.

    Raises:
        CaptureError: There is no such folder.
        CaptureFormatError: The folder holds no capture, or one of a newer version.
    """
    path = Path(path)
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise CaptureError(f"Capture {path} {found}. Name the folder that `probe record -o` made.")
    return Capture(path)


class Capture:
    """One recorded run. Holds no file open, and may be sent to another process."""

    path: Path
    manifest: dict[str, Any]
    """What `capture.json` says."""
    run_id: str
    world_size: int
    ranks: tuple[int, ...]
    """Ranks that have a folder or a packed file, ascending."""
    problems: tuple[str, ...]
    """What is missing or went wrong, one clause each; empty for a capture that is whole."""

    def __init__(self, path: Path) -> None:
        """Look at the folder; see `open_capture`."""
        self.path = path
        self.manifest = _manifest(path)
        self.run_id = self.manifest["run_id"]
        self.world_size = self.manifest["world_size"]
        self._places = Places(path, run_id=self.run_id, world_size=self.world_size)
        self.ranks = tuple(sorted(self._places.steps))
        self.problems = (*self._places.problems, *find_problems(path, self.manifest, self._places.steps))
        self._names: dict[int, tuple[tuple[Key, ...], tuple[str, ...]]] = {}
        self._twins = Twins()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was learned, and name the folder so that a process elsewhere finds it."""
        return self.__dict__ | {"path": self.path.absolute(), "_twins": Twins(), "_names": {}}

    def steps(self, rank: int) -> tuple[int, ...]:
        """List the steps that a rank recorded, ascending."""
        if rank not in self._places.steps:
            raise CaptureError(f"Capture {self.path} has no rank {rank}; it has {listed(self.ranks) or 'none'}.")
        return self._places.steps[rank]

    def segments(self, rank: int) -> tuple[int, ...]:
        """List the steps of a rank that are there as segments."""
        return self._places.segments(rank)

    def packed(self, rank: int) -> tuple[Packed, ...]:
        """List the packed files of a rank: those made while it recorded, then the one that `probe pack` made."""
        return self._places.packed(rank)

    @property
    def nbytes(self) -> int:
        """Size of all segments and packed files; none for what has gone since the capture was opened."""
        return sum(_size(file) for file in {self.file(rank, s) for rank in self.ranks for s in self.steps(rank)})

    def step_nbytes(self, rank: int, step: int) -> int:
        """Return what a step takes of the file that holds it; packed steps take the same each."""
        packed = self._places.packed_file_of(rank, step)
        return _size(self.file(rank, step)) // (1 if packed is None else len(packed.steps))

    @property
    def may_keep_tensors(self) -> bool:
        """Whether the run was asked to keep tensors whole; where nothing says so, it may have been."""
        config = self.manifest.get("config")
        plan = config.get("plan") if isinstance(config, dict) else None
        record = plan.get("record") if isinstance(plan, dict) else None
        return not isinstance(record, dict) or "full" not in record or bool(record["full"])

    def rows(self, rank: int, step: int) -> StepRows:
        """Read the rows of one step, without its tensors.

        Raises:
            CaptureError: The step was not recorded.
            CaptureFormatError: The file is damaged, hostile, of another run or of a newer version.
        """
        rows = self._rows(rank, step)
        if step == self.steps(rank)[0]:
            self._names[rank] = rows.keys, rows.text
        return rows

    def names(self, rank: int) -> tuple[tuple[Key, ...], tuple[str, ...]]:
        """Return the keys of a rank's first step and their texts; remembered from when its rows were read."""
        if rank not in self._names:
            self.rows(rank, self.steps(rank)[0])
        return self._names[rank]

    def _rows(self, rank: int, step: int) -> StepRows:
        known = self._known_tables(rank, step)
        if known is not None:
            # Tables that contradict each other are decoded again below, for the error message.
            with suppress(ValueError, KeyError, IndexError):
                return _DECODER.rows(known, step=step, rank=rank, world_size=self.world_size)
        with self.open_step(rank, step) as opened:
            tables = opened.tables()
            if opened.packed is None:
                self._twins.learn(opened.file)
            try:
                return _DECODER.rows(tables, step=step, rank=rank, world_size=self.world_size)
            except (ValueError, KeyError, IndexError) as error:
                raise opened.file.refusal("its tables", f"contradict each other: {error}") from error

    def tables(self, rank: int, step: int) -> Tables:
        """Read the tables of a step, without HDF5 where their places are known."""
        tables = self._known_tables(rank, step)
        if tables is None:
            with self.open_step(rank, step) as opened:
                tables = opened.tables()
                if opened.packed is None:
                    self._twins.learn(opened.file)
        return tables

    def _known_tables(self, rank: int, step: int) -> Tables | None:
        """Read the tables of a step without HDF5, where others like it were read before."""
        path, packed = self.file(rank, step), self._places.packed_file_of(rank, step)
        return self._twins.tables(path, self._identity(rank, step)) if packed is None else packed.known_tables(step)

    def tensor_keys(self, rank: int, step: int) -> tuple[Key, ...]:
        """List the quantities of a step whose tensors are kept whole, in order of first execution."""
        with self.open_step(rank, step) as opened:
            return tuple(links_of(opened, opened.tables()))

    def tensor(self, rank: int, step: int, key: Key) -> FullTensor:
        """Read a whole tensor.

        Raises:
            CaptureError: The step, or the tensor, was not kept.
            CaptureFormatError: The file is damaged, or the tensor's bits do not have their digest.
        """
        with self.open_step(rank, step) as opened:
            return opened.tensor(_link(opened, key)).read()

    def tensor_blocks(self, rank: int, step: int, key: Key, nbytes: int = 1 << 20) -> Iterator[npt.NDArray[Any]]:
        """Read a tensor piece by piece, in C order.

        Args:
            rank: Rank.
            step: Step.
            key: One of `tensor_keys`.
            nbytes: Size of a piece; the last one may be smaller.

        Yields:
            1-d arrays of bits, each in memory of its own.

        Raises:
            CaptureFormatError: As `tensor` does; that the digest is wrong shows only after the last piece.
        """
        with self.open_step(rank, step) as opened:
            tensor = opened.tensor(_link(opened, key))
            digest = xxhash.xxh3_128()
            nbytes = max(1, nbytes // tensor.item) * tensor.item
            with tensor.reader() as reader:
                for start in range(0, tensor.nbytes, nbytes):
                    piece = np.empty(min(nbytes, tensor.nbytes - start), np.uint8)
                    reader.fill(piece.data)
                    digest.update(piece.data)
                    yield piece.view(BITS[tensor.dtype])
            tensor.check(digest)

    @contextmanager
    def open_step(self, rank: int, step: int) -> Iterator[StepFile]:
        """Open the file that holds a step: its segment, or else a packed file."""
        with ExitStack() as opened:
            try:
                found = opened.enter_context(self._opened(rank, step))
            except CaptureError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
                self._places.look_again(rank)
                found = opened.enter_context(self._opened(rank, step))
            yield found

    @contextmanager
    def _opened(self, rank: int, step: int) -> Iterator[StepFile]:
        path, packed = self.file(rank, step), self._places.packed_file_of(rank, step)
        if packed is None:
            with open_segment(path) as segment:
                require_segment(segment, self._identity(rank, step))
                yield StepFile(segment, step)
        else:
            with open_segment(path, packed.sort) as file:
                packed.require_identity(file)
                yield StepFile(file, step, packed)

    def file(self, rank: int, step: int) -> Path:
        """Return the file that holds a step."""
        steps = self.steps(rank)
        if not self._places.holds(rank, step):
            has = steps_in_words(steps)
            raise CaptureError(f"Rank {rank} of capture {self.path} has no step {step}; it has {has}.")
        return self._places.file(rank, step)

    def _identity(self, rank: int, step: int) -> dict[str, int | str]:
        return {
            "run_id": self.run_id,
            "rank": rank,
            "world_size": self.world_size,
            "first_step": step,
            "last_step": step,
        }


def links_of(opened: StepFile, tables: Tables) -> dict[Key, bytes]:
    """Map the quantities whose tensors are kept whole, in order of execution, to the names of their datasets."""
    if not any(tables["tensor"]):
        return {}
    try:
        keys = _DECODER.keys(tables)
    except (ValueError, KeyError) as error:
        raise opened.file.refusal("its tables", f"contradict each other: {error}") from error
    return {key: link for key, link in zip(keys, tables["tensor"], strict=True) if link}


def _link(opened: StepFile, key: Key) -> bytes:
    links = links_of(opened, opened.tables())
    if key not in links:
        kept = listed(repr(each.label) for each in links) or "none"
        where = f"{opened.file.sort.name} {opened.file.path}"
        of_step = "" if opened.packed is None else f" of step {opened.step}"
        raise CaptureError(f"{where} keeps no whole tensor of {key.label!r}{of_step}; it keeps {kept}.")
    return links[key]


def load(file: Path | str, name: str) -> npt.NDArray[Any]:
    """Read a tensor kept whole from a segment, as values.

    Args:
        file: The segment.
        name: The quantity's label, as `/quantity` has it, e.g. `forward/blocks.3.attn`.

    Returns:
        The tensor in its shape: bf16 and fp8 widened to float32, any other type as it is.

    Raises:
        CaptureError: There is no such tensor.
        CaptureFormatError: The segment is damaged, hostile or of a newer version.
    """
    with open_segment(Path(file)) as segment:
        opened = StepFile(segment, 0)
        tables = opened.tables()
        links = {label: link for label, link in zip(tables["quantity"], tables["tensor"], strict=True) if link}
        link = links.get(encode(name))
        if link is None:
            kept = listed(repr(label.decode()) for label in links) or "none"
            raise CaptureError(f"Segment {file} keeps no whole tensor of {name!r}; it keeps {kept}.")
        tensor = opened.tensor(link).read()
    return widen(tensor.bits, tensor.dtype)


def _manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    if not file.exists():
        raise CaptureFormatError(
            f"Folder {path} is no capture: {MANIFEST_FILE} is missing. Name the folder that `probe record -o` made; "
            "if this is it, the run ended before anything was recorded."
        )
    manifest = read_json(file)
    if manifest.get("format") != FORMAT_CAPTURE:
        raise CaptureFormatError(f"Folder {path} is no capture: {MANIFEST_FILE} has another format.")
    version, run_id, world_size = (manifest.get(name) for name in ("version", "run_id", "world_size"))
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CaptureFormatError(
            f"Capture {path} has format version {version}, and this probe reads up to {FORMAT_VERSION}. "
            "Install a newer trainprobe."
        )
    if version != FORMAT_VERSION or not isinstance(run_id, str) or not isinstance(world_size, int) or world_size < 1:
        raise CaptureFormatError(
            f"File {file} is damaged: version {version!r}, run_id {run_id!r}, world_size {world_size!r}. "
            "Record the run again."
        )
    return manifest


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
