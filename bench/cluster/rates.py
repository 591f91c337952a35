"""Looks whether links are as fast as declared, by bare transfers, before anything is measured over them.

Hosts send to each other in pairs, both ways at once, a few pairs at a time: a link whose directions share a budget, or
that is not shaped at all, is found here. It judges links, never what runs over them.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.cluster.commands import NetworkFailed
from bench.cluster.hosts import Host
from bench.remote import Remote, State

#: Of one transfer: long beside the burst a link may send at once.
SECONDS = 1.0
#: Pairs at a time: what the links carry then must be little beside what the machine's cores can move.
PAIRS_AT_ONCE = 4
#: What of a full frame of 1514 bytes is payload: 1448, after headers of IPv4 and TCP with timestamps.
PAYLOAD_SHARE = 1448 / 1514
#: A link within these shares of what it can carry is as declared.
SHARE_MIN, SHARE_MAX = 0.95, 1.1
#: A busy machine may slow a transfer, never speed one up: what was too slow is tried again this often.
TRIES = 3
#: An unshaped link is tried with this.
UNSHAPED_BYTES = 32 << 20
#: Far longer than a transfer at the declared rate.
TIMEOUT_SECONDS = 60.0
RECEIVE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one direction of one link, in Mbit/s of payload; `of_declared` is the share of what the link can carry."""

    sender: str
    receiver: str
    mbit: float
    declared: float | None

    @property
    def of_declared(self) -> float | None:
        return None if self.declared is None else self.mbit / (self.declared * PAYLOAD_SHARE)


def confirm(team: Mapping[str, Remote], hosts: Sequence[Host], numbers: Mapping[str, str]) -> dict[str, float]:
    """{host: share of its declared rate at which it received}, the best of some tries for slow ones.

    `NetworkFailed` for a link that is faster than declared: nothing measured over it would mean anything.
    """
    shares: dict[str, float] = {}
    left = [host for host in hosts if host.mbit is not None]
    for _ in range(TRIES):
        if len(left) < 2:
            break
        for rate in measure(team, left, numbers):
            if rate.of_declared is not None:
                shares[rate.receiver] = max(rate.of_declared, shares.get(rate.receiver, 0.0))
        slow = {name for name, share in shares.items() if share < SHARE_MIN}
        left = [host for host in left if host.name in slow]
        if len(left) == 1:
            left.append(next(host for host in hosts if host.mbit is not None and host is not left[0]))
    fast = {name: share for name, share in shares.items() if share > SHARE_MAX}
    if fast:
        raise NetworkFailed(f"links are faster than declared, the shaping has no effect: {fast}")
    return shares


def measure(
    team: Mapping[str, Remote], hosts: Sequence[Host], numbers: Mapping[str, str], streams: int = 1
) -> list[Rate]:
    """Every host sends and receives once; with an odd number, one of them twice."""
    rates: list[Rate] = []
    pairs = list(zip(hosts[::2], hosts[1::2], strict=False))
    if len(hosts) % 2 and len(hosts) > 1:
        pairs.append((hosts[-1], hosts[0]))
    for some in batches(pairs):
        ways = [way for one, other in some for way in ((one, other), (other, one))]
        ports = [team[receiver.name].call(listen, numbers[receiver.name]) for _, receiver in ways]
        for host in itertools.chain.from_iterable(some):
            out, into = next((at, way) for at, way in enumerate(ways) if way[0] is host)
            target = (numbers[into[1].name], ports[out])
            team[host.name].start(exchange, target, amount(slower(*into)), streams)
        for host in itertools.chain.from_iterable(some):
            sender = next(way[0] for way in ways if way[1] is host)
            bytes_per_s = team[host.name].result()
            rates.append(Rate(sender.name, host.name, bytes_per_s * 8 / 1e6, slower(sender, host)))
    return rates


def batches(pairs: Sequence[tuple[Host, Host]]) -> list[list[tuple[Host, Host]]]:
    """Pairs a few at a time, no host twice at once."""
    found: list[list[tuple[Host, Host]]] = []
    for pair in pairs:
        last = found[-1] if found else []
        if not last or len(last) == PAIRS_AT_ONCE or {*pair} & {host for other in last for host in other}:
            found.append([])
        found[-1].append(pair)
    return found


def slower(one: Host, other: Host) -> float | None:
    """What two hosts' links can carry between them."""
    rates = [host.mbit for host in (one, other) if host.mbit is not None]
    return min(rates) if rates else None


def amount(mbit: float | None) -> int:
    return UNSHAPED_BYTES if mbit is None else round(mbit * 1e6 / 8 * SECONDS)


def listen(state: State, host: str) -> int:
    """The port this process will be sent to at."""
    state["rate_listener"] = socket.create_server((host, 0))
    state["rate_listener"].settimeout(TIMEOUT_SECONDS)
    return int(state["rate_listener"].getsockname()[1])


def exchange(state: State, target: tuple[str, int], nbytes: int, streams: int) -> float:
    """Send to `target` over some connections, and be sent to; bytes per second received, after the first arrivals."""
    senders = [threading.Thread(target=_send, args=(target, nbytes // streams)) for _ in range(streams)]
    for sender in senders:
        sender.start()
    with state.pop("rate_listener") as listener:
        incoming = [listener.accept()[0] for _ in range(streams)]
    received: list[list[tuple[float, int]]] = [[] for _ in incoming]
    receivers = [threading.Thread(target=_receive, args=pair) for pair in zip(incoming, received, strict=True)]
    for thread in receivers:
        thread.start()
    for thread in (*receivers, *senders):
        thread.join(TIMEOUT_SECONDS)
    arrivals = sorted(itertools.chain.from_iterable(received))
    if len(arrivals) < 2:
        raise TimeoutError(f"nothing to measure arrived within {TIMEOUT_SECONDS:g} s")
    return sum(size for _, size in arrivals[1:]) / (arrivals[-1][0] - arrivals[0][0])


def _send(target: tuple[str, int], nbytes: int) -> None:
    data = memoryview(bytes(RECEIVE_BYTES))
    with socket.create_connection(target, TIMEOUT_SECONDS) as sock:
        while nbytes > 0:
            nbytes -= sock.send(data[:nbytes])


def _receive(sock: socket.socket, arrivals: list[tuple[float, int]]) -> None:
    into = bytearray(RECEIVE_BYTES)
    with sock:
        sock.settimeout(TIMEOUT_SECONDS)
        while size := sock.recv_into(into):
            arrivals.append((time.monotonic(), size))
