"""The gRPC library, loaded so that processes which use it may fork: import `grpc` from here, before anything else does.

Decides one setting. gRPC's own fork support, on by default, makes about every fourth child crash that is forked while
a channel is open (1.85, measured); with it off, children run unharmed as long as they leave gRPC alone, which
`client/grpc_channel.py` sees to. It is read once, when the library is loaded, so it is set for just that long.
"""

from __future__ import annotations

import logging
import os
import sys

FORK_ENV = "GRPC_ENABLE_FORK_SUPPORT"

if FORK_ENV in os.environ:  # the user's own choice
    import grpc
    import grpc.aio
elif "grpc" in sys.modules:
    import grpc
    import grpc.aio

    logging.getLogger("tensorhub").warning(
        "gRPC was loaded before TensorHub, with its fork support: forked children of this process may crash while a "
        "grpc:// server is in use; set %s=0, or start children by 'spawn' or 'forkserver'",
        FORK_ENV,
    )
else:
    os.environ[FORK_ENV] = "0"
    try:
        import grpc
        import grpc.aio
    finally:
        del os.environ[FORK_ENV]

__all__ = ["grpc"]
