"""A closed form for T(N): how long until N readers hold a shard that they all asked for before it was published.

Pure arithmetic; docs/model.md derives it. What varies from machine to machine is fitted on N = 1 alone, the rest are
constants of the code: that is why a prediction for N > 1 can be wrong, and is printed beside what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Constants:
    """What the code decides, and what a core can do."""

    #: A reader passes on what it has verified, and verifies whole chunks.
    chunk_bytes: int
    #: A link is two in a row, one host's uplink and the other's downlink: so much must have come whole over the first
    #: before the second passes it on.
    packet_bytes: int
    #: Bytes per second that one thread can digest: what a chunk costs once it is there.
    digest_bytes_per_s: float
    #: Hops between a reader and a complete copy, at most.
    depth_max: int
    #: Readers that a source has at once, at most.
    readers_per_source: int


@dataclass(frozen=True, slots=True)
class Alone:
    """One replicate by one reader that has all links for itself, in seconds."""

    #: From the call of publish to the return of replicate, and the transfer in it.
    whole: float
    transfer: float
    #: From the grant until the server may send the next reader here: plan, registration, and a call if one is needed.
    set_up: float
    #: One look at the source's progress block.
    look: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """What one reader alone shows."""

    #: Bytes per second of payload that one pull gets out of the link.
    bytes_per_s: float
    #: All of a replicate but the transfer: transaction, plan, registration, the last look, installation.
    around_s: float
    #: A reader is a source this long after its own source was one.
    set_up_s: float
    #: Two processes hear of each other over the network: a bound for handing on what was verified.
    look_s: float

    @classmethod
    def of(cls, shard_bytes: int, pulls: Sequence[Alone]) -> Fitted:
        """From repeated pulls by one reader."""
        whole, transfer = median(pull.whole for pull in pulls), median(pull.transfer for pull in pulls)
        set_up, look = median(pull.set_up for pull in pulls), median(pull.look for pull in pulls)
        return cls(shard_bytes / transfer, max(whole - transfer, 0.0), set_up, look)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a distribution graph: hops from a first source to the last reader, readers of its busiest source."""

    depth: int
    fan_out: int

    @classmethod
    def of(cls, readers: int, sources: int, depth_max: int, readers_per_source: int) -> Shape:
        """Of a crowd that prefers a source without readers: a chain per complete source, as deep as is allowed.

        Only what no chain can take goes to sources that have readers already. `ValueError` for what fits in no graph.
        """
        if min(readers, sources, depth_max, readers_per_source) < 1:
            raise ValueError(f"{readers} readers of {sources} sources, {depth_max} deep, make no graph")
        for fan_out in range(1, readers_per_source + 1):
            room, level = 0, sources
            for _ in range(depth_max):
                level *= fan_out
                room += level
                if room >= readers:
                    return cls(-(-readers // sources) if fan_out == 1 else depth_max, fan_out)
        raise ValueError(
            f"{readers} readers find no place behind {sources} sources, {depth_max} deep, {readers_per_source} wide"
        )


def lag_s(constants: Constants, fitted: Fitted) -> float:
    """How much later a reader has a chunk than its source, when neither waits for anything else.

    The chunk has to cross both halves of the link, to be verified and to be handed on.
    """
    crossing = constants.chunk_bytes + min(constants.packet_bytes, constants.chunk_bytes)
    return crossing / fitted.bytes_per_s + constants.chunk_bytes / constants.digest_bytes_per_s + fitted.look_s


def hop_s(constants: Constants, fitted: Fitted) -> float:
    """What one hop more costs. A reader that began later by its set-up finds that much read ahead: the longer of the
    two delays hides the other."""
    return max(fitted.set_up_s, lag_s(constants, fitted))


def predict(constants: Constants, fitted: Fitted, shard_bytes: int, readers: int, sources: int = 1) -> float:
    """Seconds until the last of `readers` has everything, from `sources` that are complete when all ask.

    The busiest source sends the shard `fan_out` times over one link; every further hop adds its delay.
    """
    shape = Shape.of(readers, sources, constants.depth_max, constants.readers_per_source)
    transfer = shard_bytes * shape.fan_out / fitted.bytes_per_s
    return fitted.around_s + transfer + (shape.depth - 1) * hop_s(constants, fitted)


def error(predicted: float, measured: float) -> float:
    """Relative, of what was measured."""
    return abs(predicted - measured) / measured
