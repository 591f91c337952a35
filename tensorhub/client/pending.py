"""What of a session waits for answers, and what may be asked again when its connection was lost.

Pure bookkeeping for `client/session.py`: no connection, no clock, no task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tensorhub import messages as m
from tensorhub.errors import BY_NAME, Broken, OutcomeUnknown, ServerUnavailable, TensorHubError
from tensorhub.messages import Event, Notice, Refused, Reply, Request
from tensorhub.types import ModelKey

#: Events kept for a watcher that does not look; then the oldest go, and the watcher is told how many.
WATCH_EVENTS_MAX = 1024

#: Asked again after a lost connection, because twice is the same as once:
#: `List`, `Status`, `Wait` change nothing; a seat's own `Join` finds the seat taken by itself; `Publish`, `Seal`,
#: `Serve`, `Reroute`, `Unpublish` are named by the generation they speak of, `Replicate`, `Done`, `Abort` by group and
#: sequence number; `Leave` of a seat that was left leaves nothing.
#: Not `Goodbye` and `Unwatch`: a lost connection says the same. Not `Progress`: the next one says more.
ASKED_AGAIN = (
    m.List,
    m.Status,
    m.Wait,
    m.Join,
    m.Publish,
    m.Seal,
    m.Unpublish,
    m.Serve,
    m.Replicate,
    m.Reroute,
    m.Done,
    m.Abort,
    m.Leave,
)


@dataclass(slots=True, eq=False)
class Pending:
    """A call without its answer. `answered` holds a reply or an error as its result, so that none goes unseen."""

    call_id: int
    request: Request
    began_s: float
    answered: asyncio.Future[Reply | TensorHubError]
    #: Whether a server may have seen it.
    sent: bool = False

    def end(self, outcome: Reply | TensorHubError) -> None:
        """Give the caller its outcome; a second one is too late."""
        if not self.answered.done():
            self.answered.set_result(outcome)

    def request_at(self, now_s: float) -> Request:
        """The request as it reads now: the server's share of the time shrinks while nobody is connected."""
        match self.request:
            case m.Replicate() | m.Reroute() | m.Wait() | m.Unpublish():
                spent_ns = round((now_s - self.began_s) * 1e9)
                return replace(self.request, timeout_ns=max(0, self.request.timeout_ns - spent_ns))
            case _:
                return self.request

    def given_up(self, why: str) -> TensorHubError:
        """The error of a call whose answer will not come."""
        name = type(self.request).__name__
        if isinstance(self.request, m.Done) and self.sent:
            return OutcomeUnknown(f"the answer to {name} is lost: {why}; ask again before using the tensors")
        return ServerUnavailable(f"{name} has no answer: {why}")


@dataclass(slots=True, eq=False)
class Watching:
    """A watch of one model: events that nobody has looked at yet."""

    call_id: int
    model: ModelKey
    events: deque[Event] = field(default_factory=deque)
    #: Events lost because nobody looked.
    missed: int = 0
    error: TensorHubError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, reply: Reply) -> None:
        """Take what the server answers to the watch: events, or that it refuses."""
        match reply:
            case Event():
                if len(self.events) >= WATCH_EVENTS_MAX:
                    self.events.popleft()
                    self.missed += 1
                self.events.append(reply)
            case Refused():
                self.error = error_of(reply)
            case _:
                return  # acknowledged
        self.changed.set()

    def end(self, error: TensorHubError) -> None:
        self.error = self.error or error
        self.changed.set()


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a seat wants to hear, and how it takes its place again."""

    on_notice: Callable[[Notice | m.Joined | Refused], None]
    rejoin: Callable[[], m.Join]


def error_of(refused: Refused) -> TensorHubError:
    """The error that a refusal names."""
    cls = BY_NAME.get(refused.error)
    if cls is None:
        return Broken(f"the server refused by a name this client does not know: {refused.error}: {refused.message}")
    return cls(refused.message, refused.where)
