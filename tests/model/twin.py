"""A naive twin of the server: plain dicts, no indexes, everything found by scanning. It predicts every message.

It knows one model, one lineage, one buffer set, no places and no rerouting; within that it is complete, the patience of
readers included. It shares no code with the server but the message types.
"""

from __future__ import annotations

from typing import Any

SECOND = 1_000_000_000
LEASE, MARGIN = 10 * SECOND, 4 * SECOND + SECOND // 2
READERS_MAX, DEPTH_MAX, PATIENCE = 4, 256, SECOND // 4

#: (to, call, kind, what matters of it)
Message = tuple[str, int, str, Any]
Seat = tuple[str, int]


class Stop(Exception):
    """The request is refused with this error name."""


class Twin:
    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.now = 0
        self.leases: dict[str, int] = {}
        self.seats: dict[Seat, str] = {}
        self.groups: dict[str, list[int]] = {}  # replica: [group, sequence]
        self.groups_born = 0
        self.born = 0
        self.queued = 0
        self.highest = -1
        self.last: dict[Seat, int] = {}
        self.holdings: dict[str, dict[str, Any]] = {}  # by generation, oldest first
        self.known: dict[tuple[int, int], dict[str, Any]] = {}  # (version, shard): root, author, reported
        self.transactions: dict[str, dict[str, Any]] = {}
        self.lingers: dict[Seat, tuple[str, int, int]] = {}  # what it may still read, and since which transaction
        self.outcomes: dict[tuple[str, int, int], int | None] = {}
        self.out: list[Message] = []

    # ------------------------------------------------------------ speaking

    def say(self, to: str, call: int, kind: str, what: Any = None) -> None:
        if to in self.leases:
            self.out.append((to, call, kind, what))

    def step(self, who: str, call: int, name: str, *args: Any) -> list[Message]:
        """All messages that a request leads to."""
        self.out = []
        if who not in self.leases and name != "hello":
            return [(who, call, "Refused", "LeaseLost")]
        self.leases[who] = self.now + LEASE
        try:
            getattr(self, name)(who, call, *args)
        except Stop as stop:
            self.say(who, call, "Refused", str(stop))
        self.settle()
        return self.out

    def due(self) -> int | None:
        return min((at for at, _ in self.deadlines()), default=None)

    def deadlines(self) -> list[tuple[int, tuple[Any, ...]]]:
        found: list[tuple[int, tuple[Any, ...]]] = [(at, ("lease", who)) for who, at in self.leases.items()]
        for replica, tx in self.transactions.items():
            for shard, part in tx["parts"].items():
                if part["phase"] in ("waiting", "draining", "queued"):
                    found.append((part["deadline"], ("part", replica, shard)))
            if tx["version"] is not None:
                found.append((tx["deadline"], ("transaction", replica)))
        found += [(h["drain"][2], ("drain", g)) for g, h in self.holdings.items() if h["drain"]]
        found += [(h["promise"], ("promise", g)) for g, h in self.holdings.items() if self.promises(h)]
        return found

    def promises(self, h: dict[str, Any]) -> bool:
        """Whether it was granted lately and will serve: until then, newcomers wait for it."""
        return h["promise"] is not None and not h["serves"] and h["upstream"] is not None

    def tick(self) -> list[Message]:
        """Everything that happens at the earliest deadline, which is now; promises of one step end one by one."""
        self.out = []
        while self.due() == self.now:
            self.fall_due()
        return self.out

    def fall_due(self) -> None:
        what = min(((at, what) for at, what in self.deadlines()), key=lambda entry: entry[0])[1]
        if what[0] == "lease":
            del self.leases[what[1]]
            self.vacate([seat for seat, who in self.seats.items() if who == what[1]])
        elif what[0] == "part":
            tx = self.transactions[what[1]]
            phase = tx["parts"][what[2]]["phase"]
            names = {"waiting": "WaitTimeout", "draining": "DrainTimeout", "queued": "VersionUnavailable"}
            self.abort(what[1], {what[2]: names[phase]})
        elif what[0] == "transaction":
            tx = self.transactions[what[1]]
            self.abort(what[1], dict.fromkeys((s for s in range(self.shards) if s not in tx["done"]), "GroupAborted"))
        elif what[0] == "promise":
            self.holdings[what[1]]["promise"] = None
        else:
            holding = self.holdings[what[1]]
            to, call, _ = holding["drain"]
            holding["drain"] = None
            self.say(to, call, "Refused", "DrainTimeout")
        self.settle()

    # ------------------------------------------------------------ sessions and seats

    def hello(self, who: str, call: int) -> None:
        self.say(who, call, "Welcome")

    def beat(self, who: str, call: int) -> None:
        self.say(who, call, "Ok")

    def join(self, who: str, call: int, seat: Seat) -> None:
        holder = self.seats.get(seat)
        if holder is not None and holder != who:
            raise Stop("SeatTaken")
        if holder is None:
            self.seats[seat] = who
            if seat[0] not in self.groups:
                self.groups_born += 1
                self.groups[seat[0]] = [self.groups_born, 0]
        self.say(who, call, "Joined", tuple(self.groups[seat[0]]))

    def leave(self, who: str, call: int, seat: Seat) -> None:
        self.own(who, seat)
        self.vacate([seat])
        self.say(who, call, "Ok")

    def own(self, who: str, seat: Seat) -> None:
        if self.seats.get(seat) != who:
            raise Stop("BadRequest")

    def vacate(self, seats: list[Seat]) -> None:
        for replica in dict.fromkeys(seat[0] for seat in seats):
            gone = [seat for seat in seats if seat[0] == replica]
            group, sequence = self.groups[replica]
            if replica in self.transactions:
                self.abort(replica, dict.fromkeys((shard for _, shard in gone), "GroupAborted"), quiet=True)
            else:
                self.outcomes[replica, group, sequence] = None
            for seat in gone:
                del self.seats[seat]
                self.lingers.pop(seat, None)
                self.last.pop(seat, None)
                for generation in [g for g, h in self.holdings.items() if h["seat"] == seat]:
                    self.drop(generation)
            self.groups_born += 1
            self.groups[replica] = [self.groups_born, 0]
            for seat, who in self.seats.items():
                if seat[0] == replica:
                    self.say(who, 0, "Moved", (seat, self.groups_born))
            if not any(seat[0] == replica for seat in self.seats):
                del self.groups[replica]
                self.outcomes = {key: value for key, value in self.outcomes.items() if key[0] != replica}

    # ------------------------------------------------------------ holdings

    def at(self, seat: Seat) -> str | None:
        return next((g for g, h in self.holdings.items() if h["seat"] == seat), None)

    def make(self, seat: Seat, generation: str, version: int, state: str) -> dict[str, Any]:
        self.born += 1
        new = {"seat": seat, "version": version, "state": state, "root": None, "proven": True, "hidden": False}
        new |= {
            "begun": False,
            "serves": False,
            "full": False,
            "upstream": None,
            "born": self.born,
            "drain": None,
            "promise": None,
        }
        self.holdings[generation] = new
        return new

    def drop(self, generation: str) -> None:
        gone = self.holdings.pop(generation)
        for g, h in self.holdings.items():
            if h["upstream"] == generation:
                h["upstream"] = None
                self.say(self.seats.get(h["seat"], ""), 0, "SourceLost", (h["seat"], g, generation))
        self.lingers = {seat: lingers for seat, lingers in self.lingers.items() if lingers[0] != generation}
        key = (gone["version"], gone["seat"][1])
        if key in self.known:
            known = self.known[key]
            known["reported"] = [g for g in known["reported"] if g != generation]
            if known["author"] == generation:
                known["author"] = None
        if not any(h["version"] == gone["version"] for h in self.holdings.values()):
            self.known = {key: value for key, value in self.known.items() if key[0] != gone["version"]}
        for replica, tx in self.transactions.items():
            for shard, pinned in list(tx["pins"].items()):
                if pinned == generation:
                    del tx["pins"][shard]
                    self.pin(replica, shard)
        if gone["drain"]:
            to, call, _ = gone["drain"]
            kind = ("Unpublished", ()) if gone["seat"] in self.seats else ("Refused", "Closed")
            self.say(to, call, *kind)

    def offered(self, h: dict[str, Any]) -> bool:
        fills = h["state"] == "filling"
        return h["proven"] and not h["hidden"] and (not fills or (h["serves"] and bool(h["upstream"] or h["full"])))

    def complete(self, version: int, shard: int) -> list[str]:
        return [
            g
            for g, h in self.holdings.items()
            if (h["version"], h["seat"][1]) == (version, shard) and h["state"] != "filling" and self.offered(h)
        ]

    def readable(self) -> list[int]:
        versions = sorted({h["version"] for h in self.holdings.values()})
        return [v for v in versions if all(self.complete(v, shard) for shard in range(self.shards))]

    def readers(self, generation: str) -> list[dict[str, Any]]:
        return [h for h in self.holdings.values() if h["upstream"] == generation]

    def users(self, generation: str) -> list[str]:
        """Seats that read, have not said that they stopped, or are still to be granted, from a holding."""
        pins = [f"{r}#{s}" for r, tx in self.transactions.items() for s, g in tx["pins"].items() if g == generation]
        late = [f"{seat[0]}#{seat[1]}" for seat, lingers in self.lingers.items() if lingers[0] == generation]
        return sorted({*pins, *late, *(f"{h['seat'][0]}#{h['seat'][1]}" for h in self.readers(generation))})

    # ------------------------------------------------------------ publishing

    def publish(self, who: str, call: int, seat: Seat, version: int, generation: str, flavour: str) -> None:
        self.own(who, seat)
        tx = self.transactions.get(seat[0])
        if tx and (tx["version"] is not None or seat[1] in tx["parts"]):
            raise Stop("Busy")
        if self.at(seat):
            raise Stop("AlreadyPublished")
        live = any(h["version"] == version for h in self.holdings.values())
        if version <= self.last.get(seat, -1) or (version < self.highest and not live):
            raise Stop("VersionOrder")
        key = (version, seat[1])
        if key in self.known and self.known[key]["flavour"] != flavour:
            raise Stop("VersionConflict")
        self.highest = max(self.highest, version)
        self.last[seat] = version
        known = self.known.setdefault(key, {"flavour": flavour, "root": None, "author": None, "reported": []})
        alone = not any((h["version"], h["seat"][1]) == key for h in self.holdings.values())
        holding = self.make(seat, generation, version, "published")
        if alone and known["root"] is None:
            known["author"] = generation
        else:
            holding["proven"] = False
        self.say(who, call, "Announced")

    def seal(self, who: str, call: int, seat: Seat, generation: str, root: str) -> None:
        self.own(who, seat)
        holding = self.holdings.get(generation)
        if holding is None or holding["seat"] != seat:
            raise Stop("NotPublished")
        if holding["state"] != "published":
            raise Stop("BadRequest")
        if holding["root"] is not None:
            if holding["root"] != root:
                raise Stop("BadRequest")
            self.say(who, call, "Ok")
            return
        known = self.known[holding["version"], seat[1]]
        holding["root"] = root
        if known["root"] is None and known["author"] in (generation, None):
            self.establish(known, root)
        elif known["root"] is None:
            known["reported"].append(generation)
        if known["root"] is not None and not self.compare(generation, known["root"]):
            raise Stop("VersionConflict")
        self.say(who, call, "Ok")

    def establish(self, known: dict[str, Any], root: str) -> None:
        known["root"], known["author"] = root, None
        reported, known["reported"] = known["reported"], []
        for generation in reported:
            if generation not in self.holdings:
                continue
            replica, shard = self.holdings[generation]["seat"]
            tx = self.transactions.get(replica, {"parts": {}})
            part = tx["parts"].get(shard)
            if part is None or part["generation"] != generation:
                self.compare(generation, root)
            elif self.holdings[generation]["root"] == root:
                self.finished(replica, shard)
            else:
                self.abort(replica, {shard: "SourceFailed"})

    def compare(self, generation: str, root: str) -> bool:
        holding = self.holdings[generation]
        if holding["root"] == root:
            holding["proven"] = True
            return True
        self.say(self.seats[holding["seat"]], 0, "Conflicted", (holding["seat"], generation))
        self.drop(generation)
        return False

    def unpublish(self, who: str, call: int, seat: Seat, timeout: int, abandon: bool) -> None:
        self.own(who, seat)
        tx = self.transactions.get(seat[0])
        if tx and seat[1] in tx["parts"]:
            raise Stop("Busy")
        generation = self.at(seat)
        if generation is None:
            raise Stop("NotPublished")
        holding = self.holdings[generation]
        holding["hidden"] = True
        if tx:
            tx["hidden"].discard(generation)
        users = self.users(generation)
        if abandon or not users:
            if holding["drain"]:
                to, other, _ = holding["drain"]
                holding["drain"] = None
                self.say(to, other, "Unpublished", tuple(users))
            self.drop(generation)
            self.say(who, call, "Unpublished", tuple(users))
            return
        if holding["drain"]:
            self.say(holding["drain"][0], holding["drain"][1], "Refused", "Busy")
        holding["drain"] = (who, call, self.now + timeout)

    # ------------------------------------------------------------ transactions

    def fresh(self, seat: Seat, group: int, sequence: int) -> None:
        now = self.groups[seat[0]]
        if (seat[0], group, sequence) in self.outcomes or group != now[0] or sequence < now[1]:
            raise Stop("GroupAborted")
        if sequence > now[1]:
            raise Stop("BadRequest")

    def replicate(
        self,
        who: str,
        call: int,
        seat: Seat,
        group: int,
        sequence: int,
        selector: Any,
        timeout: int,
        generation: str,
        offers: int,
    ) -> None:
        self.own(who, seat)
        self.fresh(seat, group, sequence)
        replica, shard = seat
        tx = self.transactions.get(replica)
        if tx and shard in tx["parts"]:
            raise Stop("GroupAborted")
        old = self.at(seat)
        if old and self.holdings[old]["drain"]:
            raise Stop("Busy")
        self.stopped(seat, group, sequence)
        if tx is None:
            tx = {"selector": selector, "version": None, "parts": {}, "hidden": set(), "pins": {}, "done": set()}
            tx |= {"source": None, "deadline": 0}
            self.transactions[replica] = tx
        elif tx["selector"] != selector:
            self.abort(replica, {shard: "GroupMismatch"}, quiet=True)
            raise Stop("GroupMismatch")
        tx["parts"][shard] = {
            "phase": "waiting",
            "call": call,
            "generation": generation,
            "deadline": self.now + timeout,
            "who": who,
            "offers": offers,
        }
        if tx["version"] is None:
            self.decide(replica)
        else:
            tx["deadline"] = max(tx["deadline"], self.now + timeout + MARGIN)
            self.admit(replica, shard)

    def select(self, selector: Any) -> int | None:
        kind, number = selector
        readable = self.readable()
        if kind == "latest":
            return readable[-1 - number] if number < len(readable) else None
        if kind == "at least":
            return readable[-1] if readable and readable[-1] >= number else None
        if number in readable:
            return int(number)
        if number < self.highest and not any(h["version"] == number for h in self.holdings.values()):
            raise Stop("VersionUnavailable")
        return None

    def decide(self, replica: str) -> None:
        tx = self.transactions[replica]
        try:
            version = self.select(tx["selector"])
        except Stop as stop:
            self.abort(replica, {next(iter(tx["parts"])): str(stop)})
            return
        if version is None:
            return
        tx["version"] = version
        held = set()
        for shard in range(self.shards):
            generation = self.at((replica, shard))
            if generation is None:
                continue
            holding = self.holdings[generation]
            if generation in self.complete(version, shard):
                held.add(shard)
            elif not holding["hidden"]:
                holding["hidden"] = True
                tx["hidden"].add(generation)
        for shard in tx["parts"]:
            if shard not in held:
                source = self.choose(replica, shard)
                tx["source"] = source and self.holdings[source]["seat"][0]
                break
        for shard in range(self.shards):
            if shard not in held:
                self.pin(replica, shard)
        tx["deadline"] = max(part["deadline"] for part in tx["parts"].values()) + MARGIN
        for shard in list(tx["parts"]):
            if self.transactions.get(replica) is tx:
                self.admit(replica, shard)

    def pin(self, replica: str, shard: int) -> None:
        tx = self.transactions[replica]
        others = [g for g in self.complete(tx["version"], shard) if self.holdings[g]["seat"][0] != replica]
        liked = [g for g in others if self.holdings[g]["seat"][0] == tx["source"]]
        # What was offered first is pinned first; holdings of this twin are offered when made, complete or proven.
        if liked or others:
            tx["pins"][shard] = (liked or others)[0]

    def admit(self, replica: str, shard: int) -> None:
        tx = self.transactions[replica]
        part = tx["parts"][shard]
        old = self.at((replica, shard))
        if old and old in self.complete(tx["version"], shard):
            part["phase"] = "held"
            tx["pins"].pop(shard, None)
            self.say(part["who"], part["call"], "Held", tx["version"])
            return
        if shard not in tx["pins"]:
            self.pin(replica, shard)
        if old:
            part["phase"] = "draining"
            if not self.holdings[old]["hidden"]:
                self.holdings[old]["hidden"] = True
                tx["hidden"].add(old)
            if self.users(old):
                return
            tx["hidden"].discard(old)
            self.drop(old)
        self.place(replica, shard)

    def place(self, replica: str, shard: int) -> None:
        tx = self.transactions[replica]
        part = tx["parts"][shard]
        source = self.choose(replica, shard)
        if source is None:
            if part["phase"] != "queued":
                self.queued += 1
                part["queued"] = self.queued
            part["phase"] = "queued"
            return
        part["phase"] = "reading"
        filling = self.make((replica, shard), part["generation"], tx["version"], "filling")
        filling |= {
            "upstream": source,
            "promise": self.now + PATIENCE,
            "serves": part["offers"] == tx["version"] + self.known[tx["version"], shard]["flavour"],
        }
        seat = self.holdings[source]["seat"]
        tx["source"] = tx["source"] or seat[0]
        tx["pins"].pop(shard, None)
        root = self.known[tx["version"], shard]["root"]
        above = self.holdings[source]
        begun = above["state"] != "filling" or above["begun"]
        self.say(part["who"], part["call"], "Granted", (tx["version"], seat, source, root, begun))

    def choose(self, replica: str, shard: int) -> str | None:
        tx = self.transactions[replica]
        fits = []
        for g, h in self.holdings.items():
            same = (h["version"], h["seat"][1]) == (tx["version"], shard)
            if same and h["seat"][0] != replica and len(self.readers(g)) < READERS_MAX and self.depth(g) < DEPTH_MAX:
                fits.append(g)
        offered = [g for g in fits if self.offered(self.holdings[g])]
        idle = [g for g in offered if not self.readers(g)]
        for g in idle:
            if self.holdings[g]["seat"][0] == tx["source"]:
                return g
        replicated = any(self.holdings[g]["state"] == "complete" for g in self.complete(tx["version"], shard))
        coming = [h for h in self.holdings.values() if (h["version"], h["seat"][1]) == (tx["version"], shard)]
        if not idle and any(self.promises(h) for h in coming):
            return None
        if offered:
            return min(idle or offered, key=lambda g: self.rank(g, replicated))
        pinned = tx["pins"].get(shard)
        return pinned if pinned in fits and self.holdings[pinned]["hidden"] else None

    def rank(self, g: str, replicated: bool) -> tuple[bool, int, int, bool, int]:
        h = self.holdings[g]
        load = 4 * len(self.readers(g))  # nobody reports progress here: every reader has all of it left
        last = replicated and h["state"] == "published"
        return (last, load, self.below(g), h["state"] == "filling", h["born"])

    def below(self, g: str) -> int:
        """Hops of the longest chain of readers."""
        return max((1 + self.below(r) for r, h in self.holdings.items() if h["upstream"] == g), default=0)

    def depth(self, g: str) -> int:
        above = self.holdings[g]["upstream"]
        return 0 if above is None else 1 + self.depth(above)

    def serve(self, who: str, call: int, seat: Seat, generation: str) -> None:
        self.own(who, seat)
        tx = self.transactions.get(seat[0])
        part = tx["parts"].get(seat[1]) if tx else None
        if (
            part is None
            or part["generation"] != generation
            or part["phase"] in ("held", "waiting", "draining", "queued")
        ):
            raise Stop("GroupAborted")
        if part["phase"] == "done":
            raise Stop("BadRequest" if generation in self.holdings else "GroupAborted")
        self.holdings[generation] |= {"serves": True, "begun": True}
        self.say(who, call, "Ok")

    def done(self, who: str, call: int, seat: Seat, group: int, sequence: int, generation: str, root: str) -> None:
        self.own(who, seat)
        replica, shard = seat
        version = self.outcomes.get((replica, group, sequence))
        if version is not None:
            self.say(who, call, "Committed", version)
            return
        self.fresh(seat, group, sequence)
        tx = self.transactions.get(replica)
        part = tx["parts"].get(shard) if tx else None
        if tx is None or part is None or part["generation"] != generation:
            raise Stop("BadRequest")
        if part["phase"] == "done":
            self.say(who, part["call"], "Refused", "Busy")
            part["call"] = call
            return
        if part["phase"] in ("waiting", "draining", "queued"):
            raise Stop("BadRequest")
        if part["phase"] == "held":
            part["phase"], part["call"] = "done", call
            self.finished(replica, shard)
            return
        known = self.known[tx["version"], shard]
        if known["root"] is not None and known["root"] != root:
            self.abort(replica, {shard: "SourceFailed"}, quiet=True)
            raise Stop("SourceFailed")
        part["phase"], part["call"] = "done", call
        self.holdings[generation] |= {"root": root, "full": True, "upstream": None}
        if known["root"] is not None:
            self.finished(replica, shard)
        else:
            known["reported"].append(generation)

    def finished(self, replica: str, shard: int) -> None:
        tx = self.transactions[replica]
        tx["done"].add(shard)
        if len(tx["done"]) < self.shards:
            return
        self.close(replica, tx["version"])
        for part in tx["parts"].values():
            if part["generation"] in self.holdings:
                self.holdings[part["generation"]]["state"] = "complete"
            self.say(part["who"], part["call"], "Committed", tx["version"])

    def give_up(self, who: str, call: int, seat: Seat, group: int, sequence: int) -> None:
        self.own(who, seat)
        replica, shard = seat
        if [group, sequence] == self.groups[replica] and (replica, group, sequence) not in self.outcomes:
            if replica in self.transactions:
                self.abort(replica, {shard: "GroupAborted"}, quiet=True)
            else:
                self.outcomes[replica, group, sequence] = None
                self.groups[replica][1] += 1
                self.tell_idle(replica, {shard}, group, sequence)
        elif group == self.groups[replica][0] and sequence > self.groups[replica][1]:
            raise Stop("BadRequest")
        self.stopped(seat, group, sequence)
        self.say(who, call, "Ok")

    def stopped(self, seat: Seat, group: int, sequence: int) -> None:
        if seat in self.lingers and (group, sequence) >= self.lingers[seat][1:]:
            del self.lingers[seat]

    def abort(self, replica: str, failures: dict[int, str], quiet: bool = False) -> None:
        tx = self.transactions[replica]
        group, sequence = self.groups[replica]
        self.close(replica, None)
        for shard, part in sorted(tx["parts"].items()):
            if part["phase"] in ("waiting", "draining", "queued", "done"):
                self.say(part["who"], part["call"], "Refused", failures.get(shard, "GroupAborted"))
            elif not (quiet and shard in failures):
                self.say(part["who"], 0, "TransactionAborted", ((replica, shard), group, sequence))
            if part["generation"] in self.holdings:
                source = self.holdings[part["generation"]]["upstream"]
                if source and not (quiet and shard in failures):
                    self.lingers[replica, shard] = (source, group, sequence)
                self.drop(part["generation"])
        self.tell_idle(replica, {*tx["parts"], *(failures if quiet else ())}, group, sequence)
        for generation in tx["hidden"]:
            if generation in self.holdings:
                self.holdings[generation]["hidden"] = False

    def tell_idle(self, replica: str, others: set[int], group: int, sequence: int) -> None:
        for (name, shard), who in sorted(self.seats.items()):
            if name == replica and shard not in others:
                self.say(who, 0, "TransactionAborted", ((replica, shard), group, sequence))

    def close(self, replica: str, version: int | None) -> None:
        del self.transactions[replica]
        group, sequence = self.groups[replica]
        self.outcomes[replica, group, sequence] = version
        self.groups[replica][1] += 1

    # ------------------------------------------------------------ consequences

    def settle(self) -> None:
        """Repeat until nothing changes: drains that are over, roots that are orphaned, readers and groups that wait."""
        while self.drained() or self.rooted() or self.waited():
            pass

    def drained(self) -> bool:
        for g, h in self.holdings.items():
            if self.users(g):
                continue
            replica, shard = h["seat"]
            part = self.transactions.get(replica, {"parts": {}})["parts"].get(shard)
            if h["drain"]:
                self.drop(g)
                return True
            if part and part["phase"] == "draining":
                self.transactions[replica]["hidden"].discard(g)
                self.drop(g)
                self.place(replica, shard)
                return True
        return False

    def rooted(self) -> bool:
        for known in self.known.values():
            if known["root"] is None and known["author"] is None and known["reported"]:
                self.establish(known, self.holdings[known["reported"][0]]["root"])
                return True
        return False

    def waited(self) -> bool:
        queue = [
            (part["queued"], replica, shard)
            for replica, tx in self.transactions.items()
            for shard, part in tx["parts"].items()
            if part["phase"] == "queued"
        ]
        for _, replica, shard in sorted(queue):
            if self.choose(replica, shard):
                self.place(replica, shard)
                return True
            if not self.hope(replica, shard):
                self.abort(replica, {shard: "VersionUnavailable"})
                return True
        for replica, tx in self.transactions.items():
            if tx["version"] is None:
                before = len(self.out)
                self.decide(replica)
                if tx["version"] is not None or len(self.out) > before:
                    return True
        return False

    def hope(self, replica: str, shard: int) -> bool:
        tx = self.transactions[replica]
        if shard in tx["pins"]:
            return True
        for h in self.holdings.values():
            if (h["version"], h["seat"][1]) == (tx["version"], shard) and h["seat"][0] != replica:
                if h["state"] != "filling" and self.offered(h):
                    return True
                if h["state"] == "filling" and self.fed(h):
                    return True
        return False

    def fed(self, h: dict[str, Any]) -> bool:
        if h["state"] != "filling" or h["full"]:
            return True
        return h["upstream"] is not None and self.fed(self.holdings[h["upstream"]])
