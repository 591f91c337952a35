"""An unmodified verl in small: a Ray of its own, trainer ranks under FSDP2 on gloo, rollout replicas, verl's manager.

It decides how many processes there are and how they are configured; which back end moves weights, its callers say, and
may say anew at any time. What is real is verl's: actor workers, checkpoint workers, manager, replicas, configuration.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import ray
import verl.trainer.config
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CheckpointEngineConfig

from bench.verl.rollout import BUCKET_BYTES, NAME, Held, Replica, RolloutWorker, Sums
from bench.verl.trainer import TrainerWorker

#: Where each back end registers itself.
MODULES = {"tcp_baseline": "bench.verl.tcp_baseline", "tensorhub": "tensorhub.integrations.verl"}
#: What verl reserves for its workers; they share what cores there are.
LOGICAL_CPUS = 32
#: None exists and none is taken; verl counts them before it starts a replica.
LOGICAL_GPUS = 32
#: Weights never go through the object store; this is the least it takes.
STORE_BYTES = 80 << 20


@contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray of this process's own, with its files in a folder of its own."""
    os.environ.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=LOGICAL_CPUS,
            num_gpus=LOGICAL_GPUS,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
            # Else Ray starts a process per logical core at once, each of which imports for seconds.
            _system_config={"prestart_worker_first_driver": False, "enable_worker_prestart": False},
        )
        try:
            yield
        finally:
            ray.shutdown()


def configuration(model: Path, backend: str) -> DictConfig:
    """verl's own for PPO, with what a CPU and this harness need: `actor_rollout_ref` of it."""
    folder = str(Path(verl.trainer.config.__file__).parent)
    overrides = [
        "actor_rollout_ref.hybrid_engine=False",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.optim.total_training_steps=1000",
        f"actor_rollout_ref.rollout.name={NAME}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}",
        f"actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module={MODULES[backend]}",
        f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={BUCKET_BYTES >> 20}",
    ]
    with initialize_config_dir(config_dir=folder, version_base=None):
        return compose(config_name="ppo_trainer", overrides=overrides).actor_rollout_ref


@dataclass(slots=True)
class Rig:
    """A trainer and its replicas, all on one back end at a time. Steps rise over the rig's life, as in a real run."""

    config: DictConfig
    trainer: RayWorkerGroup
    backend: str
    replicas: list[Replica] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    #: Of the next replica; never used twice, since actors are named after it.
    ranks: Iterator[int] = field(default_factory=count)
    steps: Iterator[int] = field(default_factory=lambda: count(1))

    @classmethod
    def start(cls, model: Path, *, backend: str = "tcp_baseline", ranks: int = 2, replicas: int = 0) -> Rig:
        """Trainer and replicas come up at the same time: importing verl is what takes long."""
        config = configuration(model, backend)
        actor_class = RayClassWithInitArgs(cls=ray.remote(TrainerWorker), config=config, role="actor")
        trainer = RayWorkerGroup(
            resource_pool=RayResourcePool([ranks]), ray_cls_with_init=actor_class, device_name="cpu"
        )
        rig = cls(config, trainer, backend)
        rig.grow(replicas)
        trainer.init_model()
        return rig

    def grow(self, replicas: int) -> list[Replica]:
        """That many more replicas, on the rig's back end; no manager knows them yet."""
        model = omega_conf_to_dataclass(self.config.model)
        prefix = f"{id(self):x}"
        added = [
            Replica(next(self.ranks), self.config.rollout, model, gpus_per_node=1, name_suffix=prefix)
            for _ in range(replicas)
        ]
        for replica in added:
            asyncio.run(replica.init_standalone())
        self.replicas += added
        if self.options or self.backend != self.config.rollout.checkpoint_engine.backend:
            workers(added).use_backend(self.backend, MODULES[self.backend], self.options)
        return added

    def use(self, backend: str, options: Mapping[str, Any] | None = None) -> None:
        """From now on every process sends and receives by this back end, with these of its `engine_kwargs`."""
        # Rigs share a Ray, and so a reference server: each model has a name there.
        named = {"model": Path(self.config.model.path).name} if backend == "tensorhub" else {}
        self.backend, self.options = backend, named | dict(options or {})
        self.trainer.use_backend(backend, MODULES[backend], self.options)
        if self.replicas:
            workers(self.replicas).use_backend(backend, MODULES[backend], self.options)

    def manager(
        self,
        replicas: Sequence[Replica] | None = None,
        manager: type[CheckpointEngineManager] = CheckpointEngineManager,
    ) -> CheckpointEngineManager:
        """verl's, or one of its subclasses, for these replicas or all."""
        config = CheckpointEngineConfig(
            backend=self.backend,
            custom_backend_module=MODULES[self.backend],
            engine_kwargs={self.backend: dict(self.options)},
        )
        return manager(
            config=config, actor_wg=self.trainer, replicas=list(self.replicas if replicas is None else replicas)
        )

    def train(self) -> int:
        """A step of the optimizer with gradients that no other step has; its number."""
        step = next(self.steps)
        self.trainer.train(step)
        return step

    def sums(self, dtype: str | None = None) -> Sums:
        """What the trainer hands over now, on whose ranks it must be the same."""
        first, *others = self.trainer.sums(dtype)
        if any(other != first for other in others):
            raise RuntimeError("the trainer's ranks hand over different weights")
        return dict(first)

    def drop(self, replicas: Sequence[Replica]) -> None:
        """End these replicas' processes and forget them."""
        for replica in replicas:
            self.replicas.remove(replica)
            for actor in [*replica.workers, *replica.servers]:
                ray.kill(actor)

    def close(self) -> None:
        """End all its processes."""
        self.drop(list(self.replicas))
        for worker in self.trainer.workers:
            ray.kill(worker)


def workers(replicas: Sequence[Replica]) -> RayWorkerGroup:
    """The workers of all these replicas as one group, in order."""
    handles = [worker for replica in replicas for worker in replica.workers]
    return RayWorkerGroup(worker_handles=handles, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(RolloutWorker)))


def held(replicas: Sequence[Replica]) -> list[Held]:
    """What each worker of these replicas has been given."""
    return list(workers(replicas).held())


def kill(actor: Any) -> None:
    """SIGKILL, as from a machine that is gone: nothing of the process gets to say goodbye."""
    os.kill(ray.get(actor.process_id.remote()), signal.SIGKILL)
