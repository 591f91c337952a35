"""Cases in which trainers and rollouts are killed, stopped, cut off, or write where they must not.

Each says by its record what happened and what of it was wrong; `cases.py` says in words what each does.
"""

from __future__ import annotations

import time

from tensorhub.cli.chaos.record import Seen
from tensorhub.cli.chaos.rig import LEASE_SECONDS, ROLLOUT, SLACK_SECONDS, STALL_SECONDS, Rig
from tensorhub.cli.demo_worker import Failure, Member, Result, Step, Touch

#: What may be read again after a source was lost: the chunk in flight on each of two streams.
CHUNKS_AGAIN_MAX = 2.0
#: Part of a lease for which a reader is cut off from its server: it must not notice, or come back in time.
CUT_LEASES = 0.5


def source_killed_midchunk(rig: Rig) -> None:
    rig.publish()
    rig.standby()
    rig.pace()
    reading = rig.read(rig.rollout)
    victim = reading.source()
    rig.kill(victim)
    rig.record.notes.append(f"{victim} was killed")
    seen = reading.seen()
    rig.record.whole(seen, 1, chunks_again=CHUNKS_AGAIN_MAX)
    _went_elsewhere(rig, seen, victim)


def source_stopped(rig: Rig) -> None:
    rig.publish()
    rig.standby()
    rig.pace()
    reading = rig.read(rig.rollout)
    victim = reading.source()
    rig.stop(victim)
    stopped_s = time.monotonic()
    elsewhere = reading.until(lambda told: told.source != str(victim))
    noticed_s = rig.record.figures["stop_noticed_s"] = elsewhere.at_s - stopped_s
    rig.record.within(f"{victim} was stopped; given up", noticed_s, STALL_SECONDS + SLACK_SECONDS)
    seen = reading.seen()
    rig.record.whole(seen, 1)
    _went_elsewhere(rig, seen, victim)


def reader_killed(rig: Rig) -> None:
    rig.publish()
    rig.pace()
    reading = rig.read(rig.rollout)
    reading.middle()
    rig.kill(rig.rollout)
    killed_s = time.monotonic()
    answer = rig.unpublish()
    _drained(rig, answer, killed_s)
    rig.heals(Member("other", 0))


def sibling_dies(rig: Rig) -> None:
    rig.publish()
    rig.pace()
    first, second = rig.scene.members(ROLLOUT)
    survivor, dying = rig.read(first), rig.read(second)
    dying.middle()
    rig.kill(second)
    killed_s = time.monotonic()
    seen = survivor.seen()
    rig.record.refused(seen, "GroupAborted", says="shard 1")
    rig.record.within(f"{second} was killed; the group ended", seen.at_s - killed_s, LEASE_SECONDS + SLACK_SECONDS)


def zombie(rig: Rig) -> None:
    rig.publish()
    rig.pace()
    reading = rig.read(rig.rollout)
    reading.middle()
    rig.stop(rig.rollout)
    stopped_s = time.monotonic()
    answer = rig.unpublish()
    _drained(rig, answer, stopped_s)
    rig.ask([rig.trainer], Step(rig.place.seed))
    rig.publish()
    rig.go_on(rig.rollout)
    rig.record.refused(reading.seen())
    rig.pace(full=True)
    rig.record.whole(rig.replicate(rig.rollout), rig.version)


def control_partition(rig: Rig) -> None:
    partition = rig.way()
    rig.publish()
    rig.pace()
    reading = rig.read(rig.rollout)
    before = reading.middle()
    partition.cut()
    time.sleep(CUT_LEASES * LEASE_SECONDS)
    partition.mend()
    rig.record.notes.append(f"cut off for {CUT_LEASES * LEASE_SECONDS:g} s from byte {before.bytes_done} on")
    seen = reading.seen()
    rig.record.whole(seen, 1, chunks_again=0)
    rig.heals()


def partition_past_lease(rig: Rig) -> None:
    partition = rig.way()
    rig.publish()
    rig.pace()
    reading = rig.read(rig.rollout)
    reading.middle()
    partition.cut()
    cut_s = time.monotonic()
    _drained(rig, rig.unpublish(), cut_s)
    rig.ask([rig.trainer], Step(rig.place.seed))
    rig.publish()
    partition.mend()
    rig.record.untorn(reading.seen(), 1)
    rig.pace(full=True)
    rig.record.whole(rig.replicate(rig.rollout), rig.version)


def mutate_during_read(rig: Rig) -> None:
    rig.publish()
    rig.pace()
    reading = rig.read(rig.rollout)
    reading.middle()
    rig.ask([rig.trainer], Touch())
    rig.record.refused(reading.seen())
    answer = rig.unpublish()
    told = f"{answer.error}: {answer.message}" if isinstance(answer, Failure) else "nothing"
    rig.record.notes.append(f"the publisher heard {told}")
    rig.record.expect(
        isinstance(answer, Failure) and answer.error == "ContractBroken" and str(rig.rollout.replica) in answer.message,
        f"the publisher had to hear ContractBroken, naming {rig.rollout.replica}; it heard {told}",
    )
    rig.heals()


def _went_elsewhere(rig: Rig, seen: Seen, victim: Member) -> None:
    others = [source for source in seen.sources if source != str(victim)]
    rig.record.expect(bool(others), f"everything came from {victim}: it was read to its end before it was gone")


def _drained(rig: Rig, answer: Result | Failure, since_s: float) -> None:
    """An unpublish that had to return once the lease of a reader that is silent since then is over."""
    if isinstance(answer, Failure):
        rig.record.complaints.append(f"unpublish raised {answer.error}: {answer.message}")
        return
    rig.record.within("the drain completed", answer.at_s - since_s, LEASE_SECONDS + SLACK_SECONDS)
