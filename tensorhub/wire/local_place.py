"""Where the local server of a name lives: one private directory with its socket, lock and log.

It decides paths and checks who owns them; it never starts, elects or speaks to a server. All access goes through the
descriptor of the checked directory, so that nobody can swap it in between, and a socket's path fits whatever the
directory's length (`/proc/self/fd/N/socket` stays below the 107 bytes of `sockaddr_un`).
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import struct
from dataclasses import dataclass

from tensorhub.errors import BadRequest, ServerUnavailable, Unauthorized

RUNTIME_DIR_ENV = "TENSORHUB_RUNTIME_DIR"
DEFAULT_NAME = "default"
#: What keeps a directory from being used until somebody changes it: no other attempt would fare better.
_UNUSABLE = (PermissionError, NotADirectoryError, FileExistsError)
#: A file name on any file system, and never a path.
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_PRIVATE = 0o700
SOCKET, SERVER_LOCK, START_LOCK, LOG = "socket", "server.lock", "start.lock", "server.log"
_UCRED = struct.Struct("3i")


def check_local_name(name: str) -> str:
    """The name of a local server if it is usable as a directory's, else `BadRequest`."""
    if not _NAME.fullmatch(name):
        raise BadRequest(
            f"local server name {name!r}: use 1 to 64 letters, digits, '-', '_' or '.', not starting by '.'"
        )
    return name


def runtime_dir() -> str:
    """`$TENSORHUB_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/tensorhub`, else `/tmp/tensorhub-UID`; absolute."""
    if chosen := os.environ.get(RUNTIME_DIR_ENV):
        return os.path.abspath(chosen)
    if session_dir := os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(os.path.abspath(session_dir), "tensorhub")
    return f"/tmp/tensorhub-{os.geteuid()}"  # noqa: S108 - private: owner and mode are checked before use


@dataclass(slots=True)
class LocalPlace:
    """An open, checked directory of one local server. Close it after use."""

    path: str
    fd: int

    @classmethod
    def open(cls, name: str) -> LocalPlace:
        """Make what is missing. `BadRequest` when a directory is not private to this user, or closed to it,
        `ServerUnavailable` when it cannot be made or opened for another reason."""
        base = runtime_dir()
        try:
            _private_dir(base)
            path = os.path.join(base, check_local_name(name))
            return cls(path, _private_dir(path, keep=True))
        except OSError as error:
            kind = BadRequest if isinstance(error, _UNUSABLE) else ServerUnavailable
            raise kind(
                f"cannot use {base!r} for the local server: {error}; set {RUNTIME_DIR_ENV} to your own directory"
            ) from error

    @property
    def socket_path(self) -> str:
        """For bind and connect in this process only; short, and bound to the directory that was checked."""
        return f"/proc/self/fd/{self.fd}/{SOCKET}"

    def lock(self, file: str) -> int | None:
        """Descriptor that holds the lock of `file` until `unlock` or our end, or None while another holds it."""
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_current(file, fd):
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _is_current(self, file: str, fd: int) -> bool:
        """Whether the locked file is still the one of that name: a cleaner of /tmp may have removed it meanwhile."""
        try:
            named = os.stat(file, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(fd))

    def connect(self) -> socket.socket | None:
        """A connected, non-blocking socket to a server of this user, or None when nobody listens (or too many wait)."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.connect(self.socket_path)
            check_peer(sock)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return sock

    def has_listener(self) -> bool:
        """Whether a server listens, though it may have no room for one more now."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(self.socket_path)
            except BlockingIOError:
                return True
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            return True

    def log_tail(self, lines: int = 5) -> str:
        """The log's last lines, for errors; empty when there is none."""
        try:
            fd = os.open(LOG, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError:
            return ""
        with open(fd, "rb") as log:
            log.seek(max(0, os.fstat(fd).st_size - 4096))
            return "\n".join(log.read().decode("utf-8", "replace").splitlines()[-lines:])

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def unlock(fd: int) -> None:
    """Give a lock up by name, not by closing: a child forked meanwhile may hold a copy of the descriptor."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket."""
    pid, uid, _gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def check_peer(sock: socket.socket) -> int:
    """The peer's pid if it is a process of this user, else `Unauthorized`."""
    pid, uid = peer_of(sock)
    if uid != os.geteuid():
        raise Unauthorized(f"process {pid} belongs to user {uid}; a local server serves user {os.geteuid()} only")
    return pid


def _private_dir(path: str, *, keep: bool = False) -> int:
    os.makedirs(path, mode=_PRIVATE, exist_ok=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise BadRequest(
                f"{path!r} belongs to user {found.st_uid}, not {os.geteuid()}; set {RUNTIME_DIR_ENV} to one of yours"
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise BadRequest(f"{path!r} is open to others (mode {stat.S_IMODE(found.st_mode):o}); chmod it to 700")
    except BaseException:
        os.close(fd)
        raise
    if keep:
        return fd
    os.close(fd)
    return -1
