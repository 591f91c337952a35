"""What happened, line by line, and its hash: two runs of one seed are the same run or the simulation is broken.

It holds words, numbers and virtual times only: addresses differ from run to run and are scrubbed.
"""

from __future__ import annotations

import asyncio
import hashlib
import re

from tensorhub.errors import TensorHubError
from tensorhub.messages import Notice, Reply, Request

_ADDRESS = re.compile(r"0x[0-9a-f]+")
#: Fields worth a word, in this order.
_FIELDS = ("seat", "version", "selector", "group", "sequence", "watermark", "abandon", "error", "reason", "message")


class Trace:
    """Lines in order of time; `echo` prints each as it happens."""

    def __init__(self, *, echo: bool) -> None:
        self.lines: list[str] = []
        self._echo = echo
        self._began_s = asyncio.get_running_loop().time()

    def add(self, who: str, what: str) -> None:
        at_ms = (asyncio.get_running_loop().time() - self._began_s) * 1e3
        line = f"{at_ms:10.1f}ms  {who:14s} {_ADDRESS.sub('(address)', what)}"
        self.lines.append(line)
        if self._echo:
            print(line, flush=True)

    @property
    def digest(self) -> str:
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()


def brief(message: Request | Reply | Notice) -> str:
    """A message in a few words."""
    words = [type(message).__name__]
    for field in _FIELDS:
        value = getattr(message, field, None)
        if value is not None and value != "":
            words.append(f"{field}={value}")
    source = getattr(message, "source", None)
    if source is not None and hasattr(source, "seat"):
        words.append(f"source={source.seat}")
    return " ".join(words)


def told(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error.message if isinstance(error, TensorHubError) else error}"
