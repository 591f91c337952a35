"""Doors for peers that can only ask: they hand frames in and poll for frames, as over the calls of a Ray actor.

It decides how long a peer may be away between two polls, how long one poll may wait and how many peers there are. What
goes through a door is the host's and the machine's. A peer's mistakes close its own door and no other.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from tensorhub.errors import BadRequest, Closed
from tensorhub.server.host import Door, Host
from tensorhub.server.streams import CONNECTIONS_MAX, bytes_of, cut_off, submit

#: The longest wait of one poll: a peer learns at least so often that the server lives.
POLL_S = 10.0
#: Between two polls of a peer that lives; it polls again at once, so this is a peer that is gone, or stopped.
ABSENT_S = 15.0
#: Of what a peer says that it is called: it stands in every line of the log about it.
PEER_CHARS_MAX = 256
#: Unguessable, and never that of an earlier life of the server.
DOOR_ID_BYTES = 16

_UNKNOWN = "the server does not know this connection: it began anew, or the connection was closed"


@dataclass(slots=True, eq=False)
class _Polled:
    """A door and the time it has left without a poll."""

    door: Door
    #: Forgets the door; None while a poll waits.
    absence: asyncio.TimerHandle | None = None
    polls: int = 0


class PolledDoors:
    """All doors of peers that poll. A reason in place of a result says that the door is closed, and why."""

    def __init__(self, host: Host) -> None:
        self._host = host
        #: {door id: ...}; gone once a poll has told that it is closed, or its peer was away for too long.
        self._doors: dict[str, _Polled] = {}

    def open(self, peer: str) -> str:
        """The id of a new door. `Closed` when the server has stopped, or serves as many as it can."""
        if self._host.doors >= CONNECTIONS_MAX:
            raise Closed(f"{CONNECTIONS_MAX} connections are open: no more are taken")
        door_id = secrets.token_hex(DOOR_ID_BYTES)
        polled = self._doors[door_id] = _Polled(self._host.open(peer[:PEER_CHARS_MAX]))
        self._expect_poll(door_id, polled)
        return door_id

    async def submit(self, door_id: str, frames: list[bytes]) -> str | None:
        """Hand calls in, in order; waits while the host has too many. Why the door is closed, else None."""
        polled = self._doors.get(door_id)
        if polled is None:
            return _UNKNOWN
        try:
            for data in frames:
                await submit(data, polled.door)
        except BadRequest as error:
            polled.door.close(cut_off(polled.door, error))
        except Closed as error:
            return error.message
        return polled.door.closed

    async def take(self, door_id: str) -> tuple[list[bytes], str | None]:
        """Answers that wait, or none after `POLL_S`; and why the door is closed once no more will come."""
        polled = self._doors.get(door_id)
        if polled is None:
            return [], _UNKNOWN
        self._poll_began(polled)
        try:
            async with asyncio.timeout(POLL_S):
                answers = await polled.door.take()
        except TimeoutError:
            return [], None
        finally:
            self._poll_ended(door_id, polled)
        if answers:
            return [bytes_of(answer) for answer in answers], None
        self._forget(door_id, polled, "closed")
        return [], polled.door.closed

    def close(self, door_id: str) -> None:
        """Its peer is done; unknown ones are fine."""
        polled = self._doors.get(door_id)
        if polled is not None:
            self._forget(door_id, polled, "its peer closed the connection")

    def _poll_began(self, polled: _Polled) -> None:
        polled.polls += 1
        if polled.absence is not None:
            polled.absence.cancel()
            polled.absence = None

    def _poll_ended(self, door_id: str, polled: _Polled) -> None:
        polled.polls -= 1
        if polled.polls == 0 and self._doors.get(door_id) is polled:
            self._expect_poll(door_id, polled)

    def _expect_poll(self, door_id: str, polled: _Polled) -> None:
        why = f"its peer did not ask for answers for {ABSENT_S:g} s"
        polled.absence = asyncio.get_running_loop().call_later(ABSENT_S, self._forget, door_id, polled, why)

    def _forget(self, door_id: str, polled: _Polled, why: str) -> None:
        self._doors.pop(door_id, None)
        if polled.absence is not None:
            polled.absence.cancel()
            polled.absence = None
        polled.door.close(why)
