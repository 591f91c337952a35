"""One rank's part of a model that comes as a stream of temporary tensors: copied, then published from the copy.

For trainers whose framework hands out tensors of its own instead of parameters in place. All ranks see the same stream:
of whole tensors each keeps about as many bytes as the others, of distributed ones the rows that it has. It decides who
keeps what, and which of its sets of memory is written next. The stream is always drained, whatever goes wrong on this
rank, since what yields it may be collective.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tensorhub.client.hub import Hub, model_key, open
from tensorhub.client.slices import Slice, gathered, is_distributed, own_rows
from tensorhub.client.tensors import copy_problem
from tensorhub.errors import (
    BadRequest,
    Broken,
    Closed,
    DrainTimeout,
    NotPublished,
    TensorHubError,
    UnsupportedTensor,
    Where,
)
from tensorhub.pipeline.columns import NAME_SHOWN_MAX, short
from tensorhub.types import check_texts, check_timeout

if TYPE_CHECKING:
    from types import TracebackType

#: Two let a version be read while the next is copied; more would only keep versions that nobody asks for.
SETS_MAX = 8


@dataclass(frozen=True, slots=True)
class Staged:
    """What a `Staging.publish` did: bytes of this rank's part, and seconds per phase.

    `drain` of readers of the memory's last version, `gather` (waiting for the stream), `stage` (copy and cast),
    `register`, `publish`.
    """

    version: int
    nbytes: int
    tensors: int
    #: Readers that were still in the last version of this memory when it was taken back; they fail untorn and go on
    #: with a newer one.
    abandoned: bool
    phases: dict[str, float] = field(hash=False)


@dataclass(slots=True)
class _Set:
    """Memory for this rank's part of one version."""

    name: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    #: The tensors are registered as they are now.
    is_registered: bool = False
    #: A publish of it was begun since it was last taken back, whether or not it came to its end.
    may_be_shown: bool = False


class Staging:
    """Shard `shard` of `shards` of a publisher that copies what it publishes. A context manager.

    `sets` of memory are used in turns: with two, the last version stays readable while the next is copied. `dtype`, or
    its name, is what floating-point tensors are cast to, but for those whose name matches `keep_dtype`, a pattern or
    several; None casts nothing. Before memory is written again its readers are drained for `drain_s` seconds at most,
    then abandoned. Other options are those of `tensorhub.open`.
    """

    def __init__(
        self,
        model: str,
        *,
        replica: str,
        shard: int = 0,
        shards: int = 1,
        sets: int = 2,
        dtype: torch.dtype | str | None = None,
        keep_dtype: str | Sequence[str] = (),
        drain_s: float = 30.0,
        server: str | None = None,
        job: str | None = None,
        engine: str | Sequence[str] = "auto",
        location: str | None = None,
        lineage: str | None = None,
        layout: str = "",
        timeout: float = 30.0,
    ) -> None:
        if isinstance(sets, bool) or not isinstance(sets, int) or not 1 <= sets <= SETS_MAX:
            raise BadRequest(f"sets must be an int from 1 to {SETS_MAX}, not {sets!r}")
        wire = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if dtype is not None and not (isinstance(wire, torch.dtype) and wire.is_floating_point):
            raise BadRequest(f"dtype must be a floating-point torch.dtype, its name or None, not {dtype!r}")
        self._drain_s = check_timeout(drain_s)
        self._dtype, self._keep_dtype = wire, check_texts("keep_dtype", keep_dtype)
        self._shard, self._shards = shard, shards
        self._hub: Hub | None = open(
            model,
            replica=replica,
            shard=shard,
            shards=shards,
            server=server,
            job=job,
            engine=engine,
            location=location,
            lineage=lineage,
            layout=layout,
            timeout=timeout,
        )
        self._where = Where(model=str(model_key(model, job)), replica=replica, shard=shard, shards=shards)
        #: The one to be written next comes first.
        self._sets = [_Set(f"staging-{number}") for number in range(sets)]
        self._phases: dict[str, float] = {}

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(self, version: int, named: Iterable[tuple[str, torch.Tensor]], *, timeout: float = 30.0) -> Staged:
        """Drain `named`, keep a copy of this rank's part, and publish it as `version`; returns when it is readable.

        Readable by others once every rank has. Whatever fails here, `named` is drained before it is raised, and nothing
        is published. Raises as `Hub.publish` and `Hub.register`; also, once, what `Hub.unpublish` has to say of the
        version that this memory had: then publish again. An interrupt stops at once.
        """
        self._phases = dict.fromkeys(("drain", "gather", "stage", "register", "publish"), 0.0)
        stream = self._timed(named)
        try:
            return self._publish(version, stream, timeout)
        except Exception as error:
            self._exhaust(stream)
            if isinstance(error, TensorHubError):
                error.at(self._where)
            raise

    def _publish(self, version: int, stream: Iterator[object], timeout: float) -> Staged:
        hub = self._hub
        if hub is None:
            raise Closed("the staging is closed; make a new one")
        target = self._sets[0]
        with self._lap("drain"):
            abandoned = self._take_back(hub, target)
        self._fill(target, stream)
        with self._lap("register"):
            if not target.is_registered:
                hub.register(target.tensors, buffers=target.name)
                target.is_registered = True
        with self._lap("publish"):
            target.may_be_shown = True
            hub.publish(version=version, buffers=target.name, timeout=timeout)
        self._sets.append(self._sets.pop(0))
        nbytes = sum(tensor.nbytes for tensor in target.tensors.values())
        return Staged(version, nbytes, len(target.tensors), abandoned, self._phases)

    def _take_back(self, hub: Hub, target: _Set) -> bool:
        """Nobody reads this memory any more; whether somebody was told so before he had finished."""
        if not target.may_be_shown:
            return False
        abandoned = False
        try:
            hub.unpublish(timeout=self._drain_s, buffers=target.name)
        except DrainTimeout:
            hub.unpublish(abandon=True, buffers=target.name)
            abandoned = True
        except NotPublished:
            pass  # its publish failed; or it was taken back by the call that raised what became of it, a conflict say
        target.may_be_shown = False
        return abandoned

    def _fill(self, target: _Set, stream: Iterator[object]) -> None:
        load = [0] * self._shards
        kept: dict[str, torch.Tensor] = {}
        seen: set[str] = set()
        for item in stream:
            name, tensor = _named(item)
            if name in seen:
                raise BadRequest(f"the stream names {name!r} twice", _at(name))
            seen.add(name)
            if (own := self._own(name, tensor, load)) is not None:
                called, part = own
                with self._lap("stage"):
                    kept[called] = self._copy(target.tensors.get(called), part, self._wire_dtype(name, part))
        if list(kept) != list(target.tensors) or any(kept[name] is not target.tensors[name] for name in kept):
            target.is_registered = False
        target.tensors = kept

    def _exhaust(self, stream: Iterator[object]) -> None:
        """Take part in the rest of the stream for the other ranks' sake, and keep nothing of it.

        What it raises is raised. One that has raised is over.
        """
        for item in stream:
            with suppress(Exception):  # why the publish fails is known, and told afterwards
                _, tensor = _named(item)
                if is_distributed(tensor) and own_rows(tensor) is None:
                    gathered(tensor)

    def _own(self, name: str, tensor: torch.Tensor, load: list[int]) -> tuple[str, torch.Tensor] | None:
        """What this rank keeps of a tensor, and its name; None when that is for others. All ranks decide alike."""
        if is_distributed(tensor):
            rows = own_rows(tensor)
            if rows is not None:
                local = tensor.to_local()
                if rows and local.shape[0] != len(rows):
                    raise Broken(f"rank has {local.shape[0]} rows of {name!r}, of which {rows} were expected")
                _check(name, local)
                return (str(Slice(name, rows.start, rows.stop, tensor.shape[0])), local) if rows else None
            with self._lap("gather"):
                tensor = gathered(tensor)
        _check(name, tensor)
        owner = load.index(min(load))
        load[owner] += max(1, tensor.numel() * self._wire_dtype(name, tensor).itemsize)
        return (name, tensor) if owner == self._shard else None

    def _timed(self, named: Iterable[object]) -> Iterator[object]:
        stream, end = iter(named), object()
        while True:
            with self._lap("gather"):
                item = next(stream, end)
            if item is end:
                return
            yield item

    def _wire_dtype(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if self._dtype is None or not tensor.dtype.is_floating_point:
            return tensor.dtype
        return tensor.dtype if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._keep_dtype) else self._dtype

    def _copy(self, old: torch.Tensor | None, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor's elements in memory of this set: what there was under its name, if it fits."""
        if old is None or old.shape != tensor.shape or old.dtype != dtype:
            # Pinned: a device writes it, and a network adapter reads it, without a copy between.
            old = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
        with torch.no_grad():
            old.copy_(tensor)
        return old

    @contextmanager
    def _lap(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] += time.perf_counter() - began

    def close(self) -> None:
        """Give up the seat; readers go elsewhere. Idempotent."""
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.close()


def _named(item: object) -> tuple[str, torch.Tensor]:
    """An item of the stream; names count as text, as they do when tensors are registered."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        size = f" of {len(item)}" if isinstance(item, (tuple, list)) else ""
        raise BadRequest(f"the stream yields pairs of a name and a tensor, not a {type(item).__name__}{size}")
    name, tensor = item
    if not is_distributed(tensor):
        _check(str(name), tensor)
    return str(name), tensor


def _check(name: str, tensor: object) -> None:
    """`UnsupportedTensor` where no copy of it could be published, as `Hub.register` has it."""
    if (problem := copy_problem(tensor)) is not None:
        raise UnsupportedTensor(f"tensors that cannot be published: {short(name)}: {problem}", _at(name))


def _at(name: str) -> Where:
    return Where(tensor=name[:NAME_SHOWN_MAX])
