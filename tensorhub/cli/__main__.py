"""The command line `tensorhub`: parses arguments, calls what does the work, prints, and chooses the exit code.

Nothing is decided here but how things are shown. An error is one line; its code is 2 when the request itself was
malformed, else 1. Starting it imports no torch: `tensorhub --help` answers at once.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from tensorhub.errors import BadRequest, TensorHubError

EXIT_FAILED = 1
EXIT_BAD_REQUEST = 2
#: 128 + SIGINT, as shells say it.
EXIT_INTERRUPTED = 130
#: Columns of a table that goes to a file or pipe: no cell is cut for a terminal that is not there.
PIPE_COLUMNS = 240
#: What the demo gives a server to answer before it starts any process.
REACH_SECONDS = 10.0
#: After so long without an answer it says what it waits for.
WAITING_SECONDS = 1.0
#: Said without the router, which would load every engine's module; a test holds them equal.
ENGINES = "'auto', or one or more of memory, cuda_ipc, local, mooncake and tcp, best first, by commas: 'tcp,local'"
#: Between two looks of `--watch`.
WATCH_SECONDS = 1.0

app = typer.Typer(
    name="tensorhub",
    help="Reference-oriented storage for RL weights: publish in place, replicate one-sided, serve while receiving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Server = Annotated[
    str | None, typer.Option(help="'local', 'grpc://HOST:PORT', ... (default: TENSORHUB_SERVER, else local)")
]
ModelName = Annotated[str | None, typer.Option("--model", help="only this model (default: all)")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document instead of tables")]
Timeout = Annotated[float, typer.Option(min=0.001, help="seconds to wait for the server")]


@app.command()
def demo(
    *,
    weights: Annotated[Path | None, typer.Option(metavar="FILE.safetensors", help="weights to move")] = None,
    model_mib: Annotated[int | None, typer.Option(min=1, help="synthetic weights of about this many MiB")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="rollout replicas")] = 4,
    shards: Annotated[int, typer.Option(min=1, help="processes of each replica")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="train, publish, replicate, compare, unpublish")] = 3,
    engine: Annotated[str, typer.Option(help=ENGINES)] = "auto",
    server: Server = None,
    as_json: AsJson = False,
) -> None:
    """Move real weights from a trainer's processes into several rollouts' and compare every bit."""
    from tensorhub.cli import compare, demo_view
    from tensorhub.cli import weights as chosen
    from tensorhub.cli.demo import Options, run, setups
    from tensorhub.cli.fleet import ProcessFleet
    from tensorhub.client.links import parse_server
    from tensorhub.transport.router import engine_names

    options = Options(chosen.choose(weights, model_mib), replicas, shards, rounds, tuple(engine.split(",")), server)
    options.check()
    engine_names(options.engine)
    if server is not None:
        parse_server(server)
    _reach(server)
    console = Console(stderr=as_json)
    view: demo_view.LiveView | demo_view.PlainView
    if console.is_terminal and not as_json:
        view = demo_view.LiveView(console, options)
    else:
        view = demo_view.PlainView(None if as_json else console)
    signal.signal(signal.SIGTERM, _interrupt)  # so that leaving the fleet ends its processes
    try:
        with ProcessFleet(setups(options)) as fleet, view:
            outcome = run(options, fleet, view)
    except KeyboardInterrupt:
        sys.stderr.write("tensorhub: interrupted; the demo's processes have ended\n")
        raise
    if as_json:
        _print_json(outcome.as_json())
    else:
        for line in demo_view.outcome_lines(outcome):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(compare.exit_code(outcome.differences))


@app.command()
def status(
    server: Server = None,
    model: ModelName = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="look again every second, until interrupted")] = False,
    timeout: Timeout = 10.0,
) -> None:
    """What the server knows: versions, who holds and reads them, processes, waits."""
    from tensorhub.cli import tables

    hub = _hub_module()
    if not watch:
        view = hub.server_status(server=server, model=model, timeout=timeout)
        if as_json:
            _print_json(tables.as_json(view))
        else:
            _tables_console().print(Group(*tables.status_parts(view)))
        return
    if as_json:
        raise BadRequest("--json prints one document; it does not go with --watch")
    _watch(lambda: Group(*tables.status_parts(hub.server_status(server=server, model=model, timeout=timeout))))


@app.command()
def versions(server: Server = None, model: ModelName = None, as_json: AsJson = False, timeout: Timeout = 10.0) -> None:
    """The versions that exist, newest first, and who holds them."""
    from tensorhub.cli import tables

    found = _hub_module().server_versions(server=server, model=model, timeout=timeout)
    if as_json:
        _print_json({"versions": tables.as_json(found)})
    else:
        _tables_console().print(tables.versions_part(found))


@app.command()
def graph(
    *,
    server: Server = None,
    model: ModelName = None,
    job: Annotated[str | None, typer.Option(help="only this job (default with --model: TENSORHUB_JOB)")] = None,
    version: Annotated[str | None, typer.Option(help="a version, as '7' (default: the newest of each model)")] = None,
    shards: Annotated[bool, typer.Option("--shards", help="a node per shard instead of one per replica")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="write a picture instead")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="the same as PNG (needs the extra 'graph')")] = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="look again every second, until interrupted")] = False,
    timeout: Timeout = 10.0,
) -> None:
    """Who pulled what from whom: a tree, a picture, or nodes and edges."""
    from tensorhub.cli import graph as graphs
    from tensorhub.cli import graph_svg, graph_text, tables

    outputs = [name for name, given in (("--json", as_json), ("--svg", svg), ("--png", png)) if given]
    if watch and outputs:
        raise BadRequest(f"{outputs[0]} is made once; it does not go with --watch")
    hub = _hub_module()

    def look() -> tuple[graphs.Graph, ...]:
        view = hub.server_status(server=server, model=model, job=job, timeout=timeout)
        return graphs.from_status(view, job=job, version=version, by_shard=shards)

    if watch:
        _watch(lambda: graph_text.drawings(look()))
    found = look()
    if as_json:
        _print_json({"graphs": tables.as_json(found)})
    if svg is not None or png is not None:
        picture = graph_svg.svg(graphs.only_one(found))
        if svg is not None:
            _write(svg, picture.encode())
        if png is not None:
            _write(png, graph_svg.png(picture))
    if not outputs:
        _tables_console().print(graph_text.drawings(found))


@app.command()
def chaos(
    *,
    server: Annotated[str, typer.Option(help="kind of the server it starts: 'frames', 'grpc' or 'local'")] = "frames",
    mib: Annotated[int, typer.Option(help="synthetic weights of about this many MiB, 16 to 4096")] = 64,
    only: Annotated[str, typer.Option(metavar="CASES", help="only these, by commas (--list names them)")] = "",
    seed: Annotated[int | None, typer.Option(help="draws weights and the moments of trouble (default: fresh)")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="name the cases and run none")] = False,
    as_json: AsJson = False,
) -> None:
    """Kill, stop, cut off and restart real processes of its own in the middle of transfers; report what came of it."""
    from tensorhub.cli.chaos import command

    if list_cases:
        command.show_cases(as_json=as_json)
        return
    signal.signal(signal.SIGTERM, _interrupt)  # so that leaving a case ends its processes
    try:
        everything_held = command.run(server, mib, only, seed, as_json=as_json)
    except KeyboardInterrupt:
        sys.stderr.write("tensorhub: interrupted; all processes that chaos had started have ended\n")
        raise
    raise typer.Exit(0 if everything_held else EXIT_FAILED)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def serve(context: typer.Context) -> None:
    """Run a reference server over gRPC in the foreground; `serve local` or `serve frames` another (--help: options)."""
    # The server is the one thing of the command line that needs neither hub nor torch.
    server = importlib.import_module("tensorhub.server.__main__")
    kind = [] if context.args[:1] in (["local"], ["grpc"], ["frames"]) else ["grpc"]
    raise typer.Exit(int(server.main([*kind, *context.args]) or 0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    errors = Console(stderr=True)
    try:
        app(args=list(arguments) if arguments is not None else None, standalone_mode=True)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BadRequest as error:
        return _complain(errors, error, EXIT_BAD_REQUEST)
    except (TensorHubError, _worker_failed()) as error:
        return _complain(errors, error, EXIT_FAILED)
    return 0


def _reach(server: str | None) -> None:
    """Fail at once, and once, where every worker of the demo would wait for the same server in vain.

    Only servers that somebody must have started are asked: all others the workers start where there is none.
    """
    server = server or os.environ.get("TENSORHUB_SERVER") or "local"
    if server.startswith(("grpc://", "grpcs://", "frames://")):
        with _told_of_waiting(server):
            _hub_module().server_status(server=server, timeout=REACH_SECONDS)


@contextmanager
def _told_of_waiting(server: str) -> Iterator[None]:
    """One line on stderr if what happens meanwhile takes a while."""
    note = threading.Timer(WAITING_SECONDS, lambda: sys.stderr.write(f"waiting for {server}\n"))
    note.daemon = True
    note.start()
    try:
        yield
    finally:
        note.cancel()


def _complain(console: Console, error: Exception, code: int) -> int:
    text = " ".join(str(error).split())
    console.print(f"tensorhub: {type(error).__name__}: {text}", markup=False, highlight=False, soft_wrap=True)
    return code


def _worker_failed() -> type[Exception]:
    from tensorhub.cli.fleet import WorkerFailed

    return WorkerFailed


def _hub_module() -> Any:
    """The public package: its calls to a server need no hub, and so no torch."""
    return importlib.import_module("tensorhub")


def _tables_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_COLUMNS)


def _watch(look: Callable[[], RenderableType]) -> NoReturn:
    """Show what `look` sees, again and again, until interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)  # so that the terminal gets its screen and cursor back
    with Live(auto_refresh=False, screen=Console().is_terminal) as live:
        while True:
            live.update(look(), refresh=True)
            time.sleep(WATCH_SECONDS)


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise BadRequest(f"cannot write {path}: {error.strerror}") from error
    sys.stderr.write(f"wrote {path}\n")


def _print_json(document: object) -> None:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
