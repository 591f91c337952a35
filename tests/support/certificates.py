"""Certificates for tests, made by the `openssl` command: an authority, and what it issues for this host."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Every name and number by which tests reach a server of this host.
HERE = "DNS:localhost,IP:127.0.0.1,IP:::1"


@dataclass(frozen=True, slots=True)
class Pair:
    """Paths of a certificate and its key, PEM."""

    cert: str
    key: str


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates. `cert` is what trusts them."""

    folder: Path
    cert: str
    key: str

    def issue(self, name: str, places: str = HERE) -> Pair:
        """A certificate for `places`, and its key."""
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        _openssl(name, cert, key, "-CA", self.cert, "-CAkey", self.key, "-addext", f"subjectAltName={places}")
        return Pair(str(cert), str(key))


@contextmanager
def authority() -> Iterator[Authority]:
    """A fresh authority that nobody else trusts."""
    with tempfile.TemporaryDirectory(prefix="th-ca-") as folder:
        cert, key = Path(folder, "ca.pem"), Path(folder, "ca.key")
        _openssl("a test's authority", cert, key, "-addext", "keyUsage=keyCertSign")
        yield Authority(Path(folder), str(cert), str(key))


def _openssl(name: str, cert: Path, key: Path, *options: str) -> None:
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    made = ["-keyout", str(key), "-out", str(cert), "-subj", f"/CN={name}", "-days", "2"]
    done = subprocess.run(
        ["openssl", "req", "-x509", *curve, *made, *options], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
