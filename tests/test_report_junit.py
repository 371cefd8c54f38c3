"""JUnit XML."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from report_cases import ABOVE, BATCH, FAILING, INCONCLUSIVE, LONG, PASSING, STATE

from probe.report.junit import to_junit


def test_checks_become_test_cases_and_the_verdict_is_one_too() -> None:
    assert (
        to_junit(replace(FAILING, checks=(BATCH, ABOVE, STATE, LONG)))
        == """\
<?xml version='1.0' encoding='utf-8'?>
<testsuite name="probe diff" failures="2" errors="1" skipped="1" tests="5">
  <testcase classname="probe" name="batch" />
  <testcase classname="probe" name="attention outputs">
    <failure message="above 31 of 1,240">difference 21.3 %, tolerance 1.23 %; worst at step 1, rank 1, blocks.2.attn: \
l2 norm expected 12.3, actual 12.6</failure>
  </testcase>
  <testcase classname="probe" name="state, not judged">
    <skipped message="recorded only" />
  </testcase>
  <testcase classname="probe" name="LoRA parameters of every block after step">
    <error message="not comparable">no quantity of this check is in both arms</error>
  </testcase>
  <testcase classname="probe" name="verdict">
    <failure message="different">Different: 3 quantities are more than 10 times above tolerance. \
The first divergence is blocks.2.attn.</failure>
  </testcase>
</testsuite>
"""
    )


def test_a_passing_comparison_has_no_failure() -> None:
    suite = ElementTree.fromstring(to_junit(PASSING))
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "0",
        "errors": "0",
        "skipped": "1",
    }


def test_what_could_not_be_told_is_an_error_and_no_failure_of_the_whole() -> None:
    suite = ElementTree.fromstring(to_junit(INCONCLUSIVE))
    error = suite.find("testcase[@name='verdict']/error")
    assert error is not None
    assert error.get("message") == "inconclusive"


def test_characters_that_xml_cannot_hold_are_replaced() -> None:
    suite = ElementTree.fromstring(to_junit(replace(PASSING, checks=(replace(BATCH, what="a\x1b<&\ud800"),))))
    assert suite[0].get("name") == "a\ufffd<&\ufffd"
