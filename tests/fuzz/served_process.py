"""A stream server in a process of its own, for the fuzzer: it says where it listens and what it serves, then waits.

One line: host, port, address and length of the registered memory, whose bytes are those of `pattern(1, length)`, and
the address of a progress block beside it. It ends with its input.
"""

from __future__ import annotations

import sys

from tensorhub.native import Limits
from tensorhub.pipeline.exposure import HEADER_BYTES, Header
from tensorhub.types import Digest, Generation, SessionId
from tests.support.streams import Served

NBYTES = 4096
GENERATION = b"g" * 16
#: Of connections and time: what a fuzzer does must end soon, whatever it was.
LIMITS = Limits(connections=64, greeting_s=2.0, request_s=2.0, reply_s=2.0, idle_s=2.0)


def main() -> None:
    with Served(LIMITS, NBYTES) as served:
        block = served.memory.map(HEADER_BYTES)
        header = Header(SessionId(b"i" * 16), Generation(GENERATION), 4, 2, Digest(b"m" * 16), True)
        served.memory.poke(block, header.pack())
        served.server.add(served.address, NBYTES)
        served.server.add(block, HEADER_BYTES)
        print(*served.place[:2], served.address, NBYTES, block, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
