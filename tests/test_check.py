"""Checks: what they select, and what a wrong one says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from probe.check import Check, default_checks, owner, owners
from probe.errors import PlanError
from probe.point import Key, Kind
from probe.selection import parse_steps


def family(kind: Kind, name: str, item: str = "") -> str | None:
    key = Key(kind=kind, name=name, item=item)
    return next((check.what for check in default_checks() if check.selects(key)), None)


FORWARD = {
    "model output": ["(root)"],
    "block outputs": [
        "blocks.0",
        "model.layers.31",
        "transformer.h.0",
        "encoder.layer.0",
        "visual.transformer.resblocks.11",
        "single_transformer_blocks.3",
        "double_blocks.1",
        "layers.2",
    ],
    "attention outputs": [
        "blocks.0.attn",
        "model.layers.3.self_attn",
        "transformer.h.0.attn",
        "encoder.layer.0.attention",
        "encoder.block.0.layer.0.SelfAttention",
        "transformer_blocks.3.attn1",
        "blocks.0.cross_attn",
        "attn_blocks.0.attn",
    ],
    "norm outputs": [
        "blocks.3.norm1",
        "model.layers.3.input_layernorm",
        "model.layers.3.post_attention_layernorm",
        "transformer.h.0.ln_1",
        "transformer.ln_f",
        "RMSNorm",
        "blocks.0.attn.q_norm",
        "encoder.layer.0.attention.output.LayerNorm",
        "model.norm",
    ],
    "MLP outputs": [
        "blocks.0.mlp",
        "blocks.0.ffn",
        "layers.0.feed_forward",
        "transformer_blocks.3.ff",
        "model.layers.0.block_sparse_moe",
        "img_mlp",
    ],
    "LoRA outputs": ["blocks.0.attn.qkv_proj.lora_A", "x.lora_B.default", "x.lora_dropout.default"],
    "other module outputs": [
        "blocks.0.attn.qkv_proj",
        "transformer.h.0.attn.c_attn",
        "encoder.layer.0.attention.self",
        "transformer_blocks.3.attn1.to_out.0",
        "blocks.0.mlp.fc1",
        "blocks.0.ffn.0",
        "transformer_blocks.3.ff.net.0",
        "mlp.2",
        "text_refiner",
        "blocks.0.adaln",
        "blocks.0.attn_drop",
        "blocks.0.mlp.layers.0",
    ],
}


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, names in FORWARD.items() for name in names])
def test_module_outputs_of_common_models_fall_into_their_family(what: str, name: str) -> None:
    assert family(Kind.FORWARD, name) == what


@pytest.mark.parametrize(
    ("what", "kind", "name", "item"),
    [
        ("batch", Kind.BATCH, "pixel_values", ""),
        ("initial parameters", Kind.PARAM, "blocks.0.attn.qkv_proj.lora_A.weight", "before"),
        ("LoRA parameters after step", Kind.PARAM, "blocks.0.attn.qkv_proj.lora_A.weight", ""),
        ("parameters after step", Kind.PARAM, "blocks.0.attn.qkv_proj.weight", ""),
        ("LoRA gradients", Kind.GRAD, "blocks.0.attn.qkv_proj.lora_B.weight", "clipped"),
        ("parameter gradients", Kind.GRAD, "blocks.0.norm1.weight", ""),
        ("gradients of block outputs", Kind.BACKWARD, "blocks.1", "[0]"),
        ("gradients of other outputs", Kind.BACKWARD, "blocks.1.attn", ""),
        ("loss", Kind.LOSS, "micro_loss", ""),
        ("loss scale", Kind.LOSS, "loss_scale", ""),
        ("gradient norm", Kind.GRAD_NORM, "grad_norm", ""),
        ("learning rate", Kind.LR, "lr", "[1]"),
        ("state", Kind.STATE, "trainable", ""),
        ("state", Kind.STATE, "dropouts_in_train_mode", ""),
        ("state, not judged", Kind.STATE, "modules_in_train_mode", ""),
        ("state, not judged", Kind.STATE, "rng.cpu", ""),
        ("explicit records", Kind.EXPLICIT, "loss/video", ""),
        ("calls", Kind.CALL, "torch.nn.functional.cross_entropy", "[0]"),
    ],
)
def test_every_kind_has_its_family(what: str, kind: Kind, name: str, item: str) -> None:
    assert family(kind, name, item) == what


def test_every_kind_with_any_name_belongs_to_some_default_check() -> None:
    assert [kind for kind in Kind if family(kind, "x") is None] == []


def test_only_what_a_branch_may_legitimately_drop_is_not_required() -> None:
    assert [check.what for check in default_checks() if not check.required] == [
        "model output",
        "LoRA outputs",
        "block outputs",
        "attention outputs",
        "norm outputs",
        "MLP outputs",
        "other module outputs",
        "loss scale",
        "gradients of block outputs",
        "gradients of other outputs",
        "state, not judged",
        "calls",
    ]


def test_names_of_checks_are_unique() -> None:
    names = [check.what for check in default_checks()]
    assert sorted(set(names)) == sorted(names)


def test_a_check_selects_by_kind_glob_leaf_and_step() -> None:
    check = Check(
        what="tail",
        where="blocks 40 to 49",
        kinds=(Kind.GRAD,),
        select=("blocks.4?.*",),
        leaf=("weight",),
        without=("*norm*",),
        steps=parse_steps("2-"),
    )
    key = Key(kind=Kind.GRAD, name="blocks.40.fc1.weight")
    assert (check.selects(key), check.selects(key, 1), check.selects(key, 2)) == (True, False, True)
    for kind, name in (
        (Kind.PARAM, "blocks.40.fc1.weight"),
        (Kind.GRAD, "blocks.39.fc1.weight"),
        (Kind.GRAD, "blocks.40.fc1.bias"),
        (Kind.GRAD, "blocks.40.norm1.weight"),
    ):
        assert not check.selects(Key(kind=kind, name=name))


def test_a_declared_tolerance_is_written_as_it_was_meant() -> None:
    declared: list[dict[str, Any]] = [
        {"form": "rel or abs", "rel": 0.15, "abs": 0.03},
        {"form": "rel + abs", "rel": 0.03, "abs": 0.01},
        {"form": "rel", "rel": 0.0002},
        {"form": "abs", "abs": 0.0004},
        {"form": "ratio", "ratio": 20.0},
        {"form": "record only", "rel": 0.5},
        {"form": "record only", "abs": 600.0},
        {"form": "exact"},
        {},
    ]
    assert [Check(what="x", where="", **fields).bound for fields in declared] == [
        "15 % or 0.03 abs",
        "3 % + 0.01 abs",
        "0.02 %",
        "0.0004 abs",
        "20x",
        "50 %",
        "600 abs",
        "",
        "",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"form": "relative"},
            "Check 'x' has form 'relative'. Did you mean 'rel'? Allowed: abs, calibrated, exact, ratio, record only, "
            "rel, rel + abs, rel or abs.",
        ),
        (
            {"form": "ratoi"},
            "Check 'x' has form 'ratoi'. Did you mean 'ratio'? Allowed: abs, calibrated, exact, ratio, record only, "
            "rel, rel + abs, rel or abs.",
        ),
        ({"form": "rel"}, "Check 'x' has form 'rel' and lacks 'rel'. Add rel = NUMBER."),
        ({"form": "rel or abs", "rel": 0.1}, "Check 'x' has form 'rel or abs' and lacks 'abs'. Add abs = NUMBER."),
        (
            {"form": "exact", "rel": 0.1},
            "Check 'x' has form 'exact', which takes no 'rel', but rel = 0.1 is given. Remove it or change the form.",
        ),
        ({"form": "abs", "abs": -1.0}, "Check 'x' has abs = -1.0. It must be finite and not negative."),
        ({"form": "abs", "abs": float("nan")}, "Check 'x' has abs = nan. It must be finite and not negative."),
        ({"form": "ratio", "ratio": 0.5}, "Check 'x' has ratio = 0.5. It must be at least 1 (20 allows 20 x)."),
        ({"form": "exact", "k": 3.0}, "Check 'x' has form 'exact', which takes no 'k', but k = 3.0 is given."),
        ({"k": 0.0}, "Check 'x' has k = 0.0. It must be finite and above 0."),
        (
            {"form": "record only", "rel": 0.5, "abs": 0.5},
            "Check 'x' has form 'record only', which shows one bound, and two are given.",
        ),
        (
            {"metric": ("mean_asb",)},
            "Check 'x' has metric = 'mean_asb'. Did you mean 'mean_abs'? Allowed: l2, max_abs, mean, mean_abs, rms, "
            "sample, sketch, value.",
        ),
        (
            {"reduce": "nrom"},
            "Check 'x' has reduce = 'nrom'. Did you mean 'norm'? Allowed: count, mean, norm, sum_squares.",
        ),
        ({"over_ranks": "max"}, "Check 'x' has over_ranks = 'max'. Allowed: mean."),
        ({"window": 0}, "Check 'x' has window = 0. It must be at least 1 step."),
        (
            {"metric": ("sketch",), "window": 5},
            "Check 'x' has metric = 'sketch', which is no single number, and asks for a mean or a group of it. "
            "Name another metric, such as 'l2'.",
        ),
        (
            {"metric": ("l2", "mean"), "over_ranks": "mean"},
            "Check 'x' makes one number and names 2 metrics. Name one.",
        ),
        (
            {"metric": ("mean",), "reduce": "norm"},
            "Check 'x' has reduce = 'norm', which takes no 'metric', but metric = 'mean' is given. Remove it.",
        ),
        (
            {"metric": ("sample",)},
            "Check 'x' has form 'calibrated', which takes no metric 'sample'. Use 'exact', 'rel' or 'abs'.",
        ),
    ],
)
def test_a_wrong_check_says_what_is_wrong_with_it(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        Check(what="x", where="", **fields)


def test_the_owners_of_many_quantities_are_those_of_each() -> None:
    checks = (
        Check(what="norm", where="", select=("grad/*",), reduce="norm", form="rel", rel=0.1),
        Check(what="size", where="", select=("forward/*",), metric=("mean_abs",), form="rel", rel=0.1),
        Check(what="step 2", where="", select=("forward/*",), steps=parse_steps("2")),
        *default_checks(),
    )
    names = ("(root)", "blocks.0", "blocks.1.attn", "micro_loss", "lr", "*", "blocks.1.lora_A.weight")
    items = ("", "[0]", "before", "(norm)", "(mean_abs)", "(other)")
    keys = [Key(kind=kind, name=name, item=item) for kind in Kind for name in names for item in items]
    for step in (None, 1, 2):
        assert owners(checks, keys, step) == [owner(checks, key, step) for key in keys]
