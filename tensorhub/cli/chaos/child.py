"""Runs a module as `python -m` would, in a process that dies with its parent: `python -m …chaos.child PARENT MODULE …`.

It decides nothing else. A server has no pipe to its starter by which it would notice that it is alone.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From now on this process is killed when the thread of its parent ends that started it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)  # it died before it could be watched


def main(arguments: list[str]) -> None:
    """`arguments`: the parent's pid, the module, its own arguments."""
    parent, module, *rest = arguments
    die_with(int(parent))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
