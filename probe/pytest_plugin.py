"""Equivalence as an assertion, for pytest: the fixture `probe_check`, the marker `probe`, the options `--probe-*`.

The entry point is imported in every pytest run of an environment, so that nothing is imported here but what pytest
itself has imported already; what a check needs is imported by the test that has one. This module must not know how
anything is recorded or judged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from probe.equivalence.checker import ProbeCheck, Told
    from probe.equivalence.options import Options

MARKER = (
    "probe(tolerances=None, steps=1, seed=0, k=3, ranks=1): how probe_check compares, and on how many gloo ranks the "
    "test runs."
)
FIXTURE = "probe_check"
_RECORDED, _PREFIX = "probe.recorded", "probe."
_RANK_REQUEST = "PROBE_TEST_RANK"
_STALE = pytest.StashKey[list[str]]()


# ---------------------------------------------------------------------- options
def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("probe", "equivalence of training code (trainprobe)")
    group.addoption(
        "--probe-record",
        action="store_true",
        help="Record baselines that are missing or no longer met, and fail, so that a person looks.",
    )
    group.addoption("--probe-record-all", action="store_true", help="Record all baselines anew, and pass.")
    group.addoption("--probe-report", metavar="DIR", help="Write an HTML page of every failed check to DIR.")


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker; in the process of one rank, take its part."""
    config.addinivalue_line("markers", MARKER)
    if _RANK_REQUEST in os.environ:
        from probe.equivalence.ranks import RankPlugin, rank_request

        request = rank_request()
        if request is not None:
            config.pluginmanager.register(RankPlugin(request), "probe-rank")


# ---------------------------------------------------------------------- the fixture
@pytest.fixture
def probe_check(request: pytest.FixtureRequest) -> Iterator[ProbeCheck]:
    """Compare two callables, or a callable with a stored baseline: `probe_check(candidate, baseline=..., inputs=(x,))`.

    Random generators are seeded before the test's body and put back after it.
    """
    from pathlib import Path

    from probe.equivalence.arm import undisturbed
    from probe.equivalence.checker import RECORD, RECORD_ALL, Place, ProbeCheck

    item, config = request.node, request.config
    report = config.getoption("--probe-report")
    place = Place(
        file=item.path,
        test=item.nodeid.partition("::")[2],
        nodeid=item.nodeid,
        root=config.rootpath,
    )
    mode = RECORD_ALL if config.getoption("--probe-record-all") else ""
    mode = mode or (RECORD if config.getoption("--probe-record") else "")

    def tell(told: Told) -> None:
        _take(item, told)

    with undisturbed(()):
        yield ProbeCheck(
            place=place,
            options=_options(item),
            mode=mode,
            report=config.invocation_params.dir / Path(report) if report else None,
            tell=tell,
        )


def _options(item: pytest.Item) -> Options:
    from probe.equivalence.options import from_marker

    marker = item.get_closest_marker("probe")
    return from_marker(marker.args, marker.kwargs) if marker else from_marker((), {})


def _take(item: pytest.Item, told: Told) -> None:
    """Put a check's numbers into the reports of its test."""
    if told.recorded:
        item.user_properties.append((_RECORDED, told.recorded))
    if told.comparison is None:
        return
    from probe.equivalence.explain import properties

    item.user_properties.extend(properties(told.label, told.comparison))
    if told.failed:
        from dataclasses import replace

        from probe.report.text import to_text

        # The table; what the message has said already is not said again.
        table = to_text(replace(told.comparison, first_divergence=None, notes=(), reason=""))
        item.add_report_section("call", f"probe_check, {told.label}", table)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Seed a test that has checks; run one that is marked with ranks in their processes instead of here.

    Not a fixture: plugins that shuffle tests seed again after the fixtures.
    """
    marker = pyfuncitem.get_closest_marker("probe")
    if marker is None and FIXTURE not in pyfuncitem.fixturenames:
        return None
    options = _options(pyfuncitem)
    member: Any = pyfuncitem.config.pluginmanager.get_plugin("probe-rank")
    if options.ranks > 1 and member is None:
        _on_ranks(pyfuncitem, options.ranks)
        return True
    if FIXTURE in pyfuncitem.fixturenames:
        from probe.equivalence.arm import seed_all

        seed_all(options.seed)
    if member is None or options.ranks == 1:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with member.group():
        pyfuncitem.obj(**arguments)
    return True


def _on_ranks(item: pytest.Function, ranks: int) -> None:
    __tracebackhide__ = True
    from probe.equivalence.ranks import run_ranks, told

    outcomes = run_ranks(item, ranks)
    first = outcomes[0]
    item.user_properties.extend(first.properties)
    text = told(outcomes)
    if text:
        for name, content in first.sections:
            item.add_report_section("call", name.removeprefix("Captured ").removesuffix(" call"), content)
        pytest.fail(text, pytrace=False)
    if first.outcome == "skipped":
        pytest.skip(first.text)


# ---------------------------------------------------------------------- plain assertions
def pytest_assertrepr_compare(config: pytest.Config, op: str, left: object, right: object) -> list[str] | None:
    """Explain `assert actual == probe.close_to(expected)` in our words."""
    close = sys.modules.get("probe.equivalence.close")
    if close is None or op != "==":
        return None
    for one, other in ((right, left), (left, right)):
        if isinstance(one, close.CloseTo):
            lines: list[str] = one.explain(other)
            return lines
    return None


# ---------------------------------------------------------------------- baselines whose test is gone
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Look for stored baselines that no collected test has, before any option deselects tests."""
    if any("::" in str(argument) for argument in config.args):
        return  # Files are not collected whole.
    folders = {item.path.parent: None for item in items}
    with_baselines = {folder for folder in folders if os.path.isdir(os.path.join(folder, "captures"))}
    if not with_baselines:
        return
    from probe.equivalence.stored import stale

    of_files: dict[Path, list[str]] = {}
    for item in items:
        if item.path.parent in with_baselines:
            of_files.setdefault(item.path, []).append(item.nodeid.partition("::")[2])
    root = config.rootpath
    found = [str(path.relative_to(root)) if path.is_relative_to(root) else str(path) for path in stale(of_files)]
    config.stash[_STALE] = found
    output: Any = getattr(config, "workeroutput", None)
    if output is not None:
        output["probe_stale"] = found


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take what a pytest-xdist worker found; all workers collect the same."""
    found = getattr(node, "workeroutput", {}).get("probe_stale")
    if found:
        node.config.stash[_STALE] = found


# ---------------------------------------------------------------------- the end of the run
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List recorded and stale baselines; under GitHub Actions, annotate the lines of failed checks."""
    recorded, failed = [], []
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = getattr(report, "user_properties", None)
            if not properties or report.when != "call":
                continue
            recorded += [str(value) for name, value in properties if name == _RECORDED]
            if outcome == "failed" and any(str(name).startswith(_PREFIX) for name, _ in properties):
                failed.append(report)
    stale = config.stash.get(_STALE, [])
    if recorded or stale:
        terminalreporter.section("probe")
    for path in recorded:
        terminalreporter.write_line(f"recorded: {path}")
    for path in stale:
        terminalreporter.write_line(f"stale: {path} (its test is gone; remove it)")
    if failed and os.environ.get("GITHUB_ACTIONS") == "true":
        from probe.equivalence.github import annotation

        for report in failed:
            terminalreporter.write_line(annotation(report, config.rootpath))
