"""Each arm imports its own tree under an editable install, and the capture proves it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from git_repos import editable_finder, editable_path, environment, python, write
from synthetic import run as synthetic_run

from probe.errors import CaptureError
from probe.protocol.own_imports import import_environment, interpreter, owner, prove, require_one_code
from probe.protocol.worktrees import Tree

PACKAGE = {"src/tinynet/__init__.py": "", "src/tinynet/model.py": ""}


def imported(site: Path, tree: Tree, known: list[Path], tmp_path: Path, module: str, **env: str) -> str:
    """Return the file that `import MODULE` takes in the environment of an arm."""
    variables = import_environment(
        tree, known, program=python(site), environment={**os.environ, **env}, links=tmp_path / "links"
    )
    words = [python(site), "-c", f"import {module}; print({module}.__file__)"]
    done = subprocess.run(words, capture_output=True, text=True, env=variables, cwd=tmp_path, check=True)
    return os.path.realpath(done.stdout.strip())


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("checkout", "other"):
        write(tmp_path / name, PACKAGE)
    return tmp_path / "checkout", tmp_path / "other"


def test_a_path_file_that_points_at_one_tree_does_not_win_in_the_other(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    site = environment(tmp_path / "env")
    editable_path(site, trees[0] / "src")
    for root in trees:
        tree = Tree(arm="baseline", root=root)
        assert imported(site, tree, list(trees), tmp_path, "tinynet.model") == str(root / "src/tinynet/model.py")


def test_an_editable_finder_that_points_at_one_tree_does_not_win_in_the_other(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    site = environment(tmp_path / "env")
    editable_finder(site, {"tinynet": str(trees[0] / "src" / "tinynet")})
    for root in trees:
        tree = Tree(arm="baseline", root=root)
        assert imported(site, tree, list(trees), tmp_path, "tinynet.model") == str(root / "src/tinynet/model.py")


def test_a_package_that_is_exposed_from_a_folder_of_another_name_is_found_too(tmp_path: Path) -> None:
    roots = [tmp_path / "checkout", tmp_path / "other"]
    for root in roots:
        write(root, {"lib/__init__.py": "", "lib/model.py": ""})
    site = environment(tmp_path / "env")
    editable_finder(site, {"tinynet": str(roots[0] / "lib")})
    for root in roots:
        tree = Tree(arm="baseline", root=root)
        assert imported(site, tree, roots, tmp_path, "tinynet.model") == str(root / "lib/model.py")


def test_entries_of_pythonpath_that_point_at_one_tree_are_moved_to_the_other(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    for root in trees:
        write(root, {"extra/more.py": ""})
    site = environment(tmp_path / "env")
    path = f"{trees[0] / 'extra'}{os.pathsep}{tmp_path / 'elsewhere'}"
    tree = Tree(arm="baseline", root=trees[1])
    assert imported(site, tree, list(trees), tmp_path, "more", PYTHONPATH=path) == str(trees[1] / "extra/more.py")
    variables = import_environment(
        tree, list(trees), program=python(site), environment={"PYTHONPATH": path}, links=tmp_path / "links"
    )
    roots = [str(trees[1] / name) for name in ("extra", "src", "")]
    assert variables["PYTHONPATH"].split(os.pathsep) == [
        *(root.rstrip("/") for root in roots),
        str(tmp_path / "elsewhere"),
    ]


def test_a_virtual_environment_inside_a_tree_is_no_import_root_of_the_other(
    trees: tuple[Path, Path], tmp_path: Path
) -> None:
    site = environment(trees[0] / ".venv")
    (trees[1] / site.relative_to(trees[0])).mkdir(parents=True)
    variables = import_environment(
        Tree(arm="baseline", root=trees[1]), list(trees), program=python(site), environment={}, links=tmp_path
    )
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(trees[1] / "src"), str(trees[1])]


def test_the_interpreter_of_a_script_is_the_one_that_its_first_lines_name(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "direct": f"#!{tmp_path}/bin/python3\n",
            "long": f"#!/bin/sh\n'''exec' {tmp_path}/bin/python3 \"$0\" \"$@\"\n' '''\n",
            "env": "#!/usr/bin/env python3\n",
            "shell": "#!/bin/sh\nexec train\n",
            "bin/python": "",
            "bin/python3": "",
        },
    )
    for name in ("python", "python3"):
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": str(tmp_path / "bin")}
    assert interpreter("/x/python3.10", variables) == "/x/python3.10"
    found = {name: interpreter(str(tmp_path / name), variables) for name in ("direct", "long", "env", "shell")}
    assert found == {
        "direct": str(tmp_path / "bin" / "python3"),
        "long": str(tmp_path / "bin" / "python3"),
        "env": str(tmp_path / "bin" / "python3"),
        "shell": str(tmp_path / "bin" / "python"),
    }


def test_the_innermost_tree_owns_a_file(tmp_path: Path) -> None:
    outer, inner = tmp_path / "repo", tmp_path / "repo" / "out" / "tree"
    assert owner(inner / "a.py", [outer, inner]) == inner
    assert owner(outer / "a.py", [outer, inner]) == outer
    assert owner(tmp_path / "repository" / "a.py", [outer, inner]) is None


def capture_of(*files: Path, code: str = "aaaa") -> Any:
    capture = synthetic_run("base-0", steps=(1,), layers=1)
    provenance = {"code": {"hash": code, "files": {str(file): "1" for file in files}}}
    capture.manifest["provenance"].update(provenance)  # type: ignore[index]
    return capture


def test_a_run_that_imported_its_own_tree_is_believed(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    tree = Tree(arm="baseline", root=own)
    prove(capture_of(own / "train.py", tmp_path / "shared" / "tools.py"), tree, [own, other])


def test_a_file_of_another_tree_is_named_with_where_it_should_have_come_from(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    files = [own / "train.py", other / "pkg" / "model.py", other / "pkg" / "ops.py"]
    with pytest.raises(CaptureError) as error:
        prove(capture_of(*files), Tree(arm="candidate", root=own), [own, other])
    assert str(error.value) == (
        f"The candidate imported {other}/pkg/model.py from another tree, and should have imported {own}/pkg/model.py. "
        "2 of 3 files did. An absolute path in the command leads there, or an editable install that goes before "
        "PYTHONPATH. Write paths relative to the tree, and uninstall the package or install it where each arm can "
        "import its own."
    )


def test_a_run_that_imported_nothing_of_its_tree_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as error:
        prove(capture_of(tmp_path / "x.py"), Tree(arm="baseline", root=tmp_path / "own"), [tmp_path / "own"])
    assert str(error.value) == (
        f"The baseline imported no file of its tree {tmp_path}/own; it imported {tmp_path}/x.py. What runs is "
        "installed, or is named by an absolute path. Name a script or package of the tree in the command, or install "
        "the package as editable."
    )


def test_a_folder_that_was_edited_between_two_runs_is_noticed(tmp_path: Path) -> None:
    tree = Tree(arm="candidate", root=tmp_path)
    require_one_code(capture_of(code="a"), capture_of(code="a"), tree)
    with pytest.raises(CaptureError) as error:
        require_one_code(capture_of(code="a"), capture_of(code="b"), tree)
    assert str(error.value) == (
        f"The candidate's tree {tmp_path} was edited between its runs base-0 and base-0. Start over with --force."
    )
