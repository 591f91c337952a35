"""Fuzzes one target, or all in turn, at leisure: prints the input that failed, as hex, and how to run it again.

python -m tests.fuzz TARGET --seconds 60       # or `all`
python -m tests.fuzz TARGET --forever
python -m tests.fuzz TARGET --hex 0a1b…        # one input
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from tests.fuzz.mutate import edited, random_edits
from tests.fuzz.targets import TARGETS, Target

#: The longest input of pure noise.
NOISE_BYTES_MAX = 2000
#: Inputs that are edited once more: what was refused late shows more of a parser.
POOL_MAX = 500


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=float, default=10.0, help="for each target (default: 10)")
    parser.add_argument("--forever", action="store_true", help="round after round, until an input fails")
    parser.add_argument("--hex", type=bytes.fromhex, help="one input, of one target; no others are tried")
    parser.add_argument("--seed", type=int, default=None, help="draws the inputs (default: fresh)")
    chosen = parser.parse_args(arguments)
    names = list(TARGETS) if chosen.target == "all" else [chosen.target]
    if chosen.hex is not None:
        if chosen.target == "all":
            parser.error("--hex is an input of one target; name it")
        return _one(names[0], chosen.hex)
    seed = random.randrange(2**32) if chosen.seed is None else chosen.seed
    while True:
        for name in names:
            failed = _fuzz(name, random.Random(seed), chosen.seconds)
            if failed is not None:
                return _one(name, failed)
        if not chosen.forever:
            return 0
        seed += 1


def _fuzz(name: str, source: random.Random, seconds: float) -> bytes | None:
    """The first input that fails within so many seconds."""
    target, tried, until = TARGETS[name], 0, time.monotonic() + seconds
    pool = target.valid()
    while time.monotonic() < until:
        data = _next(source, pool)
        tried += 1
        if not _passes(target, data):
            return data
        if len(pool) < POOL_MAX and source.random() < 0.05:
            pool.append(data)
    target.finish()
    print(f"{name}: {tried} inputs, nothing found", flush=True)
    return None


def _next(source: random.Random, pool: list[bytes]) -> bytes:
    if source.random() < 0.05:
        return source.randbytes(source.randrange(NOISE_BYTES_MAX))
    return edited(source.choice(pool), random_edits(source), pool)


def _passes(target: Target, data: bytes) -> bool:
    try:
        target.run(data)
    except Exception:
        return False
    return True


def _one(name: str, data: bytes) -> int:
    """Run one input and say what came of it."""
    try:
        TARGETS[name].run(data)
    except Exception:
        traceback.print_exc()
        print(f"\n{name} fails; run it again by:\npython -m tests.fuzz {name} --hex {data.hex()}", flush=True)
        return 1
    print(f"{name} passes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
