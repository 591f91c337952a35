"""References: where a shard of a version lies in one holder, and what that version is, without a byte of it.

The server keeps and hands out these values; locators and exposures are opaque to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.types import Digest, Generation, Location, Seat, SessionId, Version


@dataclass(frozen=True, slots=True)
class Locator:
    """How one engine reaches a holder. `data` is the engine's own, opaque to all others."""

    engine: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Reference:
    """Where one shard of a version lies in one holder. Metadata, never bytes of weights."""

    seat: Seat
    session: SessionId
    generation: Generation
    location: Location
    locators: tuple[Locator, ...]
    #: Addresses of progress block, manifest and memory map in the holder (`pipeline/exposure.py`).
    exposure: bytes


@dataclass(frozen=True, slots=True)
class Content:
    """What one shard of a version is, as far as a server needs to know."""

    manifest: Digest
    shard_bytes: int
    chunks: int
    #: False for `digest="off"`: nothing of this version can be verified.
    verified: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A holding that a session brings to a server that does not know it (a restarted one)."""

    buffers: str
    version: Version
    generation: Generation
    content: Content
    #: Root digest when sealed or complete, else empty.
    root: Digest
    complete: bool
    published: bool
    watermark: int
    #: Generation of the source this filling reads from; empty for none.
    upstream: Generation
    locators: tuple[Locator, ...]
    exposure: bytes
    #: Withdrawn from new readers; it may still have old ones.
    hidden: bool = False
