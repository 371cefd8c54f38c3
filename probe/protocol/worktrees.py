"""Find or make the tree of code that an arm of a comparison runs: a folder as it is, or a worktree of a revision.

The commonest way to a false PASS is that both arms ran one tree. So a revision never runs in the checkout where the
user works: it gets a `git worktree` of its own, and a revision that is checked out with uncommitted changes is refused,
for the worktree would not hold them. This module must not know what is run in a tree.

Source: the project's job study, section 3, failures 1 and 23.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from probe.errors import CaptureError, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one arm runs, as it was asked for; nothing is made yet."""

    arm: str
    """`baseline` or `candidate`."""
    named: str
    """The revision or folder as the user wrote it."""
    folder: Path | None
    """The folder, resolved; None for a revision."""
    commit: str = ""
    """The revision's full commit; empty for a folder."""

    @property
    def identity(self) -> str:
        """Text that stays the same as long as the arm is the same: the commit, or the folder's path."""
        return self.commit or str(self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The code of one arm, ready to run."""

    arm: str
    root: Path
    """Resolved; nothing above it belongs to the arm."""
    commit: str = ""
    """Commit of a worktree that was made here; empty for a folder, which is used as it is."""


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it prints.

    Raises:
        CaptureError: git is not installed, or fails.
    """
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise CaptureError(f"Command 'git' cannot be run: {error.strerror}. Install git, or give folders.") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise CaptureError(
            f"Command 'git {' '.join(arguments)}' failed in {folder}: {said[-1] if said else 'no word'}."
        )
    return done.stdout


def checkout_of(folder: Path) -> Path | None:
    """Return the top folder of the git checkout that holds a folder, or None."""
    try:
        return Path(git(folder, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()
    except CaptureError:
        return None


def checkouts(folder: Path) -> dict[Path, str]:
    """Return every worktree of the repository that a folder is in, with its commit; empty outside a repository."""
    try:
        text = git(folder, "worktree", "list", "--porcelain")
    except CaptureError:
        return {}
    found: dict[Path, str] = {}
    path = None
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "worktree":
            path = Path(rest).resolve()
        elif word == "HEAD" and path is not None:
            found[path] = rest
    return found


def find_source(arm: str, named: str, *, here: Path) -> Source:
    """Say what an arm's argument names: a folder, or a revision of the repository that holds `here`.

    Raises:
        CaptureError: It is neither, or both; or the revision is checked out with changes that it does not hold.
    """
    folder = here / named
    commit = _commit(here, named)
    if commit and folder.is_dir() and "/" not in named:
        raise CaptureError(
            f"The {arm} {named!r} is both a folder and a revision. Write './{named}' for the folder, or the commit "
            f"{commit[:12]} for the revision."
        )
    if commit:
        _require_clean(arm, named, commit, here)
        return Source(arm=arm, named=named, folder=None, commit=commit)
    if folder.is_dir():
        folder = folder.resolve()
        # `.` in a folder of a checkout means the checkout: what is imported lies beside that folder.
        top = checkout_of(folder) if folder == here or folder in here.parents else None
        return Source(arm=arm, named=named, folder=top or folder)
    repository = checkout_of(here)
    where = f"no revision of the repository {repository}" if repository else f"no revision: {here} is in no repository"
    raise CaptureError(f"The {arm} {named!r} is no folder and {where}. Check its spelling.")


def _commit(here: Path, named: str) -> str:
    if not named or named.startswith("-"):
        return ""
    try:
        return git(here, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{named}^{{commit}}").strip()
    except CaptureError:
        return ""


def changed_files(folder: Path) -> list[str]:
    """List the files under git's control that differ from the commit that is checked out."""
    lines = git(folder, "status", "--porcelain", "--untracked-files=no", "-z").split("\0")
    return [line[3:] for line in lines if len(line) > 3 and line[2] == " "]


def _require_clean(arm: str, named: str, commit: str, here: Path) -> None:
    for checkout, head in checkouts(here).items():
        changed = changed_files(checkout) if head == commit and checkout.is_dir() else []
        if changed:
            count = "1 file" if len(changed) == 1 else f"{len(changed)} files"
            raise CaptureError(
                f"The {arm} {named!r} ({commit[:12]}) is checked out in {checkout} with uncommitted changes in "
                f"{count}: {listed(changed)}. The revision does not hold them. Commit them, or name the folder "
                f"{checkout} to run what is there."
            )


def make_tree(source: Source, place: Path, *, here: Path) -> Tree:
    """Return the tree of an arm: its folder, or a worktree at `place`, made unless it is there.

    Raises:
        CaptureError: git cannot make the worktree, or something else is at `place`.
    """
    if source.folder is not None:
        return Tree(arm=source.arm, root=source.folder)
    place = place.resolve()
    if place.exists() and checkouts(here).get(place) != source.commit:
        if place not in checkouts(here):
            raise CaptureError(f"Folder {place} is no worktree of this repository. Move it away, or choose another -o.")
        git(here, "worktree", "remove", "--force", str(place))
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        # --force: a worktree whose folder was deleted by hand is still registered.
        git(here, "worktree", "add", "--force", "--detach", str(place), source.commit)
    return Tree(arm=source.arm, root=place, commit=source.commit)


def restore(tree: Tree, *, links: tuple[Path, ...] = (), origin: Path | None = None) -> None:
    """Put a worktree back to its commit, so that no run finds what an earlier one left. A folder is left as it is.

    Args:
        tree: The tree.
        links: Files and folders below `origin` that git does not hold, such as data; each is linked to in its
            place.
        origin: The user's checkout.

    Raises:
        CaptureError: The tree is no longer at its commit, or holds something where a link is to be.
    """
    if not tree.commit:
        return
    if checkout_of(tree.root) != tree.root:
        raise CaptureError(f"Folder {tree.root} is no longer a worktree. Start over with --force.")
    git(tree.root, "reset", "--quiet", "--hard", tree.commit)
    git(tree.root, "clean", "--quiet", "-ffdx")
    for path in links:
        if origin is None or origin not in path.parents or not path.exists():
            raise CaptureError(
                f"Link {path} cannot be made: it is nothing in the checkout {origin}. Check its spelling."
            )
        place = tree.root / path.relative_to(origin)
        if place.exists() or place.is_symlink():
            raise CaptureError(f"Link {place} cannot be made: {tree.commit[:12]} holds a file of that name. Omit it.")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)


def submodules(tree: Tree) -> list[str]:
    """List the submodules of a worktree: git leaves their folders empty."""
    if not tree.commit:
        return []
    entries = git(tree.root, "ls-tree", "-r", "-z", tree.commit).split("\0")
    return [entry.partition("\t")[2] for entry in entries if entry.startswith("160000 ")]


def files_between(here: Path, one: Source, two: Source) -> list[str]:
    """List the files in which two revisions differ; empty where one is a folder."""
    if not one.commit or not two.commit:
        return []
    return [name for name in git(here, "diff", "--name-only", "-z", one.commit, two.commit).split("\0") if name]
