"""Steps and globs."""

from __future__ import annotations

import re

import pytest

from probe.errors import PlanError
from probe.point import Key, Kind
from probe.selection import StepSet, glob_pattern, matches, nearest, parse_steps, patterns_by_kind, split_kind


@pytest.mark.parametrize(
    ("text", "ranges", "again"),
    [
        ("1", ((1, 1),), "1"),
        ("1-5,10", ((1, 5), (10, 10)), "1-5,10"),
        (" 10 , 1 - 5 ", ((1, 5), (10, 10)), "1-5,10"),
        ("10-", ((10, None),), "10-"),
        ("1-3,3-4,5", ((1, 5),), "1-5"),
        ("4-,2,9-12", ((2, 2), (4, None)), "2,4-"),
        ("1-9,3", ((1, 9),), "1-9"),
    ],
)
def test_steps_are_read_sorted_and_joined(text: str, ranges: tuple[tuple[int, int | None], ...], again: str) -> None:
    steps = parse_steps(text)
    assert (steps, str(steps)) == (StepSet(ranges), again)
    assert parse_steps(again) == steps


def test_a_step_set_holds_its_steps_and_no_others() -> None:
    assert [step for step in range(15) if step in parse_steps("2-4,10-")] == [2, 3, 4, 10, 11, 12, 13, 14]
    assert [parse_steps(text).last for text in ("1-5,10", "3-")] == [10, None]


HOW = " Write numbers and ranges such as '1-5,10' or '10-'; the first step is 1."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Steps '' cannot be read at ''." + HOW),
        (
            "1-5,x",
            "Steps '1-5,x' cannot be read at 'x'." + HOW,
        ),
        (
            "-3",
            "Steps '-3' cannot be read at '-3'." + HOW,
        ),
        ("0-3", "Steps '0-3' cannot be used at '0-3': steps count from 1."),
        ("1,5-3", "Steps '1,5-3' cannot be used at '5-3': 3 comes before 5."),
    ],
)
def test_wrong_steps_are_refused_with_the_part_that_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        parse_steps(text)


@pytest.mark.parametrize(
    ("glob", "name", "fits"),
    [
        ("blocks.*", "blocks.3.attn", True),
        ("blocks.#", "blocks.31", True),
        ("blocks.#", "blocks.3.attn", False),
        ("BLOCKS.?", "blocks.3", True),
        ("blocks.3.attn[0]", "blocks.3.attn[0]", True),
        ("blocks.3.attn[0]", "blocks.3.attn0", False),
        ("(root)", "(root)", True),
        ("(root)", "root", False),
        ("*a+b*", "xa+b", True),
        ("*", "two\nlines", True),
    ],
)
def test_a_glob_matches_whole_names_with_plain_brackets(glob: str, name: str, fits: bool) -> None:
    assert bool(glob_pattern((glob,)).fullmatch(name)) is fits


def test_a_selection_may_start_with_a_kind() -> None:
    assert split_kind("forward/blocks.*") == (Kind.FORWARD, "blocks.*")
    assert split_kind("explicit/loss/video") == (Kind.EXPLICIT, "loss/video")
    assert split_kind("*/x") == (None, "x")
    assert split_kind("x.*") == (None, "x.*")


def test_selections_match_by_name_or_by_name_with_item() -> None:
    patterns = patterns_by_kind(("param/*:before", "forward/attn", "forward/*[1]"))
    assert matches(patterns[Kind.PARAM], "w", "before")
    assert not matches(patterns[Kind.PARAM], "w", "")
    assert matches(patterns[Kind.FORWARD], "attn", "[0]")
    assert matches(patterns[Kind.FORWARD], "mlp", "[1]")
    assert not matches(patterns[Kind.FORWARD], "mlp", "[0]")
    assert patterns[Kind.LOSS] is None


def test_every_label_that_is_shown_selects_its_quantity_and_no_other_item_of_it() -> None:
    items = ("", "[0]", ".q", "(result)", "(gradient)[1]", "before")
    keys = [Key(kind=Kind.CALL, name="blocks.0.attention", item=item) for item in items]
    for key in keys:
        pattern = patterns_by_kind((key.label,))[Kind.CALL]
        found = [each.item for each in keys if matches(pattern, each.name, each.item)]
        assert found == (list(items) if not key.item else [key.item])


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("", "A selection is empty. Write '*' to select everything."),
        (
            "foward/x",
            "Selection 'foward/x' starts with 'foward', which is no kind. Did you mean 'forward'? Allowed: backward, "
            "batch, call, explicit, forward, grad, grad_norm, loss, lr, param, state.",
        ),
        ("grad/", "Selection 'grad/' names no quantity. Write 'grad/*' to select the whole kind."),
        (
            "blocks.[0-9].attn",
            "Selection 'blocks.[0-9].attn' has a character class. Brackets are plain text here; "
            "write '#' for a number, '?' for one character, '*' for any text.",
        ),
    ],
)
def test_wrong_selections_are_refused(selection: str, message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        split_kind(selection)


def test_the_nearest_word_is_offered_only_when_it_is_near() -> None:
    assert nearest("stps", ("steps", "kinds")) == " Did you mean 'steps'? Allowed: kinds, steps."
    assert nearest("zzz", ("steps", "kinds")) == " Allowed: kinds, steps."
