"""What a pull says of itself: to people while it runs, to its caller in the end, to another life of the server.

It changes nothing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tensorhub.client.margins import NS
from tensorhub.client.results import Replication, Transfer
from tensorhub.references import Undertaking
from tensorhub.types import NO_GENERATION, UNVERIFIED, Version

if TYPE_CHECKING:
    from tensorhub.client.pull import Pull


def transfer_of(pull: Pull) -> Transfer:
    """How far it is, for people."""
    filling, grant, uses = pull.filling, pull.grant, pull.sources.uses
    if filling is not None:
        filling.sample()
    manifest = pull.slot.holding.manifest
    return Transfer(
        str(grant.version) if grant is not None else str(pull.selector),
        str(grant.source.seat) if grant is not None else "",
        uses[-1].engine if uses else "",
        pull.bytes_done,
        grant.content.shard_bytes if grant is not None else 0,
        manifest.entries_done(filling.counter.watermark) if filling is not None else 0,
        len(manifest.names),
    )


def undertaking_of(pull: Pull) -> Undertaking | None:
    """What was decided for this shard and how far it is; None as long as nothing is."""
    slot, held, grant, filling = pull.slot, pull.held, pull.grant, pull.filling
    if held is not None:
        version, content, upstream = held.version, slot.holding.content(slot.verified), NO_GENERATION
    elif grant is not None:
        version, content, upstream = grant.version, grant.content, grant.source.generation
    else:
        return None
    has_begun = slot.holding.generation == pull.generation
    will_be = pull.offer is not None and pull.offer.manifest.digest == content.manifest
    shown = slot.holding if has_begun else pull.offer if will_be and held is None else None
    return Undertaking(
        slot.buffers.name,
        pull.selector,
        version,
        content,
        pull.generation,
        int(pull.left_s() * NS),
        held is not None,
        pull.only is None,
        upstream,
        filling.counter.watermark if filling is not None else 0,
        pull.bytes_done,
        UNVERIFIED if slot.pending is None else slot.pending.root,
        shown.locators if shown is not None else (),
        shown.exposure if shown is not None else b"",
        has_begun,
    )


def replication_of(pull: Pull, version: Version) -> Replication:
    """What it has done; it is complete."""
    return Replication(
        version.number,
        version.lineage,
        pull.bytes_done,
        asyncio.get_running_loop().time() - pull.began,
        tuple(pull.sources.uses),
        dict(pull.phases),
        pull.held is not None,
        pull.slot.verified,
        pull.filling.bytes_read if pull.filling is not None else 0,
    )
