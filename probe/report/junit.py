"""The comparison as JUnit XML, for continuous-integration servers: one test case per check and one for the whole.

This module must not know how anything was judged.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from probe.judge.comparison import CheckResult, Comparison, Outcome, Verdict
from probe.report import words

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no way to write. Source: Extensible Markup Language (XML) 1.0, section 2.2, `Char`."""


def to_junit(comparison: Comparison) -> str:
    """Return the XML text."""
    suite = ElementTree.Element("testsuite", name="probe diff")
    for check in comparison.checks:
        _add_check(suite, check)
    whole = ElementTree.SubElement(suite, "testcase", classname="probe", name="verdict")
    if comparison.outcome is not Outcome.EQUIVALENT:
        tag = "failure" if comparison.outcome is Outcome.DIFFERENT else "error"
        _add(whole, tag, comparison.outcome.value, words.sentence(comparison))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _add_check(suite: ElementTree.Element, check: CheckResult) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="probe", name=_clean(check.what))
    text = f"difference {words.actual_difference(check)}, tolerance {words.tolerance(check)}"
    if check.worst is not None:
        text += f"; worst at {words.worst(check.worst)}"
    if check.verdict in words.FAILING:
        _add(case, "failure", words.verdict(check), text)
    elif check.verdict is Verdict.NOT_COMPARABLE:
        _add(case, "error", check.verdict.value, check.not_compared_why or text)
    elif check.verdict is Verdict.RECORDED_ONLY:
        _add(case, "skipped", check.verdict.value, "")


def _add(case: ElementTree.Element, tag: str, message: str, text: str) -> None:
    ElementTree.SubElement(case, tag, message=_clean(message)).text = _clean(text) or None


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
