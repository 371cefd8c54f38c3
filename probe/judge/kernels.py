"""Which attention kernels ran in a capture, and where two captures differ in them.

Recording notes them as facts about the job (`state/attention.<module>`); they are shown, never judged. This module
must not know how they were found out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from probe.errors import listed
from probe.measure.series import CaptureLike
from probe.point import Kind

PREFIX = "attention."


def attention_kernels(capture: CaptureLike) -> dict[str, str]:
    """Return the kernel of each module that called one, from the first step of every rank.

    A module whose ranks or calls used several kernels gets them all, sorted and joined by ` + `.
    """
    found: dict[str, set[str]] = {}
    # Ranks mostly have the same names and texts, which are then the same objects.
    read = [capture.names(rank) for rank in capture.ranks if capture.steps(rank)]
    columns = {(id(keys), id(texts)): (keys, texts) for keys, texts in read}
    for keys, texts in columns.values():
        for key, text in zip(keys, texts, strict=True):
            if key.kind is Kind.STATE and key.name.startswith(PREFIX):
                found.setdefault(key.name.removeprefix(PREFIX), set()).add(text)
    return {module: " + ".join(sorted(kernels)) for module, kernels in found.items()}


def kernel_summary(kernels: Mapping[str, str]) -> str:
    """Say in a few words which kernels ran.

    >>> kernel_summary({"blocks.0.attn": "torch sdpa: flash", "blocks.1.attn": "torch sdpa: flash"})
    'torch sdpa: flash (2 modules)'
    """
    counts = Counter(kernels.values())
    return ", ".join(f"{kernel} ({n} module{'s' if n > 1 else ''})" for kernel, n in sorted(counts.items()))


def kernel_changes(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> list[str]:
    """List the changes of kernel between two arms, modules of the same change together.

    >>> kernel_changes({"a": "flash_attn", "b": "flash_attn"}, {"a": "torch sdpa: math", "b": "torch sdpa: math"})
    ['attention of a, b: flash_attn -> torch sdpa: math']
    """
    modules: dict[tuple[str, str], list[str]] = {}
    for module in sorted(baseline.keys() | candidate.keys()):
        change = (baseline.get(module, "none seen"), candidate.get(module, "none seen"))
        if change[0] != change[1]:
            modules.setdefault(change, []).append(module)
    return [f"attention of {listed(names)}: {before} -> {after}" for (before, after), names in modules.items()]
