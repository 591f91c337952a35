"""TensorHub: reference-oriented storage for the weights of RL post-training.

`publish` turns weights that already lie in a process's memory into immutable references; `replicate` pulls a version
one-sided from whoever holds it, verifies every byte, and serves it on. See `docs/architecture.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tensorhub import errors
from tensorhub.errors import TensorHubError, Unavailable, UsageError
from tensorhub.types import AtLeast, Newest

if TYPE_CHECKING:
    from tensorhub.client.calls import publish, replicate
    from tensorhub.client.hub import Hub, open
    from tensorhub.client.looking import server_status, server_versions
    from tensorhub.client.mirror import Mirror
    from tensorhub.client.results import Replication, SourceUse, Transfer
    from tensorhub.client.runtime import shutdown
    from tensorhub.client.staging import Staged, Staging

__version__ = "0.1.0"

#: {public name: module}. Loaded at first use: naming the package must cost nothing and need no native library.
_LAZY = {
    "Hub": "tensorhub.client.hub",
    "open": "tensorhub.client.hub",
    "server_status": "tensorhub.client.looking",
    "server_versions": "tensorhub.client.looking",
    "Mirror": "tensorhub.client.mirror",
    "Staged": "tensorhub.client.staging",
    "Staging": "tensorhub.client.staging",
    "publish": "tensorhub.client.calls",
    "replicate": "tensorhub.client.calls",
    "Replication": "tensorhub.client.results",
    "SourceUse": "tensorhub.client.results",
    "Transfer": "tensorhub.client.results",
    "shutdown": "tensorhub.client.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tensorhub' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "AtLeast",
    "Hub",
    "Mirror",
    "Newest",
    "Replication",
    "SourceUse",
    "Staged",
    "Staging",
    "TensorHubError",
    "Transfer",
    "Unavailable",
    "UsageError",
    "__version__",
    "errors",
    "open",
    "publish",
    "replicate",
    "server_status",
    "server_versions",
    "shutdown",
]
