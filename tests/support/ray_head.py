"""One Ray cluster of one node: `python -m tests.support.ray_head DIRECTORY` prints its address and ends with its stdin.

A process of its own, so that the tests' process joins and leaves the cluster as any other would.
"""

from __future__ import annotations

import logging
import sys

import ray

OBJECT_STORE_BYTES = 100_000_000


def main(directory: str) -> None:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=directory,
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
