"""Run one test function on several ranks: a pytest process for each, joined by a gloo process group.

Processes and not forks or pickled functions, so that fixtures, parameters, classes and every import mode work as they
do for any test. The parent waits, and tells what the ranks found. This module must not import torch in the parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REQUEST = "PROBE_TEST_RANK"
"""Environment variable that makes a pytest process one rank: a JSON object."""

GRACE_S = 15.0
"""Seconds that the other ranks have to end once one has failed: they may wait for it in a collective."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one rank's test ended."""

    rank: int
    outcome: str
    """`passed`, `failed` or `skipped`; `died` without a report."""
    text: str = ""
    """What failed, as pytest shows it, or the end of what the process printed."""
    properties: tuple[tuple[str, str], ...] = ()
    sections: tuple[tuple[str, str], ...] = field(default=())


def rank_request() -> dict[str, Any] | None:
    """Return what this process was started for, or None if it is an ordinary pytest process."""
    text = os.environ.get(REQUEST)
    return json.loads(text) if text else None


class RankPlugin:
    """What a rank's process does besides running its test: join the group, report to the parent."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._request = request
        self._reports: list[Any] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Give the options that a conftest declares the values that they have in the parent."""
        for name, value in self._request["options"].items():
            setattr(config.option, name, value)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Join the process group for the time of the test."""
        import torch.distributed as distributed

        distributed.init_process_group(
            "gloo",
            init_method=f"file://{self._request['store']}",
            rank=self._request["rank"],
            world_size=self._request["ranks"],
        )
        try:
            yield
        finally:
            distributed.destroy_process_group()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reports of the test."""
        self._reports.append(report)

    def pytest_sessionfinish(self) -> None:
        """Tell the parent."""
        failed = next((each for each in self._reports if each.failed), None)
        skipped = next((each for each in self._reports if each.skipped), None)
        told = failed or skipped or (self._reports[-1] if self._reports else None)
        outcome = "failed" if failed else "skipped" if skipped else "passed" if told else "died"
        text = ""
        if skipped and not failed:
            text = str(skipped.longrepr[2]) if isinstance(skipped.longrepr, tuple) else skipped.longreprtext
        elif failed:
            text = failed.longreprtext
        content = {
            "outcome": outcome,
            "text": text,
            "properties": list(told.user_properties) if told else [],
            "sections": [list(each) for each in told.sections] if told else [],
        }
        Path(self._request["result"]).write_text(json.dumps(content), encoding="utf-8")


def run_ranks(item: pytest.Item, ranks: int) -> list[Outcome]:
    """Run a test on several ranks, each in a pytest process of its own.

    Args:
        item: The test. It is run in none but these processes.
        ranks: Number of processes.
    """
    with tempfile.TemporaryDirectory(prefix="probe-ranks-") as folder:
        store, processes = Path(folder) / "store", []
        for rank in range(ranks):
            request = {
                "rank": rank,
                "ranks": ranks,
                "store": str(store),
                "result": f"{folder}/{rank}.json",
                "options": _declared_options(item.config),
            }
            with open(f"{folder}/{rank}.txt", "wb") as output:
                processes.append(
                    subprocess.Popen(
                        _command(item),
                        cwd=item.config.invocation_params.dir,
                        env=_environment(rank, ranks, json.dumps(request)),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(processes)
        return [_outcome(Path(folder), rank) for rank in range(ranks)]


def _command(item: pytest.Item) -> list[str]:
    config = item.config
    path, _, test = item.nodeid.partition("::")
    words = [sys.executable, "-m", "pytest", f"{item.path}::{test}" if test else str(path)]
    words += ["--rootdir", str(config.rootpath), "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", "-q"]
    words += ["--import-mode", str(config.getoption("importmode"))]
    if config.inipath is not None:
        words += ["-c", str(config.inipath)]
    for plugin in config.getoption("plugins") or ():
        words += ["-p", str(plugin)]
    for warning in config.getoption("pythonwarnings") or ():
        words += ["-W", str(warning)]
    for override in config.getoption("override_ini") or ():
        words += ["-o", str(override)]
    for option in ("--probe-record", "--probe-record-all"):
        words += [option] if config.getoption(option) else []
    if config.getoption("--probe-report"):
        words += ["--probe-report", str(config.getoption("--probe-report"))]
    return words


def _declared_options(config: pytest.Config) -> dict[str, Any]:
    """Return the values of options that conftest files and the like declare, as far as JSON can hold them."""
    group = getattr(getattr(config, "_parser", None), "_anonymous", None)
    values = {option.dest: getattr(config.option, option.dest, None) for option in getattr(group, "options", ())}
    plain = (str, int, float, bool, type(None))
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, plain) or (isinstance(value, list) and all(isinstance(each, plain) for each in value))
    }


def _environment(rank: int, ranks: int, request: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTEST_ADDOPTS" and not name.startswith(("PYTEST_XDIST", "PYTEST_CURRENT"))
    }
    here = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**kept, **here, REQUEST: request}


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all; once one has failed the others have `GRACE_S` to end by themselves."""
    deadline = None
    try:
        while any(process.poll() is None for process in processes):
            if deadline is None and any(process.returncode for process in processes):
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _outcome(folder: Path, rank: int) -> Outcome:
    result = folder / f"{rank}.json"
    if not result.exists():
        output = (folder / f"{rank}.txt").read_text(encoding="utf-8", errors="replace")
        return Outcome(rank=rank, outcome="died", text="\n".join(output.splitlines()[-30:]))
    content = json.loads(result.read_text(encoding="utf-8"))
    return Outcome(
        rank=rank,
        outcome=content["outcome"],
        text=content["text"],
        properties=tuple((str(name), str(value)) for name, value in content["properties"]),
        sections=tuple((str(name), str(value)) for name, value in content["sections"]),
    )


def told(outcomes: list[Outcome]) -> str:
    """Say what failed, once where the ranks say the same."""
    by_text: dict[str, list[int]] = {}
    killed = []
    for each in outcomes:
        if each.outcome in ("failed", "died"):
            if each.outcome == "died" and not each.text:
                killed.append(each.rank)
            else:
                by_text.setdefault(each.text, []).append(each.rank)
    parts = []
    for text, ranks in by_text.items():
        who = "All ranks" if len(ranks) == len(outcomes) else f"Rank {', '.join(map(str, ranks))}"
        parts.append(f"{who} of {len(outcomes)} failed:\n{text}")
    if killed:
        parts.append(f"Rank {', '.join(map(str, killed))} of {len(outcomes)} ended without a word.")
    return "\n\n".join(parts)
