"""Plans and plan files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from probe.check import Check, default_checks
from probe.errors import PlanError
from probe.plan import Plan, default_plan, load_plan, plan_from_dict
from probe.point import Kind
from probe.selection import ALL_STEPS, parse_steps

FILE = """
[record]
kinds = ["forward", "grad", "loss"]
include = ["forward/blocks.*"]
exclude = ["*.norm?"]
full = ["forward/blocks.3.attn"]
steps = "1-5,10"

[[check]]
what = "loss"
where = "return of compute_loss"
select = "loss/*"
form = "rel or abs"
rel = 0.15
abs = 0.03

[[check]]
what = "tail gradients"
kinds = "grad"
select = ["*blocks.4?.*"]
leaf = "lora_B"
steps = 1
k = 5
required = false

[[check]]
what = "blow-up"
select = "grad/*"
form = "ratio"
ratio = 20
steps = "2-"

[[check]]
what = "windows"
select = "loss/*"
metric = "value"
window = 50
over_ranks = "mean"
form = "abs"
abs = 0.1

[[check]]
what = "samples"
select = "explicit/logits"
metric = ["sample", "l2"]
form = "exact"

[[check]]
what = "counts"
select = "grad/*"
reduce = "count"
form = "exact"
"""


def plan_file(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plan_file_becomes_a_plan_with_its_checks_before_the_defaults(tmp_path: Path) -> None:
    assert load_plan(plan_file(tmp_path, FILE)) == Plan(
        kinds=(Kind.FORWARD, Kind.GRAD, Kind.LOSS),
        include=("forward/blocks.*",),
        exclude=("*.norm?",),
        full=("forward/blocks.3.attn",),
        steps=parse_steps("1-5,10"),
        checks=(
            Check(
                what="loss",
                where="return of compute_loss",
                form="rel or abs",
                required=True,
                select=("loss/*",),
                rel=0.15,
                abs=0.03,
            ),
            Check(
                what="tail gradients",
                where="*blocks.4?.*",
                kinds=(Kind.GRAD,),
                select=("*blocks.4?.*",),
                leaf=("lora_B",),
                k=5.0,
                steps=parse_steps("1"),
            ),
            Check(
                what="blow-up",
                where="grad/*",
                form="ratio",
                required=True,
                select=("grad/*",),
                ratio=20.0,
                steps=parse_steps("2-"),
            ),
            Check(
                what="windows",
                where="loss/*",
                form="abs",
                required=True,
                select=("loss/*",),
                abs=0.1,
                metric=("value",),
                window=50,
                over_ranks="mean",
            ),
            Check(
                what="samples",
                where="explicit/logits",
                form="exact",
                required=True,
                select=("explicit/logits",),
                metric=("sample", "l2"),
            ),
            Check(what="counts", where="grad/*", form="exact", required=True, select=("grad/*",), reduce="count"),
            *default_checks(),
        ),
    )


def test_an_empty_plan_file_is_the_default_plan(tmp_path: Path) -> None:
    assert load_plan(plan_file(tmp_path, "")) == default_plan()
    assert default_plan() == Plan(kinds=tuple(Kind), steps=ALL_STEPS, checks=default_checks())


def test_the_default_checks_can_be_left_out(tmp_path: Path) -> None:
    text = 'default_checks = false\n[[check]]\nwhat = "all"\nform = "record only"\n'
    assert load_plan(plan_file(tmp_path, text)).checks == (Check(what="all", where="*", form="record only"),)


@pytest.mark.parametrize("form", ["calibrated", "exact", "record only"])
def test_forms_without_bounds_need_none(form: str) -> None:
    entry = {"what": "x", "form": form}
    assert plan_from_dict({"check": [entry], "default_checks": False}).checks[0].form == form


def test_a_plan_survives_json(tmp_path: Path) -> None:
    for plan in (default_plan(), load_plan(plan_file(tmp_path, FILE))):
        assert plan_from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_a_kind_that_no_include_names_is_recorded_whole() -> None:
    plan = Plan(kinds=(Kind.FORWARD, Kind.GRAD), include=("forward/blocks.*",), exclude=("*.norm?", "grad/*bias"))
    asked = [
        (Kind.FORWARD, "blocks.0.attn"),
        (Kind.FORWARD, "head"),
        (Kind.FORWARD, "blocks.0.norm1"),
        (Kind.GRAD, "head.weight"),
        (Kind.GRAD, "head.bias"),
        (Kind.LOSS, "micro_loss"),
    ]
    assert [plan.records(kind, name) for kind, name in asked] == [True, False, False, True, False, False]


def test_full_tensors_are_named_by_selection() -> None:
    plan = default_plan().narrowed(steps="2", full=["forward/blocks.#.attn"])
    assert plan.steps == parse_steps("2")
    assert [
        plan.keeps(Kind.FORWARD, "blocks.3.attn"),
        plan.keeps(Kind.FORWARD, "blocks.3.attn", "[0]"),
        plan.keeps(Kind.BACKWARD, "blocks.3.attn"),
        default_plan().keeps(Kind.FORWARD, "blocks.3.attn"),
    ] == [True, True, False, False]


def test_a_command_line_without_steps_leaves_the_plan_its_steps() -> None:
    assert Plan(steps=parse_steps("7")).narrowed().steps == parse_steps("7")


KINDS = "backward, batch, call, explicit, forward, grad, grad_norm, loss, lr, param, state"
CHECK_KEYS = (
    "abs, form, k, kinds, leaf, metric, over_ranks, ratio, reduce, rel, required, select, steps, what, where, window, "
    "without"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "recrod = 1",
            "Key 'recrod' of the plan is unknown. Did you mean 'record'? Allowed: check, default_checks, record.",
        ),
        (
            "[record]\nstep = '1'",
            "Key 'step' of [record] is unknown. Did you mean 'steps'? "
            "Allowed: calls, exclude, full, include, inside_compiled, kinds, steps, steps_per_file.",
        ),
        (
            "[record]\ncalls = ['model.attention']",
            "Key 'calls' of [record] has 'model.attention', which is no import path of a function. "
            "Write 'package.module:function' or 'package.module:Class.method'.",
        ),
        (
            "[record.calls]\nattention = 3",
            "Key 'calls' of [record] has 3, which is no import path of a function. "
            "Write 'package.module:function' or 'package.module:Class.method'.",
        ),
        (
            "[record.calls]\n'' = 'a:b'",
            "Key 'calls' of [record] has an empty name for 'a:b'. Give the function a name.",
        ),
        (
            "[record]\ncalls = 3",
            "Key 'calls' of [record] is 3 (a number), not text or a list of texts.",
        ),
        (
            "[record]\ninside_compiled = ['frward/x']",
            "Key 'inside_compiled' of [record] cannot be used. Selection 'frward/x' starts with 'frward', which is no "
            "kind. Did you mean 'forward'? Allowed: " + ", ".join(sorted(kind.value for kind in Kind)) + ".",
        ),
        (
            "[[check]]\nwhat = 'a'\n[[check]]\nwhat = 'b'\nselct = '*'",
            f"Key 'selct' of [[check]] 2 is unknown. Did you mean 'select'? Allowed: {CHECK_KEYS}.",
        ),
        (
            "[[check]]\nwhat = 'a'\nwindow = 0.5",
            "Key 'window' of [[check]] 1 ('a') is 0.5 (a number), not a whole number.",
        ),
        (
            "[[check]]\nwhat = 'a'\nmetric = 3",
            "Key 'metric' of [[check]] 1 ('a') is 3 (a number), not text or a list of texts.",
        ),
        ("record = 3", "Key 'record' of the plan is 3 (a number), not a table."),
        ("check = 'x'", "Key 'check' of the plan is 'x' (text), not a list of tables. Write [[check]]."),
        ("default_checks = 1", "Key 'default_checks' of the plan is 1 (a number), not true or false."),
        ("[record]\nkinds = []", f"Key 'kinds' of [record] is empty, so nothing would be recorded. Allowed: {KINDS}."),
        (
            "[record]\nkinds = ['forwards']",
            f"Key 'kinds' of [record] has 'forwards', which is no kind. Did you mean 'forward'? Allowed: {KINDS}.",
        ),
        ("[record]\nfull = [1]", "Key 'full' of [record] is [1] (a list), not text or a list of texts."),
        (
            "[record]\ninclude = ['']",
            "Key 'include' of [record] cannot be used. A selection is empty. Write '*' to select everything.",
        ),
        ("[record]\nsteps = true", "Key 'steps' of [record] is True (a truth value), not text such as '1-5,10'."),
        (
            "[record]\nsteps = '5-1'",
            "Key 'steps' of [record] cannot be used. Steps '5-1' cannot be used at '5-1': 1 comes before 5.",
        ),
        ("[[check]]\nform = 'exact'", "Key 'what' of [[check]] 1 is missing. It names the row of the table."),
        (
            "[[check]]\nwhat = 'a'\nform = 'rel'\nrel = '2 %'",
            "Key 'rel' of [[check]] 1 ('a') is '2 %' (text), not a number.",
        ),
        (
            "[[check]]\nwhat = 'a'\nselect = 'blocks.[0-9]'",
            "Key 'select' of [[check]] 1 ('a') cannot be used. Selection 'blocks.[0-9]' has a character class. "
            "Brackets are plain text here; write '#' for a number, '?' for one character, '*' for any text.",
        ),
    ],
)
def test_a_wrong_plan_file_names_key_place_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    path = plan_file(tmp_path, text)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert [str(caught.value), *caught.value.__notes__] == [message, f"The plan is {str(path)!r}."]


def test_a_wrong_check_also_says_which_entry_it_is(tmp_path: Path) -> None:
    path = plan_file(tmp_path, "[[check]]\nwhat = 'a'\nform = 'rel'")
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert [str(caught.value), *caught.value.__notes__] == [
        "Check 'a' has form 'rel' and lacks 'rel'. Add rel = NUMBER.",
        "It is entry 1 of [[check]].",
        f"The plan is {str(path)!r}.",
    ]


def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert str(caught.value) == f"Plan {str(path)!r} cannot be read: No such file or directory. Check the path."
    broken = plan_file(tmp_path, "[record")
    with pytest.raises(PlanError, match=f"^Plan {re.escape(repr(str(broken)))} is not valid TOML: .+\\.$"):
        load_plan(broken)


def test_functions_have_names_of_their_own_or_their_import_path_and_travel_with_the_plan() -> None:
    listed = plan_from_dict({"record": {"calls": ["a.b:f", "c:K.m"]}})
    assert listed.calls == (("a.b.f", "a.b:f"), ("c.K.m", "c:K.m"))
    named = plan_from_dict({"record": {"calls": {"attention": "a.b:f"}, "inside_compiled": ["blocks.*"]}})
    assert named.calls == (("attention", "a.b:f"),)
    assert plan_from_dict(named.as_dict()) == named
    assert (named.taps_inside("blocks.3.attn"), named.taps_inside("out"), Plan().taps_inside("out")) == (
        True,
        False,
        False,
    )
