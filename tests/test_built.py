"""Compiled modules are used where they were built of this source, and only there."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from probe.built import built
from probe.capture import summary
from probe.measure import blocks, distance

USED = {
    "probe.capture._reduce": summary,
    "probe.measure._elementwise": blocks,
    "probe.measure._sketches": distance,
}


@pytest.mark.parametrize("name", USED)
def test_the_build_at_hand_is_of_this_source(name: str) -> None:
    build = pytest.importorskip(name, reason="there was no C compiler when the package was installed")
    assert USED[name].compiled is build


@pytest.mark.parametrize("interface", [2, 1, None])
def test_a_build_that_is_called_in_another_way_is_not_used(
    monkeypatch: pytest.MonkeyPatch, interface: int | None
) -> None:
    build = SimpleNamespace() if interface is None else SimpleNamespace(INTERFACE=interface)
    monkeypatch.setitem(sys.modules, "probe.some_build", build)
    assert built("probe.some_build", 2) is (build if interface == 2 else None)


def test_without_a_build_there_is_none() -> None:
    assert importlib.util.find_spec("probe.some_build") is None
    assert built("probe.some_build", 1) is None
