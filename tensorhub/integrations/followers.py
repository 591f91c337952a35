"""Consumers that are brought to the newest version, each on its own: a schedule between one trainer and many rollouts.

For frameworks whose own schedule stops everybody for every version. It decides when a consumer is brought to which
version, how often a failure is tried again, and when a consumer is given up. How one is brought is the caller's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tensorhub.errors import WaitTimeout

C = TypeVar("C", bound=Hashable)
V = TypeVar("V")

#: A consumer that could not be brought to so many versions in a row is given up: it is broken, not unlucky.
TRIES = 3

_LOG = logging.getLogger("tensorhub.integrations")


@dataclass(slots=True)
class _Follower:
    """One consumer's thread, as the others see it."""

    #: Announcements that it has been brought to.
    held: int = 0
    is_wanted: bool = True


class Followers(Generic[C, V]):
    """Brings every consumer to the version announced last; versions that come while one is busy are skipped for it.

    `await bring(consumer, version, is_first)` runs on a thread, and a loop, of the consumer's own, never twice at once
    for one of them, and returns when the consumer uses the version; `is_first` until it has. It may raise: then it is
    called again, for what is newest by then, `TRIES` times in a row; or not at all when the error is one of `deaths`.
    What is no `Exception`, a cancellation say, is final too. `gave_up(consumer)` is told of who is brought to nothing
    any more, unless he was removed, and the log why; the others never notice.
    """

    def __init__(
        self,
        bring: Callable[[C, V, bool], Coroutine[Any, Any, None]],
        gave_up: Callable[[C], None],
        deaths: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> None:
        self._bring, self._gave_up, self._deaths = bring, gave_up, deaths
        #: Guards what is below, and says that some of it has changed; held for moments only.
        self._changed = threading.Condition()
        self._followers: dict[C, _Follower] = {}
        #: Who is being brought now, perhaps for a follower that was removed meanwhile.
        self._busy: set[C] = set()
        #: How many versions were announced, and the last one.
        self._count = 0
        self._newest: V | None = None

    def add(self, consumers: Iterable[C]) -> None:
        """More consumers: brought to the newest version at once, if there is one."""
        with self._changed:
            for consumer in consumers:
                if consumer in self._followers:
                    continue
                follower = _Follower()
                # Not waited for at exit: it may be in a call to a process that has been stopped.
                threading.Thread(
                    target=self._follow, args=(consumer, follower), name="tensorhub-follower", daemon=True
                ).start()
                self._followers[consumer] = follower

    def remove(self, consumers: Iterable[C]) -> None:
        """Brought to nothing any more; what is being brought now is finished, before it is brought again."""
        with self._changed:
            for consumer in consumers:
                if (follower := self._followers.pop(consumer, None)) is not None:
                    follower.is_wanted = False
            self._changed.notify_all()

    def announce(self, version: V) -> None:
        """There is a newer version; returns at once."""
        with self._changed:
            self._count, self._newest = self._count + 1, version
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Until all who are left have been brought to what is announced now, or something newer; `WaitTimeout`."""
        with self._changed:
            count = self._count
            if not self._changed.wait_for(lambda: self._behind(count) == 0, timeout_s):
                raise WaitTimeout(
                    f"{self._behind(count)} of {len(self._followers)} consumers do not use version {self._newest!r} "
                    f"after {timeout_s:g} s"
                )

    def lags(self) -> dict[C, int]:
        """{consumer: how many announcements it is behind}."""
        with self._changed:
            return {consumer: self._count - follower.held for consumer, follower in self._followers.items()}

    def close(self) -> None:
        """No consumer is brought to anything any more. Idempotent."""
        with self._changed:
            self.remove(list(self._followers))

    def _behind(self, count: int) -> int:
        return sum(follower.held < count for follower in self._followers.values())

    def _follow(self, consumer: C, follower: _Follower) -> None:
        try:
            self._keep_up(consumer, follower)
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread, nobody may wait for it any more
            self._give_up(consumer, follower, error)

    def _keep_up(self, consumer: C, follower: _Follower) -> None:
        """Bring it to what is newest, until it is not wanted any more; raises why it is given up."""
        failures = 0

        def is_due() -> bool:
            return follower.held < self._count and consumer not in self._busy

        while True:
            with self._changed:
                self._changed.wait_for(lambda: not follower.is_wanted or is_due())
                if not follower.is_wanted:
                    return
                count, version = self._count, self._newest
                self._busy.add(consumer)
            try:
                # Announced, as it is behind.
                asyncio.run(self._bring(consumer, version, follower.held == 0))  # type: ignore[arg-type]
                failures = 0
                with self._changed:
                    follower.held = count
            except Exception as error:
                failures += 1
                if failures >= TRIES or isinstance(error, self._deaths):
                    raise
                _LOG.warning("%r was not brought to %r: %s", consumer, version, error)
            finally:
                with self._changed:
                    self._busy.discard(consumer)
                    self._changed.notify_all()

    def _give_up(self, consumer: C, follower: _Follower, error: BaseException) -> None:
        with self._changed:
            if not follower.is_wanted:
                return  # removed meanwhile; who has come in its place has a thread of his own
        _LOG.error("%r is given up, and the others go on without it: %r", consumer, error)
        try:
            self._gave_up(consumer)
        except BaseException:  # noqa: BLE001 - as above
            _LOG.exception("who was to be told that %r is given up failed", consumer)
        with self._changed:
            if self._followers.get(consumer) is follower:
                self.remove([consumer])
