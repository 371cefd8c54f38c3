"""A script that kills itself at a chosen call to the file system, for what must lose nothing whatever ends it."""

from __future__ import annotations

_SCRIPT = """
import os, signal, sys
from pathlib import Path
{imports}
calls, last = 0, int(sys.argv[2])
def counted(real):
    def call(*arguments):
        global calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return call
os.pwrite, os.fsync, os.rename, os.unlink = map(counted, (os.pwrite, os.fsync, os.rename, os.unlink))
{call}
print(calls)
"""


def killed_script(imports: str, call: str) -> str:
    """Write the script: its arguments are a folder and the number of the call, and it prints how many there were."""
    return _SCRIPT.format(imports=imports, call=call)
