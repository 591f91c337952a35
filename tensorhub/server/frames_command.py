"""The options of a server over plain frames, and its life as a process: the server of a cluster without Ray or gRPC.

It decides nothing a server does. `server/__main__.py` runs it.
"""

from __future__ import annotations

import argparse

from tensorhub.addresses import Address
from tensorhub.errors import BadRequest, ServerUnavailable
from tensorhub.server.direct import address_of, listen, serve_direct
from tensorhub.server.foreground import announce, until_ended
from tensorhub.server.host import Host
from tensorhub.wire.token import TOKEN_ENV, TOKEN_FILE_ENV


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `tensorhub serve frames` takes, besides lease and beat. It has no default address: nothing is encrypted, so
    which network it is on is for whoever starts it to say."""
    parser.add_argument("--listen", metavar="HOST:PORT", required=True, help="address to bind; port 0: any")
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"clients must show this token (or ${TOKEN_ENV}, ${TOKEN_FILE_ENV})"
    )


async def run(host: Host, options: argparse.Namespace, *, has_token: bool) -> int:
    """Serve in the foreground; the exit code. `BadRequest` for an address that cannot be bound."""
    at = Address.parse(options.listen)
    try:
        listener = listen(at.host, at.port)
    except ServerUnavailable as error:
        raise BadRequest(f"{error}: another process may, or the address is not of this host") from error
    announce("frames", address_of(listener), ["encryption", *([] if has_token else ["a token"])])
    return await until_ended(host, serve_direct(listener, host))
