"""The process that beats: it ends with its reason, with its parent, and never beats for one that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from tensorhub.client.grpc_beat import BOARD_BYTES, Board, Orders, Parent
from tensorhub.client.grpc_heart import GrpcHeart
from tensorhub.wire.grpc_names import ACCEPTED, METHOD
from tests.support.servers import until

pytestmark = pytest.mark.slow
REQUEST, EXPECTED = b"beat of session 7", b"ok"
SECOND = 1_000_000_000
#: Long enough that only what the test does ends a wait.
NEVER = 60 * SECOND


class Echo:
    """A server that answers every beat by `reply`, and notes it."""

    def __init__(self, reply: bytes | None = EXPECTED) -> None:
        self.reply = reply
        self.beats: list[bytes] = []
        self.target = ""

    async def session(self, _requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.send_initial_metadata(((ACCEPTED, "1"),))
        while (data := await context.read()) is not grpc.aio.EOF:
            self.beats.append(data)
            if self.reply is not None:
                await context.write(self.reply)


@asynccontextmanager
async def echoing(reply: bytes | None = EXPECTED) -> AsyncIterator[Echo]:
    echo = Echo(reply)
    server = grpc.aio.server()
    _, service, method = METHOD.split("/")
    handler = grpc.stream_stream_rpc_method_handler(echo.session)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    echo.target = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield echo
    finally:
        await server.stop(None)


def heart(target: str, interval_ns: int = SECOND // 50, ack_timeout_ns: int = NEVER) -> GrpcHeart:
    return GrpcHeart(target, REQUEST, EXPECTED, interval_ns, ack_timeout_ns)


async def until_true(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20.0):
        while not condition():
            await asyncio.sleep(0.005)


def test_beats_go_out_whole_and_again() -> None:
    """The request arrives byte for byte, once per interval; the time of the last acknowledged one rises."""

    async def main() -> None:
        async with echoing() as echo:
            beating = heart(echo.target)
            seen: set[int] = {0}
            while len(seen) < 4:
                await until_true(lambda: beating.acknowledged_ns() not in seen)
                seen.add(beating.acknowledged_ns())
            assert beating.failed() is None
            beating.stop()
            assert set(echo.beats) == {REQUEST}
            assert (beating.failed(), beating.acknowledged_ns()) == ("stopped", max(seen))

    asyncio.run(main())


@pytest.mark.parametrize(("reply", "why"), [(b"no", "another reply than expected"), (None, "no reply in time")])
def test_it_ends_for_a_reason_that_its_owner_reads(reply: bytes | None, why: str) -> None:
    """Another reply, or none, ends it unacknowledged."""

    async def main() -> None:
        async with echoing(reply) as echo:
            beating = heart(echo.target, ack_timeout_ns=SECOND // 20)
            await until_true(beating.failed)
            assert beating.failed() == why
            assert beating.acknowledged_ns() == 0
            beating.stop()
            assert beating.failed() == why

    asyncio.run(main())


def test_a_server_that_is_not_there_is_named() -> None:
    """What the stream met is what the owner reads."""

    async def main() -> None:
        beating = heart("grpc://127.0.0.1:1")
        await until_true(beating.failed)
        assert "grpc://127.0.0.1:1 refuses connections" in str(beating.failed())
        beating.stop()

    asyncio.run(main())


def test_a_killed_heart_is_noticed() -> None:
    """Somebody kills the process: its owner learns it, with the status."""

    async def main() -> None:
        async with echoing() as echo:
            beating = heart(echo.target)
            os.kill(beating._process.pid, signal.SIGKILL)
            await until_true(beating.failed)
            assert "ended with status -9" in str(beating.failed())
            beating.stop()

    asyncio.run(main())


def test_stop_gives_everything_back() -> None:
    """Process, descriptors and memory are gone when `stop` returns; stopping again is nothing."""

    async def main() -> None:
        async with echoing() as echo:
            descriptors = len(os.listdir("/proc/self/fd"))
            beating = heart(echo.target)
            pid = beating._process.pid
            beating.stop()
            beating.stop()
            assert not Path(f"/proc/{pid}").exists()
            assert len(os.listdir("/proc/self/fd")) == descriptors

    asyncio.run(main())


def test_signals_of_the_terminal_and_the_launcher_do_not_reach_it() -> None:
    """It is no member of its parent's process group, and what is sent to it by mistake does not end it."""

    async def main() -> None:
        async with echoing() as echo:
            beating = heart(echo.target)
            await until_true(beating.acknowledged_ns)
            pid = beating._process.pid
            assert os.getpgid(pid) != os.getpgid(0)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
            before = beating.acknowledged_ns()
            await until_true(lambda: beating.acknowledged_ns() > before)
            beating.stop()

    asyncio.run(main())


def test_a_forked_child_sees_a_dead_heart() -> None:
    """A fork does not own the process: it acknowledges nothing there, says so, and stopping it ends nobody."""

    async def main() -> None:
        async with echoing() as echo:
            beating = heart(echo.target)
            await until_true(beating.acknowledged_ns)
            child = os.fork()
            if child == 0:
                dead = "forked" in str(beating.failed()) and beating.acknowledged_ns() == 0
                beating.stop()
                os._exit(0 if dead else 1)
            assert os.waitpid(child, 0)[1] == 0
            before = beating.acknowledged_ns()
            await until_true(lambda: beating.acknowledged_ns() > before)
            beating.stop()

    asyncio.run(main())


#: Starts a heart, prints its process and its acknowledged beats' count is the server's to see; then waits for a line.
TRAINER = """
import sys
from tensorhub.client.grpc_heart import GrpcHeart
from tensorhub.wire.grpc_names import ACCEPTED, METHOD
beating = GrpcHeart(sys.argv[1], bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3]), 20_000_000, 60_000_000_000)
print(beating._process.pid, flush=True)
sys.stdin.readline()
"""


@asynccontextmanager
async def trainer(echo: Echo) -> AsyncIterator[tuple[subprocess.Popen[str], int]]:
    """A process with a heart that beats: (process, pid of its heart)."""
    command = [sys.executable, "-c", TRAINER, echo.target, REQUEST.hex(), EXPECTED.hex()]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        heart_pid = int(await asyncio.to_thread(process.stdout.readline))
        await until_true(lambda: echo.beats)
        yield process, heart_pid
    finally:
        process.kill()
        process.communicate()


def test_it_ends_with_its_parent() -> None:
    """A trainer that is killed leaves no process behind."""

    async def main() -> None:
        async with echoing() as echo, trainer(echo) as (process, heart_pid):
            watched = os.pidfd_open(heart_pid)
            process.kill()
            process.wait()
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(watched, ended.set)
            async with asyncio.timeout(20.0):
                await ended.wait()
            asyncio.get_running_loop().remove_reader(watched)
            os.close(watched)

    asyncio.run(main())


def test_it_does_not_beat_for_a_stopped_parent() -> None:
    """source_stopped: no beat while the trainer is stopped, whatever the interval; beats again when it goes on."""

    async def main() -> None:
        async with echoing() as echo, trainer(echo) as (process, _):
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            await asyncio.sleep(0.1)  # a beat that was on its way
            before = len(echo.beats)
            await asyncio.sleep(0.5)  # 25 intervals
            assert len(echo.beats) == before
            process.send_signal(signal.SIGCONT)
            await until_true(lambda: len(echo.beats) > before)

    asyncio.run(main())


def test_states_of_a_process_are_told_apart() -> None:
    """Sleeping is alive; stopped and dead are not. A process that is not our parent is not beaten for."""
    with pytest.raises(ProcessLookupError, match="not our parent"):
        Parent(os.getpid())
    code = (
        "import os, signal, sys; from tensorhub.client.grpc_beat import Parent\n"
        "parent = Parent(os.getppid()); print(parent.is_still(), flush=True)\n"
        "for line in sys.stdin: print(parent.is_still(), flush=True)"
    )
    middle = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {code!r}], stdin=0, stdout=1)\n"
        "child.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout.readline() == "False\n"
        parent.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, parent.pid, os.WSTOPPED)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "True\n"
        parent.kill()
        until(lambda: Path(f"/proc/{parent.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z")
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "True\n"


def test_the_board_is_one_memory() -> None:
    """What one side writes the other reads; a reason of any length and any bytes fits."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, BOARD_BYTES)
    writer, reader = Board(fd), Board(fd)
    os.close(fd)
    assert (reader.acknowledged_ns(), reader.ending()) == (0, "")
    writer.acknowledge(2**63 - 1)
    writer.end("gone: é\ud800" + "x" * BOARD_BYTES)
    assert reader.acknowledged_ns() == 2**63 - 1
    assert reader.ending().startswith("gone: é?xxx")
    writer.close()
    reader.close()


def test_orders_survive_their_line() -> None:
    """What the owner orders is what the process reads."""
    orders = Orders("grpc://h:1", 7, b"\x00\xff", b"\n", 1, 2)
    assert Orders.parse(orders.line()) == orders
    assert orders.line().count(b"\n") == 1


def test_it_imports_nothing_heavy() -> None:
    """It starts at once: neither torch nor numpy, nor protobuf, nor the session's modules."""
    code = (
        "import sys, tensorhub.client.grpc_beat, tensorhub.client.grpc_channel\n"
        "heavy = {'torch', 'ray', 'numpy', 'google.protobuf', 'msgpack', 'tensorhub.messages'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
