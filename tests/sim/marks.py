"""Interesting situations by name: a sweep that has not met one of them says nothing about it, and fails.

A mark is set where the situation is *observed*, never where its cause is injected.
"""

from __future__ import annotations

import enum


class Mark(enum.Enum):
    """A situation; its value says what was seen."""

    REROUTED = "a replicate returned that had read from several sources"
    PARTIAL_SERVED = "bytes were read from a process that was still filling"
    UNCOVERED_LIE = "a reader noticed wrong bytes that its engine had called a success"
    DRAIN_WAITED = "an unpublish returned after it had waited for readers"
    DRAIN_TIMED_OUT = "an unpublish gave up waiting, and a later one went through"
    ABANDONED = "an unpublish returned while somebody was still reading"
    GROUP_ABORTED = "a shard heard that a sibling had failed"
    SPREAD_COMMIT = "a transaction committed whose shards had asked at different times"
    ALREADY_HELD = "a replicate returned at once, for the version was held"
    SUBSET = "a replicate of some tensors returned"
    LEASE_EXPIRED = "the server declared a process dead that still lived"
    ZOMBIE_FAILED = "a reader woke past its lease and its replicate failed"
    SEAT_LOST = "a process woke and found its seat taken by its successor"
    GIL_SURVIVED = "a process stood still past its lease, its heart beat on, and it was not declared dead"
    SOURCE_KILLED = "a source died under a reader, which then finished elsewhere"
    CONTRACT_BROKEN = "a publisher that wrote behind its readers' backs was told so"
    OUTCOME_UNKNOWN = "the answer to a commit was lost"
    RECONNECTED = "a session came back after a loss of connection"
    TORN_HEALED = "a replicate returned on tensors that an earlier one had left torn"
    FLOWED_THROUGH_RESTART = "a replicate in flight when the server died returned, and read no byte again"
    WAITED_THROUGH_RESTART = "a replicate that had no version yet when the server died got one"
    DRAINED_THROUGH_RESTART = "an unpublish under way when the server died returned"
    DECISION_KEPT = "a group half of which was being filled when the server died returned that version, whole"
    LATEST_HELD = "a new server said which version is the latest when only older ones were back, and was right"
    PREVIOUS_KEPT = "a replicate failed before the first byte and the version before it was still held, whole"


#: What only the death of a server brings about.
OF_RESTARTS = frozenset(
    {
        Mark.FLOWED_THROUGH_RESTART,
        Mark.WAITED_THROUGH_RESTART,
        Mark.DRAINED_THROUGH_RESTART,
        Mark.DECISION_KEPT,
        Mark.LATEST_HELD,
    }
)


class Marks:
    """How often each situation was met."""

    def __init__(self) -> None:
        self.counts: dict[Mark, int] = {}

    def hit(self, mark: Mark) -> None:
        self.counts[mark] = self.counts.get(mark, 0) + 1
