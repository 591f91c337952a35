"""Holders of one shard of one version, made by hand: what pure decisions see, without the calls that lead to it.

The holdings are made, attached and indexed by the server's own functions, so indexes are what they would be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub.server import holdings
from tensorhub.server.offers import refresh
from tensorhub.server.placement import Choice, Reader, choose
from tensorhub.server.settings import DEFAULTS, Settings
from tensorhub.server.state import (
    Holding,
    HoldingState,
    Lineage,
    Member,
    ModelTable,
    Replica,
    Session,
    Slot,
    State,
)
from tensorhub.server.turn import Turn
from tensorhub.types import Epoch, Generation, Location, ReplicaId, Seat, SessionId, Version
from tests.unit.server.kit import ACTOR, content, ident

PUBLISHED, FILLING, COMPLETE = HoldingState.PUBLISHED, HoldingState.FILLING, HoldingState.COMPLETE
#: Chunks of the shard.
CHUNKS = 8


@dataclass
class Holders:
    settings: Settings = DEFAULTS
    now_ns: int = 0
    shards: int = 1
    turn: Turn = field(init=False)
    model: ModelTable = field(init=False)

    def __post_init__(self) -> None:
        self.turn = Turn(State(Epoch(ident("epoch"))), self.settings, self.now_ns, "the test")
        self.model = ModelTable(ACTOR, lineages={"main": Lineage(0, 0, 9)}, newest="main")

    def member(self, name: str, location: str = "", shard: int = 0) -> Member:
        """Its seat, taken when it is not yet."""
        replica_id = ReplicaId(name)
        replica = self.model.replicas.setdefault(replica_id, Replica(self.model, replica_id, self.shards, "flat", 1))
        if shard not in replica.members:
            session = Session(SessionId(ident(f"{name} {shard}")), f"host-{name}", 7)
            seat = Seat(ACTOR, replica_id, shard)
            replica.members[shard] = session.members[seat] = Member(
                seat, session, replica, False, Location.parse(location)
            )
            self.turn.state.sessions[session.id] = session
        return replica.members[shard]

    def slot(self, shard: int = 0, version: int = 1) -> Slot:
        return self.model.versions[Version("main", version)].slots[shard]

    def add(
        self,
        name: str,
        location: str = "",
        state: HoldingState = COMPLETE,
        *,
        watermark: int = CHUNKS,
        reads: Holding | None = None,
        readers: int = 0,
        slow: str = "",
        shard: int = 0,
        version: int = 1,
        buffers: str = "a",
    ) -> Holding:
        """A holder; a filling reads from `reads` and serves. `readers` others, which never serve, read from it."""
        member = self.member(name, location, shard)
        member.slow = slow
        slot = holdings.slot_for(member, Version("main", version), content(version, chunks=CHUNKS))
        generation = Generation(ident(f"{name} {shard} {version} {buffers}"))
        holding = holdings.make(self.turn, member, buffers, slot, generation, state=state)
        holding.watermark, holding.serves = watermark, state is FILLING
        if reads is not None:
            holdings.attach(self.turn, holding, reads)
        refresh(self.turn, holding)
        for number in range(readers):
            self.add_reader(holding, f"{name}-reader-{number}", shard=shard, version=version)
        return holding

    def add_reader(self, source: Holding, name: str, *, shard: int = 0, version: int = 1) -> Holding:
        """A reader of a subset: it never serves, has nothing yet, and so weighs as much as any."""
        reader = self.add(name, state=FILLING, watermark=0, shard=shard, version=version)
        reader.serves = False
        refresh(self.turn, reader)
        holdings.attach(self.turn, reader, source)
        return reader

    def ask_to_leave(self, reader: Holding, reason: str = "it lagged") -> None:
        """It reads on until it has another source, and counts no more at this one."""
        reader.asked = reason
        holdings.reweigh(self.turn, reader)

    def choice(self, location: str = "", name: str = "asker", **asks: object) -> Choice | None:
        """What a reader of this name gets that asks from there."""
        return choose(self.slot(), Reader(ReplicaId(name), Location.parse(location), **asks))  # type: ignore[arg-type]

    def chosen(self, location: str = "", name: str = "asker", **asks: object) -> str:
        """Whose holding it gets; empty for none."""
        found = self.choice(location, name, **asks)
        return "" if found is None else str(found.holding.member.replica.id)

    def reason(self, location: str = "", name: str = "asker", **asks: object) -> str:
        """Why it gets that; empty for none."""
        found = self.choice(location, name, **asks)
        return "" if found is None else found.reason
