"""Write a failed check as an annotation that GitHub Actions shows beside the line.

Source: GitHub's documentation, "Workflow commands for GitHub Actions", setting an error message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLE = "not equivalent"


def annotation(report: Any, root: Path) -> str:
    """Return the workflow command.

    Args:
        report: pytest's report of a failed test.
        root: Folder that the path is relative to.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    path, line, text = report.nodeid.partition("::")[0], 1, str(report.longrepr)
    if crash is not None:
        path, line, text = crash.path, crash.lineno, crash.message
        if Path(path).is_relative_to(root):
            path = str(Path(path).relative_to(root))
    kind, colon, rest = text.partition(": ")
    text = rest if colon and kind.startswith("probe.") else text
    return f"::error file={_value(path)},line={line},title={_value(f'probe: {TITLE}')}::{_message(text)}"


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
