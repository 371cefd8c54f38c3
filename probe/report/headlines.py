"""What a reader must know before the table: which code differs, what the candidate lacks, which checks prove nothing.

One sentence each, folded; the details stay where they are. Names stand in backticks. This module must not know which
report it writes for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from probe.judge.command_change import command_change
from probe.judge.comparison import CheckResult, CodeChange, Comparison, Verdict
from probe.point import Kind
from probe.report import recorded, words
from probe.report.narrowing import module_of

MOST = 6
"""Names in one sentence."""
_INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""A layer's number: a component of a name that is all digits."""
_OF_MODULE = (Kind.FORWARD.value, Kind.BACKWARD.value)


def headlines(comparison: Comparison) -> list[str]:
    """Return the sentences, none where there is nothing to know."""
    found = [_code(comparison), *_lacking(comparison), *_checks(comparison.checks)]
    return [text for text in found if text]


def _code(comparison: Comparison) -> str:
    if not comparison.runs or any(run.in_process for run in comparison.runs):
        return ""
    if comparison.code is None:
        return "Code: which files the arms ran was not recorded."
    if comparison.code.count:
        return f"Code that differs: {_files(comparison.code)}."
    commands = [
        next((run.command for run in comparison.runs if run.arm == arm), "") for arm in ("baseline", "candidate")
    ]
    change = command_change(*commands) if all(commands) else ""
    return f"Code: both arms ran the same files{f'; the candidate ran {change}' if change else ''}."


def _files(code: CodeChange) -> str:
    parts = []
    for names, what in (
        (code.changed, "changed"),
        (code.added, "only in the candidate"),
        (code.removed, "only in the baseline"),
    ):
        if names:
            parts.append(f"{_count(len(names), 'file')} {what} ({_cut([f'`{name}`' for name in names])})")
    if code.outside:
        parts.append(f"{_count(len(code.outside), 'file')} outside the source trees")
    return ", ".join(parts)


def _lacking(comparison: Comparison) -> Iterator[str]:
    """Say what only one arm has, and whether the other does not call it or hides it in a compiled region."""
    coverage = comparison.coverage
    for labels, only, lacks, gone in (
        (coverage.missing, "baseline", "candidate", "No longer called in the candidate"),
        (coverage.unexpected, "candidate", "baseline", "Called in the candidate only"),
    ):
        paths = [run.path for run in comparison.runs if run.arm == lacks] if labels else []
        told = [recorded.inside_compiled(path) for path in paths]
        hidden = {name for names in told for name in names or ()}
        inside, _ = folded(label for label in labels if module_of(label) in hidden)
        modules, others = folded(label for label in labels if module_of(label) not in hidden)
        if inside:
            hides = f"Inside a compiled region in the {lacks}, where nothing is recorded unless asked for"
            yield f"{hides}: {_cut(inside)}."
        if modules and None not in told and told:
            yield f"{gone}: {_cut(modules)}."
        elif modules:
            why = " (no longer called, or inside a compiled region)" if only == "baseline" else ""
            yield f"Modules in the {only} only{why}: {_cut(modules)}."
        if others:
            yield f"{'Also in' if inside or modules else 'In'} the {only} only: {_cut(others)}."


def folded(labels: Iterable[str]) -> tuple[list[str], list[str]]:
    """Fold labels over layers: modules whose output is among them, and everything else.

    >>> folded(["forward/blocks.0.norm", "forward/blocks.1.norm", "backward/blocks.1.norm", "grad/a.weight"])
    (['`blocks.*.norm` (2)'], ['`grad/a.weight`'])
    """
    of_forward: dict[str, list[str]] = {}
    of_others: dict[str, list[str]] = {}
    split = [label.partition("/")[::2] for label in labels]
    names = {re.sub(r"[@#\[:].*", "", name) for kind, name in split if kind == Kind.FORWARD.value}
    for kind, name in split:
        plain = re.sub(r"[@#\[:].*", "", name)
        if kind in _OF_MODULE and plain in names:
            members = of_forward.setdefault(_INDEX.sub("*", plain), [])
        else:
            plain = f"{kind}/{re.sub('@.*', '', name)}"
            members = of_others.setdefault(_INDEX.sub("*", plain), [])
        if plain not in members:
            members.append(plain)
    return _named(of_forward), _named(of_others)


def _named(groups: dict[str, list[str]]) -> list[str]:
    return [
        f"`{pattern}` ({len(members)})" if len(members) > 1 else f"`{members[0]}`"
        for pattern, members in groups.items()
    ]


def _checks(checks: Sequence[CheckResult]) -> Iterator[str]:
    judging = [check for check in checks if check.verdict is not Verdict.RECORDED_ONLY]
    judged = [check for check in judging if check.cells]
    passing = [check for check in judged if check.verdict not in words.FAILING]
    nothing = [check for check in judging if not check.cells]
    if nothing:
        names = [f"{check.what}{f' ({check.not_compared_why})' * bool(check.not_compared_why)}" for check in nothing]
        yield f"{_count(len(nothing), 'check')} judged nothing: {_cut(names)}."
    yield _named_checks(
        [check for check in passing if check.vacuous and check.fit != "vacuous"],
        "proved nothing by passing, for a scrambled run would pass too (vacuous)",
    )
    yield _named_checks(
        [check for check in judged if check.fit == "vacuous"],
        "declared more than ten times as wide as calibration would allow (vacuous)",
    )
    yield _named_checks(
        [check for check in judged if check.fit == "flaky"],
        "declared so narrow that the unmodified code exceeds it by itself (flaky)",
    )
    yield _assumed(judged)
    left = [check for check in judging if check.not_compared]
    if left:
        there = sum(check.not_compared + check.cells for check in judging)
        lost = sum(check.not_compared for check in left)
        yield f"{lost:,} of {there:,} values were not judged, in {_count(len(left), 'check')}; the rows say why."


def _assumed(judged: Sequence[CheckResult]) -> str:
    """Say which tolerances are floors; all of them at once where that is so."""
    found = [check for check in judged if check.assumed]
    if len(found) > 1 and found == [check for check in judged if check.form == "calibrated"]:
        return f"All {len(found)} calibrated checks used assumed floors: nothing was measured for them."
    return _named_checks(found, "used assumed floors, for nothing was measured")


def _named_checks(checks: Sequence[CheckResult], what: str) -> str:
    if not checks:
        return ""
    return f"{_count(len(checks), 'check')} {what}: {_cut([check.what for check in checks])}."


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _cut(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST])
    return shown if len(names) <= MOST else f"{shown} and {len(names) - MOST:,} more"
