"""Builds a planned cluster out of network namespaces, bridges and shaped links, and takes it down again.

Every host is a namespace with one interface; all bridges are in one more namespace, so that nothing of the machine's
own network is touched. Deleting the namespaces deletes everything. Names carry the process that made them and when it
was started: what a killed run left behind is known as such, and removed by the next.
"""

from __future__ import annotations

import os
from pathlib import Path

from bench.cluster.commands import NetworkFailed, ip, run, tc
from bench.cluster.hosts import IPV4_NET, IPV6_NET, Plan

PREFIX = "thbench"
NETNS = Path("/run/netns")
#: A host's only interface, besides loopback.
INTERFACE = "eth0"
#: The name of the namespace that holds the bridges: no host's, since those have no underscore.
FABRIC = "_fabric"
#: Jumbo frames, as in data centres. With 1500 dozens of hosts on a few cores take twice the processor time, and it is
#: that which would be measured.
MTU = 9000
#: What a link may send at once: little beside any transfer, at 200 Mbit/s and above two of the kernel's largest packets
#: (64 KiB), so that none has to be cut in software.
BURST_SECONDS = 0.005
BURST_BYTES_MIN, BURST_BYTES_MAX = 16 << 10, 128 << 10
#: What waits for a link before it is dropped: 20 ms of it, and never less than some large packets.
QUEUE_SECONDS = 0.02
QUEUE_BYTES_MIN = 512 << 10


class Network:
    """The kernel's side of one cluster; `build` once, `remove` at least once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.id = f"{PREFIX}-{os.getpid()}-{started(os.getpid())}"
        self._ports = {host.name: f"p{at}" for at, host in enumerate(plan.hosts)}

    def namespace(self, host: str) -> str:
        return f"{self.id}-{host}"

    def path(self, host: str) -> str:
        """What `setns` takes."""
        return str(NETNS / self.namespace(host))

    def build(self) -> None:
        """All of it, or an error; what exists by then `remove` finds."""
        remove_stale()
        names = [FABRIC, *self._ports]
        run(["ip", "-batch", "-"], [f"netns add {self.namespace(name)}" for name in names])
        self._build_fabric()
        for host in self.plan.hosts:
            self._build_host(host.name)
            self.shape(host.name, host.mbit)

    def shape(self, host: str, mbit: float | None) -> None:
        """Give a host's link another rate, in each direction; None lets it run free."""
        self._limit(self.namespace(host), INTERFACE, mbit)
        self._limit(self.namespace(FABRIC), self._ports[host], mbit)

    def remove(self) -> None:
        """Everything of this network, whatever there is of it."""
        remove_all(self.id)

    def _build_fabric(self) -> None:
        fabric = self.namespace(FABRIC)
        lines = ["link set lo up"]
        for bridge in self.plan.bridges:
            lines += [f"link add {bridge} type bridge stp_state 0 forward_delay 0 mcast_snooping 0"]
            lines += [f"link set {bridge} mtu {MTU} up"]
        for at, trunk in enumerate(self.plan.trunks):
            lines.append(f"link add t{at}d mtu {MTU} type veth peer name t{at}u mtu {MTU}")
            lines += [f"link set t{at}d master {trunk.bridge} up", f"link set t{at}u master {trunk.above} up"]
        for host, port in self._ports.items():
            lines.append(
                f"link add {port} mtu {MTU} type veth peer name {INTERFACE} netns {self.namespace(host)} mtu {MTU}"
            )
            lines.append(f"link set {port} master {self.plan.bridge_of[host]} up")
        ip(fabric, lines)
        for at, trunk in enumerate(self.plan.trunks):
            for end in ("d", "u"):
                self._limit(fabric, f"t{at}{end}", trunk.mbit)

    def _build_host(self, host: str) -> None:
        numbers = self.plan.numbers[host]
        lines = [
            "link set lo up",
            f"address add {numbers.ipv4}/{IPV4_NET.prefixlen} dev {INTERFACE}",
            f"address add {numbers.ipv6}/{IPV6_NET.prefixlen} dev {INTERFACE} nodad",
            f"link set {INTERFACE} up",
        ]
        ip(self.namespace(host), lines)

    def _limit(self, namespace: str, interface: str, mbit: float | None) -> None:
        """What leaves this end of a link. Each end is limited where it sends: the directions know nothing of each
        other."""
        if mbit is None:
            tc(namespace, [f"qdisc replace dev {interface} root pfifo"])
            return
        bytes_per_s = mbit * 1e6 / 8
        burst = min(max(round(bytes_per_s * BURST_SECONDS), BURST_BYTES_MIN), BURST_BYTES_MAX)
        queue = max(round(bytes_per_s * QUEUE_SECONDS), QUEUE_BYTES_MIN)
        tc(
            namespace,
            [f"qdisc replace dev {interface} root tbf rate {round(mbit * 1e6)}bit burst {burst} limit {queue}"],
        )


def remove_stale() -> None:
    """Networks of processes that have ended."""
    for name in namespaces():
        pid, _, rest = name.removeprefix(f"{PREFIX}-").partition("-")
        began = rest.partition("-")[0]
        if not pid.isdecimal() or started(int(pid)) != began:
            remove_all(name)


def remove_all(start: str) -> None:
    """Every namespace whose name is `start` or begins with it and a dash; all are tried before any is complained of."""
    failures = []
    for name in namespaces():
        if name == start or name.startswith(f"{start}-"):
            try:
                run(["ip", "netns", "delete", name])
            except NetworkFailed as error:
                if name in namespaces():  # else somebody else was faster
                    failures.append(str(error))
    if failures:
        raise NetworkFailed("; ".join(failures))


def namespaces() -> list[str]:
    """All that this module ever made and that are still there."""
    if not NETNS.is_dir():
        return []
    return sorted(path.name for path in NETNS.iterdir() if path.name.startswith(f"{PREFIX}-"))


def started(pid: int) -> str:
    """When a process was started, in ticks since boot, which tells a pid's lives apart; "" when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return fields[19]
