"""Plays a transcript against the real machine and writes what it answered: the same text again, when nothing changed.

A line is `TIME  WHO  COMMAND  -> ANSWER`; answers of other calls that a step leads to follow on lines of their own.
A command without an answer yet shows `(waits)`. `WHO` is `replica` or `replica#shard`; `# shards 2` sets their number.
After `server dies` an empty one is there; a process `returns` with what the old one knew of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub import messages as m
from tensorhub.server.machine import Machine
from tensorhub.server.settings import SECOND_NS
from tensorhub.server.state import HoldingState
from tensorhub.server.turn import Outgoing
from tensorhub.types import Digest, Epoch, Generation, parse_selector
from tests.unit.server.kit import ACTOR, Cluster, Process, content, ident, root
from tests.unit.server.kit import undertaking as undertaken

MS = SECOND_NS // 1000
LATER_LIFE = Epoch(ident("later life"))


@dataclass
class Player:
    cluster: Cluster = field(default_factory=Cluster)
    processes: dict[str, Process] = field(default_factory=dict)
    #: {(session, call): what} of calls that wait.
    waiting: dict[tuple[bytes, int], str] = field(default_factory=dict)
    #: The server that died.
    earlier: Machine | None = None

    def play(self, text: str) -> str:
        """The transcript as the machine tells it."""
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("# shards "):
                self.cluster.shards = int(line.removeprefix("# shards "))
            if not line.strip() or line.startswith("#"):
                lines.append(line)
            elif not line.startswith(" "):
                lines += self.step(line.split("->")[0])
        return "\n".join(lines) + "\n"

    def step(self, line: str) -> list[str]:
        when, who, *words = line.split()
        head = f"{when:<8}{who:<11}{' '.join(words):<34}"
        before = len(self.cluster.log)
        self.pass_time(int(when.removesuffix("ms")) * MS)
        late = self.told(self.cluster.log[before:])
        seen = len(self.cluster.log)
        call, session = self.command(who, words)
        own, others = "(waits)", []
        for out in self.cluster.log[seen:]:
            if out.id == call and out.to == session:
                own = describe(out.message)
            else:
                others += self.told([out])
        if call and own == "(waits)":
            self.waiting[session, call] = words[0]
        own = "" if call == 0 else own
        return [*late, f"{head}-> {own}".rstrip() if own else head.rstrip(), *others]

    def pass_time(self, to_ns: int) -> None:
        """Processes that are not killed beat while time passes."""
        cluster = self.cluster
        while cluster.now_ns < to_ns:
            cluster.now_ns = min(cluster.now_ns + SECOND_NS, to_ns)
            for process in self.processes.values():
                if process.session in cluster.machine.state.sessions:
                    cluster.log += cluster.machine.receive(cluster.now_ns, process.session, 0, m.Beat(process.session))
            cluster.log += cluster.machine.tick(cluster.now_ns)
            cluster.machine.check()

    def told(self, outs: list[Outgoing]) -> list[str]:
        lines = []
        for out in outs:
            name = next((name for name, process in self.processes.items() if process.session == out.to), None)
            what = self.waiting.pop((out.to, out.id), "")
            if name is not None and not isinstance(out.message, m.Joined | m.Welcome):
                lines.append(f"{'':<53}-> {name}: {what + ': ' if what else ''}{describe(out.message)}")
        return lines

    def command(self, who: str, words: list[str]) -> tuple[int, bytes]:  # noqa: C901 - one line per command
        verb, *rest = words
        if (who, verb) == ("server", "dies"):
            self.earlier, self.cluster.machine = self.cluster.machine, Machine(LATER_LIFE)
            self.waiting.clear()
            return 0, b""
        if verb == "join":
            life = 1 + sum(name.split("'")[0] == who for name in self.processes)
            process = self.cluster.process(who, location=rest[0] if rest else "", life=life)
            self.processes[who] = process
            return 0, process.session
        process = self.processes[who]
        number = int(rest[0].removeprefix("v")) if rest and rest[0].startswith("v") else 0
        match verb:
            case "publish":
                lineage = rest[1] if len(rest) > 1 and rest[1] != "other" else "main"
                what = content(number + (100 if "other" in rest else 0))
                process.published = process.fresh()
                version = m.Version(lineage, number)
                request: m.Request = m.Publish(process.seat, "a", version, process.published, what, (), b"")
            case "seal":
                request = m.Seal(process.seat, process.published, root(number + (100 if "other" in rest else 0)))
            case "unpublish":
                request = m.Unpublish(process.seat, "a", process.held("a"), 5 * SECOND_NS, "abandon" in rest)
            case "replicate":
                return process.replicate(parse_selector(rest[0].removeprefix("v"))), process.session
            case "serve":
                request = m.Serve(process.seat, process.generation, (), b"")
            case "progress":
                process.progress(int(rest[0]))
                return 0, process.session
            case "reroute":
                holding = self.cluster.machine.state.generations[process.generation]
                source = holding.upstream.generation if holding.upstream else process.generation
                return process.reroute(source, holding.watermark), process.session
            case "done":
                digest = (
                    root(number)
                    if number
                    else root(process.cluster.machine.state.generations[process.generation].slot.record.version.number)
                )
                return process.done(number, digest), process.session
            case "rejoin":
                request = m.Join(process.seat, process.shards, "flat", False, process.location)
            case "abort" | "stopped":
                request = m.Abort(process.seat, process.group, process.sequence, " ".join(rest))
            case "leave":
                request = m.Leave(process.seat)
            case "wait":
                request = m.Wait(ACTOR, parse_selector(rest[0].removeprefix("v")), process.location, 3 * SECOND_NS)
            case "returns" if self.earlier is not None:
                process.hello(self.earlier.state.epoch)
                claims, standing = brought(self.earlier, process)
                assert isinstance(process.join(claims, standing=standing), m.Joined)
                return 0, process.session
            case "killed":
                del self.processes[who]
                self.cluster.disconnect(process)
                return 0, process.session
            case "next":
                process.sequence += 1
                return 0, process.session
            case "versions":
                request = m.List(ACTOR)
            case _:
                raise ValueError(f"no such command: {verb}")
        return process.ask(request), process.session


def brought(machine: Machine, process: Process) -> tuple[tuple[m.Claim, ...], m.Standing]:
    """What the process would bring to another server, by what this one knew of it."""
    member = machine.state.sessions[process.session].members[process.seat]
    replica, claims, undertaking = member.replica, [], None
    versions = [holding.slot.record.version for holding in member.holdings.values()]
    for holding in member.holdings.values():
        slot, generation = holding.slot, holding.generation
        if holding.state is HoldingState.FILLING:
            source = holding.upstream.generation if holding.upstream is not None else Generation(b"")
            process.generation = generation
            undertaking = undertaken(
                process,
                version=slot.record.version,
                content=slot.content,
                upstream=source,
                watermark=holding.watermark,
                bytes_done=holding.bytes_done,
            )
        else:
            is_published = holding.state is HoldingState.PUBLISHED
            version, whole = slot.record.version, holding.root or Digest(b"")
            claims.append(
                m.Claim("a", version, generation, slot.content, whole, is_published, 8, (), b"", holding.hidden)
            )
    outcomes = [
        (number, outcome.version) for number, outcome in replica.outcomes.items() if outcome.version is not None
    ]
    (_, last), committed = outcomes[-1] if outcomes else ((0, -1), None)
    lineages = replica.model.lineages
    marks = tuple(m.LineageMark(name, each.order, each.first) for name, each in lineages.items())
    seen = max(versions, default=None)
    standing = m.Standing(
        replica.group, replica.sequence, last, committed, member.published, seen, marks if versions else (), undertaking
    )
    return tuple(claims), standing


def describe(message: m.Reply | m.Notice) -> str:
    """A message in the words of the transcripts."""
    match message:
        case m.Ok() | m.Announced():
            return "ok"
        case m.Granted(version, _, _, source, reason, _):
            return f"v{version} from {source.seat} ({reason})"
        case m.Held(version):
            return f"holds v{version} already"
        case m.Committed(version):
            return f"committed v{version}"
        case m.Found(version):
            return f"v{version}"
        case m.Unpublished(readers):
            return f"unpublished, abandoned {', '.join(readers)}" if readers else "unpublished"
        case m.Refused(error, text):
            return f"{error}: {text}"
        case m.SourceLost(_, _, _, reason):
            return f"[source lost: {reason}]"
        case m.TransactionAborted(_, _, _, reason):
            return f"[aborted: {reason}]"
        case m.Moved(_, group, _, reason):
            return f"[group {group}: {reason}]"
        case m.Conflicted(_, _, _, reason):
            return f"[conflict: {reason}]"
        case m.Listing(rows):
            return ", ".join(f"v{row.version} {row.state}" for row in rows) or "none"
    return type(message).__name__
