"""The gRPC library, loaded so that processes which use it may fork: import `grpc` from here, before anything else does.

Decides two settings, unless the user did. gRPC's own fork support, on by default, makes about every fourth child crash
that is forked while a channel is open (1.85, measured); with it off, children run unharmed as long as they leave gRPC
alone, which `client/grpc_channel.py` sees to. And its core logs to stderr what it tells its caller anyway (a handshake
that failed, a port that is taken), once per attempt, where our error says it once. Both are read when the library is
loaded, so they are set for just that long.
"""

from __future__ import annotations

import logging
import os
import sys

FORK_ENV = "GRPC_ENABLE_FORK_SUPPORT"
VERBOSITY_ENV = "GRPC_VERBOSITY"

if "grpc" in sys.modules and FORK_ENV not in os.environ:
    logging.getLogger("tensorhub").warning(
        "gRPC was loaded before TensorHub, with its fork support: forked children of this process may crash while a "
        "grpc:// server is in use; set %s=0, or start children by 'spawn' or 'forkserver'",
        FORK_ENV,
    )
_ours = {name: value for name, value in ((FORK_ENV, "0"), (VERBOSITY_ENV, "NONE")) if name not in os.environ}
os.environ.update(_ours)
try:
    import grpc
    import grpc.aio
finally:
    for _name in _ours:
        del os.environ[_name]

__all__ = ["grpc"]
