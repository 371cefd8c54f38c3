"""Find the compiled modules, which are there only where a C compiler was at hand when the package was installed.

What they compute is computed without them too, more slowly. This module must not know what that is.
"""

from __future__ import annotations

import importlib
from typing import Any


def built(name: str, interface: int) -> Any:
    """Import a compiled module.

    Args:
        name: Its full name.
        interface: How it is called; it says the same in its constant `INTERFACE`.

    Returns:
        The module; None where it was not built, or its build is older than the source tree and is called in another
        way.
    """
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return module if getattr(module, "INTERFACE", 0) == interface else None
