"""How to narrow the first divergence down: what to record that was not recorded yet, and the sentence that says so.

Keeping tensors whole tells more only once, and only of what is recorded; behind the boundary of a compiled region
nothing is, until a plan asks for it. This module must not know how a command is written.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from probe.judge.comparison import Comparison, FirstDivergence, RunSummary
from probe.point import Kind
from probe.report import recorded

KEEP, INSIDE, SHOW, KEPT = "keep", "inside", "show", "kept"
"""Keep tensors whole; record inside a compiled region; look at what there is; that again, for it was kept whole."""
ROOT = "(root)"
"""Name of the outermost module."""
PLAN_FILE = "inside.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """What tells more about a divergence."""

    what: str
    """`keep`, `inside`, `show` or `kept`."""
    sentence: str = ""
    """What to do, beside what the divergence itself says."""
    plan_file: str = ""
    """Where a plan that looks inside could be written."""
    plan: str = ""
    """Its text."""


def narrowing(comparison: Comparison) -> Narrowing:
    """Choose what tells more about the first divergence, which there is."""
    found = comparison.first_divergence
    assert found is not None
    runs = [next((run for run in comparison.runs if run.arm == arm), None) for arm in ("baseline", "candidate")]
    both = [run for run in runs if run is not None]
    module, hidden = _hidden(found, both)
    if hidden:
        selections = _selections(module, hidden)
        count = "1 module" if len(hidden) == 1 else f"{len(hidden):,} modules"
        lies = "lies" if len(hidden) == 1 else "lie"
        return Narrowing(
            what=INSIDE,
            sentence=f"Record inside the compiled region: {count} of {module!r} {lies} there, where nothing is "
            "recorded unless a plan asks for it (`inside_compiled`).",
            plan_file=_plan_file(comparison.plan),
            plan=_plan(comparison.plan, selections, both),
        )
    if not found.keep:
        return Narrowing(what=SHOW)
    if len(both) == 2 and all(recorded.keeps_whole(run.path, found) for run in both):
        sentence = "Both arms kept it whole: `Tensors kept whole` says which of its elements differ."
        return Narrowing(what=KEPT, sentence=sentence)
    otherwise = "Or keep" if found.next else "Keep"
    return Narrowing(what=KEEP, sentence=f"{otherwise} the tensors around it whole in both arms, and compare again.")


def advice(comparison: Comparison) -> str:
    """Say what to do about the first divergence; nothing where there is none."""
    found = comparison.first_divergence
    return "" if found is None else " ".join(text for text in (found.next, narrowing(comparison).sentence) if text)


def module_of(label: str) -> str:
    """Return the module's name in a label of its output or the output's gradient; empty for everything else.

    >>> module_of("backward/blocks.1.attn[0]#2"), module_of("grad/blocks.1.attn.weight")
    ('blocks.1.attn', '')
    """
    kind, _, name = label.partition("/")
    return re.sub(r"[@#\[:].*", "", name) if kind in (Kind.FORWARD.value, Kind.BACKWARD.value) else ""


def _hidden(found: FirstDivergence, runs: Iterable[RunSummary]) -> tuple[str, list[str]]:
    """Return the module at fault, or the one before it, and what of it lies inside a compiled region of either arm."""
    inside = {name for run in runs for name in recorded.inside_compiled(run.path) or ()}
    modules = [name for name in (module_of(found.ahead),) if name]
    if found.place.kind in (Kind.FORWARD, Kind.BACKWARD):
        modules.insert(0, found.place.name)
    elif found.place.kind is Kind.GRAD:
        modules.insert(0, found.place.name.rpartition(".")[0])
    for module in modules:
        hidden = sorted(each for each in inside if module in (ROOT, each) or each.startswith(f"{module}."))
        if hidden:
            return module, hidden
    return "", []


def _selections(module: str, hidden: Iterable[str]) -> list[str]:
    if module == ROOT:
        return ["*"]
    return [*([module] if module in hidden else []), f"{module}.*"]


def _plan_file(plan: str) -> str:
    """Name the plan beside the one that it is made of, or in the reader's folder."""
    own = PurePath(plan)
    return str(own.with_name(f"{own.stem}-{PLAN_FILE}")) if plan else PLAN_FILE


def recorded_plan(run: RunSummary) -> str:
    """Return a plan's text that records what a run did; empty where the run was recorded without a plan.

    What was kept whole is left out: it is large, and asked for anew where it is wanted.
    """
    record = recorded.record_table(run.path)
    lines = [
        f"{name} = {json.dumps(record[name], ensure_ascii=False)}"
        for name in ("include", "exclude", "inside_compiled")
        if record.get(name)
    ]
    kinds = record.get("kinds")
    if kinds and set(kinds) != {kind.value for kind in Kind}:
        lines.append(f"kinds = {json.dumps(kinds)}")
    calls = record.get("calls")
    if isinstance(calls, dict) and calls:
        lines.append("[record.calls]")
        lines += [f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(path)}" for name, path in calls.items()]
    return "\n".join(["[record]", *lines]) if lines else ""


def _plan(plan: str, selections: list[str], runs: Sequence[RunSummary]) -> str:
    """Return the text of a plan that looks inside: the reader's own with one key changed, where that can be done."""
    before = [str(each) for run in runs for each in recorded.record_table(run.path).get("inside_compiled") or ()]
    wanted = list(dict.fromkeys([*before, *selections]))
    line = f"inside_compiled = {json.dumps(wanted, ensure_ascii=False)}"
    alone = f"[record]\n{line}"
    try:
        text = Path(plan).read_text("utf-8") if plan else next((recorded_plan(run) for run in runs), "")
    except (OSError, ValueError):
        return alone
    lines = [each for each in text.splitlines() if not each.lstrip().startswith("inside_compiled")]
    heads = [number for number, each in enumerate(lines) if each.partition("#")[0].strip() == "[record]"]
    if heads:
        lines.insert(heads[0] + 1, line)
    else:
        lines = [*lines, *([""] if lines else []), *alone.splitlines()]
    made = "\n".join(lines)
    return made if _holds(made, wanted) else alone


def _holds(text: str, wanted: list[str]) -> bool:
    """Say whether a text is a plan with the selections: what was written over several lines, for one, is not."""
    # Few reports come here.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]
    try:
        return bool(tomllib.loads(text)["record"]["inside_compiled"] == wanted)
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        return False
