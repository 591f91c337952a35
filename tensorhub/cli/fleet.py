"""Runs the demo's workers as real processes: starts them, gives each command a deadline, and ends them all.

It decides when a worker counts as dead or stuck, and leaves no orphan. It never looks into what a result says.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import gettempdir
from types import TracebackType
from typing import Any, Protocol

from tensorhub.cli.demo_worker import Command, Failure, Member, Progress, Result, Setup, main

#: What the fork server imports before it forks. None of it starts a thread when imported.
PRELOAD = ("torch", "tensorhub.client.hub", "tensorhub.client.registry", "tensorhub.cli.demo_worker")
#: A worker that was asked to end gets this long before it is killed.
END_SECONDS = 5.0
#: Between two looks at whether a process has stopped.
LOOK_SECONDS = 0.001

OnProgress = Callable[[Member, Progress], None]


class WorkerFailed(Exception):
    """A worker failed, died or did not answer in time; says which and why."""


class Fleet(Protocol):
    """The workers of a demo, as its course needs them."""

    def ask(
        self, commands: Mapping[Member, Command], timeout_s: float, on_progress: OnProgress | None = None
    ) -> dict[Member, Any]:
        """Give each worker its command at once; all results, or `WorkerFailed` naming every worker that failed."""
        ...

    def pieces(self, member: Member, nbytes: int, timeout_s: float) -> Iterable[bytes]:
        """The raw pieces that follow a `Stream` result, until `nbytes` have come."""
        ...


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    connection: Connection


class ProcessFleet:
    """A `Fleet` of processes. Use it as a context manager: leaving it ends every process."""

    def __init__(self, setups: Iterable[Setup], target: Callable[[Connection, Setup], None] = main) -> None:
        self._setups = tuple(setups)
        self._target = target
        self._workers: dict[Member, _Worker] = {}

    def __enter__(self) -> ProcessFleet:
        # A fresh interpreter per worker: nothing inherited, as on another host.
        # One process imports torch, all others are its forks: ten imports take a minute on two cores.
        context = multiprocessing.get_context("forkserver")
        over_ray = any((setup.server or "").startswith("ray://") for setup in self._setups)
        context.set_forkserver_preload([*PRELOAD, "ray"] if over_ray else list(PRELOAD))
        # Ctrl-C reaches every process of the foreground group; ours alone acts on it. What starts here inherits the
        # block, also while it imports; a worker lifts it once it ignores the signal.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            forkserver.ensure_running()
        except OSError as error:  # above all a TMPDIR in which the path of a socket is too long
            raise WorkerFailed(
                f"no process can be started with a socket below {gettempdir()}: {error}; set TMPDIR to another folder"
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            for setup in self._setups:
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=self._target,
                    args=(theirs, setup),
                    name=f"tensorhub-demo-{setup.member}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._workers[setup.member] = _Worker(process, ours)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(
        self, commands: Mapping[Member, Command], timeout_s: float, on_progress: OnProgress | None = None
    ) -> dict[Member, Any]:
        deadline = time.monotonic() + timeout_s
        failures: dict[Member, str] = {}
        for member, command in commands.items():
            try:
                self._workers[member].connection.send(command)
            except OSError as error:
                # Its own last words, if there are any, say more than the broken pipe.
                failures[member] = self._last_words(member) or f"cannot be reached: {error}"
        pending = {self._workers[m].connection: m for m in commands if m not in failures}
        results: dict[Member, Any] = {}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = f"did not answer within {timeout_s:g} s"
                failures.update({m: f"{late} to {type(commands[m]).__name__}" for m in pending.values()})
                break
            for connection in ready:
                member = pending[connection]  # type: ignore[index]  # wait() answers with what it was given
                message = self._receive(member)
                match message:
                    case Progress():
                        if on_progress is not None:
                            on_progress(member, message)
                        continue
                    case Result(value):
                        results[member] = value
                    case reason:
                        failures[member] = reason
                        # The others may now wait for the failed one in vain: they get a moment to say so themselves.
                        deadline = min(deadline, time.monotonic() + END_SECONDS)
                del pending[connection]  # type: ignore[arg-type]
        if failures:
            raise WorkerFailed(_told_once(failures))
        return results

    def begin(self, member: Member, command: Command) -> None:
        """Give one worker a command without waiting for its answer, which `hear` brings."""
        try:
            self._workers[member].connection.send(command)
        except OSError as error:
            raise WorkerFailed(f"{member}: {self._last_words(member) or f'cannot be reached: {error}'}") from error

    def hear(self, member: Member, timeout_s: float) -> Progress | Result | Failure:
        """What a worker says next; `WorkerFailed` when it dies or says nothing in time."""
        connection = self._workers[member].connection
        if not connection.poll(timeout_s):
            raise WorkerFailed(f"{member}: said nothing for {timeout_s:g} s")
        try:
            message = connection.recv()
        except (EOFError, OSError):
            raise WorkerFailed(f"{member}: {self._death(member)}") from None
        if not isinstance(message, (Progress, Result, Failure)):
            raise WorkerFailed(f"{member}: sent {type(message).__name__}, which is no answer")
        return message

    def signal(self, member: Member, number: signal.Signals) -> None:
        """Kill, stop or continue one worker; when this returns, it is dead or stands still, if that was meant."""
        process = self._workers[member].process
        if process.pid is None or not process.is_alive():
            raise WorkerFailed(f"{member}: {self._death(member)}")
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join(END_SECONDS)
        elif number == signal.SIGSTOP:
            await_stop(process.pid)

    def pieces(self, member: Member, nbytes: int, timeout_s: float) -> Iterable[bytes]:
        connection = self._workers[member].connection
        while nbytes > 0:
            if not connection.poll(timeout_s):
                raise WorkerFailed(f"{member}: sent no bytes for {timeout_s:g} s")
            try:
                piece = connection.recv_bytes()
            except (EOFError, OSError):
                raise WorkerFailed(f"{member}: {self._death(member)}") from None
            nbytes -= len(piece)
            yield piece

    def close(self) -> None:
        """End every process, by its pid: closed pipes first, then SIGTERM, then SIGKILL. Idempotent."""
        workers = list(self._workers.values())
        self._workers.clear()
        for worker in workers:
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGCONT)  # one that stands still hears nothing of its end
        for worker in workers:
            worker.connection.close()
        for stop in (None, BaseProcess.terminate, BaseProcess.kill):
            for worker in workers:
                if stop is not None and worker.process.is_alive():
                    stop(worker.process)
            deadline = time.monotonic() + END_SECONDS / 2
            for worker in workers:
                worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in workers:
            if not worker.process.is_alive():  # a process in an uninterruptible wait cannot be reaped
                worker.process.close()

    def _receive(self, member: Member) -> Progress | Result | str:
        """The next message, or why there is none."""
        try:
            message = self._workers[member].connection.recv()
        except (EOFError, OSError):
            return self._death(member)
        if isinstance(message, Failure):
            return f"{message.error}: {message.message}"
        if not isinstance(message, (Progress, Result)):
            return f"sent {type(message).__name__}, which is no answer"
        return message

    def _last_words(self, member: Member) -> str | None:
        while self._workers[member].connection.poll(0):
            message = self._receive(member)
            if isinstance(message, str):
                return message
        return None

    def _death(self, member: Member) -> str:
        process = self._workers[member].process
        process.join(END_SECONDS)
        code = process.exitcode
        if code is None:
            return "closed its pipe and goes on"
        return f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"


def await_stop(pid: int) -> None:
    """Until a process that was sent SIGSTOP stands still: nobody's parent can wait for it where a fork server made it.

    `WorkerFailed` when it does not.
    """
    deadline = time.monotonic() + END_SECONDS
    while not _stands_still(pid):
        if time.monotonic() > deadline:
            raise WorkerFailed(f"process {pid} does not stop within {END_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)


def _stands_still(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "TZX"


def _told_once(failures: Mapping[Member, str]) -> str:
    """Who failed and why; workers with the same reason share it."""
    members: dict[str, list[str]] = {}
    for member, reason in sorted(failures.items()):
        members.setdefault(reason, []).append(str(member))
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in members.items())
