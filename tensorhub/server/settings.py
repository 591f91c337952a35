"""The named limits and durations of a reference server, each with its reason. Values only, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.errors import BadRequest

SECOND_NS = 1_000_000_000

#: Readers of one source when no other has a place: each has its part of one uplink, and below a quarter of it a reader
#: does better to wait for the next source.
READERS_PER_SOURCE_MAX = 4
#: Hops between a reader and a complete copy. A hop costs a chunk's time on the link and a call, some milliseconds; a
#: second reader on one uplink costs a whole shard's time: so chains are long. They end where the last reader would be
#: some seconds behind the first, and so that a walk up a chain stays short.
DEPTH_MAX = 256
#: Readers that must report a source before it is kept from everyone: one alone may be the sick one.
SICK_REPORTS = 2
#: A reader this many times slower than what it reads from, or than others, twice in a row, is a straggler; once is
#: enough for the second: noise is less.
SLOWER = 2
FAR_SLOWER = 3
#: One in so many fillings of a shard, at most, counts as slow: when more lag, they lack what they share.
SLOW_SHARE = 8
#: A rate is measured over at least this long: one report, of those that readers make every 0.2 s at first.
PACE_WINDOW_NS = 3 * SECOND_NS // 20
#: And counts for so long: two of the later reports, every 0.5 s, with some delay.
FRESH_NS = 6 * SECOND_NS // 5
#: What a source must be ahead of a straggler: this long at its rate, and so many chunks; less may be under way.
LEAD_NS = SECOND_NS // 5
LEAD_CHUNKS = 4
#: Nobody is moved for what is left of a shard when a healthy rate needs less than this for it: a move costs some calls.
PAYS_NS = SECOND_NS // 2
#: Rates remembered per shard: what the last few fillings did is what the next can do.
RATES_MAX = 8
#: Times one filling is asked to leave a source: a graph that is rebuilt again and again moves no bytes.
MOVES_MAX = 4
#: Partial sources looked at for one reader before it is made to wait: keeps a step short in a large fan-out.
CANDIDATES_MAX = 64
#: Transaction outcomes remembered per replica, for calls that come late or again.
OUTCOMES_MAX = 16
#: Lines of story kept per replica: enough for the last few transactions.
STORY_MAX = 48
#: Names kept of those who read a holding, to be told to a publisher that broke its contract: a rack full.
SERVED_MAX = 64
#: Sources remembered per filling: few give way while one reader reads; above it those that gave least are forgotten.
ORIGINS_MAX = 8
#: Lineages of one model: a job that resumes this often needs a new model name.
LINEAGES_MAX = 1024
#: Where a lineage may be said to stand: places rise when lives disagree, by less than this in the life of any job.
PLACES_MAX = 2**31
#: Models a server remembers; idle ones are forgotten first.
MODELS_MAX = 4096
#: Processes of one cluster: 16 000 accelerators, and as much again for those that come and go.
SESSIONS_MAX = 32_768
#: Seats of one process: all shards of all models it holds.
SEATS_PER_SESSION_MAX = 1024
#: Blocked `Wait` calls and open watches of one process.
WAITS_PER_SESSION_MAX = 256
#: Buffer sets of one seat: double buffering needs two.
BUFFER_SETS_MAX = 16
#: Engines of one holder times endpoints of each.
LOCATORS_MAX = 64
#: A locator and an exposure are addresses, never data.
OPAQUE_BYTES_MAX = 4096
#: Characters of what a reader says about its engine.
ROUTE_TEXT_MAX = 256
#: Characters of a reason for which a shard gave up: stories and outcomes repeat it, and every sibling is told.
REASON_TEXT_MAX = 4096
#: `dc/rack/host` and some room: each level is an index entry per holding.
LOCATION_DEPTH_MAX = 8
#: No wait is endless: a day is longer than any step of training.
TIMEOUT_NS_MAX = 24 * 3600 * SECOND_NS
#: Incarnations of groups: a life begins to count somewhere below 2**GROUP_BITS, and believes nobody who is far above.
GROUP_BITS, GROUP_MAX = 48, 2**62
#: What `Settings.sources` may be.
ALL_SOURCES, COMPLETE_SOURCES = "all", "complete"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server may be started with; durations are nanoseconds of its monotonic clock."""

    #: A session silent for longer is dead.
    lease_ns: int = 10 * SECOND_NS
    #: How often sessions are asked to beat: several may be lost within a lease.
    beat_ns: int = SECOND_NS
    #: What is left of a lease after its control connection broke: a killed process is known soon.
    reconnect_ns: int = 2 * SECOND_NS
    #: How long a new life waits for the sessions of an earlier one with what they may contradict. They notice within a
    #: beat, and try again every second.
    grace_ns: int = 3 * SECOND_NS
    #: How long a decided transaction outlives its members' deadlines: last replies and clocks that differ.
    commit_margin_ns: int = 5 * SECOND_NS
    #: How long a reported source is offered to nobody, unless it proves progress before.
    quarantine_ns: int = 10 * SECOND_NS
    #: How long others wait for a filling to serve, rather than share a source: longer than a plan and a call take.
    patience_ns: int = SECOND_NS // 4
    #: The same for a filling that reads from another data centre: a plan is several round trips of a long link.
    far_patience_ns: int = 2 * SECOND_NS
    #: How long a straggler has to leave its source, and then waits for a place at the end of a chain before any will
    #: do: the readers that it held up must overtake it meanwhile.
    slow_patience_ns: int = SECOND_NS
    #: Who is offered: "all", or "complete" holders only, to measure what relaying while receiving contributes.
    sources: str = ALL_SOURCES

    def __post_init__(self) -> None:
        if self.sources not in (ALL_SOURCES, COMPLETE_SOURCES):
            raise BadRequest(f"sources={self.sources!r}: a server offers {ALL_SOURCES!r} or {COMPLETE_SOURCES!r}")
        shortest = min(self.patience_ns, self.far_patience_ns, self.slow_patience_ns)
        if shortest < 0:
            raise BadRequest(f"a patience of {shortest} ns: it cannot be negative")


DEFAULTS = Settings()
