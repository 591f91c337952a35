"""What must not need the interpreter: digests, copies, reads of another process, serving streams, the heartbeat.

Thin, checked wrappers around the C files beside; every call gives the GIL up. They decide nothing about weights, and
they load the library at first use, so that importing TensorHub never fails for lack of a compiler.
"""

from tensorhub.native.beat import Beat
from tensorhub.native.follow import Follow
from tensorhub.native.memory import (
    PROGRESS_WORDS,
    copy,
    copy_ranges,
    differing,
    digest,
    digest_runs,
    gather,
    scatter,
    store,
)
from tensorhub.native.process import Reading, ReadOutcome, allow_readers, lower_priority, probe_process, read_process
from tensorhub.native.streams import (
    Failure,
    Limits,
    Opening,
    Status,
    Stream,
    StreamOutcome,
    StreamReading,
    StreamServer,
)

__all__ = [
    "copy",
    "copy_ranges",
    "differing",
    "gather",
    "scatter",
    "store",
    "digest",
    "PROGRESS_WORDS",
    "digest_runs",
    "read_process",
    "Reading",
    "ReadOutcome",
    "probe_process",
    "allow_readers",
    "lower_priority",
    "StreamServer",
    "Limits",
    "StreamReading",
    "StreamOutcome",
    "Stream",
    "Opening",
    "Failure",
    "Status",
    "Beat",
    "Follow",
]
