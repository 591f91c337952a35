"""Puts benchmark processes onto hosts of an emulated cluster: enters the host's network before anything runs there.

All hosts share one kernel: shared memory and same-host engines would cheat, and what runs here must name engines and
servers that use the network.
"""

from __future__ import annotations

import ctypes
import os

from bench.remote import State

CLONE_NEWNET = 0x40000000


def enter(_: State, path: str, environment: dict[str, str]) -> None:
    """Move this process, which must have one thread yet, into the network namespace at `path`."""
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"a process of {len(threads)} threads cannot move as a whole; enter before starting any")
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(namespace, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({path})")
    finally:
        os.close(namespace)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)  # dozens of hosts share few cores
