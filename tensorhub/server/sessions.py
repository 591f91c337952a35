"""Who is alive and who sits where: sessions, leases, seats, and what falls when one of them goes.

It never looks at versions but to drop what a dead process held; what a process brings, `returning.py` takes.
"""

from __future__ import annotations

from dataclasses import replace

from tensorhub.errors import BadRequest, Closed, GroupAborted, LayoutMismatch, SeatTaken, TensorHubError
from tensorhub.messages import PROTOCOL, Hello, Join, Joined, Moved, Ok, Welcome
from tensorhub.server import groups, returning
from tensorhub.server.grace import open_grace
from tensorhub.server.grants import check_location, part_of
from tensorhub.server.holdings import drop, linger, stopped
from tensorhub.server.settings import (
    BUFFER_SETS_MAX,
    MODELS_MAX,
    SEATS_PER_SESSION_MAX,
    SESSIONS_MAX,
)
from tensorhub.server.state import Linger, Member, ModelTable, Outcome, Replica, Session
from tensorhub.server.turn import Turn, at, where
from tensorhub.types import ID_BYTES, NAME_BYTES_MAX, SHARDS_MAX, ModelKey, Seat, SessionId, check_name

# ---------------------------------------------------------------- sessions


def hello(turn: Turn, request: Hello) -> None:
    """A new session, or one whose connection broke and is back."""
    if request.protocol != PROTOCOL:
        raise BadRequest(f"this server speaks protocol {PROTOCOL}, the client {request.protocol}; use one release")
    if request.session != turn.sender or len(request.session) != ID_BYTES:
        raise BadRequest(f"a session id is {ID_BYTES} random bytes, the same for all messages of the session")
    check_name("host", request.host)
    session = turn.state.sessions.get(turn.sender)
    is_foreign = request.epoch not in (b"", turn.state.epoch)
    lingers: list[Linger] = []
    if session is not None and is_foreign:
        lingers = _was_elsewhere(turn, session)
        session = None
    is_known = session is not None
    if session is None:
        if len(turn.state.sessions) >= SESSIONS_MAX:
            raise BadRequest(f"this server has {SESSIONS_MAX} sessions already; close some, or use a second server")
        session = turn.state.sessions[turn.sender] = Session(turn.sender, request.host, request.pid)
    for lingerer in lingers:
        again = replace(lingerer, session=session)
        session.lingers[again.seat] = again.source.lingering[again.generation] = again
    if is_foreign:
        session.returned = True
        open_grace(turn)
    session.connected = True
    renew(turn, turn.sender)
    turn.reply(Welcome(turn.state.epoch, turn.settings.lease_ns, turn.settings.beat_ns, is_known))


def _was_elsewhere(turn: Turn, session: Session) -> list[Linger]:
    """Two servers believe to be the one. What it did with the other, this one has not heard: all that it has here goes.
    Returns what its process may still read: it has been granted that here, and has not said that it stopped."""
    for member in session.members.values():
        _may_read_on(turn, member)
    end(turn, session, "left", "its process was with another server meanwhile", may_read_on=True)
    del turn.state.sessions[session.id]
    return list(session.lingers.values())


def _may_read_on(turn: Turn, member: Member) -> None:
    """Its seat goes, but its process may live, and has not heard of it: what it reads is not drained before it says so,
    or its lease ends."""
    replica = member.replica
    for holding in member.holdings.values():
        part = part_of(holding)
        linger(turn, holding, (0, 0) if part is None else (replica.group, replica.sequence))


def renew(turn: Turn, session: SessionId) -> None:
    """The session is alive now."""
    turn.deadlines.set(("lease", session), turn.now_ns + turn.settings.lease_ns)


def disconnected(turn: Turn, session: Session) -> None:
    """A killed process is known soon; one that lives comes back, or its heart goes on beating beside."""
    session.connected = False
    soon = turn.now_ns + turn.settings.reconnect_ns
    turn.deadlines.set(("lease", session.id), min(soon, turn.deadlines.at[("lease", session.id)]))


def end(turn: Turn, session: Session, kind: str, reason: str, *, may_read_on: bool = False) -> None:
    """The session is over: everything of it goes, in one step; only what it may read on is left to the caller."""
    groups_of: dict[Replica, list[Member]] = {}
    for member in session.members.values():
        groups_of.setdefault(member.replica, []).append(member)
    for call, key in session.waits.items():
        model = turn.state.models[key]
        del model.waits[session.id, call]
        turn.deadlines.cancel(("wait", session.id, call))
        turn.refuse(session.id, call, Closed("the session was closed"))
    for call, key in session.watches.items():
        del turn.state.models[key].watchers[session.id, call]
    if kind == "expired":
        del turn.state.sessions[session.id]
    for replica, members in groups_of.items():
        vacate(turn, replica, members, kind, reason)
    for seat in () if may_read_on else list(session.lingers):
        stopped(turn, session, seat)
    for key in dict.fromkeys([*session.waits.values(), *session.watches.values()]):
        if (known := turn.state.models.get(key)) is not None:  # else its last seat was ours, and it is forgotten
            mark_idle(turn, known)
    turn.deadlines.cancel(("lease", session.id))


def goodbye(turn: Turn) -> None:
    session = turn.session()
    end(turn, session, "left", "its process said goodbye")
    turn.reply(Ok())
    del turn.state.sessions[session.id]


# ---------------------------------------------------------------- seats


def join(turn: Turn, request: Join) -> None:
    """Take a seat. Joining one's own seat again tells the group's numbers."""
    session, seat = turn.session(), request.seat
    _check_join(request)
    known = turn.state.models.get(seat.model)
    replica = None if known is None else known.replicas.get(seat.replica)
    if replica is not None and (replica.shards, replica.layout) != (request.shards, request.layout):
        raise LayoutMismatch(
            f"replica {seat.replica!r} has {replica.shards} shards of layout {replica.layout!r}, this shard says "
            f"{request.shards} of {request.layout!r}",
            where(seat, shards=request.shards),
        )
    holder = None if replica is None else replica.members.get(seat.shard)
    if replica is not None and holder is not None and holder.session is session:
        returning.reconcile(turn, holder, request)
        turn.reply(Joined(replica.group, replica.sequence))
        return
    if holder is not None and holder.session.connected:
        raise SeatTaken(
            f"seat {seat} is held by process {holder.session.pid} on {holder.session.host}; "
            "end it, or use another replica name",
            where(seat, shards=request.shards),
        )
    if len(session.members | session.lingers) >= SEATS_PER_SESSION_MAX:
        raise BadRequest(f"a process holds at most {SEATS_PER_SESSION_MAX} seats", where(seat))
    if replica is not None and holder is not None:
        _may_read_on(turn, holder)
        vacate(turn, replica, [holder], "left", f"process {session.pid} on {session.host} took its seat")
    _sit(turn, request, session)


def _check_join(request: Join) -> None:
    seat, place = request.seat, where(request.seat, shards=request.shards)
    for kind, name in (("job", seat.model.job), ("model", seat.model.name), ("replica", seat.replica)):
        check_name(kind, name)
    if not 1 <= request.shards <= SHARDS_MAX or not 0 <= seat.shard < request.shards:
        raise BadRequest(f"shard {seat.shard} of {request.shards}: a replica has 1 to {SHARDS_MAX} shards", place)
    check_location(request.location, place)
    if len(request.layout) > NAME_BYTES_MAX:
        raise BadRequest(f"layout {request.layout[:40]!r}... is longer than {NAME_BYTES_MAX} characters", place)
    if len(request.claims) > BUFFER_SETS_MAX:
        raise BadRequest(f"{len(request.claims)} claims: a shard has at most {BUFFER_SETS_MAX} buffer sets", place)


def make_model(turn: Turn, key: ModelKey) -> ModelTable:
    """The model's table; the longest idle one makes room when there are too many."""
    state = turn.state
    known = state.models.get(key)
    if known is not None:
        return known
    if len(state.models) >= MODELS_MAX:
        oldest = next(iter(state.idle), None)
        if oldest is None:
            raise BadRequest(f"this server has {MODELS_MAX} models in use already; use a second server")
        del state.idle[oldest], state.models[oldest]
    state.models[key] = ModelTable(key)
    return state.models[key]


def mark_idle(turn: Turn, model: ModelTable) -> None:
    """A model nobody uses is forgotten at once if nothing was ever published, else when room is needed."""
    if model.replicas or model.waits or model.watchers or model.key not in turn.state.models:
        return
    if model.lineages:
        turn.state.idle[model.key] = None
    else:
        del turn.state.models[model.key]


def _sit(turn: Turn, request: Join, session: Session) -> None:
    seat = request.seat
    model = make_model(turn, seat.model)
    turn.state.idle.pop(model.key, None)
    replica = model.replicas.get(seat.replica)
    if replica is None:
        replica = Replica(model, seat.replica, request.shards, request.layout, _next_group(turn))
        model.replicas[seat.replica] = replica
    member = Member(seat, session, replica, request.spot, request.location)
    replica.members[seat.shard] = session.members[seat] = member
    turn.event("joined", model, None, seat, f"process {session.pid} on {session.host}")
    returning.come_back(turn, member, request, is_first=len(replica.members) == 1)
    undertaking = request.standing.undertaking
    if undertaking is None or undertaking.held or undertaking.generation in turn.state.generations:
        # What it was granted here before it was with another server is over, or known again as what it reads.
        stopped(turn, session, seat)
    turn.reply(Joined(replica.group, replica.sequence))


def _next_group(turn: Turn) -> int:
    turn.state.groups += 1
    return turn.state.groups


def leave(turn: Turn, seat: Seat) -> None:
    member = turn.member(seat)
    vacate(turn, member.replica, [member], "left", f"shard {seat.shard} left")
    stopped(turn, member.session, seat)
    turn.reply(Ok())


def vacate(turn: Turn, replica: Replica, members: list[Member], kind: str, reason: str) -> None:
    """These seats are empty now: the group's transaction ends, what they held goes, the others get a new group."""
    failures: dict[int, TensorHubError] = {
        member.seat.shard: GroupAborted(reason, at(member)) for member in sorted(members, key=_shard)
    }
    for member in members:
        turn.event(kind, replica.model, None, member.seat, reason)
    if replica.transaction is not None:
        groups.abort(turn, replica.transaction, failures, quiet=tuple(failures))
    else:
        late = {shard: error.message for shard, error in failures.items()}
        groups.record(replica, replica.group, replica.sequence, Outcome(None, late))
    for member in members:
        del replica.members[member.seat.shard], member.session.members[member.seat]
        for holding in list(member.holdings.values()):
            drop(turn, holding, reason)
    replica.group, replica.sequence, replica.moved = _next_group(turn), 0, reason
    for member in replica.members.values():
        turn.notify(member.session.id, Moved(member.seat, replica.group, replica.sequence, reason))
    if not replica.members:
        del replica.model.replicas[replica.id]
        mark_idle(turn, replica.model)


def _shard(member: Member) -> int:
    return member.seat.shard
