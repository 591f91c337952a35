"""An inference server's gate, as far as a sync touches it. Apart, since its process need not import verl.

It generates nothing; it notes what it is told, in order.
"""

from __future__ import annotations

import os
from typing import Any


class Server:
    """Open or closed, and the calls that it saw."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.generating = True

    def process_id(self) -> int:
        return os.getpid()

    def seen(self) -> tuple[bool, list[str]]:
        """Whether it generates now, and every call since it was asked last."""
        calls, self.calls = self.calls, []
        return self.generating, calls

    def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        self.calls.append("abort")
        self.generating = False
        return {"aborted_count": 0, "request_ids": []}

    def release_kv_cache(self) -> None:
        self.calls.append("release_kv_cache")

    def resume_kv_cache(self) -> None:
        self.calls.append("resume_kv_cache")

    def resume_generation(self) -> None:
        self.calls.append("resume")
        self.generating = True
