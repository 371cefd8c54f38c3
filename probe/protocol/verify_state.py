"""Remember what a verification was asked and which of its runs are whole, so that it goes on where it stopped.

One JSON file in the output folder, written whole or not at all, and a lock that the launched commands inherit: a
training process that outlives a killed verification still holds it, so that two never write into one capture. This
module must not know how anything is run or judged.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probe.errors import CaptureError, listed
from probe.store.folder import write_json
from probe.store.problems import read_json

STATE_FILE = "verify.json"
LOCK_FILE = "verify.lock"
FORMAT = "probe-verify"
VERSION = 1


@dataclass(slots=True)
class State:
    """The state of one verification; every change is written at once."""

    folder: Path
    request: Mapping[str, Any]
    """What was asked, as plain values: what must be the same for the runs to be used again."""
    done: dict[str, str] = field(default_factory=dict)
    """Name of a run that is whole to its run_id."""

    def finish(self, name: str, run_id: str) -> None:
        """Note that a run is whole."""
        self.done[name] = run_id
        self.save()

    def save(self) -> None:
        """Write the file."""
        content = {"format": FORMAT, "version": VERSION, "request": dict(self.request), "done": self.done}
        write_json(self.folder / STATE_FILE, content)


def open_state(folder: Path, request: Mapping[str, Any], *, force: bool) -> State:
    """Read the state of a folder, or begin one.

    Args:
        folder: The output folder; it exists.
        request: What is asked now.
        force: Begin anew whatever the folder holds; its captures are replaced as they are recorded again.

    Raises:
        CaptureError: The folder holds something else, or the runs of another request.
    """
    file = folder / STATE_FILE
    request = json.loads(json.dumps(request))
    if force or not file.exists():
        others = sorted(entry.name for entry in folder.iterdir() if entry.name != LOCK_FILE)
        if others and not force:
            raise CaptureError(
                f"Folder {folder} holds {listed(others)}, and nothing that says it is of `probe verify`. "
                "Choose another folder with -o."
            )
        state = State(folder=folder, request=request)
        state.save()
        return state
    found = read_json(file)
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise CaptureError(
            f"File {file} is of version {found.get('version')!r}, and this probe reads version {VERSION}. "
            "Start over with --force."
        )
    earlier = found.get("request")
    earlier = earlier if isinstance(earlier, dict) else {}
    other = sorted(name for name in {*earlier, *request} if earlier.get(name) != request.get(name))
    if other:
        raise CaptureError(
            f"Folder {folder} holds the runs of another request; what is different: {listed(other)}. "
            "Choose another folder with -o, or start over with --force."
        )
    done = found.get("done")
    return State(folder=folder, request=request, done=dict(done) if isinstance(done, dict) else {})


def digest(request: Mapping[str, Any]) -> str:
    """Return eight hex digits that name a request."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:8]


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold a folder for this command and what it launches; gives the descriptor to inherit.

    Raises:
        CaptureError: Another command holds it.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CaptureError(
                f"Folder {folder} is in use by another `probe verify`, or by a training run that outlived one. "
                "Wait for it to end, or end it."
            ) from None
        yield descriptor
    finally:
        os.close(descriptor)
