"""`python -m tensorhub.server local|grpc|frames`: a reference server in this process, or detached from its starter.

It reads arguments and environment and sets logging up; it decides nothing a server does. It imports neither torch nor
ray, nor grpc where it is not spoken: the first client of a host waits for it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import sys
from logging.handlers import RotatingFileHandler

from tensorhub.errors import BadRequest, Broken, TensorHubError
from tensorhub.server import frames_command, grpc_command, life
from tensorhub.server.host import Host
from tensorhub.server.local import elect, serve
from tensorhub.server.settings import Settings
from tensorhub.wire.local_place import DEFAULT_NAME, LOG, LocalPlace, check_local_name
from tensorhub.wire.token import read_token

#: How long a local server outlives its last client: the next job of a script finds it warm.
IDLE_S = 30.0
LEASE_ENV, BEAT_ENV, IDLE_ENV = "TENSORHUB_LEASE_S", "TENSORHUB_BEAT_S", "TENSORHUB_LOCAL_IDLE_S"
LOG_LEVEL_ENV = "TENSORHUB_LOG_LEVEL"
#: With one predecessor: at most 2 MiB per name.
LOG_BYTES_MAX = 2**20


class _BoundedLog(RotatingFileHandler):
    """The log file, with stdout and stderr of the process behind it: a crash is found where people look."""

    def __init__(self, path: str) -> None:
        super().__init__(path, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8")
        self._redirect()

    def doRollover(self) -> None:  # noqa: N802 - named by logging
        super().doRollover()
        self._redirect()

    def _redirect(self) -> None:
        assert self.stream is not None  # opened by the base class: no `delay`
        for fd in (1, 2):
            os.dup2(self.stream.fileno(), fd)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except TensorHubError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201 - a command's own output
        return 2 if isinstance(error, BadRequest) else 1


def _run_local(options: argparse.Namespace) -> int:
    place = LocalPlace.open(options.name)
    if options.detach and os.fork() > 0:
        # The starter waits for this process only; the server is nobody's child and leaves no zombie in a trainer.
        os._exit(0)
    _set_up_logging(_BoundedLog(os.path.join(place.path, LOG)) if options.detach else logging.StreamHandler())
    place.close()
    _raise_descriptor_limit()
    return asyncio.run(_serve_local(options))


async def _serve_local(options: argparse.Namespace) -> int:
    elected = await elect(options.name)
    if elected is None:
        if not options.detach:
            sys.stderr.write(f"a server of this user already serves {options.name!r} on this host\n")
        return 0
    try:
        await serve(elected, _host(options), options.idle_s)
    except Broken:
        return 1  # logged with its story by the host
    return 0


def _run_remote(options: argparse.Namespace) -> int:
    _set_up_logging(logging.StreamHandler())
    _raise_descriptor_limit()
    return asyncio.run(_serve_remote(options))


async def _serve_remote(options: argparse.Namespace) -> int:
    token = read_token(options.token_file)
    return int(await options.command.run(_host(options, token), options, has_token=bool(token)))


def _host(options: argparse.Namespace, token: bytes = b"") -> Host:
    return Host(life.begin(round(options.lease_s * 1e9), round(options.beat_s * 1e9)), token=token)


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _set_up_logging(handler: logging.Handler) -> None:
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("tensorhub")
    log.addHandler(handler)
    log.setLevel(os.environ.get(LOG_LEVEL_ENV, "INFO").upper())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tensorhub.server", description="Run a reference server.")
    kinds = parser.add_subparsers(required=True)
    local = kinds.add_parser("local", help="for the processes of this user on this host; leaves when idle")
    local.set_defaults(run=_run_local)
    local.add_argument("--name", type=check_local_name, default=DEFAULT_NAME, help="namespace: 'local:NAME'")
    local.add_argument("--detach", action="store_true", help="go to the background and log to a file")
    _add_durations(local)
    local.add_argument(
        "--idle-s",
        type=float,
        default=os.environ.get(IDLE_ENV, IDLE_S),
        help=f"how long to stay when nobody is there (or {IDLE_ENV})",
    )
    for kind, command, spoken in (("grpc", grpc_command, "gRPC"), ("frames", frames_command, "plain frames")):
        remote = kinds.add_parser(
            kind,
            help=f"for the processes of a cluster, over {spoken}; in the foreground",
            epilog="`tensorhub serve` runs the one over gRPC, `tensorhub serve frames` the one over plain frames, "
            "`tensorhub serve local` the one of this host; their options: tensorhub serve KIND --help",
        )
        remote.set_defaults(run=_run_remote, command=command)
        command.add_options(remote)
        _add_durations(remote)
    return parser


def _add_durations(parser: argparse.ArgumentParser) -> None:
    defaults = Settings()
    for flag, env, default, what in (
        ("--lease-s", LEASE_ENV, defaults.lease_ns / 1e9, "how long a silent session is trusted"),
        ("--beat-s", BEAT_ENV, defaults.beat_ns / 1e9, "how often sessions are asked to beat"),
    ):
        parser.add_argument(flag, type=float, default=os.environ.get(env, default), help=f"{what} (or {env})")


if __name__ == "__main__":
    sys.exit(main())
