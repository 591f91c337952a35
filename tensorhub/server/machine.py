"""The reference server as a pure machine: requests, disconnects and time in; messages out.

One step checks, then changes, then replies; a refused request has changed nothing. What a step touched is settled
before it ends: a blocked call is answered by the step that makes its answer true. No I/O, clock, randomness or logging;
the time is an argument, ids come in with requests.
"""

from __future__ import annotations

from typing import TypeVar, assert_never

from tensorhub import messages as m
from tensorhub.errors import TensorHubError
from tensorhub.server import (
    grace,
    grants,
    groups,
    lateness,
    offers,
    publishing,
    reading,
    roots,
    sessions,
    stragglers,
    watching,
)
from tensorhub.server.invariants import check
from tensorhub.server.settings import DEFAULTS, Settings
from tensorhub.server.state import State
from tensorhub.server.turn import Outgoing, Turn
from tensorhub.types import Epoch, Generation, ModelKey, ReplicaId, Seat, SessionId

__all__ = ["Machine", "Outgoing", "Settings"]

T = TypeVar("T")


class Machine:
    """One life of a reference server.

    Incarnations of groups count from `groups`, which hosts draw: those of two lives must differ.
    """

    def __init__(self, epoch: Epoch, settings: Settings = DEFAULTS, groups: int = 0) -> None:
        self.settings = settings
        self.state = State(epoch, groups=groups)

    def receive(self, now_ns: int, sender: SessionId, call: int, request: m.Request) -> list[Outgoing]:
        """Take one request. Overdue deadlines are left to `tick`: a server that was stopped itself hears first what was
        said meanwhile, and declares nobody dead for its own silence."""
        turn = Turn(self.state, self.settings, now_ns, f"{sender.hex()[:6]}/{call}", sender, call)
        try:
            if not isinstance(request, m.Hello):
                turn.session()
                sessions.renew(turn, sender)
            _dispatch(turn, request)
        except TensorHubError as error:
            turn.refuse_sender(error)
        return _settle(turn)

    def disconnected(self, now_ns: int, sender: SessionId) -> list[Outgoing]:
        """The session's control connection is gone: its lease shrinks; a Hello restores it."""
        turn = Turn(self.state, self.settings, now_ns, f"{sender.hex()[:6]} disconnected")
        session = self.state.sessions.get(sender)
        if session is not None:
            sessions.disconnected(turn, session)
        return _settle(turn)

    def tick(self, now_ns: int) -> list[Outgoing]:
        """Let everything happen that is due, in the order of its deadlines."""
        out: list[Outgoing] = []
        while (key := self.state.deadlines.pop(now_ns)) is not None:
            turn = Turn(self.state, self.settings, now_ns, f"{key[0]} deadline")
            _due(turn, key)
            out += _settle(turn)
        return out

    def next_deadline_ns(self) -> int | None:
        """When `tick` has something to do, at the earliest."""
        return self.state.deadlines.next_ns()

    def check(self) -> None:
        """Raise `Broken` naming the invariant that does not hold."""
        check(self.state)


def _dispatch(turn: Turn, request: m.Request) -> None:  # noqa: C901, PLR0912 - one line per request
    match request:
        case m.Hello():
            sessions.hello(turn, request)
        case m.Beat():
            turn.reply(m.Ok())
        case m.Join():
            sessions.join(turn, request)
        case m.Publish():
            publishing.publish(turn, request)
        case m.Seal():
            publishing.seal(turn, request)
        case m.Unpublish():
            publishing.unpublish(turn, request)
        case m.Replicate():
            groups.replicate(turn, request)
        case m.Serve():
            reading.serve(turn, request)
        case m.Progress():
            reading.progress(turn, request)
        case m.Reroute():
            reading.reroute(turn, request)
        case m.Done():
            groups.done(turn, request)
        case m.Abort():
            groups.give_up(turn, request)
        case m.Wait():
            watching.wait(turn, request)
        case m.List():
            watching.listing(turn, request)
        case m.Status():
            watching.status(turn, request)
        case m.Watch():
            watching.watch(turn, request)
        case m.Unwatch():
            watching.unwatch(turn, request)
        case m.Leave():
            sessions.leave(turn, request.seat)
        case m.Goodbye():
            sessions.goodbye(turn)
        case _:
            assert_never(request)


def _settle(turn: Turn) -> list[Outgoing]:
    """Look again at everything the step touched, until nothing is touched any more.

    It ends: each round answers a call, frees a holding, or finds nothing to do; none of them is ever undone by another.
    """
    while turn.drains or turn.slots or turn.models:
        if turn.drains:
            reading.drained(turn, _first(turn.drains))
        elif turn.slots:
            slot = _first(turn.slots)
            roots.settle(turn, slot)
            reading.wake(turn, slot)
        else:
            model = _first(turn.models)
            for transaction in grants.in_order(model):
                if model.undecided.get(transaction.replica.id) is transaction:
                    groups.try_decide(turn, transaction)
            for waiting in list(model.waits.values()):
                watching.look(turn, model, waiting)
    return turn.out


def _first(touched: dict[T, None]) -> T:
    thing = next(iter(touched))
    del touched[thing]
    return thing


def _due(turn: Turn, key: tuple[object, ...]) -> None:  # noqa: C901, PLR0912 - one line per kind
    """A deadline has come. Its subject exists: whoever ends a subject cancels its deadlines."""
    state = turn.state
    match key:
        case ("lease", bytes() as session):
            sessions.end(turn, state.sessions[SessionId(session)], "expired", "its process was silent past its lease")
        case ("part", Seat() as seat):
            lateness.part_late(turn, state.models[seat.model].replicas[seat.replica], seat.shard)
        case ("transaction", ModelKey() as model, str() as replica):
            transaction = state.models[model].replicas[ReplicaId(replica)].transaction
            if transaction is not None:
                lateness.transaction_late(turn, transaction)
        case ("absent", ModelKey() as model, str() as replica):
            transaction = state.models[model].replicas[ReplicaId(replica)].transaction
            if transaction is not None:
                lateness.not_back(turn, transaction)
        case ("drain", bytes() as generation):
            publishing.drain_late(turn, state.generations[Generation(generation)])
        case ("wait", bytes() as session, int() as call):
            table = state.models[state.sessions[SessionId(session)].waits[call]]
            watching.wait_late(turn, table, table.waits[SessionId(session), call])
        case ("grace",):
            grace.end_grace(turn)
            reading.lose_hope(turn)
        case ("unsure", bytes() as generation):
            grace.sure(turn, state.generations[Generation(generation)])
        case ("asked", bytes() as generation):
            stragglers.not_heard(turn, state.generations[Generation(generation)])
        case ("promise", bytes() as generation):
            offers.end_promise(turn, state.generations[Generation(generation)])
        case ("patience", Seat() as seat):
            reading.patience_over(turn, state.models[seat.model].replicas[seat.replica], seat.shard)
        case ("quarantine", bytes() as generation):
            reading.end_quarantine(turn, state.generations[Generation(generation)])
        case _:
            raise AssertionError(f"no such deadline: {key}")
