"""Begin recording in a Python process below `probe record`, then run the user's own sitecustomize.

This folder stands first on PYTHONPATH, so Python imports this file at start-up. Whatever goes wrong here must leave the
user's process as it would have been.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _probe_begin() -> None:
    try:
        import probe
    except ImportError:
        # The job runs in another environment than the launcher: load the launcher's own copy under the same name.
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        spec = importlib.util.spec_from_file_location(
            "probe", os.path.join(root, "__init__.py"), submodule_search_locations=[root]
        )
        if spec is None or spec.loader is None:
            raise ImportError(f"probe cannot be loaded from {root}") from None
        probe = importlib.util.module_from_spec(spec)
        sys.modules["probe"] = probe
        spec.loader.exec_module(probe)
    from probe.capture import session

    session.begin_once()


def _probe_chain() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [p for p in sys.path if os.path.abspath(p or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("PROBE_REQUEST"):
    try:
        _probe_begin()
    except Exception as error:
        print(f"probe: this process cannot record and runs without it: {error!r}", file=sys.stderr, flush=True)
_probe_chain()
