"""By which arguments two command lines differ, in words. This module must not know what the commands are of."""

from __future__ import annotations


def command_change(command: str, other: str) -> str:
    """Say by which arguments one command line differs from another.

    >>> command_change("train.py --run-id 0 --lr 1", "train.py --run-id 3 --lr 1 --branch opt")
    '--run-id 3 instead of --run-id 0; with --branch opt'
    """
    # difflib costs 8 ms to import: only where arms were started differently.
    import difflib

    one, two = command.split(), other.split()
    changes = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes():
        # An option's value alone says nothing: its name goes with it.
        named = kind == "replace" and a > 0 and one[a - 1].startswith("-")
        left, right = " ".join(one[a - named : b]), " ".join(two[c - named : d])
        if kind == "replace":
            changes.append(f"{right} instead of {left}")
        elif kind != "equal":
            changes.append(f"with {right}" if right else f"without {left}")
    return "; ".join(changes)
