"""`tensorhub chaos` with real processes: it is ok where TensorHub holds, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


def chaos(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command with temporary files of its own, by which its processes are known."""
    return subprocess.Popen(
        [sys.executable, "-m", "tensorhub", "chaos", "--mib", "16", "--seed", "1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
    )


def running(folder: Path) -> list[int]:
    """Processes whose environment names the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def until_nothing_is_left(folder: Path) -> None:
    """No file at once; no process soon: those that only served the others end with them."""
    assert list(folder.iterdir()) == []
    deadline_s = time.monotonic() + PATIENCE_S
    while left := running(folder):
        assert time.monotonic() < deadline_s, f"processes {left} are left"
        time.sleep(0.02)


def test_two_cases_hold_and_leave_nothing(tmp_path: Path) -> None:
    """source_killed_midchunk, mutate_during_read: `tensorhub chaos --json` says in one document that both are ok."""
    command = chaos(tmp_path, "--only", "source_killed_midchunk,mutate_during_read", "--json")
    out, err = command.communicate(timeout=PATIENCE_S)
    document = json.loads(out)
    assert [(case["case"], case["verdict"], case["complaints"]) for case in document["cases"]] == [
        ("source_killed_midchunk", "ok", []),
        ("mutate_during_read", "ok", []),
    ]
    assert (command.returncode, document["ok"], err) == (0, True, "")
    assert document["cases"][0]["verified_bytes"] > 2 * (16 << 20)
    assert document["cases"][1]["errors"]
    until_nothing_is_left(tmp_path)


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while a case runs ends server and workers, removes the folder, and is told in one line."""
    command = chaos(tmp_path, "--only", "source_stopped")
    assert command.stdout is not None
    deadline_s = time.monotonic() + PATIENCE_S
    while not any(b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in running(tmp_path)):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 130
    assert err == "tensorhub: interrupted; all processes that chaos had started have ended\n"
    until_nothing_is_left(tmp_path)
