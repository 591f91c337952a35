"""A trainer in a process of its own: publishes a model from a CUDA device, says how, and stays until its input ends.

Run as `python -m tests.gpu.publisher SERVER MODEL ENGINE MIB`.
"""

from __future__ import annotations

import json
import sys

import torch

import tensorhub
from tests.gpu.models import MIB, plain


def main() -> None:
    """One line of JSON once it is published; every further line of input is a round: the next version is published."""
    server, model, engine, mib = sys.argv[1:]
    tensors = plain(torch.device("cuda", 0), int(mib) * MIB, 1)
    with tensorhub.open(model, replica="trainer", server=server, engine=engine.split(",")) as hub:
        hub.register(tensors)
        version = 1
        hub.publish(version=version)
        print(json.dumps({"version": version, "staged_bytes": hub.staged_bytes}), flush=True)
        for _ in sys.stdin:
            hub.unpublish(timeout=60)
            for tensor in tensors.values():
                tensor.add_(1)
            version += 1
            hub.publish(version=version)
            print(json.dumps({"version": version, "staged_bytes": hub.staged_bytes}), flush=True)


if __name__ == "__main__":
    main()
