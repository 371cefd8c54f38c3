"""Make each arm import its own tree, whatever is installed, and prove from the capture that it did.

An editable install puts one tree on the path of every process. So the folders from which the environment imports the
user's checkout are found by asking its own interpreter, and the same folders of the arm's tree go before them on
PYTHONPATH. That this was enough is not believed but read from the provenance of each capture: the files that were
really imported. This module must not know how a tree came to be.

Source: the project's job study, section 3, failure 1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from probe.errors import CaptureError, listed
from probe.judge.provenance_changes import code_hash
from probe.measure.series import CaptureLike
from probe.protocol.worktrees import Tree

_PYTHON = re.compile(r"(python|pypy)[0-9.]*")

_ASK = """
import importlib.metadata, json, sys
packages = {}
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("__editable__"):
        packages.update(getattr(module, "MAPPING", {}))
        for name, paths in getattr(module, "NAMESPACES", {}).items():
            packages.update({name: path for path in paths})
projects = []
for distribution in importlib.metadata.distributions():
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except Exception:
        continue
    if origin.get("dir_info", {}).get("editable") and origin.get("url", "").startswith("file://"):
        from urllib.parse import unquote
        projects.append(unquote(origin["url"][len("file://"):]))
print(json.dumps({"path": [p for p in sys.path if p], "prefix": sys.prefix, "packages": packages,
                  "projects": projects}))
"""
"""Asked of the job's interpreter, which has processed its .pth files by then: the path, what setuptools' editable
finders expose, and the project folders of editable installs (PEP 610)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Installed:
    """From where a Python environment imports."""

    path: tuple[str, ...] = ()
    """`sys.path`, .pth files included."""
    prefix: str = sys.prefix
    packages: Mapping[str, str]
    """Package to folder (or module to file), as editable finders expose them."""
    projects: tuple[str, ...] = ()
    """Project folders of editable installs."""


def import_environment(
    tree: Tree, known: Sequence[Path], *, program: str, environment: Mapping[str, str], links: Path
) -> dict[str, str]:
    """Return the environment in which an arm runs: its own import roots first.

    Args:
        tree: The arm's tree.
        known: Every tree that its imports might stray to: the user's checkout and its worktrees, and both arms' trees.
        program: The program of the command, by which the interpreter is found.
        environment: The user's environment.
        links: Folder for links, made where an editable install exposes a package under another name than its folder's.
    """
    installed = _ask(interpreter(program, environment), environment)
    roots: list[str] = []
    for name, path in sorted(installed.packages.items()):
        own = _own(Path(path), tree, known)
        if own is not None:
            roots.append(str(_root_of(name, own, links)))
    folders = [*installed.path, *(inner for project in installed.projects for inner in (f"{project}/src", project))]
    for folder in map(Path, folders):
        own = _own(folder, tree, known)
        if own is not None and own.is_dir() and not _is_environment(folder, installed.prefix):
            roots.append(str(own))
    roots += [str(folder) for folder in (tree.root / "src", tree.root) if folder.is_dir()]
    for entry in environment.get("PYTHONPATH", "").split(os.pathsep):
        # A relative entry means a folder of whatever tree the command runs in.
        if entry and not (os.path.isabs(entry) and owner(Path(entry), known) is not None):
            roots.append(entry)
    return {**environment, "PYTHONPATH": os.pathsep.join(dict.fromkeys(roots))}


def interpreter(program: str, environment: Mapping[str, str]) -> str:
    """Return the Python that a program runs in: itself, the one its first lines name, or the one on PATH."""
    if _PYTHON.fullmatch(os.path.basename(program)):
        return program
    try:
        with open(program, "rb") as file:
            head = file.read(512).decode("utf-8", "replace")
    except OSError:
        head = ""
    path = environment.get("PATH")
    if head.startswith("#!"):
        # Where its path is long, pip writes `#!/bin/sh` and the interpreter on the second line.
        for word in re.findall(r"[^\s'\"]+", " ".join(head[2:].splitlines()[:2])):
            if _PYTHON.fullmatch(os.path.basename(word)):
                return shutil.which(word, path=path) or sys.executable
    return shutil.which("python", path=path) or shutil.which("python3", path=path) or sys.executable


def _ask(python: str, environment: Mapping[str, str]) -> _Installed:
    """Ask an interpreter from where it imports; one that cannot say is taken to expose nothing, and the proof tells."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK], capture_output=True, text=True, timeout=120, env=dict(environment), check=True
        )
        told = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return _Installed(packages={})
    return _Installed(
        path=tuple(told["path"]),
        prefix=told["prefix"],
        packages={name: path for name, path in told["packages"].items() if isinstance(path, str)},
        projects=tuple(told["projects"]),
    )


def owner(path: Path, known: Sequence[Path]) -> Path | None:
    """Return the innermost of the known trees that holds a path, or None."""
    resolved = path.resolve()
    holders = [root for root in known if resolved == root or root in resolved.parents]
    return max(holders, key=lambda root: len(root.parts), default=None)


def _own(path: Path, tree: Tree, known: Sequence[Path]) -> Path | None:
    """Return the same path in the arm's tree, where it exists there and the path is in a known tree."""
    root = owner(path, known)
    if root is None:
        return None
    own = tree.root / path.resolve().relative_to(root)
    return own if own.exists() else None


def _is_environment(folder: Path, prefix: str) -> bool:
    """Tell whether a folder is part of a virtual environment, which may lie inside a checkout."""
    resolved, home = folder.resolve(), Path(prefix).resolve()
    return "site-packages" in resolved.parts or "dist-packages" in resolved.parts or home in resolved.parents


def _root_of(name: str, own: Path, links: Path) -> Path:
    """Return the folder from which `import name` finds a package."""
    parts = tuple(name.split("."))
    if own.with_suffix("").parts[-len(parts) :] == parts:
        return own.parents[len(parts) - 1]
    link = links.joinpath(*parts).with_suffix(own.suffix)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(own)
    return links


def prove(capture: CaptureLike, tree: Tree, known: Sequence[Path]) -> None:
    """Check that what a run imported lies in its arm's own tree.

    Raises:
        CaptureError: A file is of another tree, or none is of the arm's own.
    """
    files = sorted(_files(capture))
    strayed = [(file, root) for file in files if (root := owner(Path(file), known)) not in (None, tree.root)]
    if strayed:
        file, root = strayed[0]
        more = f" {len(strayed)} of {len(files)} files did." if len(strayed) > 1 else ""
        assert root is not None
        raise CaptureError(
            f"The {tree.arm} imported {file} from another tree, and should have imported "
            f"{tree.root / Path(file).relative_to(root)}.{more} An absolute path in the command leads there, or an "
            "editable install that goes before PYTHONPATH. Write paths relative to the tree, and uninstall the package "
            "or install it where each arm can import its own."
        )
    if not any(owner(Path(file), known) == tree.root for file in files):
        raise CaptureError(
            f"The {tree.arm} imported no file of its tree {tree.root}; it imported {listed(files, most=3) or 'none'}. "
            "What runs is installed, or is named by an absolute path. Name a script or package of the tree in the "
            "command, or install the package as editable."
        )


def _files(capture: CaptureLike) -> Sequence[str]:
    provenance = capture.manifest.get("provenance")
    code = provenance.get("code") if isinstance(provenance, Mapping) else None
    files = code.get("files") if isinstance(code, Mapping) else None
    return list(files) if isinstance(files, Mapping) else []


def require_one_code(earlier: CaptureLike, later: CaptureLike, tree: Tree) -> None:
    """Check that two runs of an arm ran the same code: a folder can be edited between them.

    Raises:
        CaptureError: They did not.
    """
    if code_hash(earlier) != code_hash(later):
        raise CaptureError(
            f"The {tree.arm}'s tree {tree.root} was edited between its runs {earlier.path.name} and "
            f"{later.path.name}. Start over with --force."
        )
