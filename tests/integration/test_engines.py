"""The main job over every engine that leaves a process: every dtype, a source that dies, one that stands still."""

from __future__ import annotations

import asyncio
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

import tensorhub
from tensorhub.errors import EngineUnavailable, Unavailable
from tensorhub.pipeline import follow
from tensorhub.ports import Ranges
from tensorhub.transport.router import open_engines
from tests.integration.conftest import Opener, blank, same, weights
from tests.support.engines import Meddler, meddled
from tests.support.process import Child, child

pytestmark = pytest.mark.slow

ENGINES = ("local", "tcp", "mooncake")
#: 10 MiB, in batches of one: the act comes between two of them, whatever the speed.
ROWS = 512
BATCH_BYTES = 1 << 20
STALL_S = 1.5


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """Each engine's name, where it starts."""
    name: str = request.param
    try:
        started = open_engines(name)
    except EngineUnavailable as error:
        pytest.skip(str(error))
    for one in started:
        asyncio.run(one.close())
    return name


def every_dtype() -> dict[str, torch.Tensor]:
    """One large and one tiny tensor of every dtype that holds bytes, with every bit pattern there is."""
    plain = {v for v in vars(torch).values() if isinstance(v, torch.dtype) and not str(v).startswith("torch.q")}
    dtypes = sorted(plain, key=str)
    found: dict[str, torch.Tensor] = {}
    for number, dtype in enumerate(dtypes):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # half precision complex numbers are "experimental"
                torch.empty(16, dtype=dtype).view(torch.uint8)
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # a name without storage in this build
        for name, nbytes in (("large", 96 << 10), ("tiny", 64)):
            raw = (torch.arange(nbytes, dtype=torch.int64) * 31 + number).to(torch.uint8)
            found[f"{name}.{dtype}"] = (raw % 2 if dtype is torch.bool else raw).view(dtype)
    return found


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.view(torch.uint8) for name, tensor in tensors.items()}


def test_all_dtypes_over_every_engine(hub: Opener, engine: str) -> None:
    """all_dtypes: bit patterns of every dtype, large and tiny, arrive as they are, over the engine asked for."""
    ours = every_dtype()
    theirs = {name: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype) for name, tensor in ours.items()}
    assert len(ours) > 20
    hub("trainer", ours, engine=engine).publish(version=1, digest="now")
    got = hub("rollout", theirs, engine=engine).replicate(1, timeout=30)
    assert same(bits(ours), bits(theirs))
    assert (got.engine, got.verified) == (engine, True)


def _serve(pipe: Connection, server: str, model: str, engine: str, replica: str) -> None:
    """Publish the weights, or hold them after a replicate, and serve until told to end."""
    tensors = weights(1, rows=ROWS) if replica == "trainer" else blank(weights(1, rows=ROWS))
    with tensorhub.open(model, replica=replica, server=server, engine=engine) as hub:
        hub.register(tensors)
        if replica == "trainer":
            hub.publish(version=1, digest="now")
        else:
            hub.replicate(1, timeout=60)
        pipe.send("serving")
        pipe.recv()


class Midway:
    """Acts upon the present source of a reader, once, when a batch begins after half of all bytes."""

    def __init__(self, act: Callable[[Child], None], sources: dict[str, Child]) -> None:
        self._act, self._sources = act, sources
        self.hub: tensorhub.Hub | None = None
        #: Bytes of all large reads begun.
        self.begun = 0
        self.acted = False

    async def look(self, ranges: Ranges) -> None:
        self.begun += ranges.total_bytes
        assert self.hub is not None
        progress = self.hub.progress()
        if progress is not None and not self.acted and progress.bytes_done >= progress.bytes_total // 2:
            self.acted = True
            self._act(self._sources[progress.source.partition("#")[0]])


def pull_while(
    hub: Opener, server: str, model: str, engine: str, act: Callable[[Child], None]
) -> tuple[tensorhub.Replication, Midway, int]:
    """A pull with two complete holders, the first of which meets `act` midway; what came of it, and the total bytes."""
    theirs, patch = blank(weights(1, rows=ROWS)), pytest.MonkeyPatch()
    with child(_serve, server, model, engine, "trainer") as trainer:
        assert trainer.hear() == "serving"
        with child(_serve, server, model, engine, "standby") as standby:
            assert standby.hear() == "serving"
            midway = Midway(act, {"trainer": trainer, "standby": standby})
            with patch.context() as small, meddled(patch, lambda inner: Meddler(inner, before=midway.look)):
                small.setattr(follow, "BATCH_BYTES_MAX", BATCH_BYTES)
                midway.hub = hub("rollout", theirs, engine=engine)
                got = midway.hub.replicate(1, timeout=60)
            assert same(theirs, weights(1, rows=ROWS))
            assert remembered(midway.hub) == {use.replica: use.nbytes for use in got.sources}
            midway.hub.close()
    return got, midway, sum(tensor.nbytes for tensor in theirs.values())


def remembered(hub: tensorhub.Hub) -> dict[str, int]:
    """{replica: bytes} that the server put down to the sources of `rollout`: what `tensorhub graph` shows."""
    (row,) = [row for row in hub.status().holdings if row.seat.replica == "rollout"]
    return {pull.source.replica: pull.nbytes for pull in row.pulled}


def test_source_killed_midchunk_over_every_engine(hub: Opener, server: str, model: str, engine: str) -> None:
    """source_killed_midchunk: the reader goes on from its watermark elsewhere; only what was in flight comes again."""
    got, midway, total = pull_while(hub, server, model, engine, Child.kill)
    assert midway.acted
    assert len({use.replica for use in got.sources}) == 2
    assert sum(use.nbytes for use in got.sources) == got.nbytes
    in_flight, digests = (follow.WINDOW + 1) * BATCH_BYTES, total // 1024
    assert midway.begun <= total + in_flight + digests


def test_source_stopped_over_every_engine(
    hub: Opener, server: str, model: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """source_stopped: a source that stands still is left within the watchdog; one-sided reads do not even notice."""
    monkeypatch.setenv("TENSORHUB_STALL_S", str(STALL_S))
    got, midway, _ = pull_while(hub, server, model, engine, lambda source: source.signal(signal.SIGSTOP))
    replicas = {use.replica for use in got.sources}
    assert midway.acted
    assert len(replicas) == (1 if engine == "local" else 2)


def test_timeout_then_late_write_over_every_engine(
    hub: Opener, server: str, model: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """timeout_then_late_write: what a stopped source still sends after the pull went elsewhere changes no tensor."""
    monkeypatch.setenv("TENSORHUB_STALL_S", str(STALL_S))
    stopped: list[Child] = []

    def stop(source: Child) -> None:
        source.signal(signal.SIGSTOP)
        stopped.append(source)

    theirs, patch = blank(weights(1, rows=ROWS)), pytest.MonkeyPatch()
    with child(_serve, server, model, engine, "trainer") as trainer:
        assert trainer.hear() == "serving"
        midway = Midway(stop, {"trainer": trainer})
        with patch.context() as small, meddled(patch, lambda inner: Meddler(inner, before=midway.look)):
            small.setattr(follow, "BATCH_BYTES_MAX", BATCH_BYTES)
            midway.hub = hub("rollout", theirs, engine=engine)
            if engine == "local":
                midway.hub.replicate(1, timeout=60)
            else:
                with pytest.raises(Unavailable):
                    midway.hub.replicate(1, timeout=60)
        mine = {name: tensor.fill_(5).clone() for name, tensor in theirs.items()}
        stopped[0].signal(signal.SIGCONT)
        # Another process reads the source over the same engine: by the time it is done, late bytes would have come.
        with child(_serve, server, model, engine, "witness") as witness:
            assert witness.hear() == "serving"
        assert same(theirs, mine)
