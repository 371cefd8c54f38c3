"""The words of the HTML page, explained where they are used: for someone who has never seen the tool.

A word is marked (`<abbr>`, which shows its meaning under the pointer) and its meaning is written below the part of the
page that uses it, for screens without a pointer and for print.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from probe.judge.comparison import Comparison
from probe.report import words
from probe.report.legend import SEES as EXPLAINED

VALUE, SPREAD, TOLERANCE, SEES = "value", "spread", "tolerance", "sees"
HORIZON, VACUOUS, ASSUMED, FLAKY = "horizon", "vacuous", "assumed", "flaky"
ORIGIN, TIGHT, RATIO = "origin", "tight tolerance", "difference / tolerance"

MEANINGS = {
    VALUE: "one quantity (such as a module's output) at one step, in one microbatch, on one rank.",
    SPREAD: "how far the unmodified code departs from itself when it is run again.",
    TOLERANCE: "how far the candidate may depart from the baseline: a multiple of the spread, and at least what the "
    "precision of the numbers makes unavoidable.",
    SEES: EXPLAINED.removeprefix("sees: "),
    HORIZON: "the last step up to which a quantity is judged: after it, runs of the unmodified code drift so far apart "
    "that a difference would tell little.",
    VACUOUS: "the tolerance is so wide that a scrambled run would pass: passing this check proves nothing.",
    ASSUMED: "no spread was measured; the tolerance is a guess from the precision of the numbers.",
    FLAKY: "the tolerance was declared by hand, and the unmodified code exceeds it by itself.",
    ORIGIN: "whether the difference arose at this place (what was compared before it is within tolerance), before it "
    "(its inputs already differed), or cannot be told (something between was not comparable).",
    TIGHT: "what the quantity's own spread allows, without the allowance for similar layers: it finds the first "
    "divergence, and the table is judged by the tolerance.",
    RATIO: "the difference as a multiple of what is allowed: up to 1 is within tolerance.",
}


def marked(term: str, text: str = "") -> str:
    """Mark a word whose meaning shows under the pointer."""
    return f'<abbr title="{escape(term)}: {escape(MEANINGS[term])}">{escape(text or term)}</abbr>'


def meanings(terms: Iterable[str]) -> str:
    """List words with their meanings."""
    items = "".join(f"<div><dt>{escape(term)}</dt><dd>{escape(MEANINGS[term])}</dd></div>" for term in terms)
    return f'<dl class="terms soft">{items}</dl>' if items else ""


def of_table(comparison: Comparison) -> list[str]:
    """Return the words that the table of checks uses."""
    checks = comparison.checks
    found = {
        VALUE: any(check.cells for check in checks),
        SPREAD: True,
        TOLERANCE: True,
        SEES: any(words.detectable(check) != words.NOTHING for check in checks),
        HORIZON: any(
            (check.horizon is not None and not check.covered) or "horizon" in check.not_compared_why for check in checks
        ),
        VACUOUS: any(words.fit(check) == "vacuous" for check in checks),
        FLAKY: any(words.fit(check) == "flaky" for check in checks),
        ASSUMED: any(check.assumed for check in checks),
    }
    return [term for term, used in found.items() if used]


def of_divergence(comparison: Comparison) -> list[str]:
    """Return the words that the first divergence uses."""
    found = comparison.first_divergence
    return [] if found is None else [ORIGIN, *([TIGHT] if found.tolerance > 0 else [])]
