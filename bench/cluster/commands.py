"""Runs `ip` and `tc`: each with a deadline, its return code checked, its complaint in the error. It decides nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from bench.remote import Missing

#: Both answer in milliseconds; a kernel that takes longer is stuck.
COMMAND_SECONDS = 30.0
INSTALL = "root, and Debian's iproute2"


class NetworkFailed(OSError):
    """The kernel refused to build what was asked for; says what, and its words."""


def check_able() -> None:
    """`Missing` where no cluster can be emulated."""
    lacking = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if os.geteuid() != 0:
        lacking.append("root")
    if lacking:
        raise Missing(f"an emulated cluster needs {INSTALL}; lacking: {', '.join(lacking)}")
    try:
        run(["ip", "netns", "list"])
    except NetworkFailed as error:
        raise Missing(f"an emulated cluster needs network namespaces: {error}") from error


def run(command: Sequence[str], lines: Sequence[str] = ()) -> str:
    """What the command printed; `lines` go to its standard input, for `-batch -`."""
    try:
        done = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NetworkFailed(f"{' '.join(command)} took longer than {COMMAND_SECONDS:g} s") from error
    if done.returncode != 0:
        raise NetworkFailed(f"{' '.join(command)} returned {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ip(namespace: str, lines: Sequence[str]) -> None:
    """A batch of `ip` within a namespace."""
    run(["ip", "-n", namespace, "-batch", "-"], lines)


def tc(namespace: str, lines: Sequence[str]) -> None:
    """A batch of `tc` within a namespace."""
    run(["tc", "-n", namespace, "-batch", "-"], lines)
