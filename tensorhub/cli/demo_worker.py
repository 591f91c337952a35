"""One process of the demo or of `tensorhub chaos`: a shard of the trainer or of a rollout, driven over a pipe.

It decides nothing: it does what the commands say with a hub of its own and answers each with a result or the error's
name and message. It ends when told, when the pipe closes, or with its parent; of the demo also at its first error.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, assert_never

from tensorhub.cli import compare, pace, weights
from tensorhub.errors import TensorHubError

if TYPE_CHECKING:
    import torch

#: How often a replicate that runs is reported: smooth for an eye, nothing for a pipe.
PROGRESS_SECONDS = 0.05
#: Bytes of one piece of the final comparison.
PIECE_BYTES = 4 << 20
#: What a worker gets to close its hub once its pipe is; no more than the fleet waits for it.
GRACE_SECONDS = 5.0

#: `tensorhub.open`, or a fake of it. An adapter's seam: the hub is imported by the worker alone.
OpenHub = Callable[..., Any]


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """Who a worker is."""

    replica: str
    shard: int

    def __str__(self) -> str:
        return f"{self.replica}#{self.shard}"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to open its hub and make its tensors."""

    member: Member
    shards: int
    trainer: bool
    specs: tuple[weights.TensorSpec, ...]
    file: str | None
    seed: int
    model: str
    server: str | None
    job: str | None
    engine: tuple[str, ...]
    timeout_s: float
    #: Whether an error of the hub is an answer like any other, after which the worker goes on.
    goes_on: bool = False


# ---------------------------------------------------------------- commands and their results


@dataclass(frozen=True, slots=True)
class Open:
    """Make the tensors, open the hub, register. Result: None."""


@dataclass(frozen=True, slots=True)
class Step:
    """Change every floating tensor. Result: None."""

    seed: int


@dataclass(frozen=True, slots=True)
class Touch:
    """Change the last element of every floating tensor, whoever reads them. Result: None."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Send at most so many bytes a second over each connection to a reader; 0: as fast as can be. Result: None."""

    bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Result: seconds that the call took."""

    version: int


@dataclass(frozen=True, slots=True)
class Unpublish:
    """Result: seconds that the call took."""

    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replicate:
    """Pull a version, reporting `Progress` meanwhile. Result: `Pulled`."""

    version: int | str = "latest"
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Digests:
    """Result: {tensor: blake2b of what is in memory now}."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Send every tensor's bytes, in name order, as raw pieces. Result, before the pieces: [(name, nbytes)]."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Close the hub and end. Result: None."""


Command = Open | Step | Touch | Pace | Publish | Unpublish | Replicate | Digests | Stream | Leave


@dataclass(frozen=True, slots=True)
class Pull:
    """Bytes that came from one source."""

    source: str
    nbytes: int
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pulled:
    """What one shard's replicate reported."""

    version: int
    nbytes: int
    seconds: float
    verified: bool
    engine: str
    engine_reason: str
    pulls: tuple[Pull, ...]
    phases: dict[str, float]
    #: All bytes that landed, those read in vain included.
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replicate that runs has come. Comes before its result, any number of times."""

    bytes_done: int
    bytes_total: int
    source: str
    at_s: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True, slots=True)
class Result:
    """The command succeeded. `at_s` is the monotonic clock, one for all processes of a host."""

    value: Any
    at_s: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True, slots=True)
class Failure:
    """The command failed; the worker ends, unless it was told to go on."""

    error: str
    message: str
    at_s: float = field(default_factory=time.monotonic, compare=False)


# ---------------------------------------------------------------- the process


def main(connection: Connection, setup: Setup) -> None:
    """Entry point of a spawned process."""
    end_with(connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; the parent ends us
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fleet blocked it until here
    import torch

    torch.set_num_threads(1)  # many workers share the host's cores
    serve(connection, setup, importlib.import_module("tensorhub").open)


def serve(connection: Connection, setup: Setup, open_hub: OpenHub) -> None:
    """Answer commands until told to leave, the first failure, or the end of the pipe."""
    worker = _Worker(connection, setup, open_hub)
    try:
        while True:
            command = connection.recv()
            try:
                worker.obey(command)
            except TensorHubError as error:
                if not setup.goes_on:
                    raise
                worker.send(Failure(type(error).__name__, str(error)))
            if isinstance(command, Leave):
                return
    except EOFError:
        return  # nobody is left to answer to
    except Exception as error:  # noqa: BLE001  whatever it is, the parent must hear its name
        with contextlib.suppress(ConnectionError):  # unless it has left, which may be the very failure
            connection.send(Failure(type(error).__name__, str(error)))
    finally:
        with contextlib.suppress(TensorHubError):  # after Leave it is closed; else a failure is told, or nobody listens
            worker.close()
        connection.close()


@dataclass(slots=True)
class _Worker:
    connection: Connection
    setup: Setup
    open_hub: OpenHub
    hub: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Guards `connection.send`: the progress thread reports while the main thread pulls.
    sending: threading.Lock = field(default_factory=threading.Lock)

    def obey(self, command: Command) -> None:
        match command:
            case Open():
                self.open()
                self.answer(None)
            case Step(seed):
                weights.step(self.tensors, seed + self.setup.member.shard)
                self.answer(None)
            case Touch():
                weights.touch(self.tensors)
                self.answer(None)
            case Pace(bytes_per_s):
                pace.slow_down(bytes_per_s)
                self.answer(None)
            case Publish(version):
                self.answer(self.timed(lambda: self.hub.publish(version=version)))
            case Unpublish(timeout_s):
                within_s = self.setup.timeout_s if timeout_s is None else timeout_s
                self.answer(self.timed(lambda: self.hub.unpublish(timeout=within_s)))
            case Replicate(version, timeout_s):
                self.answer(self.replicate(version, self.setup.timeout_s if timeout_s is None else timeout_s))
            case Digests():
                self.answer(self.digests())
            case Stream():
                self.stream()
            case Leave():
                self.close()
                self.answer(None)
            case _:
                assert_never(command)

    def answer(self, value: Any) -> None:
        self.send(Result(value))

    def send(self, message: Result | Progress | Failure) -> None:
        with self.sending:
            self.connection.send(message)

    def open(self) -> None:
        setup = self.setup
        if setup.trainer:
            self.tensors = weights.load(setup.file, setup.specs, setup.seed + setup.member.shard)
        else:
            self.tensors = weights.blank(setup.specs)
        self.hub = self.open_hub(
            setup.model,
            replica=setup.member.replica,
            shard=setup.member.shard,
            shards=setup.shards,
            server=setup.server,
            job=setup.job,
            engine=setup.engine,
            timeout=setup.timeout_s,
        )
        self.hub.register(self.tensors)

    @staticmethod
    def timed(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def replicate(self, version: int | str, timeout_s: float) -> Pulled:
        done = threading.Event()
        reporter = threading.Thread(target=self.report, args=(done,), daemon=True)
        reporter.start()
        try:
            got = self.hub.replicate(version, timeout=timeout_s)
        finally:
            done.set()
            reporter.join()
        pulls = tuple(Pull(f"{s.replica}#{s.shard}", s.nbytes, s.engine, s.reason) for s in got.sources)
        # However fast it was, its end is shown.
        self.send(Progress(got.nbytes, got.nbytes, ", ".join(dict.fromkeys(pull.source for pull in pulls))))
        return Pulled(
            version=got.version,
            nbytes=got.nbytes,
            seconds=got.seconds,
            verified=got.verified,
            engine=got.engine,
            engine_reason=got.engine_reason,
            pulls=pulls,
            phases=dict(got.phases),
            bytes_read=got.bytes_read,
        )

    def report(self, done: threading.Event) -> None:
        while not done.wait(PROGRESS_SECONDS):
            now = self.hub.progress()
            if now is not None and now.bytes_total:
                try:
                    self.send(Progress(now.bytes_done, now.bytes_total, now.source))
                except ConnectionError:
                    return  # nobody looks any more; the main thread meets the same when it answers

    def digests(self) -> dict[str, str]:
        return {
            name: compare.digest(str(tensor.dtype), tuple(tensor.shape), weights.raw_bytes(tensor))
            for name, tensor in self.tensors.items()
        }

    def stream(self) -> None:
        names = sorted(self.tensors)
        self.answer([(name, self.tensors[name].nbytes) for name in names])
        for name in names:
            data = weights.raw_bytes(self.tensors[name])
            for start in range(0, len(data), PIECE_BYTES):
                self.connection.send_bytes(data[start : start + PIECE_BYTES])

    def close(self) -> None:
        hub, self.hub = self.hub, None
        if hub is not None:
            hub.close()


def end_with(connection: Connection) -> None:
    """Kill this process soon after the other end of its pipe is gone, whatever it is busy with, and leave no orphan.

    The kernel's signal for a parent's death would not do: the parent is the fork server, which lives as long as we.
    """
    watched = select.poll()
    watched.register(connection.fileno(), 0)  # asked for nothing, it tells of the hang-up alone

    def watch() -> None:
        watched.poll()
        time.sleep(GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="demo-end", daemon=True).start()
