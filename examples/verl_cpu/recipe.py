"""How the run is configured: what verl is told on its command line and by its environment. It starts nothing.

verl is used as installed. Only `Manager.TENSORHUB` needs a change of verl, the patch in deploy/verl, because the v1
trainer does not ask which manager to use: it is applied to a copy in the run's own folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import witness
from task import Task

HERE = Path(__file__).resolve().parent
PATCH = HERE.parents[1] / "deploy" / "verl" / "verl-0.9.1-checkpoint-manager.patch"
ROLLOUT = "hf_cpu"  # as hf_cpu_rollout registers it, which cannot be imported without verl on its path
MANAGER_CLASS = "tensorhub.integrations.verl.TensorHubCheckpointManager"
#: Ray hands work to as many processes as it counts CPUs and GPUs. These are counted, not used: the machine has fewer.
CLAIMED_CPUS = 16
CLAIMED_GPUS = 8
#: Prompts and answers of a toy; Ray would take a third of the machine's memory.
OBJECT_STORE_BYTES = 512 << 20
PATCH_SECONDS = 60


class Manager(StrEnum):
    """Who brings a version from the trainer to the rollouts."""

    STOCK = "stock"
    TENSORHUB = "tensorhub"


@dataclass(frozen=True, slots=True)
class Run:
    """What one run is."""

    steps: int
    back_end: str
    back_end_module: str
    manager: Manager
    is_frozen: bool
    #: Holds everything of the run: model, prompts, log, metrics, records, Ray's own files.
    folder: Path

    @property
    def metrics(self) -> Path:
        """Where verl writes one JSON line per step."""
        return self.folder / "metrics.jsonl"

    @property
    def record(self) -> Path:
        """Where witnesses write."""
        return self.folder / "record"


def overrides(run: Run, task: Task) -> list[str]:
    """What verl's main_ppo is told on its command line."""
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    values = [
        *_algorithm(),
        f"data.train_files={task.train}",
        f"data.val_files={task.validation}",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "data.dataloader_num_workers=0",
        "actor_rollout_ref.hybrid_engine=False",
        f"{model}.path={task.model}",
        f"{model}.use_remove_padding=False",
        f"+{model}.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=2",
        f"{actor}.use_kl_loss=False",
        f"{actor}.optim.lr=1e-2",
        f"{rollout}.name={ROLLOUT}",
        f"{rollout}.n=2",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node=2",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=2",
        f"{rollout}.agent.num_workers=1",
        f"{rollout}.checkpoint_engine.backend={run.back_end}",
        f"{rollout}.checkpoint_engine.custom_backend_module={'frozen' if run.is_frozen else 'witnessed'}",
        *_trainer(run),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",  # of eight processes, for 64 prompts
        f"ray_kwargs.ray_init.num_cpus={CLAIMED_CPUS}",
        f"++ray_kwargs.ray_init.num_gpus={CLAIMED_GPUS}",
        "++ray_kwargs.ray_init.include_dashboard=False",
        f"++ray_kwargs.ray_init.object_store_memory={OBJECT_STORE_BYTES}",
        f"++ray_kwargs.ray_init._temp_dir={run.folder / 'ray'}",
    ]
    if run.back_end == "tensorhub":
        values.append(f"+{rollout}.checkpoint_engine.engine_kwargs.tensorhub.dtype=bfloat16")
    if run.manager is Manager.TENSORHUB:
        values.append(f"+{rollout}.checkpoint_manager_class={MANAGER_CLASS}")
    return values


def _algorithm() -> list[str]:
    return [
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        "++algorithm.rollout_correction.bypass_mode=True",  # the rollouts' own log-probabilities are the old ones
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        "reward.custom_reward_function.name=compute_score",
        "reward.num_workers=1",
    ]


def _trainer(run: Run) -> list[str]:
    return [
        "trainer.use_v1=True",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "trainer.device=cpu",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={run.steps}",
        "trainer.total_epochs=1000000",  # the number of steps ends the run
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
    ]


def environment(run: Run) -> dict[str, str]:
    """The environment of verl's processes: that of this one, and what makes verl find CPU, rollout and witness."""
    path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    if run.manager is Manager.TENSORHUB:
        path.insert(0, str(patched_verl(run.folder / "patched")))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,hf_cpu_rollout",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        # At INFO the v1 trainer calls `logger.info(..., flush=True)`, which logging refuses.
        "VERL_LOGGING_LEVEL": "WARN",
        "VERL_FILE_LOGGER_PATH": str(run.metrics),
        witness.RECORD: str(run.record),
        witness.BACK_END: run.back_end,
        witness.BACK_END_MODULE: run.back_end_module,
        "OMP_NUM_THREADS": "1",
        "HYDRA_FULL_ERROR": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_DISABLE_DASHBOARD": "1",
        # Ray would start a process for each CPU it was told of, and have all workers yield to whatever else runs here.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "WANDB_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
    }


def patched_verl(folder: Path) -> Path:
    """A copy of the installed verl with the patch of deploy/verl applied; the folder to put on the path."""
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("verl is not installed in this environment: run scripts/setup-verl")
    shutil.copytree(Path(found.origin).parent, folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        ["patch", "-p1", "--silent", "--directory", folder, "--input", PATCH], check=True, timeout=PATCH_SECONDS
    )
    return folder
