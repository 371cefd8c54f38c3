"""What holds for every test."""

from __future__ import annotations

import pytest

from probe.store import twins


@pytest.fixture(autouse=True)
def nothing_learned() -> None:
    """What the captures of other tests taught must not decide how a test's own are read."""
    twins._known.clear()
