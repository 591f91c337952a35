"""Begins a life of the server: draws what must differ from every other life, for the machine draws nothing itself."""

from __future__ import annotations

import secrets

from tensorhub.server.machine import Machine
from tensorhub.server.settings import DEFAULTS, GROUP_BITS, Settings
from tensorhub.types import ID_BYTES, Epoch

#: Beats after which every session has noticed that its server is another: some may be lost.
GRACE_BEATS = 3


def begin(lease_ns: int | None = None, beat_ns: int | None = None) -> Machine:
    """An empty machine with an epoch of its own; a duration that is not given is the default."""
    beat_ns = DEFAULTS.beat_ns if beat_ns is None else beat_ns
    settings = Settings(
        lease_ns=DEFAULTS.lease_ns if lease_ns is None else lease_ns,
        beat_ns=beat_ns,
        grace_ns=max(DEFAULTS.grace_ns, GRACE_BEATS * beat_ns),
    )
    return Machine(Epoch(secrets.token_bytes(ID_BYTES)), settings, secrets.randbits(GROUP_BITS))
