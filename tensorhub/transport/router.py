"""Which engine carries a pair: the first of the preferred ones that both have and that reaches the source.

Decides and says why; moves nothing. The only place that knows every engine by name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tensorhub.errors import BadRequest, EngineUnavailable
from tensorhub.messages import Locator
from tensorhub.ports import Engine
from tensorhub.transport.local import LocalEngine
from tensorhub.transport.memory import MemoryEngine
from tensorhub.transport.mooncake import MooncakeEngine, is_worth_opening
from tensorhub.transport.route import LOOPBACK

#: What users write to leave the choice to us.
AUTO = "auto"

#: {name: how to open it under the host that its locators name}, fastest first: the order of "auto".
_ENGINES: dict[str, Callable[[str], Engine]] = {
    MemoryEngine.name: lambda _: MemoryEngine(),
    LocalEngine.name: lambda _: LocalEngine(),
    MooncakeEngine.name: MooncakeEngine,
}
#: {name: whether "auto" opens it here}; others always. Whoever names one gets it.
_WORTH_OPENING: dict[str, Callable[[], bool]] = {MooncakeEngine.name: is_worth_opening}

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

    One that is named must start, or `EngineUnavailable` says why; of "auto", those that can, at least one.
    """
    named = {preference} if isinstance(preference, str) else set(preference)
    opened: list[Engine] = []
    failures: list[str] = []
    for name in engine_names(preference):
        if name not in named and not _WORTH_OPENING.get(name, lambda: True)():
            continue
        try:
            opened.append(_ENGINES[name](host))
        except EngineUnavailable as error:
            failures.append(f"{name}: {error.message}")
            if name in named:
                raise EngineUnavailable(f"cannot start engine {failures[-1]}", error.where) from error
            _log.warning("engine %s does not start here", failures[-1])
    if not opened:
        raise EngineUnavailable(f"no engine starts here: {'; '.join(failures)}")
    return opened


def choose(engines: Sequence[Engine], locators: Sequence[Locator], preference: str | Sequence[str] = AUTO) -> Choice:
    """The first preferred engine that is open here, offered by the source, and reaches it."""
    passed: list[str] = []
    for name in engine_names(preference):
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
