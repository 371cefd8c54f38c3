"""What the launcher tells the processes below it, and how a process begins to record.

The request travels in one environment variable. Each Python process reads it at start-up
(`bootstrap/sitecustomize.py`) and, when torch has been imported there, attaches. This module itself imports no torch,
for it runs in every Python process of the job, the launcher's helpers included.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import random
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from probe.capture.attach import Attachment

REQUEST = "PROBE_REQUEST"
"""Environment variable that holds the request as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to record, as the launcher or the environment asks for it."""

    output: str
    run_id: str
    plan: dict[str, Any]
    """A plan as plain values (`Plan.as_dict`)."""
    seed: int | None = None
    perturb: str = ""
    strict: bool = False
    command: tuple[str, ...] = ()
    steps: str = ""
    digest: str = ""
    """Folder where each rank leaves a digest of what training ended in; empty: none is taken."""
    step_offset: int = 0
    """Steps that were trained before this run, which goes on from a checkpoint: its first step is one more."""
    steps_per_file: int = 1
    """Steps that each rank folds into one file."""
    bare: bool = False
    """Nothing is recorded: only the digest, if one is asked for."""

    def to_json(self) -> str:
        """Write the request for the environment."""
        return json.dumps(asdict(self))


def read_request() -> Request | None:
    """Read the request of this process, or None when recording is off.

    `PROBE=1` with `PROBE_OUT=DIR` asks for the default plan without the launcher.
    """
    text = os.environ.get(REQUEST)
    if text:
        fields = json.loads(text)
        fields["command"] = tuple(fields.get("command", ()))
        return Request(**fields)
    output = os.environ.get("PROBE_OUT")
    if os.environ.get("PROBE") == "1" and output:
        from probe.plan import default_plan

        # Ranks of one launch agree on the run without talking: torchrun gives them an id, else there is one process.
        run = os.environ.get("TORCHELASTIC_RUN_ID") or str(uuid.uuid4())
        run_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{os.path.abspath(output)}#{run}").hex
        return Request(output=output, run_id=run_id, plan=default_plan().as_dict(), command=tuple(sys.orig_argv))
    return None


class _AfterImport(importlib.abc.MetaPathFinder):
    """Call a function once a module has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then, self._busy = name, then, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as it would be found anyway, and wrap its loader."""
        if name != self._name or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is None or spec.loader is None:
            return None
        sys.meta_path.remove(self)
        spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    """Run a module as its own loader does, then call a function."""

    def __init__(self, inner: importlib.abc.Loader, then: Callable[[], None]) -> None:
        self._inner, self._then = inner, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Give the module its own loader back first: code that asks for data files goes through it.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._then()


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` when module `name` is imported, or now if it already is."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


_attachment: Attachment | None = None


def attachment() -> Attachment | None:
    """Give what is installed in this process, or None when nothing is recorded."""
    return _attachment


_begun = False


def begin_once() -> None:
    """Begin recording if this process was asked to and has not begun yet."""
    global _begun
    if not _begun:
        _begun = True
        request = read_request()
        if request is not None:
            begin(request)


def begin(request: Request) -> None:
    """Prepare this process: seed it, and attach as soon as torch is there."""
    if request.seed is not None:
        _seed(request.seed)
    after_import("torch", lambda: _attach_or_tell(request))


def _seed(seed: int) -> None:
    from probe.capture.launched import launched_rank

    number = seed + launched_rank()
    random.seed(number)

    def seed_numpy() -> None:
        sys.modules["numpy"].random.seed(number % 2**32)

    def seed_torch() -> None:
        sys.modules["torch"].manual_seed(number)

    after_import("numpy", seed_numpy)
    after_import("torch", seed_torch)


def _attach_or_tell(request: Request) -> None:
    # Runs inside the user's `import torch`, which must succeed whatever happens here.
    try:
        _attach(request)
    except Exception as error:
        if request.strict:
            raise
        print(f"probe: this process cannot record and runs without it: {error!r}", file=sys.stderr, flush=True)


def _attach(request: Request) -> None:
    global _attachment
    if _attachment is not None:
        return
    if request.digest:
        from probe.capture.outcome_digest import OutcomeDigest

        outcome = OutcomeDigest(Path(request.digest))
        outcome.install()
        atexit.register(outcome.write)
    if request.bare:
        return
    from probe.capture import perturb
    from probe.capture.attach import Attachment
    from probe.capture.provenance import manifest
    from probe.capture.recorder import Recorder
    from probe.plan import plan_from_dict

    recorder = Recorder(
        output=Path(request.output),
        run_id=request.run_id,
        plan=plan_from_dict(request.plan),
        strict=request.strict,
        first_step=request.step_offset + 1,
        steps_per_file=request.steps_per_file,
        manifest=lambda world_size, imported: manifest(request, world_size, imported),
    )
    _attachment = Attachment(recorder, perturb.parse(request.perturb))
    _attachment.install()
    atexit.register(_end, _attachment, Path(request.output))


def _end(attached: Attachment, output: Path) -> None:
    if not attached.mine():
        return
    attached.close()
    recorder = attached.recorder
    seen = {
        "rank": recorder.rank,
        "program": sys.argv[0] if sys.argv else "",
        "events": recorder.events,
        "steps": len(recorder.steps_written),
        "waited_s": recorder.waited_s,
        "problem": recorder.problem,
        "warnings": recorder.warnings,
    }
    from probe.store.layout import NOTES_FOLDER

    try:
        folder = output / NOTES_FOLDER
        folder.mkdir(exist_ok=True)
        (folder / f"{os.getpid()}.json").write_text(json.dumps(seen))
    except OSError:
        pass  # a full disk was told already; the note only improves the launcher's last line
