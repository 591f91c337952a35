"""A small job on Ray: one trainer actor, some rollout actors, real tensors, a reference server at `ray://tensorhub`.

    python deploy/ray/example_job.py [--rollouts 2] [--steps 3] [--mib 64] [--server ray://tensorhub] [--cluster auto]

Each step the trainer changes its weights in place and publishes them, the rollouts pull them and compare every tensor
with the trainer's by checksum, and the trainer takes the version back. Nothing here starts the server: the first hub
does, if there is none yet. A token (`TENSORHUB_TOKEN`, `TENSORHUB_TOKEN_FILE`) of this process is handed to the actors.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping

import torch

import tensorhub
from tensorhub.wire.token import TOKEN_ENV, read_token

try:
    import ray
except ImportError as error:
    sys.exit(f"example_job.py needs Ray ({error}); install it by: pip install '.[ray]' in a checkout of TensorHub")

MODEL = "actor"
TIMEOUT_S = 120.0
#: Of each layer: a matrix of 4 MiB and its bias.
WIDTH = 1024
LAYER_MIB = 4


def weights(mib: int) -> dict[str, torch.Tensor]:
    """Tensors of about that size, zeros."""
    layers = max(1, mib // LAYER_MIB)
    matrices = {f"layers.{layer}.weight": torch.zeros(WIDTH, WIDTH) for layer in range(layers)}
    biases = {f"layers.{layer}.bias": torch.zeros(WIDTH) for layer in range(layers)}
    return matrices | biases


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Of the bytes of each tensor."""
    return {name: hashlib.blake2b(tensor.numpy().data).hexdigest() for name, tensor in tensors.items()}


@ray.remote
class Trainer:
    def __init__(self, server: str, mib: int) -> None:
        self.weights = weights(mib)
        self.hub = tensorhub.open(MODEL, replica="trainer", server=server, timeout=TIMEOUT_S)
        self.hub.register(self.weights)

    def step(self, version: int) -> dict[str, str]:
        """Train, publish; the checksums of what was published."""
        generator = torch.Generator().manual_seed(version)
        for tensor in self.weights.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator))
        self.hub.publish(version=version)
        return checksums(self.weights)

    def take_back(self) -> None:
        """From here on the weights may be written to."""
        self.hub.unpublish(timeout=TIMEOUT_S)


@ray.remote
class Rollout:
    def __init__(self, name: str, server: str, mib: int) -> None:
        self.weights = weights(mib)
        self.hub = tensorhub.open(MODEL, replica=name, server=server, spot=True, timeout=TIMEOUT_S)
        self.hub.register(self.weights)

    def pull(self, version: int) -> tuple[dict[str, str], str]:
        """The checksums of what is in place now, and a line about how it came."""
        got = self.hub.replicate(tensorhub.AtLeast(version), timeout=TIMEOUT_S)
        sources = ", ".join(f"{source.replica} by {source.engine}" for source in got.sources)
        rate = got.nbytes / got.seconds / 1e9
        return checksums(
            self.weights
        ), f"{got.nbytes / 1e6:.0f} MB in {got.seconds:.3f} s, {rate:.2f} GB/s, from {sources}"


def join(cluster: str) -> str:
    """Join the cluster, or start one where "auto" finds none; says which. Workers inherit no environment of this
    process, so its token is handed to them: on their nodes, its file may not be."""
    token = read_token()
    environment = {"env_vars": {TOKEN_ENV: os.fsdecode(token)} if token else {}}
    doing = "started a cluster that ends with this job," if cluster == "local" else "joined the cluster"
    try:
        ray.init(address=cluster, runtime_env=environment, log_to_driver=False)
    except ConnectionError:
        if cluster != "auto" or os.environ.get("RAY_ADDRESS"):
            raise  # it was named, so another would be a surprise
        doing = "found no cluster, and started one that ends with this job,"
        ray.init(address="local", runtime_env=environment, log_to_driver=False)
    with_token = "; its actors get this process's token" if token else ""
    return f"{doing} at {ray.get_runtime_context().gcs_address}{with_token}"


def main() -> int:
    options = _parser().parse_args()
    print(join(options.cluster))
    trainer = Trainer.options(num_cpus=0).remote(options.server, options.mib)
    names = [f"rollout-{number}" for number in range(options.rollouts)]
    rollouts = [Rollout.options(num_cpus=0).remote(name, options.server, options.mib) for name in names]
    identical = True
    for version in range(1, options.steps + 1):
        published = ray.get(trainer.step.remote(version), timeout=TIMEOUT_S)
        pulled = ray.get([rollout.pull.remote(version) for rollout in rollouts], timeout=TIMEOUT_S)
        for name, (found, line) in zip(names, pulled, strict=True):
            same = found == published
            identical &= same
            print(f"version {version} {name}: {line}: {'identical' if same else 'DIFFERENT'}")
        ray.get(trainer.take_back.remote(), timeout=TIMEOUT_S)
    print("all identical" if identical else "some differ")
    return 0 if identical else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("example_job.py", description="Train, publish, pull and compare on Ray.")
    parser.add_argument("--server", default="ray://tensorhub")
    parser.add_argument(
        "--cluster", default="auto", help="address of the cluster (default: the one found here, else a new one)"
    )
    parser.add_argument("--rollouts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--mib", type=int, default=64, help="size of the model in MiB")
    return parser


if __name__ == "__main__":
    sys.exit(main())
