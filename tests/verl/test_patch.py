"""The patch in deploy/verl makes verl's v1 trainer honour `checkpoint_manager_class`, and changes nothing else."""

from __future__ import annotations

import filecmp
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.sources import ROOT

FOUND = importlib.util.find_spec("verl")
PATCH = ROOT / "deploy" / "verl" / "verl-0.9.1-checkpoint-manager.patch"
PATCHED_FILE = "trainer/ppo/v1/trainer_separate_async.py"
PATCH_SECONDS = 30
#: verl imports torch, transformers and Ray.
IMPORT_SECONDS = 240
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(IMPORT_SECONDS + 60),
    pytest.mark.skipif(FOUND is None, reason="verl is not installed here: scripts/setup-verl"),
]
#: A class of one's own, as a user would have it.
PROBE = """
from verl.checkpoint_engine import CheckpointEngineManager
class Manager(CheckpointEngineManager): pass
"""
#: The trainer's own `_setup`, with nothing around it: no workers, no servers. Prints where verl is and who manages.
BUILD = """
import sys
from types import SimpleNamespace
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async as module

trainer_base.PPOTrainer._setup = lambda self: None
replicas = ["replica"]
module.LLMServerManager = SimpleNamespace(create=lambda **_: SimpleNamespace(get_replicas=lambda: replicas))
rollout = {
    "prometheus": {"enable": False},
    "checkpoint_engine": {"_target_": "verl.workers.config.CheckpointEngineConfig", "backend": "naive"},
}
if sys.argv[1:]:
    rollout["checkpoint_manager_class"] = sys.argv[1]
trainer = object.__new__(module.PPOTrainerSeparateAsync)
trainer.config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
trainer.llm_server_manager = SimpleNamespace(rollout_replicas=[])
trainer.actor_rollout_wg = "workers"
trainer._enable_hybrid_replicas = False
trainer._setup()
manager = trainer.standalone_checkpoint_manager
assert (manager.actor_wg, manager.replicas) == ("workers", replicas)
print(module.__file__, type(manager).__module__ + "." + type(manager).__name__)
"""


def installed() -> Path:
    """Where the installed verl lies."""
    assert FOUND is not None
    assert FOUND.origin is not None
    return Path(FOUND.origin).parent


def patch(folder: Path, *options: str) -> None:
    """Applies the patch below the folder, as the instructions beside it say."""
    command = ["patch", "-p1", *options, "--input", str(PATCH)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATCH_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fuzz" not in done.stdout  # it is for exactly this version


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the installed verl and the class of one's own."""
    shutil.copytree(installed(), tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")
    return tmp_path


def manager_in(copy: Path, *configured: str) -> str:
    """Which class the trainer of this copy of verl makes its manager of."""
    # Of this process's environment nothing that names modules for verl to load: they are not on this path.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    environment = {**inherited, "PYTHONPATH": str(copy), "VERL_LOGGING_LEVEL": "WARN", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", BUILD, *configured]
    done = subprocess.run(
        command, cwd=copy, env=environment, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    file, manager = done.stdout.splitlines()[-1].split()
    assert Path(file).is_relative_to(copy)
    return manager


def test_patched_trainer_takes_the_class_that_is_configured(copy: Path) -> None:
    """With the patch, the class that the configuration names manages the replicas."""
    patch(copy)
    assert manager_in(copy, "probe.Manager") == "probe.Manager"


def test_patched_trainer_without_the_key_is_as_before(copy: Path) -> None:
    """With the patch and nothing configured, verl's own class manages them."""
    patch(copy)
    assert manager_in(copy) == "verl.checkpoint_engine.base.CheckpointEngineManager"


def test_unpatched_trainer_ignores_the_key(copy: Path) -> None:
    """Without the patch the key has no effect: the patch is needed as long as this holds."""
    assert manager_in(copy, "probe.Manager") == "verl.checkpoint_engine.base.CheckpointEngineManager"


def test_patch_touches_one_file_and_can_be_undone(copy: Path) -> None:
    """Applied, one file differs from what was installed; undone, none does."""
    patch(copy)
    differing = [
        str(file.relative_to(installed()))
        for file in sorted(installed().rglob("*.py"))
        if not filecmp.cmp(file, copy / "verl" / file.relative_to(installed()), shallow=False)
    ]
    assert differing == [PATCHED_FILE]
    patch(copy, "--reverse")
    assert filecmp.cmp(installed() / PATCHED_FILE, copy / "verl" / PATCHED_FILE, shallow=False)
