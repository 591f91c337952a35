"""The options of a server over gRPC: what it binds, what seals it, what it lacks then.

It decides nothing a server does. `server/__main__.py` and the command line's `tensorhub serve` both run it.
"""

from __future__ import annotations

import argparse
import socket

from tensorhub.addresses import Address
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.server.foreground import announce, until_ended
from tensorhub.server.host import Host
from tensorhub.wire.token import TOKEN_ENV, TOKEN_FILE_ENV

PORT = 50051


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `tensorhub serve` takes, besides lease and beat."""
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help=f"address to bind; port 0: any (default: [::]:{PORT}, all addresses)"
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM), with any intermediates; needs --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", help="key of the certificate (PEM)")
    parser.add_argument(
        "--tls-client-ca", metavar="FILE", help="serve only clients whose certificate this CA has signed (mutual TLS)"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"clients must show this token (or ${TOKEN_ENV}, ${TOKEN_FILE_ENV})"
    )


async def run(host: Host, options: argparse.Namespace, *, has_token: bool) -> int:
    """Serve in the foreground until SIGTERM or SIGINT. 1 when the machine broke: the next life starts empty.

    `BadRequest` for options that cannot be used, `ServerUnavailable` where gRPC is not installed.
    """
    try:
        from tensorhub.server.grpc_service import Tls, serve
    except ModuleNotFoundError as missing:
        raise ServerUnavailable(
            f"a server over gRPC needs the module {missing.name!r}; "
            "install it by: pip install '.[grpc]' in a checkout of TensorHub"
        ) from missing
    if bool(options.tls_cert) != bool(options.tls_key) or (options.tls_client_ca and not options.tls_cert):
        raise BadRequest("TLS needs both --tls-cert and --tls-key; --tls-client-ca comes on top of them")
    tls = Tls(options.tls_cert, options.tls_key, options.tls_client_ca) if options.tls_cert else None
    listen = Address.parse(options.listen) if options.listen else default_listen()
    lacks = [name for name, given in (("TLS", tls is not None), ("a token", has_token)) if not given]
    scheme = "grpc" if tls is None else "grpcs"
    return await until_ended(host, serve(host, listen, tls, lambda bound: announce(scheme, bound, lacks)))


def default_listen() -> Address:
    """All addresses of both kinds; of IPv4 alone where this host has no IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return Address("0.0.0.0", PORT)  # noqa: S104 - a server is there to be reached; the warning says what that means
    return Address("::", PORT)
