"""Makes the reference server's actor in the cluster this machine belongs to, on this node, and says where it listens.

    python deploy/ray/start_server.py [--name tensorhub] [--anywhere] [--lease-s 10] [--beat-s 1]

Clients would make the actor themselves; this decides where it lives, and shows that it can be reached, before they
come. Run it once, on the head node: running it again finds the actor that is there, and changes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys

from tensorhub.addresses import Address
from tensorhub.errors import TensorHubError
from tensorhub.server.ray_actor import BEAT_ENV, LEASE_ENV, find, start
from tensorhub.wire.sockets import tcp_socket

try:
    import ray
except ImportError as error:
    sys.exit(f"start_server.py needs Ray ({error}); install it by: pip install '.[ray]' in a checkout of TensorHub")

ANSWER_S = 60.0
DIAL_S = 5.0


def main() -> int:
    options = _parser().parse_args()
    environ = dict(os.environ)
    for variable, seconds in ((LEASE_ENV, options.lease_s), (BEAT_ENV, options.beat_s)):
        if seconds is not None:
            environ[variable] = str(seconds)
    ray.init(address=options.cluster, log_to_driver=False)
    node_id = None if options.anywhere else ray.get_runtime_context().get_node_id()
    there_before = find(options.name) is not None
    try:
        actor = start(options.name, environ, node_id)
    except TensorHubError as error:
        print(error, file=sys.stderr)
        return 2
    address, node, epoch = ray.get(actor.where.remote(), timeout=ANSWER_S)
    print(f"ray://{options.name} lives on node {node}, epoch {epoch.hex()}")
    if there_before:
        print("it was there before: its node, settings and token are those it was made with, whatever was given now")
    if address is None:
        print("it listens nowhere: clients will use actor calls, which are slower; its log says why")
        return 0
    try:
        with tcp_socket(Address.parse(address).host) as sock:
            sock.settimeout(DIAL_S)
            sock.connect((Address.parse(address).host, Address.parse(address).port))
    except OSError as error:
        print(f"{address} cannot be reached from here ({error}): such clients will use actor calls, which are slower")
        return 0
    print(f"it takes frames at {address}, which can be reached from here")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("start_server.py", description="Make the reference server's Ray actor.")
    parser.add_argument("--name", default="tensorhub", help="clients write server='ray://NAME'")
    parser.add_argument("--cluster", default="auto", help="address of the cluster (default: the one found here)")
    parser.add_argument("--anywhere", action="store_true", help="let Ray choose the node")
    parser.add_argument("--lease-s", type=float, help="how long a silent process is trusted (default 10)")
    parser.add_argument("--beat-s", type=float, help="how often processes are asked to beat (default 1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
