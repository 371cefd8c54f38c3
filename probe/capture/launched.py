"""Which rank a process is, from the variables its launcher set.

No torch, so that seeding can ask before it is imported.
"""

from __future__ import annotations

import os


def launched_rank() -> int:
    """Give the rank that the launcher's environment variables name, or 0."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 0


def launched_world_size() -> int:
    """Give the number of ranks that the launcher's environment variables name, or 1."""
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        text = os.environ.get(name, "")
        if text.isdigit():
            return int(text)
    return 1
