"""In which code a suggested recording runs: without it both arms' lines, pasted one after the other, run one tree.

The source trees that a run recorded say where its code was. Where the arms ran in two folders that are still there,
each line goes into its own; where one folder was switched from commit to commit, the line switches it. This module
must not start git.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from probe.judge.comparison import RunSummary
from probe.report import recorded, words

STATE_FILE = "verify.json"
"""What `probe verify` writes beside its captures; it tells in which folder the command ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """The code of one arm."""

    remark: str
    """Which code it is, for the comment before the line."""
    folder: str = ""
    """Absolute folder to run in; empty: the reader's own."""
    variables: str = ""
    """Assignments before the command, for a shell."""
    switch: str = ""
    """Command that brings the reader's checkout to the recorded commit; empty: it is as it should be."""

    def __call__(self, line: str) -> str:
        """Return a command line that runs in this code."""
        if self.folder:
            return f"(cd {shlex.quote(self.folder)} && {self.variables}{line})"
        return f"{self.switch} && {line}" if self.switch else line

    def path(self, path: str) -> str:
        """Return a path of the reader's as it must be written in the line."""
        return os.path.abspath(path) if self.folder and path else path


def checkout(run: RunSummary, other: RunSummary) -> Checkout:
    """Return the code of a run, which is compared with another arm's run."""
    known = f"{run.arm}, commit {words.commit(run)}" if run.commit else f"the {run.arm}'s code"
    own, others = recorded.trees(run.path), recorded.trees(other.path)
    elsewhere = {tree.root for tree in others}
    apart = [tree for tree in own if tree.root not in elsewhere and Path(tree.root).is_dir()] if others else []
    if apart:
        return _in_folder(run, apart[0].root, known)
    if run.commit and run.dirty and not (other.dirty and run.commit == other.commit):
        known += "; the uncommitted changes of the recorded run are not in the commit: bring them back before recording"
    elif run.commit and other.dirty and not run.dirty:
        known += "; put uncommitted changes away first, such as with `git stash`"
    if not run.commit or run.commit == other.commit:
        return Checkout(remark=known)
    at = {tree.root: tree.commit for tree in others}
    moved = [tree for tree in own if tree.commit and tree.commit != at.get(tree.root)]
    switches = [_switch(tree.root, tree.commit) for tree in moved]
    if not switches:
        switches = [_switch("", run.commit)] if "," not in run.commit else []
    return Checkout(remark=known, switch=" && ".join(switches))


def _switch(root: str, commit: str) -> str:
    here = Path.cwd().resolve()
    inside = not root or not Path(root).is_dir() or Path(root).resolve() in (here, *here.parents)
    where = [] if inside else ["-C", root]
    return shlex.join(["git", *where, "switch", "--detach", commit[:10]])


def _in_folder(run: RunSummary, root: str, known: str) -> Checkout:
    output = Path(run.path).resolve().parent
    trees, here = output / "trees", Path.cwd().resolve()
    if Path(root).resolve() in (here, *here.parents):
        return Checkout(remark=known)
    if Path(root).resolve() != trees / run.arm:
        return Checkout(remark=known, folder=root)
    # `probe verify` let each arm import from its own tree, and ran the command in the folder that it was called from.
    roots = [trees / f"{run.arm}-imports", Path(root) / "src", Path(root)]
    imports = os.pathsep.join(str(each) for each in roots if each.is_dir())
    return Checkout(
        remark=known,
        folder=str(Path(root) / _inner(output)),
        variables=f'PYTHONPATH={shlex.quote(imports)}"${{PYTHONPATH:+:$PYTHONPATH}}" ',
    )


def _inner(output: Path) -> Path:
    """Return the folder inside a tree in which `probe verify` ran the command."""
    request = recorded.read(output / STATE_FILE).get("request")
    here = str(request.get("folder") or "") if isinstance(request, dict) else ""
    top = next((each for each in (Path(here), *Path(here).parents) if (each / ".git").exists()), None) if here else None
    return Path(here).relative_to(top) if top is not None else Path()
