"""Calls that only look: wait for a version, watch events, list, status. They change nothing but who is waiting."""

from __future__ import annotations

from tensorhub.errors import BadRequest, VersionUnavailable, WaitTimeout, Where
from tensorhub.messages import Found, List, Listing, Ok, Status, Unwatch, Wait, Watch
from tensorhub.server import views
from tensorhub.server.grace import may_decide
from tensorhub.server.grants import check_location
from tensorhub.server.sessions import make_model, mark_idle
from tensorhub.server.settings import WAITS_PER_SESSION_MAX
from tensorhub.server.state import ModelTable, Session, Waiting
from tensorhub.server.turn import Turn
from tensorhub.server.versions import seen, select
from tensorhub.types import ModelKey, check_name, parse_selector


def wait(turn: Turn, request: Wait) -> None:
    """Answer when a version matches."""
    session = turn.session()
    _check_model(request.model)
    parse_selector(request.selector)
    check_location(request.location, Where(model=str(request.model)))
    if turn.call in session.waits:
        return  # the same call once more: its one answer is still to come
    _check_room(turn, session)
    model = _use(turn, request.model)
    waiting = Waiting(turn.sender, turn.call, request.selector, request.location)
    model.waits[turn.sender, turn.call] = waiting
    session.waits[turn.call] = request.model
    turn.deadlines.set(("wait", turn.sender, turn.call), turn.until(request.timeout_ns))
    look(turn, model, waiting)


def look(turn: Turn, model: ModelTable, waiting: Waiting) -> None:
    """Answer a blocked `Wait` if its selector matches now, or never can."""
    if not may_decide(turn, model, waiting.selector):
        return
    try:
        record = select(model, waiting.selector, waiting.location)
    except VersionUnavailable as error:
        _end_wait(turn, model, waiting)
        turn.refuse(waiting.session, waiting.call, error)
        return
    if record is not None:
        _end_wait(turn, model, waiting)
        turn.say(waiting.session, waiting.call, Found(record.version))


def wait_late(turn: Turn, model: ModelTable, waiting: Waiting) -> None:
    _end_wait(turn, model, waiting)
    error = WaitTimeout(
        f"no version matched {waiting.selector} in time; {seen(model)}",
        Where(model=str(model.key), version=str(waiting.selector)),
    )
    turn.refuse(waiting.session, waiting.call, error)


def _end_wait(turn: Turn, model: ModelTable, waiting: Waiting) -> None:
    del model.waits[waiting.session, waiting.call]
    del turn.state.sessions[waiting.session].waits[waiting.call]
    turn.deadlines.cancel(("wait", waiting.session, waiting.call))
    mark_idle(turn, model)


def watch(turn: Turn, request: Watch) -> None:
    """Events of this model answer the call from now on."""
    session = turn.session()
    _check_model(request.model)
    _check_room(turn, session)
    model = _use(turn, request.model)
    model.watchers[turn.sender, turn.call] = None
    session.watches[turn.call] = request.model


def unwatch(turn: Turn, request: Unwatch) -> None:
    session = turn.session()
    key = session.watches.pop(request.call, None)
    if key is not None:
        model = turn.state.models[key]
        del model.watchers[turn.sender, request.call]
        mark_idle(turn, model)
    turn.reply(Ok())


def listing(turn: Turn, request: List) -> None:
    turn.session()
    turn.reply(Listing(tuple(row for model in _models(turn, request.model) for row in views.versions(model))))


def status(turn: Turn, request: Status) -> None:
    turn.session()
    turn.reply(views.status(turn, _models(turn, request.model)))


def _models(turn: Turn, key: ModelKey | None) -> list[ModelTable]:
    if key is None:
        return views.models_of(turn.state)
    model = turn.state.models.get(key)
    return [] if model is None else [model]


def _check_model(key: ModelKey) -> None:
    check_name("job", key.job)
    check_name("model", key.name)


def _check_room(turn: Turn, session: Session) -> None:
    if turn.call == 0:
        raise BadRequest("a one-way call cannot wait for an answer")
    if len(session.waits) + len(session.watches) >= WAITS_PER_SESSION_MAX:
        raise BadRequest(f"a process has at most {WAITS_PER_SESSION_MAX} open waits and watches")


def _use(turn: Turn, key: ModelKey) -> ModelTable:
    model = make_model(turn, key)
    turn.state.idle.pop(key, None)
    return model
