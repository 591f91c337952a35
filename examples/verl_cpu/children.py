"""Ends everything that was started, also what its own parent has left behind. It starts nothing.

Ray's processes leave their session and their parent. As a subreaper this process becomes the parent of all that its
descendants leave, so that none can get out of sight. Linux only.
"""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
#: Ray ends its own processes within seconds when it is asked to.
GENTLE_SECONDS = 20.0
FIRM_SECONDS = 10.0
#: What is killed can have started something a moment before.
ROUNDS = 3


def adopt_orphans() -> None:
    """From now on, descendants whose parent ends become children of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_all() -> None:
    """Asks the children to end, which end their own in good order; then kills what is left. Raises if that fails."""
    me = psutil.Process()
    for child in me.children():
        _signal(child, signal.SIGTERM)
    psutil.wait_procs(me.children(recursive=True), timeout=GENTLE_SECONDS)
    for _ in range(ROUNDS):
        left = me.children(recursive=True)
        for process in left:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(left, timeout=FIRM_SECONDS)
        if not me.children(recursive=True):
            return
    raise RuntimeError(f"these processes do not end: {[process.pid for process in me.children(recursive=True)]}")


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)
