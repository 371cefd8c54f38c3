"""List the files that a process has imported, from which `probe.capture.provenance` says what code ran.

A module of its own, for the recorder asks before anything heavy is wanted. It must not import what it lists.
"""

from __future__ import annotations

import sys


def imported_files() -> tuple[str, ...]:
    """List the files of the modules that this process has imported."""
    # Not by getattr: a lazy module would import what it stands for.
    files = [vars(module).get("__file__") for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    return tuple(file for file in files if isinstance(file, str))
