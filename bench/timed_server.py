"""A reference server that counts where its CPU time goes: `python -m bench.timed_server FILE local|grpc ...`.

It wraps the steps that every kind of server takes (decode, the machine, encode) with a clock of the thread's CPU time;
what is left of the process's is transport and event loop. It changes nothing else, and is not run where rates are
measured: the clocks cost some of what they count.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: {where a function is looked up when it is called: what its time counts as}. Absent modules are not in use.
STEPS = {
    ("tensorhub.wire.codec", "decode_call"): "decode",
    ("tensorhub.wire.codec", "encode_answer"): "encode",
    ("tensorhub.wire.proto", "decode_call"): "decode",
    ("tensorhub.wire.proto", "encode_answer"): "encode",
    ("tensorhub.server.machine", "Machine.receive"): "machine",
    ("tensorhub.server.machine", "Machine.tick"): "machine",
}


class Shares:
    """Seconds of CPU time by step, and of the process, from the first counted step on."""

    def __init__(self) -> None:
        self.seconds = {"decode": 0.0, "machine": 0.0, "encode": 0.0}
        self.calls = 0
        self.began: float | None = None

    def count(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted."""

        @functools.wraps(function)
        def counted(*arguments: Any) -> Any:
            if self.began is None:
                self.began = time.process_time()
            started = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.seconds[step] += time.thread_time() - started
                self.calls += step == "decode"

        return counted

    def install(self) -> None:
        """Count in this process from now on."""
        for (module_name, path), step in STEPS.items():
            try:
                owner: Any = importlib.import_module(module_name)
            except Exception as error:  # noqa: BLE001 - whatever an absent library raises
                sys.stderr.write(f"{module_name} is not counted: {error}\n")
                continue
            *outer, name = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, name, self.count(step, getattr(owner, name)))

    def found(self) -> dict[str, float]:
        """Seconds by step; `transport` is the rest; `calls` counts them."""
        total = time.process_time() - (self.began if self.began is not None else time.process_time())
        return {**self.seconds, "transport": total - sum(self.seconds.values()), "calls": float(self.calls)}


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM, then write what was found to the file."""
    shares = Shares()
    shares.install()
    server: Any = importlib.import_module("tensorhub.server.__main__")
    status = int(server.main(arguments[1:]))
    Path(arguments[0]).write_text(json.dumps(shares.found()), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
