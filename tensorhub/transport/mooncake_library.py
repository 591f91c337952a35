"""The Mooncake Transfer Engine as a library: how it is loaded, started, kept quiet and shared within a process.

The only module that imports `mooncake`. Translates its return codes into errors; decides nothing about reads. What it
relies on was tried on the real thing and stands in `docs/mooncake.md`.
"""

from __future__ import annotations

import ctypes
import importlib
import ipaddress
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from tensorhub.addresses import Address, is_number
from tensorhub.errors import Closed, EngineUnavailable
from tensorhub.transport.bounce import Slabs
from tensorhub.transport.registrations import Registrations

PROTOCOL_ENV = "TENSORHUB_MOONCAKE_PROTOCOL"
DEVICE_ENV = "TENSORHUB_MOONCAKE_DEVICE"
#: {protocol: kinds of memory whose addresses it takes}.
KINDS = {
    "tcp": frozenset({"host"}),
    "rdma": frozenset({"host", "cuda"}),
    "efa": frozenset({"host", "cuda"}),
    "ascend": frozenset({"host", "npu"}),
}
#: Peers find each other by address: no metadata server.
_HANDSHAKE = "P2PHANDSHAKE"
_RDMA_DEVICES = Path("/sys/class/infiniband")
#: Mooncake's own switches. The user's word counts where there is one.
_LOG_ENV, _IPV6_ENV, _TCP_ENV = "MC_LOG_LEVEL", "MC_USE_IPV6", "MC_FORCE_TCP"
#: glog's level that prints only what ends the process, and the C++ name of its switch.
_FATAL, _LEVEL_SYMBOL = 3, "_ZN3fLI17FLAGS_minloglevelE"
_INSTALL = (
    "install a build of it: 'pip install mooncake-transfer-engine', or where there is no CUDA "
    "'pip install mooncake-transfer-engine-non-cuda'; on Debian it needs "
    "'apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2'"
)
#: Answer for a request that is late for the library itself: it may still land.
_TIMED_OUT = -2
#: What is mapped or not as a whole; some kernels have larger ones. Over TCP a registration is a line in a table. The
#: others pin its memory, again for every range that joins it: there, only what touches is joined.
PAGE_BYTES = 4096
CELL_MAGIC = b"tensorhub/mooncake/1"
CELL_BYTES = 64


class TransferEngine(Protocol):
    """The calls of `mooncake.engine.TransferEngine` that are used; int codes, no exceptions."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, nbytes: int) -> int: ...
    def unregister_memory(self, address: int) -> int: ...
    def send_probe(self, peer: str) -> int: ...
    def batch_transfer_async_read(self, peer: str, local: list[int], remote: list[int], nbytes: list[int]) -> int: ...
    def transfer_check_status(self, batch: int) -> int: ...


class Library:
    """One started engine of this process. Any thread may use it."""

    def __init__(self, engine: TransferEngine, host: str, protocol: str) -> None:
        self.protocol = protocol
        self.pid = os.getpid()
        self._engine: TransferEngine | None = engine
        self.address = Address(host, engine.get_rpc_port())
        #: Ranges so close share a registration, so that peers may read them together (`registrations.py`).
        self.grain = PAGE_BYTES if protocol == "tcp" else 1
        self.registered = Registrations(self.give, self.take_back, self.grain)
        self.slabs = Slabs(self)
        #: Where peers read who this is: a restarted process may have the same address and port.
        self._cell = np.frombuffer(cell_of(secrets.token_bytes(16)), dtype=np.uint8).copy()
        self.give(self.cell, CELL_BYTES)
        self.is_revoked = False
        self._names: dict[Address, list[bytes]] = {}
        #: Guards `_names`; held for a look-up.
        self._names_lock = threading.Lock()

    @property
    def cell(self) -> int:
        """Address of the cell."""
        return int(self._cell.ctypes.data)

    @property
    def incarnation(self) -> bytes:
        return bytes(self._cell[len(CELL_MAGIC) : len(CELL_MAGIC) + 16])

    def close(self) -> None:
        """Give the engine back: its threads and sockets end. Holds the interpreter's lock for about a second."""
        self.registered.clear()
        self._engine = None

    def give(self, address: int, nbytes: int) -> None:
        """Register one region; `EngineUnavailable` with what the library answered."""
        code = self._running().register_memory(address, nbytes)
        if code != 0:
            raise EngineUnavailable(
                f"Mooncake ({self.protocol}) does not register {nbytes} bytes at {address:#x}: it answers {code}; "
                f"{_LOG_ENV}=INFO shows why"
            )

    def take_back(self, address: int) -> None:
        code = self._running().unregister_memory(address)
        if code != 0:
            raise EngineUnavailable(f"Mooncake ({self.protocol}) does not unregister {address:#x}: it answers {code}")

    def forget(self, address: int, nbytes: int) -> None:
        """Undo one registration of a range."""
        if not self.is_revoked:
            self.registered.remove(address, nbytes)

    def revoke(self) -> None:
        """Take all memory back, for good: a device can write to none of it any more. The last resort."""
        self.is_revoked = True
        self.registered.clear()

    def submit(self, peer: str, local: int, remote: int, nbytes: int) -> int:
        """Start one read; a number to ask `status` for, or 0 if it was not started."""
        return self._running().batch_transfer_async_read(peer, [local], [remote], [nbytes])

    def status(self, batch: int) -> int:
        """1: every byte landed. 0: still under way. Negative: failed, and no byte lands any more."""
        code = self._running().transfer_check_status(batch)
        return 0 if code == _TIMED_OUT else code

    def probe(self, peer: str) -> int:
        """0 if the peer's process answers. Waits a minute for one that is stopped, and holds up no other call."""
        return self._running().send_probe(peer)

    def _running(self) -> TransferEngine:
        if self._engine is None:
            raise Closed("the last engine over Mooncake of this process is closed")
        return self._engine

    def peer_name(self, address: Address, incarnation: bytes) -> str:
        """How to name a peer to the library, which never forgets what it learnt of a name.

        Another life at the same address gets another spelling of it: to the library that is another peer.
        """
        with self._names_lock:
            lives = self._names.setdefault(address, [])
            if incarnation not in lives:
                lives.append(incarnation)
            return str(Address(spelled(address.host, lives.index(incarnation)), address.port))


def cell_of(incarnation: bytes) -> bytes:
    """The bytes of an incarnation cell."""
    return (CELL_MAGIC + incarnation).ljust(CELL_BYTES, b"\0")


def spelled(host: str, life: int) -> str:
    """The same host, written differently for each life: hexadecimal octets, unpadded groups, capital letters."""
    if life == 0:
        return host
    if ":" in host:
        glue, parts = ":", ipaddress.IPv6Address(host).exploded.split(":")
        other = [f"{int(group, 16):x}" for group in parts]
    elif is_number(host):
        glue, parts = ".", host.split(".")
        other = [hex(int(octet)) for octet in parts]
    else:
        glue, parts, other = "", list(host), list(host.upper())
    free = [at for at in range(len(parts)) if parts[at] != other[at]]
    if life >= 1 << len(free):
        raise EngineUnavailable(
            f"{life} processes were met one after the other at one port of {host}, and Mooncake forgets none of them; "
            "restart this process to reach the newest"
        )
    for bit, at in enumerate(free):
        if life >> bit & 1:
            parts[at] = other[at]
    return glue.join(parts)


def default_protocol() -> str:
    """What the user chose, else RDMA where this host has a device for it."""
    chosen = os.environ.get(PROTOCOL_ENV) or ("rdma" if has_rdma_device() else "tcp")
    if chosen not in KINDS:
        raise EngineUnavailable(
            f"{PROTOCOL_ENV}={chosen!r} is no protocol of Mooncake's; use one of {', '.join(KINDS)}"
        )
    return chosen


def has_rdma_device() -> bool:
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


#: {(host, protocol): the one library object of this process, and how many engines use it, never 0}.
_libraries: dict[tuple[str, str], tuple[Library, int]] = {}
#: Guards the table while one is started or ended.
_starting = threading.Lock()


def acquire(host: str, protocol: str) -> Library:
    """This process's library object, started by whoever comes first; `release` it. `EngineUnavailable` says why not."""
    with _starting:
        library, users = _libraries.get((host, protocol), (None, 0))
        if library is None:
            _check_devices(protocol)
            library = start(load(":" in host)(), host, protocol)
        elif library.pid != os.getpid():
            raise EngineUnavailable(
                f"Mooncake was started by process {library.pid}, before the fork: it does not work in its children; "
                "start workers with 'spawn'"
            )
        _libraries[host, protocol] = (library, users + 1)
        return library


def release(library: Library) -> None:
    """One user fewer; the last one ends it."""
    key = (library.address.host, library.protocol)
    with _starting:
        users = _libraries[key][1] - 1
        if users:
            _libraries[key] = (library, users)
        else:
            del _libraries[key]
            library.close()


def start(engine: TransferEngine, host: str, protocol: str) -> Library:
    """Start a fresh engine of the library; `EngineUnavailable` if it does not."""
    with _environment({_TCP_ENV: "1"} if protocol == "tcp" else {}):
        code = engine.initialize(host, _HANDSHAKE, protocol, os.environ.get(DEVICE_ENV, ""))
    if code != 0:
        # It must not be used: its calls report success (a registration answers 0) and nothing is served.
        raise EngineUnavailable(
            f"Mooncake does not start with protocol {protocol!r} as {host}: it answers {code}; {PROTOCOL_ENV} and "
            f"{DEVICE_ENV} choose others, {_LOG_ENV}=INFO shows why"
        )
    return Library(engine, host, protocol)


#: Whether the library was loaded to speak IPv6, once it is loaded.
_loaded_for_ipv6: bool | None = None


def _check_devices(protocol: str) -> None:
    """Mooncake takes a protocol for a wish: without a device it starts TCP, whose bytes must not land in place."""
    if protocol not in {"rdma", "efa"}:
        return
    if os.environ.get(_TCP_ENV):
        raise EngineUnavailable(f"{_TCP_ENV} is set, so that Mooncake would not speak {protocol}; unset one of the two")
    wanted = [name for name in os.environ.get(DEVICE_ENV, "").split(",") if name]
    absent = [name for name in wanted if not (_RDMA_DEVICES / name).exists()]
    if absent or not has_rdma_device():
        missing = ", ".join(absent) or f"for {protocol}"
        raise EngineUnavailable(f"this host has no device {missing} in {_RDMA_DEVICES}; set {PROTOCOL_ENV}=tcp")


def load(is_ipv6: bool) -> Callable[[], TransferEngine]:
    """The library's class. It reads its switches once, when it is imported: they are set for that moment only."""
    global _loaded_for_ipv6  # noqa: PLW0603 - a library is loaded once per process
    wanted = {} if os.environ.get(_LOG_ENV) else {_LOG_ENV: "ERROR"}
    if is_ipv6:
        wanted[_IPV6_ENV] = "1"
    try:
        with _environment(wanted):
            module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise EngineUnavailable(f"Mooncake is not usable here ({error}); {_INSTALL}") from error
    if _loaded_for_ipv6 is None:
        _loaded_for_ipv6 = is_ipv6 or bool(os.environ.get(_IPV6_ENV))
        if _LOG_ENV in wanted:
            _silence()
    if _loaded_for_ipv6 != is_ipv6:
        raise EngineUnavailable(
            "Mooncake speaks one family of addresses per process, and it was loaded for "
            f"IPv{6 if _loaded_for_ipv6 else 4} here; {_IPV6_ENV} and the host that is advertised must agree"
        )
    return module.TransferEngine  # type: ignore[no-any-return]


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the process, and take them back: no child started later inherits them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _silence() -> None:
    """Make glog print only what ends the process: what fails is told by our errors.

    Its own switches stand in the environment, for children too, or in a variable of the library. Where the library
    is built otherwise, lines of its errors appear on stderr: a blemish, not a fault.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()}
    for path in sorted(path for path in mapped if "libglog" in path or path.endswith("/mooncake/engine.so")):
        try:
            ctypes.c_int.in_dll(ctypes.CDLL(path), _LEVEL_SYMBOL).value = _FATAL
        except (OSError, ValueError):
            continue
