from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from step_rows import make_capture

from probe import cli
from probe.errors import CaptureError
from probe.store.pack import pack
from probe.store.prune import Found, choose, delete, find_captures
from probe.store.reader import open_capture

NOW = 1_800_000_000.0
DAY = 86400.0


def aged(path: Path, days: float, *, closed: bool = True) -> Path:
    make_capture(path, (1,), closed=closed)
    for each in path.rglob("*"):
        os.utime(each, (NOW - days * DAY, NOW - days * DAY), follow_symlinks=False)
    return path


def names(found: list[Found]) -> list[str]:
    return [each.path.name for each in found]


def test_captures_are_found_at_any_depth_oldest_first(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    aged(tmp_path / "new", 1)
    aged(tmp_path / "demo/old", 40)
    aged(tmp_path / "middle", 10)
    found = find_captures(tmp_path, NOW)
    assert [(each.path.name, round(each.age_s / DAY)) for each in found] == [("old", 40), ("middle", 10), ("new", 1)]
    assert found[0].nbytes == sum(f.stat().st_size for f in (tmp_path / "demo/old").rglob("*") if f.is_file())
    assert {each.kept_for for each in found} == {""}


def test_what_is_no_capture_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/capture.json").write_text('{"format": "something else"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/capture.json").write_text("{")
    outside = aged(tmp_path.parent / f"{tmp_path.name}-outside", 90)
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "data.bin").write_bytes(b"x")
    assert find_captures(tmp_path, NOW) == []


def test_captures_are_chosen_by_age_and_by_room(tmp_path: Path) -> None:
    sizes = [
        Found(path=Path(name), nbytes=100, age_s=age, kept_for=why)
        for name, age, why in (("a", 50.0, ""), ("b", 40.0, "it holds a note"), ("c", 30.0, ""), ("d", 20.0, ""))
    ]
    assert names(choose(sizes, older_than_s=25, keep_nbytes=None)) == ["a", "c"]
    assert names(choose(sizes, older_than_s=None, keep_nbytes=400)) == []
    assert names(choose(sizes, older_than_s=None, keep_nbytes=399)) == ["a"]
    assert names(choose(sizes, older_than_s=None, keep_nbytes=250)) == ["a", "c"]
    assert names(choose(sizes, older_than_s=45, keep_nbytes=300)) == ["a"]
    assert names(choose(sizes, older_than_s=None, keep_nbytes=0)) == ["a", "c", "d"]


def test_a_capture_with_anything_else_in_it_is_kept(tmp_path: Path) -> None:
    path = aged(tmp_path / "c", 90)
    (path / "rank00000/figure.png").write_bytes(b"x")
    os.utime(path / "rank00000/figure.png", (NOW - 90 * DAY, NOW - 90 * DAY))
    (found,) = find_captures(tmp_path, NOW)
    assert found.kept_for == "it holds what is no part of a capture: rank00000/figure.png"
    assert choose([found], older_than_s=0, keep_nbytes=0) == []
    message = f"Capture {path} is not deleted: it holds what is no part of one: rank00000/figure.png."
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        delete(found)


def test_a_capture_that_may_still_be_recorded_is_kept_for_a_day(tmp_path: Path) -> None:
    aged(tmp_path / "running", 0.5, closed=False)
    aged(tmp_path / "killed", 1.5, closed=False)
    killed, running = find_captures(tmp_path, NOW)
    assert killed.kept_for == ""
    assert running.kept_for == "it may still be recorded: a rank has no end and was written to within a day"


def test_a_deleted_capture_leaves_nothing_packed_or_not(tmp_path: Path) -> None:
    path = aged(tmp_path / "c", 90)
    list(pack(open_capture(path)))
    (found,) = find_captures(tmp_path, NOW)
    delete(found)
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_leaves_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = aged(tmp_path / "c", 90)
    (found,) = find_captures(tmp_path, NOW)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            delete(found)
    assert os.listdir(path) == ["capture.json"]
    delete(find_captures(tmp_path, NOW)[0])
    assert not path.exists()


def test_what_cannot_be_deleted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = aged(tmp_path / "c", 90)
    (found,) = find_captures(tmp_path, NOW)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shutil.rmtree", refused)
    message = f"Capture {path} could not be deleted: Permission denied."
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        delete(found)


@pytest.mark.parametrize("what", ["does not exist", "is a file"])
def test_a_folder_that_is_none_is_named(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "is a file":
        path.write_text("")
    message = f"Folder {path} {what}. Name the folder that holds captures."
    with pytest.raises(CaptureError, match=f"^{re.escape(message)}$"):
        find_captures(path, NOW)


def prune(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.setattr("time.time", lambda: NOW)
    return CliRunner().invoke(cli.main, ["prune", *arguments], standalone_mode=False)


def test_the_command_deletes_only_when_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = aged(tmp_path / "old", 40), aged(tmp_path / "new", 2)
    other = aged(tmp_path / "other", 50)
    (other / "note").write_text("mine")
    os.utime(other / "note", (NOW - 50 * DAY, NOW - 50 * DAY))
    printed = prune(monkeypatch, str(tmp_path), "--older-than", "30d").output.splitlines()
    assert printed[0] == f"kept {other}: it holds what is no part of a capture: note"
    assert re.fullmatch(rf"would delete {old}: [\d.]+ kB, last written 40\.0 days ago", printed[1])
    assert re.fullmatch(
        r"Would delete 1 capture of 3, [\d.]+ kB of [\d.]+ kB\. Nothing was deleted; --yes deletes\.", printed[2]
    )
    assert old.exists()
    printed = prune(monkeypatch, str(tmp_path), "--older-than", "30d", "--yes").output.splitlines()
    assert printed[1].startswith(f"deleted {old}: ")
    assert printed[2].startswith("Deleted 1 capture of 3, ")
    assert (old.exists(), new.exists(), other.exists()) == (False, True, True)
    assert "would delete" in prune(monkeypatch, str(tmp_path), "--keep", "1K").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Nothing says which captures to delete. Give --older-than AGE, --keep SIZE, or both."),
        (
            ("--older-than", "30"),
            "Invalid value for '--older-than': '30' is no age. Write hours, days or weeks, such as '36h', '30d' or "
            "'8w'.",
        ),
        (("--keep", "lots"), "Invalid value for '--keep': 'lots' is no size. Write bytes, such as '500M' or '20GB'."),
    ],
)
def test_wrong_arguments_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert cli.status_of(["prune", str(tmp_path), *arguments]) == 2
    assert capsys.readouterr().err == f"{message}\nSee 'probe prune -h'.\n"
