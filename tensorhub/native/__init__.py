"""What must not need the interpreter: digests, copies, one-sided reads of another process, the heartbeat.

Thin, checked wrappers around `tensorhub.c`; every call gives the GIL up. They decide nothing about weights, and they
load the library at first use, so that importing TensorHub never fails for lack of a compiler.
"""

from tensorhub.native.beat import Beat
from tensorhub.native.memory import copy, copy_ranges, differing, digest, digest_runs, gather, scatter, store
from tensorhub.native.process import Reading, ReadOutcome, allow_readers, lower_priority, probe_process, read_process

__all__ = [
    "copy",
    "copy_ranges",
    "differing",
    "gather",
    "scatter",
    "store",
    "digest",
    "digest_runs",
    "read_process",
    "Reading",
    "ReadOutcome",
    "probe_process",
    "allow_readers",
    "lower_priority",
    "Beat",
]
