"""What a cluster is, as declared: hosts, where they stand, how fast their links are, which numbers they get. Pure.

It makes nothing: `network.py` turns a plan into namespaces, bridges and shaped links.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: The ranges that are reserved for benchmarks (RFC 2544, RFC 5180): no route of the machine's own leads there.
IPV4_NET = ipaddress.IPv4Network("198.18.0.0/16")
IPV6_NET = ipaddress.IPv6Network("2001:2::/64")
#: As many as this machine can carry with a process each; the addresses would do for more.
HOSTS_MAX = 256
#: Part of a namespace's name, which is a file's name.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine. `mbit` is the rate of its link, in each direction by itself; None leaves the link unshaped."""

    name: str
    mbit: float | None = 200.0
    rack: str = "r0"
    dc: str = "dc0"

    @property
    def location(self) -> str:
        """As `tensorhub.open` takes it."""
        return f"{self.dc}/{self.rack}/{self.name}"


@dataclass(frozen=True, slots=True)
class Numbers:
    """A host's addresses."""

    ipv4: str
    ipv6: str


@dataclass(frozen=True, slots=True)
class Trunk:
    """The link from one bridge to the one above it, and its rate in each direction; None is unshaped."""

    bridge: str
    above: str
    mbit: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """All hosts with their numbers and bridges, and the bridges' trunks. One bridge per rack; per data centre and over
    all only where there are several to join."""

    hosts: tuple[Host, ...]
    numbers: Mapping[str, Numbers]
    #: {host: bridge it is plugged into}.
    bridge_of: Mapping[str, str]
    bridges: tuple[str, ...]
    trunks: tuple[Trunk, ...]

    @classmethod
    def of(cls, hosts: Sequence[Host], trunk_mbit: Mapping[str, float] | None = None) -> Plan:
        """`trunk_mbit` gives rates to the trunks of racks ("dc0/r1") or data centres ("dc1"), else unshaped."""
        check(hosts)
        rates = dict(trunk_mbit or {})
        racks = list(dict.fromkeys((host.dc, host.rack) for host in hosts))
        centres = list(dict.fromkeys(dc for dc, _ in racks))
        layout = _Layout()
        for dc in centres:
            mine = [rack for rack in racks if rack[0] == dc]
            for rack in mine:
                layout.name("/".join(rack))
            if len(mine) > 1:
                for rack in mine:
                    layout.join("/".join(rack), dc, rates.pop("/".join(rack), None))
        tops = [
            dc if dc in layout.bridges else "/".join(next(rack for rack in racks if rack[0] == dc)) for dc in centres
        ]
        if len(centres) > 1:
            for dc, top in zip(centres, tops, strict=True):
                layout.join(top, "", rates.pop(dc, None))
        if rates:
            raise ValueError(f"no trunk for {', '.join(rates)}: name 'dc/rack' or 'dc', and declare at least two")
        numbers = {host.name: Numbers(str(IPV4_NET[at]), str(IPV6_NET[at])) for at, host in enumerate(hosts, 1)}
        plugged = {host.name: layout.bridges[f"{host.dc}/{host.rack}"] for host in hosts}
        return cls(tuple(hosts), numbers, plugged, tuple(layout.bridges.values()), tuple(layout.trunks))


@dataclass(slots=True)
class _Layout:
    """Bridges by the place they serve, and the trunks between them."""

    bridges: dict[str, str] = field(default_factory=dict)
    trunks: list[Trunk] = field(default_factory=list)

    def name(self, place: str) -> str:
        return self.bridges.setdefault(place, f"br{len(self.bridges)}")

    def join(self, place: str, above: str, mbit: float | None) -> None:
        self.trunks.append(Trunk(self.name(place), self.name(above), mbit))


def check(hosts: Sequence[Host]) -> None:
    """`ValueError` for a cluster that cannot be built."""
    if not 0 < len(hosts) <= HOSTS_MAX:
        raise ValueError(f"a cluster has 1 to {HOSTS_MAX} hosts, not {len(hosts)}")
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise ValueError(f"host names must differ: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    for host in hosts:
        for name in (host.name, host.rack, host.dc):
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name: use 1 to 32 small letters, digits and '-'")
        if host.mbit is not None and host.mbit <= 0:
            raise ValueError(f"host {host.name} has a link of {host.mbit} Mbit/s")
