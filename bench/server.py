"""Question: how many calls does a reference server answer, how long does a grant take, and where does the time go?

One server process, 1, 4 and 16 sessions in up to four client processes, all on this host's cores: on two cores, server
and clients take them from each other, as bare echoes do that run beside. It reports and has no bounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import clients
from bench.measure import Sample, sample
from bench.peers import echo as bare
from bench.peers import pair, ray_cluster
from bench.remote import Missing, Remote, State
from bench.report import Report

SESSIONS = (1, 4, 16)
#: More processes than this only take cores from each other and from the server; the rest are sessions of the same.
PROCESSES_MAX = 4
SECONDS = 1.5
ROUNDS = 3
#: Before the clock runs, so that all processes have been told.
LEAD_SECONDS = 0.2
START_SECONDS = 30.0
#: Sessions while CPU time is counted.
COUNTED_SESSIONS = 4

ROOT = Path(__file__).resolve().parent.parent


def local(report: Report) -> None:
    """The local server, over its Unix socket."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"TENSORHUB_RUNTIME_DIR": folder}
        name = f"bench-{secrets.token_hex(4)}"
        address = f"local:{name}"
        command = ["local", "--name", name]
        with server_process(command, environment, lambda _: until_listening(Path(folder) / name)):
            rates(report, "server", "local", clients.Reference.open, address, environment)
        counted = Path(folder) / "counted"
        with server_process(command, environment, lambda _: until_listening(Path(folder) / name), counted):
            load(clients.Reference.open, address, COUNTED_SESSIONS, environment, 1)
        shares(report, "local", json.loads(counted.read_text(encoding="utf-8")))


def grpc(report: Report) -> None:
    """The server over gRPC, on loopback."""
    if importlib.util.find_spec("grpc") is None:
        raise Missing(f"no module grpc; install: {bare.GRPC}")
    with tempfile.TemporaryDirectory() as folder:
        command = ["grpc", "--listen", "127.0.0.1:0"]
        with server_process(command, {}, first_line) as address:
            rates(report, "server", "grpc", clients.Reference.open, address, {})
        counted = Path(folder) / "counted"
        with server_process(command, {}, first_line, counted) as address:
            load(clients.Reference.open, address, COUNTED_SESSIONS, {}, 1)
        shares(report, "grpc", json.loads(counted.read_text(encoding="utf-8")))


def ray(report: Report) -> None:
    """The Ray actor: spoken to at its own address, then by actor calls."""
    with ray_cluster.opened() as (driver, cluster):
        environment = {"RAY_ADDRESS": cluster} | ray_cluster.SETTINGS
        for kind, direct in (("ray", "1"), ("ray_calls", "0")):
            settings = environment | {"TENSORHUB_RAY_DIRECT": direct}
            driver.call(start_server, f"bench-{kind}", False)
            rates(report, "server", kind, clients.Reference.open, f"ray://bench-{kind}", settings)
            driver.call(start_server, f"counted-{kind}", True)
            load(clients.Reference.open, f"ray://counted-{kind}", COUNTED_SESSIONS, settings, 1)
            shares(report, kind, driver.call(counted_shares))


def echoes(report: Report) -> None:
    """Bare echoes over what servers are reached by."""
    for kind, opener in (("frames", bare.Frames.open), ("grpc", bare.Grpc.open)):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            server = stack.enter_context(Remote(f"echo-{kind}"))
            stack.callback(server.kill)
            try:
                address = server.call(bare.serve, kind, folder)
            except Missing as error:
                report.skipped[f"echo_{kind}"] = str(error)
                continue
            server.start(bare.run)
            rates(report, "echo", kind, opener, address, {})
    try:
        with ray_cluster.opened() as (driver, cluster):
            driver.call(bare.start_actor)
            rates(report, "echo", "ray", bare.Ray.open, cluster, ray_cluster.SETTINGS)
    except Missing as error:
        report.skipped["echo_ray"] = str(error)


def rates(
    report: Report, what: str, kind: str, opener: clients.Opener, address: str, environment: Mapping[str, str]
) -> None:
    """Calls per second and the 99th percentile of the first call of a cycle, for each number of sessions."""
    first = "grant" if what == "server" else "echo"
    for sessions in SESSIONS:
        report.tell(f"{what} {kind}: {sessions} sessions")
        per_second, p99_ms = load(opener, address, sessions, environment, ROUNDS)
        report.add(f"{what}_calls_per_second_{kind}_{sessions}", "1/s", per_second)
        report.add(f"{first}_p99_ms_{kind}_{sessions}", "ms", p99_ms)


def load(
    opener: clients.Opener, address: str, sessions: int, environment: Mapping[str, str], rounds: int
) -> tuple[Sample, Sample]:
    """Calls per second, and milliseconds of the 99th percentile, over several rounds of the same clients."""
    with ExitStack() as stack:
        count = min(sessions, PROCESSES_MAX)
        processes = [stack.enter_context(Remote(f"client-{number}")) for number in range(count)]
        run = secrets.token_hex(4)  # models of their own: earlier clients' sessions may not be forgotten yet
        for number, process in enumerate(processes):
            names = [f"{run}-{session}" for session in range(number, sessions, count)]
            process.start(clients.prepare, opener, address, names, dict(environment))
        for process in processes:
            process.result()
        per_second, p99_ms = zip(*[_round(processes) for _ in range(rounds)], strict=True)
        for process in processes:
            process.call(clients.finish)
    return sample(per_second), sample(p99_ms)


def _round(processes: list[Remote]) -> tuple[float, float]:
    begin = time.monotonic() + LEAD_SECONDS
    for process in processes:
        process.start(clients.load, begin, SECONDS)
    loads: list[clients.Load] = [process.result() for process in processes]
    took = sorted(seconds for one in loads for seconds in one.first_call_seconds)
    if not took:
        raise TimeoutError(f"no call was answered within {SECONDS:g} s")
    return sum(one.calls for one in loads) / SECONDS, percentile(took, 0.99) * 1e3


def percentile(ordered: list[float], share: float) -> float:
    """The smallest of the values, which rise, that at least `share` of them do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def shares(report: Report, kind: str, found: Mapping[str, float]) -> None:
    """Where the server's CPU time went, per call."""
    for step in ("decode", "machine", "encode", "transport"):
        report.add(f"server_us_per_call_{kind}_{step}", "us CPU", sample([found[step] / found["calls"] * 1e6]))


@contextmanager
def server_process(
    command: list[str],
    environment: Mapping[str, str],
    ready: Callable[[subprocess.Popen[str]], str],
    counted: Path | None = None,
) -> Iterator[str]:
    """A server as users start it, or one that counts its CPU time into a file; gives what `ready` found."""
    module = ["tensorhub.server"] if counted is None else ["bench.timed_server", str(counted)]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *module, *command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
        try:
            try:
                yield ready(process)
            finally:
                process.terminate()
                status = process.wait(START_SECONDS)
        except (subprocess.TimeoutExpired, TimeoutError, EOFError) as error:
            process.kill()
            log.seek(0)
            raise RuntimeError(f"the server {command} does not work: {error}; it says:\n{log.read()}") from error
        finally:
            if process.stdout is not None:
                process.stdout.close()
    if status != 0:
        raise RuntimeError(f"the server {command} ended with {status}")


def first_line(process: subprocess.Popen[str]) -> str:
    """The address that the server prints once it listens."""
    assert process.stdout is not None  # it was asked for
    line = process.stdout.readline().strip()
    if not line:
        raise EOFError("it printed no address")
    return line


def until_listening(place: Path) -> str:
    """Wait for the local server's socket."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if any(path.is_socket() for path in place.glob("*")):
            return str(place)
        time.sleep(0.01)
    raise TimeoutError(f"no socket in {place} within {START_SECONDS:g} s")


def start_server(state: State, name: str, counted: bool) -> None:
    """In Ray's driver: the reference server's actor, as it is or counting."""
    from tensorhub.server import ray_actor

    if not counted:
        state["server"] = ray_actor.start(name)
        return
    from bench.timed_actor import CountingServer

    ray: Any = pair.load("ray", ray_cluster.INSTALL)
    options = {"namespace": ray_actor.NAMESPACE, "num_cpus": 0, "max_concurrency": ray_actor.CALLS_MAX}
    state["server"] = ray.remote(CountingServer).options(name=name, **options).remote(name)


def counted_shares(state: State) -> dict[str, float]:
    """In Ray's driver: what the counting actor found."""
    ray: Any = pair.load("ray", ray_cluster.INSTALL)
    found: dict[str, float] = ray.get(state["server"].counted.remote(), timeout=START_SECONDS)
    return found
