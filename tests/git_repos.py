"""Small git repositories, and Python environments in which one of their trees is installed as editable."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull,
}

FINDER = """
import importlib.util, os, sys
MAPPING = {mapping!r}


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        place = MAPPING.get(name)
        if place is None:
            return None
        return importlib.util.spec_from_file_location(
            name, os.path.join(place, "__init__.py"), submodule_search_locations=[place]
        )


def install():
    sys.meta_path.{insert}
"""


def git(folder: Path, *arguments: str) -> str:
    """Run git with an identity of its own."""
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**os.environ, **IDENTITY},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by relative path."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def repository(folder: Path, files: Mapping[str, str]) -> Path:
    """Make a repository with one commit, tagged `base`."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    commit(folder, "base", files)
    return folder.resolve()


def commit(folder: Path, tag: str, files: Mapping[str, str]) -> str:
    """Commit files on top of what is checked out, and tag the commit; returns its hash."""
    write(folder, files)
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", tag)
    git(folder, "tag", tag)
    return git(folder, "rev-parse", "HEAD")


def environment(folder: Path) -> Path:
    """Make a Python environment that sees what this one has installed, and return its site-packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site


def python(site: Path) -> str:
    """Return the interpreter of an environment, by its site-packages."""
    return str(site.parents[2] / "bin" / Path(sys.executable).name)


def editable_path(site: Path, folder: Path) -> None:
    """Install a folder as `pip install -e` does for a plain layout: one line in a .pth file."""
    (site / "__editable__.tinynet.pth").write_text(f"{folder}\n")


def editable_finder(site: Path, mapping: Mapping[str, str], *, first: bool = False) -> None:
    """Install packages as setuptools does for other layouts: a finder; `first`: before all others, as some tools do."""
    insert = "insert(0, Finder)" if first else "append(Finder)"
    (site / "__editable___tinynet_finder.py").write_text(FINDER.format(mapping=dict(mapping), insert=insert))
    (site / "__editable__.tinynet.pth").write_text(
        "import __editable___tinynet_finder; __editable___tinynet_finder.install()\n"
    )
