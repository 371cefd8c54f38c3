"""The tolerance file."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probe.errors import ToleranceError
from probe.judge.tolerance import (
    ALL_JUDGED,
    CalibratedRun,
    Tolerance,
    Tolerances,
    dump,
    load,
    parse,
    round_up,
    save,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

MEMBER = Tolerance(
    spread=(1e-07, 2e-07, 2e-07),
    floor=(9.54e-07, 9.54e-07, 9.54e-07),
    tolerance=(9.54e-07, 9.54e-07, 9.54e-07),
    control=1.4,
    horizon=2,
)
ODD = 'forward/we"ird\\name\x1b[0]#2'
TOLERANCES = Tolerances(
    k=3.0,
    created_utc="2026-01-01T00:00:00Z",
    steps=(1, 2, 3),
    world_size=2,
    runs=(
        CalibratedRun(run_id="a", path="base-0", created_utc="now", command="python train.py", commit="abc", code="c0"),
        CalibratedRun(run_id="b", path="ulp-1", perturb="ulp:1"),
    ),
    families={
        "attention outputs": {"forward/blocks.0.attn": MEMBER, ODD: replace(MEMBER, horizon=ALL_JUDGED)},
        "parameters": {"param/w": replace(MEMBER, flip=(0.1, 0.1, 0.1), control=math.inf, mark="weak")},
    },
    assumed=False,
    repeatable=True,
    self_test={"step shift": "different", "rank rotation": "not run"},
    notes=("One note.",),
)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "new" / "job.toml"
    save(TOLERANCES, file)
    assert load(file) == TOLERANCES
    assert list(tmp_path.rglob("*.tmp")) == []


def test_one_series_is_one_line_with_the_repeated_numbers_left_out() -> None:
    lines = dump(TOLERANCES).splitlines()
    assert (
        '"forward/blocks.0.attn" = { spread = [1e-07, 2e-07], floor = [9.54e-07], tolerance = [9.54e-07], '
        "control = 1.4, horizon = 2 }"
    ) in lines
    assert '[families."attention outputs"]' in lines
    assert "smallest_tolerance = 9.54e-07" in lines


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_numbers_are_rounded_upward_by_less_than_one_percent(value: float) -> None:
    rounded = round_up(value)
    assert value <= rounded <= value * 1.0101
    assert round_up(rounded) == rounded


def edited(old: str, new: str) -> dict[str, object]:
    text = dump(TOLERANCES)
    assert old in text
    return tomllib.loads(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "version = 1",
            "version = 2",
            "Key 'version' is 2, and this probe reads version 1. Calibrate again.",
        ),
        (
            'format = "probe-tolerances"',
            'format = "other"',
            "Key 'format' is 'other', and must be 'probe-tolerances'. Give a file that `probe calibrate` wrote.",
        ),
        ("k = 3.0", "k = -3.0", "Key 'k' of the file is -3.0. Allowed: finite numbers above 0."),
        ("k = 3.0", "k = nan", "Key 'k' of the file is nan. Allowed: finite numbers above 0."),
        ("steps = [1, 2, 3]", "steps = [1, 3, 2]", "Key 'steps' is [1, 3, 2]. It must be ascending and not empty."),
        (
            "spread = [1e-07, 2e-07]",
            "spread = [1e-07, -2e-07]",
            "Key 'spread' of series 'forward/blocks.0.attn' has -2e-07. Allowed: finite numbers from 0 up.",
        ),
        (
            "tolerance = [9.54e-07], control",
            "tolerance = [nan], control",
            "Key 'tolerance' of series 'forward/blocks.0.attn' has nan. Allowed: finite numbers from 0 up.",
        ),
        (
            "spread = [1e-07, 2e-07]",
            "spread = [1e-07, 2e-07, 3e-07, 4e-07]",
            "Key 'spread' of series 'forward/blocks.0.attn' has 4 numbers, and there are 3 steps.",
        ),
        (
            "horizon = 2",
            "horison = 2",
            "Key 'horison' of series 'forward/blocks.0.attn' is unknown. "
            "Allowed: control, flip, floor, horizon, mark, spread, tolerance.",
        ),
        (
            "horizon = 2",
            "horizon = -1",
            "Key 'horizon' of series 'forward/blocks.0.attn' is -1. Allowed: a step, or 0 for none.",
        ),
        (
            'mark = "weak"',
            'mark = "strong"',
            "Series 'param/w' cannot be used. The mark is 'strong'. Allowed: '', 'weak', 'vacuous', 'insensitive'.",
        ),
        (
            "world_size = 2",
            "world_sise = 2",
            "Key 'world_sise' of the file is unknown. Allowed: assumed, created, declared, families, format, k, notes, "
            "repeatable, runs, self_test, steps, version, world_size.",
        ),
    ],
)
def test_what_no_tolerance_file_can_hold_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(ToleranceError) as raised:
        parse(edited(old, new))
    assert str(raised.value) == message


def test_the_file_is_named_in_every_message(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    with pytest.raises(ToleranceError) as absent:
        load(file)
    file.write_text("k = ")
    with pytest.raises(ToleranceError) as broken:
        load(file)
    file.write_text('format = "x"')
    with pytest.raises(ToleranceError) as other:
        load(file)
    assert (
        str(absent.value) == f"Tolerance file {str(file)!r} cannot be read: No such file or directory. Check the path."
    )
    assert str(broken.value).startswith(f"Tolerance file {str(file)!r} is not valid TOML: ")
    assert str(broken.value).endswith(" Restore it, or calibrate again.")
    assert str(other.value) == (
        f"Tolerance file {str(file)!r} cannot be used. Key 'format' is 'x', and must be 'probe-tolerances'. "
        "Give a file that `probe calibrate` wrote."
    )


def test_a_tolerance_that_cannot_be_is_refused_when_it_is_made() -> None:
    with pytest.raises(ToleranceError) as negative:
        Tolerance(spread=(1.0,), floor=(-1.0,), tolerance=(1.0,))
    with pytest.raises(ToleranceError) as uneven:
        Tolerance(spread=(1.0, 1.0), floor=(1.0,), tolerance=(1.0, 1.0))
    assert str(negative.value) == "The floor is -1.0. It must be a finite number, not negative. Calibrate again."
    assert str(uneven.value) == (
        "The spread, floor and tolerance have 2, 1 and 2 steps. They must have the same number."
    )


def test_reading_costs_far_less_than_the_same_numbers_as_separate_tables(tmp_path: Path) -> None:
    """700 series must read fast; the ratio to a file with one table per series is a bound that holds on any machine."""
    members = {f"forward/blocks.{n}.attn": MEMBER for n in range(700)}
    save(replace(TOLERANCES, families={"attention outputs": members}), tmp_path / "lines.toml")
    text = "".join(
        f"[m{n}.spread]\nvalues = {[1e-07 * i for i in range(1, 31)]}\n[m{n}.floor]\nvalues = {[1e-6] * 30}\n"
        for n in range(700)
    )
    start = time.perf_counter()
    load(tmp_path / "lines.toml")
    middle = time.perf_counter()
    tomllib.loads(text)
    assert middle - start < time.perf_counter() - middle
