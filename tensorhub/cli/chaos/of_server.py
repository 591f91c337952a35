"""Cases in which the server is killed and comes back knowing nothing, or stands still for longer than a lease.

Each says by its record what happened and what of it was wrong; `cases.py` says in words what each does.
"""

from __future__ import annotations

import time

from tensorhub.cli.chaos.rig import CALL_SECONDS, LEASE_SECONDS, SLACK_SECONDS, Rig
from tensorhub.cli.demo_worker import Failure, Touch

#: A commit reaches the trainer's call and the reader's in either order.
ORDER_SECONDS = 0.25
#: For how many leases the server stands still.
STILL_LEASES = 1.5
#: For a request to reach the server; nothing is measured by it.
SETTLE_SECONDS = 0.5


def server_restart_midtransfer(rig: Rig) -> None:
    rig.publish()
    rig.standby()
    rig.pace()
    reading = rig.read(rig.rollout)
    source = reading.source()
    rig.restart_server()
    seen = reading.seen()
    rig.record.whole(seen, 1, chunks_again=0)
    rig.record.expect(
        seen.error != "" or seen.sources == (str(source),), f"its sources were {', '.join(seen.sources)}: it was moved"
    )
    rig.heals()


def server_restart_waiting(rig: Rig) -> None:
    waiting = rig.read(rig.rollout, 1)
    time.sleep(SETTLE_SECONDS)
    rig.restart_server()
    rig.publish()
    seen = waiting.seen()
    rig.record.whole(seen, 1)
    rig.record.expect(
        seen.seconds <= CALL_SECONDS + SLACK_SECONDS, f"it waited past its deadline: {seen.seconds:.2f} s"
    )


def server_restart_unpublish(rig: Rig) -> None:
    rig.publish()
    rig.pace()
    reading = rig.read(rig.rollout)
    reading.middle()
    rig.restart_server()
    answer = rig.unpublish()
    rig.ask([rig.trainer], Touch())  # the tensors are the trainer's again
    seen = reading.seen()
    rig.record.whole(seen, 1, chunks_again=0)
    if isinstance(answer, Failure):
        rig.record.complaints.append(f"unpublish raised {answer.error}: {answer.message}")
        return
    early_s = seen.at_s - answer.at_s
    rig.record.notes.append(f"unpublish returned {-early_s:.2f} s after the reader")
    rig.record.expect(
        early_s <= ORDER_SECONDS, f"unpublish returned {early_s:.2f} s before the reader was done: it still read"
    )
    rig.heals()


def server_stopped(rig: Rig) -> None:
    rig.publish()
    rig.pace()
    reading = rig.read(rig.rollout)
    reading.middle()
    rig.server.stop()
    time.sleep(STILL_LEASES * LEASE_SECONDS)
    rig.server.go_on()
    rig.record.notes.append(f"the server stood still for {STILL_LEASES * LEASE_SECONDS:g} s")
    rig.record.whole(reading.seen(), 1, chunks_again=0)
    rig.heals()
