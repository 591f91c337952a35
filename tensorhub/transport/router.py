"""Which engine carries a pair: the first preferred one that both have, that reaches the source and has not failed.

Decides and says why; moves nothing. The only place that knows every engine by name. Engines other than those every
machine runs are imported when they are first named, so that what they need may be missing.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

from tensorhub.errors import BadRequest, EngineUnavailable
from tensorhub.messages import Locator
from tensorhub.ports import Engine
from tensorhub.transport.local import LocalEngine
from tensorhub.transport.memory import MemoryEngine
from tensorhub.transport.route import LOOPBACK

#: What users write to leave the choice to us.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Kind:
    """One engine: how to open it under the host that its locators name, and whether "auto" tries it here."""

    open: Callable[[str], Engine]
    #: Why "auto" leaves it out on this machine, or None. Whoever names it gets it, or learns why it does not start.
    left_out: Callable[[], str | None] = lambda: None


def _adapted(module: str, name: str) -> Callable[[str], Engine]:
    """The engine of a module that is imported when it is first opened."""
    return lambda host: cast(Engine, getattr(importlib.import_module(f"tensorhub.transport.{module}"), name)(host))


def _cuda_ipc(_: str) -> Engine:
    from tensorhub.transport.cuda_ipc import CudaIpcEngine

    return CudaIpcEngine()


def _without_cuda() -> str | None:
    from tensorhub.transport.cuda_driver import missing

    return missing()


def _without_rdma() -> str | None:
    from tensorhub.transport.mooncake import is_worth_opening

    return None if is_worth_opening() else "without a device for it, other engines are faster"


#: Fastest first: the order of "auto".
_ENGINES: dict[str, Kind] = {
    MemoryEngine.name: Kind(lambda _: MemoryEngine()),
    "cuda_ipc": Kind(_cuda_ipc, _without_cuda),
    LocalEngine.name: Kind(lambda _: LocalEngine()),
    "mooncake": Kind(_adapted("mooncake", "MooncakeEngine"), _without_rdma),
    "tcp": Kind(_adapted("tcp", "TcpEngine")),
}

_log = logging.getLogger(__name__)


@runtime_checkable
class Reaching(Protocol):
    """An engine that can tell without a read whether it reaches a peer. One that cannot is tried."""

    def reaches(self, peer: bytes) -> str | None:
        """Why the peer is out of reach, or None."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """How to read from one source."""

    engine: Engine
    #: The source's locator for this engine.
    peer: bytes
    #: For people: the engine, and why none before it.
    reason: str


def engine_names(preference: str | Sequence[str]) -> tuple[str, ...]:
    """The engines that a preference names, best first; `BadRequest` for none, or for an unknown one."""
    names = [preference] if isinstance(preference, str) else list(preference)
    wanted: dict[str, None] = {}
    for name in names:
        if name != AUTO and name not in _ENGINES:
            raise BadRequest(
                f"engine {name!r} is unknown; use {AUTO!r}, or one or more of {', '.join(map(repr, _ENGINES))}"
            )
        wanted.update(dict.fromkeys(_ENGINES if name == AUTO else (name,)))
    if not wanted:
        raise BadRequest(f"engine=[] leaves no way to move bytes; use {AUTO!r}")
    return tuple(wanted)


def open_engines(preference: str | Sequence[str] = AUTO, host: str = LOOPBACK) -> list[Engine]:
    """Every engine that a preference names, best first; `host` is this host's number for its peers.

    One that is named must start, or `EngineUnavailable` says why; of "auto", those that can and that make sense on this
    machine, at least one.
    """
    named = {preference} if isinstance(preference, str) else set(preference)
    opened: list[Engine] = []
    failures: list[str] = []
    for name in engine_names(preference):
        kind = _ENGINES[name]
        if name not in named and (why := kind.left_out()) is not None:
            _log.debug("engine %s is left out of %r: %s", name, AUTO, why)
            continue
        try:
            opened.append(kind.open(host))
        except EngineUnavailable as error:
            failures.append(f"{name}: {error.message}")
            if name in named:
                raise EngineUnavailable(f"cannot start engine {failures[-1]}", error.where) from error
            _log.warning("engine %s does not start here", failures[-1])
    if not opened:
        raise EngineUnavailable(f"no engine starts here: {'; '.join(failures)}")
    return opened


def choose(
    engines: Sequence[Engine],
    locators: Sequence[Locator],
    preference: str | Sequence[str] = AUTO,
    failed: Mapping[str, str] | None = None,
) -> Choice:
    """The first preferred engine that is open here, offered by the source, and reaches it.

    `failed` maps engines that are not to be tried (again) with this source to the reason.
    """
    passed: list[str] = []
    for name in engine_names(preference):
        if failed is not None and name in failed:
            passed.append(f"{name} failed: {failed[name]}")
            continue
        mine = [engine for engine in engines if engine.name == name]
        theirs = [locator.data for locator in locators if locator.engine == name]
        if not mine or not theirs:
            passed.append(f"{name}: {'not offered by the source' if mine else 'not open here'}")
            continue
        for peer in theirs:
            why = mine[0].reaches(peer) if isinstance(mine[0], Reaching) else None
            if why is None:
                return Choice(mine[0], peer, name + (f" ({'; '.join(passed)})" if passed else ""))
            passed.append(f"{name}: {why}")
    raise EngineUnavailable(f"no transfer engine reaches the source: {'; '.join(passed)}")
