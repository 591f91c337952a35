"""A whole copy of a model in one process: as many shards as its publisher has, learnt from the version itself.

For readers that are not cut like the trainer: a rollout worker that loads whole tensors, an evaluator, a tool. The
mirror is one replica that holds every shard, so that one transaction decides its version; it decides nothing else.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorhub.client.allocating import Make, made_by, plain
from tensorhub.client.hub import Hub, model_key, open, place_of
from tensorhub.client.looking import wait_for_version
from tensorhub.client.results import PHASES, Replication
from tensorhub.client.slices import Slice, Wholes, joined, missing
from tensorhub.errors import Busy, Closed, GroupAborted, LayoutMismatch, TensorHubError, Where
from tensorhub.pipeline.columns import listed
from tensorhub.types import DEFAULT_BUFFERS, Selector, check_name, check_texts, check_timeout, parse_selector

if TYPE_CHECKING:
    from types import TracebackType

    import torch


class Mirror:
    """Keeps a copy of a model in host memory, up to date and served on to others. A context manager.

    `tensors` are made by the first `pull`, with the names, shapes and dtypes of the version, and written in place by
    the next ones for as long as those stay what they are. Tensors of which several shards publish rows are whole here.
    Options are those of `tensorhub.open`; `make(name, shape, dtype)` returns the memory of a tensor (pinned, or
    shared), `torch.empty` without it.
    """

    def __init__(
        self,
        model: str,
        *,
        replica: str,
        server: str | None = None,
        job: str | None = None,
        engine: str | Sequence[str] = "auto",
        spot: bool = True,
        location: str | None = None,
        layout: str = "",
        make: Make | None = None,
    ) -> None:
        self._key = model_key(model, job)
        self._replica = check_name("replica", replica)
        self._server, self._spot, self._layout = server, spot, layout
        self._engine = check_texts("engine", engine)
        self._place = place_of(location)
        self._make = make or plain
        #: Memory for tensors of which shards publish rows, of the version pulled last, and of one that is coming.
        self._wholes = Wholes(lambda name, shape, dtype: made_by(self._make, name, shape, dtype, self._where))
        #: Guards what is below: `close` may come from another thread than `pull`.
        self._lock = threading.Lock()
        #: One per shard, of the versions pulled last; empty until the first pull.
        self._hubs: list[Hub] = []
        self._is_pulling = self._is_closed = False

    def __repr__(self) -> str:
        return f"<tensorhub.Mirror {self._key} {self._replica} of {len(self._hubs)} shards, version {self.version}>"

    def __enter__(self) -> Mirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def version(self) -> int | None:
        """What all of the tensors hold; None before the first pull, while one runs, and after one that failed."""
        held = {hub.version for hub in self._hubs}
        return held.pop() if len(held) == 1 else None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """{name: tensor} of all shards; look them up after each pull."""
        names, pieces = self._parts()
        wholes = {name: joined(each) for name, each in pieces.items()}
        return {name: each[0] for name, each in names.items()} | {
            name: whole for name, whole in wholes.items() if whole is not None
        }

    def _parts(self) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[tuple[Slice, torch.Tensor]]]]:
        """What all shards have: {name: tensors of that name}, and {name of a whole: rows of it}."""
        names: dict[str, list[torch.Tensor]] = {}
        pieces: dict[str, list[tuple[Slice, torch.Tensor]]] = {}
        for hub in list(self._hubs):
            for name, tensor in hub.tensors().items():
                piece = Slice.of(name, tensor.shape)
                if piece is None:
                    names.setdefault(name, []).append(tensor)
                else:
                    pieces.setdefault(piece.name, []).append((piece, tensor))
        return names, pieces

    def pull(self, version: object = "latest", *, timeout: float = 60.0) -> Replication:
        """Bring the tensors to a version, all shards to the same; waits until there is one that matches.

        The `Replication` is that of all shards together: bytes and sources of all, phases of the slowest. On failure
        nothing is served, and `version` is None. Raises as `Hub.replicate`; `LayoutMismatch` also when two shards have
        a tensor of the same name, or rows that make no whole.
        """
        selector, timeout = parse_selector(version), check_timeout(timeout)
        with self._lock:
            self._check_open()
            if self._is_pulling:
                raise Busy("this mirror pulls already; one at a time", self._where)
            self._is_pulling = True
        try:
            done = self._pull(selector, timeout)
            self._check_open()
            return done
        finally:
            self._is_pulling = False

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("the mirror is closed; make a new one", self._where)

    def _pull(self, selector: Selector, timeout_s: float) -> Replication:
        deadline_s = time.monotonic() + timeout_s

        def left_s() -> float:
            return max(0.0, deadline_s - time.monotonic())

        if count := len(self._hubs):
            try:
                return self._replicate(selector, timeout_s)
            except LayoutMismatch:
                shards = self._shards_of(selector, left_s())
                if shards == count:
                    raise
            self._leave()  # a publisher that is cut otherwise: as a replica of other shards
        else:
            shards = self._shards_of(selector, left_s())
        self._open(shards, left_s())
        return self._replicate(selector, left_s())

    def _shards_of(self, selector: Selector, timeout_s: float) -> int:
        """Into how many shards a version is cut, as soon as there is one."""
        return wait_for_version(
            self._key, selector, server=self._server, location=self._place, timeout_s=timeout_s
        ).shards

    def _replicate(self, selector: Selector, timeout_s: float) -> Replication:
        hubs = list(self._hubs)
        self._check_open()
        done = _replicate_together(hubs, selector, timeout_s)
        try:
            self._check_wholes()
        except LayoutMismatch:
            self._leave()  # what makes no whole here is not served on as if it did
            self._wholes.keep([])
            raise
        return done

    def _check_wholes(self) -> None:
        """Every name is one tensor, and that tensor is what was read; `LayoutMismatch`."""
        names, pieces = self._parts()
        lacks = []
        if several := sorted(name for name, each in names.items() if len(each) > 1 and name not in pieces):
            lacks.append(f"{listed(several)} are in several shards")
        if both := sorted(names.keys() & pieces.keys()):
            lacks.append(f"{listed(both)} are published whole, and by rows")
        for name, each in pieces.items():
            forms = sorted({f"{tensor.dtype} {[*tensor.shape[1:]]}" for _, tensor in each})
            if len(forms) > 1:
                lacks.append(f"rows of {name!r} are {' and '.join(forms)}")
            elif (lack := missing([piece for piece, _ in each])) is not None:
                lacks.append(f"{lack} are held by no shard, or by two")
            elif joined(each) is None:
                lacks.append(f"rows of {name!r} are tied to other tensors in some shards, not in all alike")
        if lacks:
            raise LayoutMismatch(
                f"the version's shards make no whole tensors: {'; '.join(lacks)}; open a hub per shard instead",
                self._where,
            )
        self._wholes.keep(rows for each in pieces.values() for rows in each)

    def _memory(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory of a tensor of a shard: of its rows of the whole, where it is a piece."""
        piece = Slice.of(name, shape)
        return self._make(name, shape, dtype) if piece is None else self._wholes.rows(piece, shape, dtype)

    def _open(self, shards: int, timeout_s: float) -> None:
        """A seat for each shard, or none: a replica of which seats are missing would wait for them."""
        try:
            for shard in range(shards):
                hub = open(
                    self._key.name,
                    replica=self._replica,
                    shard=shard,
                    shards=shards,
                    server=self._server,
                    job=self._key.job,
                    engine=self._engine,
                    spot=self._spot,
                    location=str(self._place),
                    layout=self._layout,
                    timeout=timeout_s,
                )
                self._take(hub)
                hub.register_as_published(self._memory)
        except BaseException:
            self._leave()
            raise

    def _take(self, hub: Hub) -> None:
        with self._lock:
            if not self._is_closed:
                self._hubs.append(hub)
                return
        hub.close()
        self._check_open()

    def close(self) -> None:
        """Give up the seats; readers go elsewhere. A pull of another thread ends with `Closed`, at the latest when its
        version has come. The tensors stay whoever's holds them. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            hubs, self._hubs = self._hubs, []
        for hub in hubs:
            hub.close()

    @property
    def _where(self) -> Where:
        return Where(model=str(self._key), replica=self._replica)


def _replicate_together(hubs: Sequence[Hub], selector: Selector, timeout_s: float) -> Replication:
    """One replicate of several shards of a replica that one process holds, side by side, on the default buffers."""

    async def run() -> list[Replication | BaseException]:
        pulls = [hub._member.replicate(selector, DEFAULT_BUFFERS, timeout_s, None) for hub in hubs]
        return await asyncio.gather(*pulls, return_exceptions=True)

    outcomes = hubs[0]._on_loop(run(), timeout_s)
    failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if failures:
        raise _all_of(failures)
    return _merged([outcome for outcome in outcomes if isinstance(outcome, Replication)])


def _all_of(failures: Sequence[BaseException]) -> BaseException:
    """One error that names all: the first that is no mere consequence of another, with the others' words."""
    own = [failure for failure in failures if not isinstance(failure, GroupAborted)] or list(failures)
    first, others = own[0], own[1:]
    if not isinstance(first, TensorHubError):
        return first
    told = list(dict.fromkeys(str(other) for other in others if str(other) != str(first)))
    if told:
        first.message = "; and ".join([first.message, *told])
        first.args = (first.message, first.where)
    return first


def _merged(parts: Sequence[Replication]) -> Replication:
    return Replication(
        parts[0].version,
        parts[0].lineage,
        sum(part.nbytes for part in parts),
        max(part.seconds for part in parts),
        tuple(use for part in parts for use in part.sources),
        {phase: max(part.phases[phase] for part in parts) for phase in PHASES},
        all(part.already_held for part in parts),
        all(part.verified for part in parts),
        sum(part.bytes_read for part in parts),
    )
