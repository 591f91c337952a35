"""What people and tools see of the state: rows for `List` and `Status`. It reads everything and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tensorhub.messages import HoldingView, SessionView, StatusView, VersionView, WaitView
from tensorhub.server.holdings import names
from tensorhub.server.state import Holding, HoldingState, ModelTable, Origin, Session, State, VersionRecord
from tensorhub.server.turn import Turn
from tensorhub.views import PulledView


def versions(model: ModelTable) -> tuple[VersionView, ...]:
    """Newest first."""
    records = sorted(model.versions.values(), key=lambda record: (record.order, record.version.number), reverse=True)
    return tuple(_version(record) for record in records)


def status(turn: Turn, models: Iterable[ModelTable]) -> StatusView:
    tables = list(models)
    state = turn.state
    return StatusView(
        state.epoch,
        tuple(_session(turn, session) for session in state.sessions.values()),
        tuple(row for model in tables for row in versions(model)),
        tuple(_holding(turn, holding) for model in tables for holding in holdings(model)),
        tuple(row for model in tables for row in _waiting(turn, model)),
    )


def holdings(model: ModelTable) -> Iterator[Holding]:
    """All holdings of a model, by replica and shard."""
    for replica in model.replicas.values():
        for _, member in sorted(replica.members.items()):
            yield from member.holdings.values()


def models_of(state: State) -> list[ModelTable]:
    return sorted(state.models.values(), key=lambda model: model.key)


def _version(record: VersionRecord) -> VersionView:
    shards: dict[str, int] = {}
    for slot in record.slots.values():
        for holding in slot.holdings.values():
            complete = holding.state is not HoldingState.FILLING
            replica = holding.member.replica.id
            shards[replica] = shards.get(replica, 0) + complete
    held = [holding for slot in record.slots.values() for holding in slot.holdings.values()]
    return VersionView(
        record.model.key,
        record.version,
        _version_state(record),
        record.shards,
        sum(slot.content.shard_bytes for slot in record.slots.values()),
        tuple(sorted(name for name, count in shards.items() if count >= record.shards)),
        tuple(sorted(name for name, count in shards.items() if count < record.shards)),
        sum(len(holding.readers) for holding in held),
        all(slot.content.verified for slot in record.slots.values()),
    )


def _version_state(record: VersionRecord) -> str:
    if record.retired:
        return "retired"
    if record.readable:
        return "readable"
    return "incomplete" if record.centres else "hidden"


def _holding(turn: Turn, holding: Holding) -> HoldingView:
    member, slot = holding.member, holding.slot
    return HoldingView(
        member.seat,
        member.replica.shards,
        holding.buffers,
        slot.record.version,
        _holding_state(holding),
        holding.watermark,
        slot.content.chunks,
        slot.content.shard_bytes,
        "" if holding.upstream is None else str(holding.upstream.member.seat),
        names(holding),
        member.spot,
        member.location,
        holding.route,
        tuple(_pulled(turn, origin) for origin in holding.origins),
    )


def _pulled(turn: Turn, origin: Origin) -> PulledView:
    ended_ns = turn.now_ns if origin.ended_ns is None else origin.ended_ns
    age_ns = turn.now_ns - origin.began_ns
    return PulledView(origin.seat, origin.nbytes, origin.route, age_ns, ended_ns - origin.began_ns)


def _holding_state(holding: Holding) -> str:
    if holding.hidden:
        return "draining"
    if holding.state is HoldingState.PUBLISHED and holding.root is None:
        return "publishing"
    return holding.state.value


def _session(turn: Turn, session: Session) -> SessionView:
    left = turn.deadlines.at[("lease", session.id)] - turn.now_ns
    return SessionView(session.id, session.host, session.pid, tuple(sorted(session.members)), max(left, 0))


def _waiting(turn: Turn, model: ModelTable) -> Iterator[WaitView]:
    for replica in model.replicas.values():
        transaction = replica.transaction
        for part in () if transaction is None else transaction.parts.values():
            if part.call is not None:
                left = turn.deadlines.at.get(("part", part.member.seat), part.transaction.deadline_ns) - turn.now_ns
                what = f"replicate {part.transaction.selector}: {part.phase.value}"
                yield WaitView(str(part.member.seat), f"{what} ({part.lack})" if part.lack else what, max(left, 0))
    for holding in holdings(model):
        if holding.drain is not None:
            left = turn.deadlines.at[("drain", holding.generation)] - turn.now_ns
            what = f"unpublish {holding.slot.record.version}: readers {', '.join(names(holding))}"
            yield WaitView(str(holding.member.seat), what, max(left, 0))
    for waiting in model.waits.values():
        left = turn.deadlines.at[("wait", waiting.session, waiting.call)] - turn.now_ns
        yield WaitView(waiting.session.hex()[:8], f"version {waiting.selector}", max(left, 0))
