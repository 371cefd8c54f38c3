"""Which quantities make up one row of the table, and how a row is judged.

The default checks are the dozen and a half families that pull requests report. They select by names that are in use in
common models, and a plan file can put others before them. This module must not know how a difference is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from probe.errors import PlanError
from probe.point import Key, Kind
from probe.reduction import AS_JUDGED, check_reduction, suffixes
from probe.selection import StepSet, glob_pattern, matches, nearest, patterns_by_kind, split_kind

FORMS = ("calibrated", "exact", "rel", "abs", "rel or abs", "rel + abs", "ratio", "record only")
"""How a check may be judged; `rel or abs` passes when either bound holds, `rel + abs` when their sum does."""

NEEDS = {
    "calibrated": (),
    "exact": (),
    "rel": ("rel",),
    "abs": ("abs",),
    "rel or abs": ("rel", "abs"),
    "rel + abs": ("rel", "abs"),
    "ratio": ("ratio",),
    "record only": (),
}
"""Bounds that each form needs; it takes no others."""
MAY = {"record only": ("rel", "abs")}
"""Bounds that a form takes and does not need: what is only recorded may show one of them."""
DECLARED = ("rel", "abs", "rel or abs", "rel + abs", "ratio")
"""Forms whose bound a person declares: they need no calibration."""

NO_CHECK = -1


PLAIN_FORM_EXISTS = ("before", "clipped")
"""Items of parameters and gradients that are also recorded without an item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Say which quantities are one row of the table and how they are judged.

    A quantity belongs to the first check that selects it. A check with a metric of its own shares it with checks of
    other metrics that name theirs; a check of a group, a window or all ranks leaves it to the others.
    """

    what: str
    """Name of the row, e.g. `attention outputs`."""
    where: str
    """Where in the job's code the values are taken, in words."""
    form: str = "calibrated"
    """One of `FORMS`. Values that are not floating point are always judged exactly when the form is `calibrated`."""
    required: bool = False
    """A quantity of the check that the candidate lacks makes it different, instead of being not compared."""
    kinds: tuple[Kind, ...] = ()
    """Kinds it selects from; empty: all."""
    select: tuple[str, ...] = ("*",)
    """Selections, at least one of which must match; `*:before` and `*[0]` match by item."""
    leaf: tuple[str, ...] = ()
    """Globs for the last component of the name, at least one of which must match; empty: any."""
    without: tuple[str, ...] = ()
    """Selections that are left to later checks."""
    rel: float | None = None
    """Bound on the relative difference."""
    abs: float | None = None
    """Bound on the absolute difference."""
    ratio: float | None = None
    """Bound on the larger of actual / expected and its inverse."""
    k: float | None = None
    """Multiple of the spread for the calibrated form; None: as the tolerance file says."""
    steps: StepSet | None = None
    """Steps that the check judges; None: all."""
    metric: tuple[str, ...] = ()
    """Numbers of each quantity that are judged, from `probe.reduction.METRICS`; empty: its one judged number."""
    reduce: str = ""
    """Number that is made of all selected quantities of a microbatch or step, from `probe.reduction.REDUCES`."""
    window: int | None = None
    """Steps of which the mean is judged: 1 to `window`, and so on, where all of them are recorded."""
    over_ranks: str = ""
    """`mean`: the mean over ranks is judged, once for all of them."""

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise PlanError(f"Check {self.what!r} has form {self.form!r}.{nearest(self.form, FORMS)}")
        for name in ("rel", "abs", "ratio"):
            bound = getattr(self, name)
            if bound is None and name in NEEDS[self.form]:
                raise PlanError(f"Check {self.what!r} has form {self.form!r} and lacks {name!r}. Add {name} = NUMBER.")
            if bound is not None and name not in (*NEEDS[self.form], *MAY.get(self.form, ())):
                raise PlanError(
                    f"Check {self.what!r} has form {self.form!r}, which takes no {name!r}, but {name} = {bound!r} is "
                    "given. Remove it or change the form."
                )
            if bound is not None and not (math.isfinite(bound) and bound >= 0):
                raise PlanError(f"Check {self.what!r} has {name} = {bound!r}. It must be finite and not negative.")
        if self.ratio is not None and self.ratio < 1:
            raise PlanError(f"Check {self.what!r} has ratio = {self.ratio!r}. It must be at least 1 (20 allows 20 x).")
        if self.k is not None and self.form != "calibrated":
            raise PlanError(
                f"Check {self.what!r} has form {self.form!r}, which takes no 'k', but k = {self.k!r} is given."
            )
        if self.k is not None and not (math.isfinite(self.k) and self.k > 0):
            raise PlanError(f"Check {self.what!r} has k = {self.k!r}. It must be finite and above 0.")
        if self.form == "record only" and self.rel is not None and self.abs is not None:
            raise PlanError(f"Check {self.what!r} has form 'record only', which shows one bound, and two are given.")
        for selection in (*self.select, *self.without):
            split_kind(selection)
        check_reduction(f"Check {self.what!r}", self.form, self.metric, self.reduce, self.window, self.over_ranks)

    @property
    def bound(self) -> str:
        """The declared tolerance in words, e.g. `15 % or 0.03 abs`, `20x`; empty for forms that declare none."""
        rel, bound = f"{100 * (self.rel or 0):g} %", f"{self.abs or 0:g} abs"
        joined = {"rel or abs": f"{rel} or {bound}", "rel + abs": f"{rel} + {bound}", "rel": rel, "abs": bound}
        if self.form == "record only":
            return bound if self.abs is not None else rel if self.rel is not None else ""
        return f"{self.ratio:g}x" if self.form == "ratio" else joined.get(self.form, "")

    @property
    def unit(self) -> str:
        """Unit in which a declared bound is meant: `relative`, `absolute` or `ratio`."""
        if self.form == "ratio":
            return "ratio"
        return "relative" if self.abs is None else "absolute"

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What is put behind an item to name each number that the check makes; empty: it judges what was recorded."""
        return suffixes(self.metric, self.reduce, self.window, self.over_ranks)

    @property
    def as_recorded(self) -> bool:
        """Whether the check judges quantities by their one judged number."""
        return AS_JUDGED in self.metric or not self.suffixes

    @property
    def shares(self) -> bool:
        """Whether the quantities that the check selects are its own only in its metric."""
        return bool(self.metric) and not (self.reduce or self.over_ranks or self.window is not None)

    @property
    def group(self) -> str:
        """Name of the group that `reduce` makes one number of: how it is selected."""
        parts = [", ".join(split_kind(each)[1] for each in self.select)]
        parts += [f"named {', '.join(self.leaf)}"] if self.leaf else []
        parts += [f"without {', '.join(self.without)}"] if self.without else []
        return " ".join(parts)

    def makes_group(self, key: Key) -> bool:
        """Say whether a key without its suffix is a group that the check makes: its name, and a kind it selects."""
        of_kind = patterns_by_kind(self.select)[key.kind] is not None and (not self.kinds or key.kind in self.kinds)
        return of_kind and key.name == self.group

    def reads(self, key: Key) -> bool:
        """Say whether the check makes its numbers of a recorded quantity.

        What has an item beside its plain form (a gradient after clipping, a parameter before the first step) would be
        counted twice: it is read only where a selection names the item.
        """
        if key.item in PLAIN_FORM_EXISTS and not any(each.endswith(f":{key.item}") for each in self.select):
            return False
        return self.selects(key)

    def selects(self, key: Key, step: int | None = None) -> bool:
        """Say whether a quantity belongs to this check, in a given step or in any."""
        if self.kinds and key.kind not in self.kinds:
            return False
        if step is not None and self.steps is not None and step not in self.steps:
            return False
        if not matches(patterns_by_kind(self.select)[key.kind], key.name, key.item):
            return False
        if self.leaf and not glob_pattern(self.leaf).fullmatch(key.name.rpartition(".")[2]):
            return False
        return not (self.without and matches(patterns_by_kind(self.without)[key.kind], key.name, key.item))


_BLOCKS = (
    "blocks.#",
    "*.blocks.#",
    "*block.#",
    "*_blocks.#",
    "layers.#",
    "*.layers.#",
    "*_layers.#",
    "layer.#",
    "*.layer.#",
    "h.#",
    "*.h.#",
    "*stages.#",
    "*resblocks.#",
    "*resnets.#",
)
"""Children of a ModuleList of blocks: DiffSynth and timm `blocks`, Llama `layers`, BERT `layer`, GPT-2 `h`, CLIP
`resblocks`. Numbered children elsewhere (`attn.to_out.0`, `mlp.2`) are parts of a block and are not meant."""
_INSIDE_BLOCK = ("*attn.*", "*attn#.*", "*attention.*", "*.mlp.*", "*.ffn.*", "*.ff.*", "*.feed_forward.*")
_ATTENTION = ("*attn", "attn#", "attn_#", "*_attn_#", "*attention", "attention#", "attention_#", "mha")
"""DiffSynth `attn`, HF `self_attn`, BERT `attention`, T5 `SelfAttention`, diffusers `attn1`."""
_INSIDE_ATTENTION = ("*attn.*", "*attn#.*", "*attn_#.*", "*attention.*", "*attention#.*", "mha.*", "*.mha.*")
_NORM = (
    "*norm",
    "*norm#",
    "*norm_#",
    "norm_*",
    "*_norm_*",
    "ln",
    "ln#",
    "ln_*",
    "*_ln",
    "*_ln_#",
    "bn",
    "bn#",
    "gn",
    "gn#",
)
"""`norm1`, `input_layernorm`, `ln_1`, `q_norm`, `RMSNorm`, `norm_out`."""
_MLP = (
    "mlp",
    "mlp#",
    "*_mlp",
    "mlp_*",
    "ffn",
    "ffn#",
    "*_ffn",
    "ff",
    "ff_*",
    "feed_forward",
    "feedforward",
    "moe",
    "*_moe",
    "*experts",
)
"""DiffSynth and HF `mlp`, Wan `ffn`, diffusers `ff`, Mixtral `block_sparse_moe`."""
_LORA = ("*lora_*", "*.lora.*")
"""peft's `lora_A`, `lora_B`, `lora_embedding_A`, `lora_magnitude_vector`."""
_GRADIENTS = "after the last backward, reduced across ranks, before clipping; `:clipped`: as the optimizer got them"
_STATE_RECORDED_ONLY = ("rng*", "optimizer*", "attention*", "modules_in_train_mode")
"""Facts that may differ between two sound arms: random state, the optimizer's class, the attention kernel, and the
number of modules (fusing two makes one fewer; a dropout left off is seen by the number of dropouts)."""


def default_checks() -> tuple[Check, ...]:
    """Return the families of the default plan, in the order of the table; the first that selects a quantity has it."""
    forward, backward, grad, param = (Kind.FORWARD,), (Kind.BACKWARD,), (Kind.GRAD,), (Kind.PARAM,)
    return (
        Check(what="batch", where="inputs of the root module", form="exact", required=True, kinds=(Kind.BATCH,)),
        Check(
            what="initial parameters",
            where="trainable parameters before the first recorded step",
            form="exact",
            required=True,
            kinds=param,
            select=("*:before",),
        ),
        Check(what="model output", where="output of the root module", kinds=forward, select=("(root)",)),
        Check(what="LoRA outputs", where="outputs of LoRA adapters", kinds=forward, select=_LORA),
        Check(
            what="block outputs",
            where="outputs of the numbered blocks",
            kinds=forward,
            select=_BLOCKS,
            without=_INSIDE_BLOCK,
        ),
        Check(
            what="attention outputs",
            where="outputs of attention modules",
            kinds=forward,
            leaf=_ATTENTION,
            without=_INSIDE_ATTENTION,
        ),
        Check(what="norm outputs", where="outputs of normalization modules", kinds=forward, leaf=_NORM),
        Check(what="MLP outputs", where="outputs of feed-forward modules", kinds=forward, leaf=_MLP),
        Check(what="other module outputs", where="outputs of projections and all other modules", kinds=forward),
        Check(
            what="loss scale",
            where="factor between loss and backward",
            form="record only",
            kinds=(Kind.LOSS,),
            select=("loss_scale",),
        ),
        Check(
            what="loss",
            where="each microbatch's loss, unrounded, as backward gets it",
            required=True,
            kinds=(Kind.LOSS,),
        ),
        Check(
            what="gradients of block outputs",
            where="gradient of the loss at the outputs of the numbered blocks",
            kinds=backward,
            select=_BLOCKS,
            without=_INSIDE_BLOCK,
        ),
        Check(
            what="gradients of other outputs", where="gradient of the loss at all other module outputs", kinds=backward
        ),
        Check(
            what="LoRA gradients",
            where=_GRADIENTS,
            required=True,
            kinds=grad,
            select=_LORA,
        ),
        Check(
            what="parameter gradients",
            where=_GRADIENTS,
            required=True,
            kinds=grad,
        ),
        Check(what="gradient norm", where="return of gradient clipping", required=True, kinds=(Kind.GRAD_NORM,)),
        Check(what="learning rate", where="optimizer's parameter groups", required=True, kinds=(Kind.LR,)),
        Check(
            what="LoRA parameters after step", where="after `optimizer.step`", required=True, kinds=param, select=_LORA
        ),
        Check(what="parameters after step", where="after `optimizer.step`", required=True, kinds=param),
        Check(
            what="state, not judged",
            where="random state, optimizer class, attention kernel, number of modules",
            form="record only",
            kinds=(Kind.STATE,),
            select=_STATE_RECORDED_ONLY,
        ),
        Check(
            what="state",
            where="active dropouts, numbers of parameters and gradients, world size",
            form="exact",
            required=True,
            kinds=(Kind.STATE,),
        ),
        Check(what="explicit records", where="`probe.record` calls", required=True, kinds=(Kind.EXPLICIT,)),
        Check(what="calls", where="arguments and results of named functions", kinds=(Kind.CALL,)),
    )


@lru_cache(maxsize=1)
def _default_set() -> frozenset[Check]:
    return frozenset(default_checks())


def is_default(check: Check) -> bool:
    """Say whether a check is one of the default families, which may have nothing to judge in a job."""
    return check in _default_set()


def owner(checks: Sequence[Check], key: Key, step: int | None = None) -> int:
    """Return the number of the check that a quantity belongs to, in a given step or in any; `NO_CHECK` if to none.

    A number that was made by `probe.measure.reduced` belongs to the first check that makes it.
    """
    # Most quantities have no item, and so no suffix.
    suffix = key.item and next((each for check in checks for each in check.suffixes if key.item.endswith(each)), "")
    if suffix:
        return _owner_of_made(checks, replace(key, item=key.item[: -len(suffix)]), suffix, step)
    shared = False
    for number, check in enumerate(checks):
        if (not shared or check.metric) and check.selects(key, step) and check.as_recorded:
            return number
        shared = shared or (check.shares and check.reads(key) and check.selects(key, step))
    return NO_CHECK


def owners(checks: Sequence[Check], keys: Sequence[Key], step: int | None = None) -> list[int]:
    """Return what `owner` does for each of many keys."""
    of_kind = {kind: [n for n, check in enumerate(checks) if not check.kinds or kind in check.kinds] for kind in Kind}
    some = {kind: [checks[number] for number in numbers] for kind, numbers in of_kind.items()}
    found = []
    for key in keys:
        if key.item.endswith(")"):  # perhaps a number that was made, for which checks of other kinds count
            found.append(owner(checks, key, step))
            continue
        own = owner(some[key.kind], key, step)
        found.append(NO_CHECK if own == NO_CHECK else of_kind[key.kind][own])
    return found


def _owner_of_made(checks: Sequence[Check], source: Key, suffix: str, step: int | None) -> int:
    for number, check in enumerate(checks):
        if suffix not in check.suffixes or (step is not None and check.steps is not None and step not in check.steps):
            continue
        if check.makes_group(source) if check.reduce else check.reads(source):
            return number
    return NO_CHECK
