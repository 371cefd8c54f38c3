"""What a calibration found, as a small table: one line per family. This module must not know how it was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from probe.report import words

if TYPE_CHECKING:
    from probe.judge.tolerance import Tolerance, Tolerances


NOT_INFORMATIVE = (
    "Not informative: members whose passing proves little: a scrambled run is within the tolerance, or hardly above "
    "it, or nothing was measured for it."
)
SELF_TEST = (
    "Self-test: the first baseline against itself, scrambled; tolerances that do not find it different would find no "
    "fault either."
)
NOT_RUN = {
    "step shift": " (it takes two recorded steps)",
    "rank rotation": " (it takes two ranks)",
}
"""What each form of scrambling needs."""


def calibration_table(tolerances: Tolerances, add: Sequence[str] = ()) -> str:
    """Return the table as text: members, spread, tolerance, members without spread, and what is assumed.

    Args:
        tolerances: What was measured.
        add: Command lines that measure what is only assumed.
    """
    header = ("Family", "Members", "Largest spread", "Tolerance", "Zero spread", "Not informative")
    families = {name: members for name, members in tolerances.families.items() if members}
    rows = [header, *(_row(name, members) for name, members in families.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *_remarks(tolerances, add)])


def _row(name: str, members: Mapping[str, Tolerance]) -> tuple[str, ...]:
    spread = max(max(member.spread) for member in members.values())
    least = words.difference(min(min(member.tolerance) for member in members.values()), "relative")
    most = words.difference(max(max(member.tolerance) for member in members.values()), "relative")
    return (
        name,
        f"{len(members):,}",
        words.difference(spread, "relative") if spread else "0 (bit-identical)",
        least if least == most else f"{least} to {most}",
        f"{sum(max(member.spread) == 0 for member in members.values()):,}",
        f"{sum(bool(member.mark) for member in members.values()):,}",
    )


def _remarks(tolerances: Tolerances, add: Sequence[str]) -> Iterator[str]:
    perturbed = tolerances.perturbed_runs
    runs = f"{tolerances.plain_runs} plain" + (f" and {perturbed} perturbed" if perturbed else "")
    yield ""
    yield f"Runs: {runs}; steps {words.steps(tolerances.steps)}; tolerance = {words.number(tolerances.k)} x spread."
    if tolerances.assumed:
        yield "Assumed: the runs are bit-identical, so these tolerances are floors that nothing was measured for."
        if add:
            yield "To measure them, record the unmodified code perturbed (--perturb) and calibrate again:"
            yield from (f"  {line}" for line in add)
    if any(member.mark for members in tolerances.families.values() for member in members.values()):
        yield NOT_INFORMATIVE
    for name, result in tolerances.self_test.items():
        yield f"Self-test, {name}: {result}{NOT_RUN.get(name, '') if result == 'not run' else ''}."
    if tolerances.self_test:
        yield SELF_TEST
    yield from (f"Note: {note}" for note in tolerances.notes)
