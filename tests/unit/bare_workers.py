"""Workers without hub or tensors, for tests of how a fleet treats its processes.

They import no torch: they start fast.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection

from tensorhub.cli.demo_worker import Result, Setup, end_with, serve


def echo_pid(connection: Connection, setup: Setup) -> None:
    """Answers its first command with its pid, then waits for ever, deaf to the end of its pipe and to SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection.recv()
    connection.send(Result(os.getpid()))
    while True:
        signal.pause()


def fall_silent(connection: Connection, setup: Setup) -> None:
    """Takes its first command, never answers, and leaves with its pipe."""
    try:
        connection.recv()
        connection.recv()
    except EOFError:
        return


def say_failure(connection: Connection, setup: Setup) -> None:
    """Its hub cannot be opened."""

    def broken(model: str, **_: object) -> object:
        raise RuntimeError("no such server")

    serve(connection, setup, broken)


def outlast_pipe(connection: Connection, setup: Setup) -> None:
    """Like a worker in the midst of a long call: answers its pid, then looks at nothing but its parent's life."""
    end_with(connection)
    connection.recv()
    connection.send(Result(os.getpid()))
    while True:
        signal.pause()


def lead() -> None:
    """A demo's parent: prints the pid of a worker that is busy, and waits to be killed."""
    from tensorhub.cli import demo, weights
    from tensorhub.cli.demo_worker import Digests
    from tensorhub.cli.fleet import ProcessFleet

    setup = demo.setups(demo.Options(weights.synthetic(1), replicas=1, shards=1))[0]
    with ProcessFleet([setup], outlast_pipe) as fleet:
        print(fleet.ask({setup.member: Digests()}, 60.0)[setup.member], flush=True)
        signal.pause()
