"""The named limits and durations of a reference server, each with its reason. Values only, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

SECOND_NS = 1_000_000_000

#: One NIC saturates at about this many equal flows; more readers form a tree instead.
READERS_PER_SOURCE_MAX = 4
#: Hops between a reader and a complete copy: each adds one batch of latency, and a failure high up moves all below.
DEPTH_MAX = 8
#: Readers that must report a source before it is kept from everyone: one alone may be the sick one.
SICK_REPORTS = 2
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
#: `dc/rack/host` and some room: each level is an index entry per holding.
LOCATION_DEPTH_MAX = 8
#: No wait is endless: a day is longer than any step of training.
TIMEOUT_NS_MAX = 24 * 3600 * SECOND_NS


@dataclass(frozen=True, slots=True)
class Settings:
    """Durations a server may be started with; all are nanoseconds of its monotonic clock."""

    #: A session silent for longer is dead.
    lease_ns: int = 10 * SECOND_NS
    #: How often sessions are asked to beat: several may be lost within a lease.
    beat_ns: int = SECOND_NS
    #: What is left of a lease after its control connection broke: a killed process is known soon.
    reconnect_ns: int = 2 * SECOND_NS
    #: How long a decided transaction outlives its members' deadlines: last replies and clocks that differ.
    commit_margin_ns: int = 5 * SECOND_NS
    #: How long a reported source is offered to nobody, unless it proves progress before.
    quarantine_ns: int = 10 * SECOND_NS


DEFAULTS = Settings()
