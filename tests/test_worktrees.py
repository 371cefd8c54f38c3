"""Trees for the two arms: folders, worktrees of revisions, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from git_repos import commit, git, repository

from probe.errors import CaptureError
from probe.protocol.worktrees import (
    Source,
    Tree,
    checkout_of,
    files_between,
    find_source,
    make_tree,
    restore,
    submodules,
)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    return repository(tmp_path / "repo", {"train.py": "x = 1\n", "sub/deep.py": "y = 1\n"})


def test_a_revision_is_its_commit_and_a_folder_is_its_path(repo: Path, tmp_path: Path) -> None:
    head = git(repo, "rev-parse", "HEAD")
    (tmp_path / "copy").mkdir()
    assert find_source("baseline", "main", here=repo) == Source(arm="baseline", named="main", folder=None, commit=head)
    assert find_source("candidate", "../copy", here=repo) == Source(
        arm="candidate", named="../copy", folder=tmp_path / "copy"
    )


def test_a_dot_inside_a_checkout_means_the_checkout(repo: Path) -> None:
    assert find_source("candidate", ".", here=repo / "sub").folder == repo
    assert find_source("candidate", "sub", here=repo).folder == repo / "sub"


def test_what_is_neither_folder_nor_revision_is_refused(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as error:
        find_source("candidate", "mian", here=repo)
    assert str(error.value) == (
        f"The candidate 'mian' is no folder and no revision of the repository {repo}. Check its spelling."
    )
    with pytest.raises(CaptureError) as error:
        find_source("candidate", "main", here=tmp_path)
    assert str(error.value) == (
        f"The candidate 'main' is no folder and no revision: {tmp_path} is in no repository. Check its spelling."
    )


def test_a_name_that_is_both_a_folder_and_a_revision_is_refused(repo: Path) -> None:
    (repo / "main").mkdir()
    with pytest.raises(CaptureError) as error:
        find_source("baseline", "main", here=repo)
    head = git(repo, "rev-parse", "HEAD")[:12]
    assert str(error.value) == (
        "The baseline 'main' is both a folder and a revision. Write './main' for the folder, or the commit "
        f"{head} for the revision."
    )
    assert find_source("baseline", "./main", here=repo).folder == repo / "main"


@pytest.mark.parametrize("named", ["HEAD", "main", "base"])
def test_a_revision_that_is_checked_out_with_changes_is_refused_and_the_files_are_named(repo: Path, named: str) -> None:
    (repo / "train.py").write_text("x = 2\n")
    (repo / "sub" / "deep.py").write_text("y = 2\n")
    head = git(repo, "rev-parse", "HEAD")[:12]
    with pytest.raises(CaptureError) as error:
        find_source("candidate", named, here=repo / "sub")
    assert str(error.value) == (
        f"The candidate {named!r} ({head}) is checked out in {repo} with uncommitted changes in 2 files: "
        f"sub/deep.py, train.py. The revision does not hold them. Commit them, or name the folder {repo} to run what "
        "is there."
    )


def test_changes_do_not_matter_to_a_revision_that_is_not_checked_out(repo: Path) -> None:
    commit(repo, "later", {"train.py": "x = 2\n"})
    (repo / "train.py").write_text("x = 3\n")
    assert find_source("baseline", "base", here=repo).commit == git(repo, "rev-parse", "base")
    (repo / "scratch.txt").write_text("under no control")
    git(repo, "checkout", "--quiet", "train.py")
    assert find_source("candidate", "later", here=repo).commit == git(repo, "rev-parse", "later")


def test_a_worktree_is_made_at_the_commit_and_found_again(repo: Path, tmp_path: Path) -> None:
    commit(repo, "later", {"train.py": "x = 2\n"})
    source, place = find_source("baseline", "base", here=repo), tmp_path / "out" / "baseline"
    tree = make_tree(source, place, here=repo)
    assert tree == Tree(arm="baseline", root=place, commit=source.commit)
    assert (place / "train.py").read_text() == "x = 1\n"
    assert checkout_of(place / "sub") == place
    (place / "kept.txt").write_text("")
    assert make_tree(source, place, here=repo) == tree
    assert (place / "kept.txt").exists()
    other = make_tree(find_source("baseline", "later", here=repo), place, here=repo)
    assert (other.commit, (place / "train.py").read_text()) == (git(repo, "rev-parse", "later"), "x = 2\n")


def test_a_worktree_that_was_deleted_by_hand_is_made_again(repo: Path, tmp_path: Path) -> None:
    import shutil

    source, place = find_source("baseline", "base", here=repo), tmp_path / "baseline"
    make_tree(source, place, here=repo)
    shutil.rmtree(place)
    make_tree(source, place, here=repo)
    assert (place / "train.py").exists()


def test_a_folder_that_is_no_worktree_is_not_touched(repo: Path, tmp_path: Path) -> None:
    place = tmp_path / "baseline"
    place.mkdir()
    (place / "mine").write_text("")
    with pytest.raises(CaptureError) as error:
        make_tree(find_source("baseline", "base", here=repo), place, here=repo)
    assert str(error.value) == (
        f"Folder {place} is no worktree of this repository. Move it away, or choose another -o."
    )
    assert (place / "mine").exists()


def test_each_run_finds_its_worktree_as_committed(repo: Path, tmp_path: Path) -> None:
    tree = make_tree(find_source("baseline", "base", here=repo), tmp_path / "baseline", here=repo)
    (tree.root / "train.py").write_text("x = 9\n")
    (tree.root / "checkpoints").mkdir()
    (tree.root / "checkpoints" / "last.pt").write_text("resume from here")
    restore(tree)
    assert sorted(path.name for path in tree.root.iterdir()) == [".git", "sub", "train.py"]
    assert (tree.root / "train.py").read_text() == "x = 1\n"


def test_a_folder_that_the_user_gave_is_never_cleaned(repo: Path) -> None:
    (repo / "train.py").write_text("x = 9\n")
    restore(Tree(arm="candidate", root=repo))
    assert (repo / "train.py").read_text() == "x = 9\n"


def test_a_worktree_without_its_git_file_is_not_cleaned_as_if_it_were_the_outer_checkout(repo: Path) -> None:
    tree = make_tree(find_source("baseline", "base", here=repo), repo / "out" / "baseline", here=repo)
    (tree.root / ".git").unlink()
    (repo / "untracked").write_text("mine")
    with pytest.raises(CaptureError) as error:
        restore(tree)
    assert str(error.value) == f"Folder {tree.root} is no longer a worktree. Start over with --force."
    assert (repo / "untracked").exists()


def test_data_that_git_does_not_hold_is_linked(repo: Path, tmp_path: Path) -> None:
    (repo / "data").mkdir()
    (repo / "data" / "one").write_text("1")
    tree = make_tree(find_source("baseline", "base", here=repo), tmp_path / "baseline", here=repo)
    for _ in range(2):
        restore(tree, links=(repo / "data",), origin=repo)
        assert (tree.root / "data" / "one").read_text() == "1"
    assert (repo / "data" / "one").exists()
    for link, message in (
        (
            repo / "none",
            f"Link {repo / 'none'} cannot be made: it is nothing in the checkout {repo}. Check its spelling.",
        ),
        (
            repo / "train.py",
            f"Link {tree.root / 'train.py'} cannot be made: {tree.commit[:12]} holds a file of that name. Omit it.",
        ),
    ):
        with pytest.raises(CaptureError) as error:
            restore(tree, links=(link,), origin=repo)
        assert str(error.value) == message


def test_submodules_of_a_worktree_are_told(repo: Path, tmp_path: Path) -> None:
    tree = make_tree(find_source("baseline", "base", here=repo), tmp_path / "baseline", here=repo)
    assert submodules(tree) == []
    git(repo, "update-index", "--add", "--cacheinfo", f"160000,{tree.commit},vendor/lib")
    git(repo, "commit", "--quiet", "-m", "module")
    git(repo, "tag", "module")
    git(repo, "reset", "--quiet", "--hard")
    other = make_tree(find_source("candidate", "module", here=repo), tmp_path / "candidate", here=repo)
    assert submodules(other) == ["vendor/lib"]


def test_the_files_in_which_two_revisions_differ_are_listed(repo: Path) -> None:
    commit(repo, "later", {"config.yaml": "lr: 1\n", "train.py": "x = 2\n"})
    one, two = (find_source("baseline", name, here=repo) for name in ("base", "later"))
    assert files_between(repo, one, two) == ["config.yaml", "train.py"]
    assert files_between(repo, one, find_source("candidate", "./sub", here=repo)) == []
