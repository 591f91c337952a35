"""A process with one session, for tests that kill and stop it: `python -m tests.support.session_process LINK REPLICA`.

Prints a line of JSON after joining its seat; then answers each line on stdin by one more, and closes at its end.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

from tensorhub import messages as m
from tensorhub.client.links import parse_server
from tensorhub.client.session import Session
from tensorhub.types import Location, ModelKey, ReplicaId, Seat, SessionId

MODEL = ModelKey("job", "actor")


def join_of(replica: str) -> m.Join:
    return m.Join(Seat(MODEL, ReplicaId(replica), 0), 1, "layout", False, Location())


async def main(address: str, replica: str) -> None:
    session = Session(parse_server(address), SessionId(os.urandom(16)), host="host", pid=os.getpid())
    await session.open(30.0)
    join = join_of(replica)
    heard: list[object] = [await session.call(join, 30.0)]
    session.subscribe(join.seat, heard.append, lambda: join)
    loop = asyncio.get_running_loop()
    while True:
        assert session.epoch is not None
        report = {"session": session.id.hex(), "epoch": session.epoch.hex(), "lapses": session.lapses}
        report |= {"fenced": session.fenced(), "groups": [reply.group for reply in heard]}
        print(json.dumps(report), flush=True)
        if not await loop.run_in_executor(None, sys.stdin.readline):
            break
        await session.call(m.List(MODEL), 30.0)
    await session.close(5.0)


class SessionProcess:
    """Such a process, seen from its parent."""

    def __init__(self, address: str, replica: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.session_process", address, replica],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def report(self) -> dict[str, object]:
        """The next line it prints: waits for it."""
        line = self.process.stdout.readline()
        assert line, f"the process ended with {self.process.wait()}"
        return dict(json.loads(line))

    def ask(self) -> dict[str, object]:
        """Let it make a call, then report."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.report()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
